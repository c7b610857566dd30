"""The closed form of speed: published throughputs, physical limits, and orders that must hold."""

from typing import Any

import pytest
from estimate_factory import LLAMA_8B, MISTRAL_7B, TINY, UNKNOWN_HOST, config, cpu, gpu, setting, shape_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trainer.planning.device import Device, device_of
from trainer.planning.gpu_specs import GPU_SPECS
from trainer.planning.speed import estimate_speed, flops_per_token, speed_notes
from trainer.spec.hardware import Gpu, Hardware
from trainer.spec.model_shape import ModelShape
from trainer.spec.strategy import (
    Attention,
    Checkpointing,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Sharding,
)
from trainer.spec.units import GIB

P = 8_030_261_248
BF16 = Precision.BF16


def stranger() -> Device:
    card = Gpu(index=0, name="NVIDIA Future 1", spec_name=None, memory_bytes=24 * GIB)
    return device_of(Hardware(gpus=(card,), host=UNKNOWN_HOST))


def test_flops_of_a_token_follow_the_stated_convention() -> None:
    attention = 12 * 32 * 4096 * 8192
    assert flops_per_token(LLAMA_8B, 8192, Method.FULL) == 6 * P + attention
    assert flops_per_token(LLAMA_8B, 8192, Method.GALORE) == 6 * P + attention
    assert flops_per_token(LLAMA_8B, 8192, Method.LORA) == 4 * P + attention


LLAMA_2_13B = shape_of(config(32000, 5120, 13824, 40, 40, 40))
FULL_AC = Checkpointing.FULL
# Tokens a second and GPU that others measured. Their software is not ours, hence the tolerance: what is tested is that
# the formulas, with datasheet rates and the fitted shares, land where real machines do.
PUBLISHED: list[tuple[str, ModelShape, str, dict[str, Any], float]] = [
    ("8B, one H200, bf16, recomputed (KempnerForge)", LLAMA_8B, "1xH200",
     {"precision": BF16, "micro_batch": 8, "seq_len": 2048, "checkpointing": FULL_AC, "accumulation": 4}, 10_471),
    ("8B, 8 H100, FSDP, bf16-mixed, 8192 tokens (torchtitan, 96 GB variant)", LLAMA_8B, "8xH100-96GB-HBM2e",
     {"sharding": Sharding.FSDP, "num_ranks": 8, "micro_batch": 2, "seq_len": 8192, "compile": True,
      "checkpointing": Checkpointing.SELECTIVE}, 6_667),
    ("13B, 64 A100, FSDP, 4096 tokens (torchtitan, 61.1 % MFU)", LLAMA_2_13B, "8x8xA100-SXM4-80GB",
     {"sharding": Sharding.FSDP, "num_ranks": 64, "micro_batch": 2, "seq_len": 4096, "compile": True}, 2_220),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "spec", "fields", "measured"), [row[1:] for row in PUBLISHED], ids=[row[0] for row in PUBLISHED]
)
def test_published_throughputs_are_met(shape: ModelShape, spec: str, fields: dict[str, Any], measured: float) -> None:
    found = estimate_speed(shape, setting(**fields), gpu(spec))
    assert found.tokens_per_s_per_gpu == pytest.approx(measured, rel=0.25)


SETTINGS = st.builds(
    setting,
    st.sampled_from(
        [Sharding.DDP, Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP, Sharding.FSDP_GRAD_OP, Sharding.HSDP]
    ),
    num_ranks=st.sampled_from([1, 2, 16]),
    precision=st.sampled_from(list(Precision)),
    optimizer=st.sampled_from(list(Optimizer)),
    offload=st.sampled_from(list(Offload)),
    method=st.sampled_from(list(Method)),
    micro_batch=st.sampled_from([1, 4, 32]),
    accumulation=st.sampled_from([1, 8]),
    seq_len=st.sampled_from([128, 4096]),
    checkpointing=st.sampled_from(list(Checkpointing)),
    attention=st.sampled_from(list(Attention)),
    loss=st.sampled_from(list(LossHead)),
    activation_offload=st.booleans(),
    compile=st.booleans(),
)
DEVICES = st.sampled_from([gpu(), gpu("2x8xH100-SXM5-80GB"), gpu("1xT4"), gpu("2xRTX-4090"), cpu(2), stranger()])
SHAPES = st.sampled_from([TINY, LLAMA_8B])


@given(SHAPES, SETTINGS, DEVICES)
def test_parts_are_times_that_sum_to_the_step(shape: ModelShape, chosen: Any, device: Device) -> None:
    found = estimate_speed(shape, chosen, device)
    assert sum(found.parts.values()) == pytest.approx(found.step_s, rel=1e-9)
    assert all(seconds >= -1e-9 for seconds in found.parts.values())
    tokens = chosen.micro_batch * chosen.seq_len * chosen.accumulation
    assert found.tokens_per_s_per_gpu == pytest.approx(tokens / found.step_s)


@given(SHAPES, SETTINGS, DEVICES)
def test_nothing_is_faster_than_the_peak_of_the_device(shape: ModelShape, chosen: Any, device: Device) -> None:
    if chosen.checkpointing is not Checkpointing.NONE or chosen.seq_len > 128:
        return  # the convention counts attention as if it were not causal: long rows exceed it
    found = estimate_speed(shape, chosen, device)
    assert (found.mfu is None) is (found.peak_flops_per_s is None)
    if found.mfu is not None:
        assert 0 < found.mfu < 1


@given(SHAPES, SETTINGS, DEVICES)
def test_recomputing_and_offloading_never_speed_a_step_up(shape: ModelShape, chosen: Any, device: Device) -> None:
    plain = replace(chosen, checkpointing=Checkpointing.NONE)
    full = replace(chosen, checkpointing=Checkpointing.FULL)
    assert estimate_speed(shape, plain, device).step_s <= estimate_speed(shape, full, device).step_s
    copied, kept = replace(full, activation_offload=True), replace(full, activation_offload=False)
    assert estimate_speed(shape, kept, device).step_s <= estimate_speed(shape, copied, device).step_s


@given(SHAPES, SETTINGS, DEVICES)
def test_more_tokens_take_longer_and_amortise_the_step(shape: ModelShape, chosen: Any, device: Device) -> None:
    once = estimate_speed(shape, replace(chosen, accumulation=1), device)
    often = estimate_speed(shape, replace(chosen, accumulation=8), device)
    assert once.step_s < often.step_s
    assert once.tokens_per_s_per_gpu <= often.tokens_per_s_per_gpu * (1 + 1e-9)


def test_a_faster_card_is_faster() -> None:
    chosen = setting(checkpointing=FULL_AC, micro_batch=4)
    cards = ["RTX-3090", "A100-SXM4-80GB", "H100-SXM5-80GB", "B200"]
    seconds = [estimate_speed(LLAMA_8B, chosen, gpu(f"1x{card}")).step_s for card in cards]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("card", GPU_SPECS)
def test_every_card_of_the_catalogue_has_a_speed(card: str) -> None:
    found = estimate_speed(MISTRAL_7B, setting(precision=Precision.FP16_MIXED, micro_batch=4), gpu(f"1x{card}"))
    assert found.mfu is not None and 0.02 < found.mfu < 0.85


def test_pcie_without_peer_access_costs_more_than_nvlink() -> None:
    chosen = setting(Sharding.FSDP, num_ranks=2, checkpointing=FULL_AC)
    parts = [estimate_speed(LLAMA_8B, chosen, gpu(spec)).parts for spec in ("2xA100-SXM4-80GB", "2xRTX-4090")]
    assert parts[0]["communication_s"] * 10 < parts[1]["communication_s"]


def test_across_nodes_the_network_is_the_link() -> None:
    chosen = setting(Sharding.FSDP, num_ranks=16, checkpointing=FULL_AC)
    inside = estimate_speed(LLAMA_8B, replace(chosen, num_ranks=8), gpu("8xA100-SXM4-80GB"))
    across = estimate_speed(LLAMA_8B, chosen, gpu("2x8xA100-SXM4-80GB"))
    hybrid = replace(chosen, strategy=replace(chosen.strategy, sharding=Sharding.HSDP))
    assert inside.parts["communication_s"] < across.parts["communication_s"]
    assert estimate_speed(LLAMA_8B, hybrid, gpu("2x8xA100-SXM4-80GB")).step_s < across.step_s


def test_measured_rates_replace_the_datasheet() -> None:
    device, chosen = gpu("1xRTX-4090"), setting(precision=BF16, micro_batch=4)
    slow = replace(device, matmul_flops_per_s=10**12)
    assert estimate_speed(LLAMA_8B, chosen, slow).step_s > 10 * estimate_speed(LLAMA_8B, chosen, device).step_s
    assert "datasheet" in speed_notes(device)[0]
    assert speed_notes(slow) == ()


def test_an_unknown_card_ranks_but_promises_nothing() -> None:
    device, chosen = stranger(), setting(precision=Precision.FP16_MIXED)
    found = estimate_speed(LLAMA_8B, chosen, device)
    assert found.mfu is None and found.peak_flops_per_s is None
    assert found.tokens_per_s_per_gpu < estimate_speed(LLAMA_8B, chosen, gpu("1xRTX-3060-12GB")).tokens_per_s_per_gpu
    (note,) = speed_notes(device)
    assert "NVIDIA Future 1" in note and "probe --measure" in note


def test_a_cpu_has_no_mfu_and_says_that_its_speed_is_assumed() -> None:
    found = estimate_speed(TINY, setting(precision=Precision.FP32), cpu())
    assert found.mfu is None
    (note,) = speed_notes(cpu())
    assert "assumed" in note and "80 GFLOP/s" in note


def test_a_type_without_a_unit_is_emulated_slowly() -> None:
    t4, chosen = gpu("1xT4"), setting(precision=Precision.FP16_MIXED, micro_batch=4)
    emulated = replace(chosen, strategy=replace(chosen.strategy, precision=Precision.BF16_MIXED))
    assert estimate_speed(LLAMA_8B, emulated, t4).step_s > 5 * estimate_speed(LLAMA_8B, chosen, t4).step_s


COLLECTIVE_BYTES = [  # a parameter of the model, through the link of one of two ranks, for two micro batches
    (Sharding.DDP, 2 * 4),  # an all-reduce of fp32 gradients is a reduction and a gathering
    (Sharding.ZERO1, 2 * 4),
    (Sharding.ZERO2, 2 * 4 + 2),  # a reduction for each micro batch, then the new weights
    (Sharding.ZERO3, 2 * (2 * 2 + 4)),
    (Sharding.FSDP, 2 * (2 * 2) + 4),  # gathered twice for each micro batch, reduced with the last
    (Sharding.FSDP_GRAD_OP, 2 * 2 + 4),
]


@pytest.mark.parametrize(("sharding", "per_parameter"), COLLECTIVE_BYTES)
def test_a_slow_link_is_paid_for_every_byte_that_a_sharding_moves(sharding: Sharding, per_parameter: int) -> None:
    slow = replace(gpu("2xA100-SXM4-80GB"), link_bytes_per_s=10**7)
    chosen = setting(sharding, num_ranks=2, accumulation=2, seq_len=128)
    seconds = estimate_speed(LLAMA_8B, chosen, slow).parts["communication_s"]
    assert seconds == pytest.approx(per_parameter * P * (1 / 2) / (0.479 * 10**7), rel=0.01)
