"""The closed form of speed: published throughputs, physical limits, and orders that must hold."""

from functools import partial
from typing import Any

import pytest
from estimate_factory import LLAMA_8B, MISTRAL_7B, TINY, UNKNOWN_HOST, configuration, configurations_of, cpu, gpu
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shardwise.trainer.planning.configuration import SHARDWISE, PolicyChoices
from shardwise.trainer.planning.device import Device, device_of
from shardwise.trainer.planning.speed import constants as constants
from shardwise.trainer.planning.speed.rates import rates_of
from shardwise.trainer.planning.speed.step import (
    activation_waits,
    estimate_speed,
    evaluation_seconds,
    flops_per_token,
    offload_seconds,
    speed_notes,
)
from shardwise.trainer.planning.speed.work import work_of
from shardwise.trainer.planning.tables.gpu_chips import CHIPS
from shardwise.trainer.planning.tables.gpu_names import hardware_from_spec
from shardwise.trainer.planning.tables.gpu_specs import GPU_SPECS
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.hardware import Gpu, Hardware
from shardwise.trainer.spec.job.sections import GaloreJob, LoraJob
from shardwise.trainer.spec.model.shape import Linear, ModelShape, Norm, Positions
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Checkpointing, Fp8Recipe, LossHead, Method, Precision
from shardwise.trainer.spec.units import GIB

P = 8_030_261_248
FULL_AC = Checkpointing.FULL
BF16 = Precision.BF16
A100_FLOPS = GPU_SPECS["A100-SXM4-80GB"].fp16_flops_per_s


def stranger() -> Device:
    card = Gpu(index=0, name="NVIDIA Future 1", spec_name=None, memory_bytes=24 * GIB)
    return device_of(Hardware(gpus=(card,), host=UNKNOWN_HOST))


def seconds(shape: ModelShape, device: Device | None = None, /, **fields: Any) -> dict[str, float]:
    sharding = fields.pop("sharding", Sharding.NONE)
    return estimate_speed(shape, configuration(sharding, **fields), device or gpu("1xA100-SXM4-80GB")).parts


def test_flops_of_a_token_follow_the_stated_convention() -> None:
    attention = 12 * 32 * 4096 * 8192
    assert flops_per_token(LLAMA_8B, 8192, Method.FULL) == 6 * P + attention
    assert flops_per_token(LLAMA_8B, 8192, Method.GALORE) == 6 * P + attention
    assert flops_per_token(LLAMA_8B, 8192, Method.LORA) == 4 * P + attention


# Of our own runtime: other stacks have constants of their own.
SETTINGS = configurations_of().map(partial(replace, reference=SHARDWISE, policy=PolicyChoices()))
DEVICES = st.sampled_from([gpu(), gpu("2x8xH100-SXM5-80GB"), gpu("1xT4"), gpu("2xRTX-4090"), cpu(2), stranger()])
SHAPES = st.sampled_from([TINY, LLAMA_8B])


@given(SHAPES, SETTINGS, DEVICES)
def test_parts_are_times_that_sum_to_the_step_and_none_is_faster_than_the_peak_of_the_device(shape, chosen, device):
    found = estimate_speed(shape, chosen, device)
    assert sum(found.parts.values()) == pytest.approx(found.step_s, rel=1e-9)
    assert all(seconds >= -1e-9 for seconds in found.parts.values())
    tokens = chosen.micro_batch * chosen.seq_len * chosen.accumulation
    assert found.tokens_per_s_per_gpu == pytest.approx(tokens / found.step_s)
    assert (found.mfu is None) is (found.peak_flops_per_s is None)
    # The convention counts attention as if it were not causal: long rows exceed it.
    if found.mfu is not None and chosen.checkpointing is Checkpointing.NONE and chosen.seq_len <= 128:
        assert 0 < found.mfu < 1


@given(SHAPES, SETTINGS, DEVICES)
def test_recomputing_and_offloading_never_speed_a_step_up(shape: ModelShape, chosen: Any, device: Device) -> None:
    plain = replace(chosen, checkpointing=Checkpointing.NONE, activation_offload=False)
    full = replace(plain, checkpointing=Checkpointing.FULL)
    assert estimate_speed(shape, plain, device).step_s <= estimate_speed(shape, full, device).step_s
    for retained in (plain, full):
        copied = replace(retained, activation_offload=True)
        assert estimate_speed(shape, retained, device).step_s <= estimate_speed(shape, copied, device).step_s


@given(SHAPES, SETTINGS, DEVICES)
def test_more_tokens_take_longer_and_amortise_the_step(shape: ModelShape, chosen: Any, device: Device) -> None:
    once = estimate_speed(shape, replace(chosen, accumulation=1), device)
    often = estimate_speed(shape, replace(chosen, accumulation=8), device)
    assert once.step_s < often.step_s
    assert once.tokens_per_s_per_gpu <= often.tokens_per_s_per_gpu * (1 + 1e-9)


@pytest.mark.parametrize("card", GPU_SPECS)
def test_every_card_of_the_catalogue_has_a_speed(card: str) -> None:
    found = estimate_speed(MISTRAL_7B, configuration(precision=Precision.FP16_MIXED, micro_batch=4), gpu(f"1x{card}"))
    assert found.mfu is not None and 0.02 < found.mfu < 0.85


LINK, NETWORK = "link_bytes_per_s", "network_bytes_per_s"
TWICE: dict[str, Any] = {"accumulation": 2}
COLLECTIVE_BYTES: list[tuple[Sharding, int, str, dict[str, Any], float]] = [  # per parameter, through what is slow
    (Sharding.DDP, 2, LINK, TWICE, 2 * 4 / 2),  # an all-reduce of fp32 gradients is a reduction and a gathering
    (Sharding.ZERO1, 2, LINK, TWICE, 2 * 4 / 2),
    (Sharding.ZERO2, 2, LINK, TWICE, (2 * 4 + 2) / 2),  # a reduction for each micro batch, then the new weights
    (Sharding.ZERO3, 2, LINK, TWICE, 2 * (2 * 2 + 4) / 2),
    (Sharding.FSDP, 2, LINK, TWICE, (2 * (2 * 2) + 4) / 2),  # gathered twice a micro batch, reduced with the last
    (Sharding.FSDP, 2, LINK, {**TWICE, "policy": PolicyChoices(reduces_every_micro_batch=True)}, 2 * (2 * 2 + 4) / 2),
    (Sharding.FSDP_GRAD_OP, 2, LINK, TWICE, (2 * 2 + 4) / 2),
    # A group inside a node gathers from its ranks and sums over the copies, of which there are four or two.
    (Sharding.HSDP, 8, LINK, {**TWICE, "shard_group": 2}, 2 * (2 * 2) * (1 / 2) + 4 * (1 / 2) + 2 * (4 / 2) * (3 / 4)),
    (Sharding.HSDP, 8, LINK, {**TWICE, "shard_group": 4}, 2 * (2 * 2) * (3 / 4) + 4 * (3 / 4) + 2 * (4 / 4) * (1 / 2)),
    # One of whole nodes gathers over the network: eight sums at a time, each over two copies.
    (Sharding.HSDP, 32, NETWORK, {"shard_group": 16}, (2 * 2 + 4) * (15 / 16) + 2 * 8 * (4 / 16) * (1 / 2)),
    # (n - 1) / n of the gradients leave a node for a sum over n nodes, and as much returns.
    *((Sharding.HSDP, 8 * nodes, NETWORK, {}, 2 * 4 * (nodes - 1) / nodes) for nodes in (2, 4, 16)),
]


@pytest.mark.parametrize(("sharding", "num_ranks", "slow", "more", "per_parameter"), COLLECTIVE_BYTES)
def test_a_slow_link_is_paid_for_every_byte_that_a_sharding_moves(sharding, num_ranks, slow, more, per_parameter):
    nodes = f"{num_ranks // 8}x8" if num_ranks > 8 else str(num_ranks)
    device = replace(gpu(f"{nodes}xA100-SXM4-80GB"), **{slow: 10**7})
    found = seconds(LLAMA_8B, device, sharding=sharding, num_ranks=num_ranks, seq_len=128, **more)["communication_s"]
    assert found == pytest.approx(per_parameter * P / (constants.LINK_SHARE * 10**7), rel=0.01)


@pytest.mark.parametrize("measured", [None, 20 * 10**9])
def test_cards_that_share_an_uplink_share_its_rate(measured: int | None) -> None:
    alone = replace(gpu("4xL40S"), measured_pcie_bytes_per_s=measured)
    shared = rates_of(configuration(), replace(alone, cards_per_uplink=2)).pcie
    assert 2 * shared == pytest.approx(rates_of(configuration(), alone).pcie)


def test_an_unknown_card_ranks_but_promises_nothing_and_no_more_does_a_cpu() -> None:
    device, chosen = stranger(), configuration(precision=Precision.FP16_MIXED)
    found = estimate_speed(LLAMA_8B, chosen, device)
    assert found.mfu is None and found.peak_flops_per_s is None
    assert found.tokens_per_s_per_gpu < estimate_speed(LLAMA_8B, chosen, gpu("1xRTX-3060-12GB")).tokens_per_s_per_gpu
    (note,) = speed_notes(device)
    assert "NVIDIA Future 1" in note and "probe --measure" in note
    assert estimate_speed(TINY, configuration(precision=Precision.FP32), cpu()).mfu is None
    (note,) = speed_notes(cpu())
    assert "assumed" in note and "80 GFLOP/s" in note
    assert "datasheet" in speed_notes(gpu())[0] and speed_notes(replace(gpu(), matmul_flops_per_s=10**12)) == ()


def test_a_type_without_a_unit_is_emulated_slowly() -> None:
    t4, chosen = gpu("1xT4"), configuration(precision=Precision.FP16_MIXED, micro_batch=4)
    emulated = replace(chosen, strategy=replace(chosen.strategy, precision=Precision.BF16_MIXED))
    assert estimate_speed(LLAMA_8B, emulated, t4).step_s > 5 * estimate_speed(LLAMA_8B, chosen, t4).step_s


def test_a_token_pays_for_the_experts_it_is_sent_to_and_memory_for_all() -> None:
    dense = replace(LLAMA_8B, linears=tuple(linear for linear in LLAMA_8B.linears if "proj" in linear.name))
    pair = Linear(name="experts", num_inputs=4096, num_outputs=14336, num_copies=8, num_used=2)
    both_used = replace(pair, num_copies=2)
    experts = replace(dense, linears=(*dense.linears, pair), num_experts=8, experts_per_token=2)
    only_used = replace(dense, linears=(*dense.linears, both_used), num_experts=2, experts_per_token=2)
    all_used = replace(dense, linears=(*dense.linears, replace(pair, num_used=8)), num_experts=8, experts_per_token=8)
    chosen = {"micro_batch": 4, "checkpointing": FULL_AC}
    some, least, most = (seconds(shape, **chosen)["compute_s"] for shape in (experts, only_used, all_used))
    assert least < some < 1.1 * least
    assert most > 1.5 * some
    flops = [flops_per_token(shape, 2048, Method.FULL) for shape in (experts, only_used)]
    assert flops[0] == flops[1]


def test_all_experts_are_read_where_tokens_are_few() -> None:
    pair = Linear(name="experts", num_inputs=4096, num_outputs=14336, num_copies=8, num_used=2)
    models = (replace(LLAMA_8B, linears=(replace(pair, num_copies=copies),)) for copies in (8, 64))
    few, many = (seconds(model, seq_len=128, precision=BF16)["compute_s"] for model in models)
    read_s = 3 * 32 * 56 * 2 * 4096 * 14336 / (constants.MEMORY_SHARE * 2039e9)
    assert many - few > 0.6 * read_s


def test_norms_of_one_kernel_and_models_without_rotation_move_less() -> None:
    layered = replace(LLAMA_8B, norm=Norm.LAYER)
    still = replace(layered, positions=Positions.ALIBI)
    compute = [seconds(shape)["compute_s"] for shape in (LLAMA_8B, layered, still)]
    assert compute == sorted(compute, reverse=True)
    assert len(set(compute)) == 3
    hosts = [seconds(shape, micro_batch=1, seq_len=128)["host_s"] for shape in (LLAMA_8B, layered, still)]
    assert hosts == sorted(hosts, reverse=True)


def test_a_window_costs_its_keys() -> None:
    windowed = replace(MISTRAL_7B, sliding_window=4096, num_sliding_layers=32)
    device = gpu("1xA100-SXM4-80GB")
    rate = constants.ATTENTION_SHARE * A100_FLOPS
    for row in (4096, 32768):
        chosen = configuration(seq_len=row)
        full, some = (estimate_speed(shape, chosen, device).parts["compute_s"] for shape in (MISTRAL_7B, windowed))
        keys_saved = row / 2 - (4096 - 4096**2 / (2 * row))
        assert full - some == pytest.approx(3.5 * 4 * row * keys_saved * 4096 * 32 / rate, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("card", "other", "an_sm_and_clock"),
    [
        pytest.param("1xB200", "1xH100-SXM5-80GB", 1.0, id="products of a warp are as fast on Hopper and B200"),
        pytest.param("1xRTX-PRO-4000", "1xA100-SXM4-80GB", 0.5, id="GB20x has no others"),
    ],
)
def test_flash_attention_is_as_fast_as_an_sm_multiplies_for_one_warp(card: str, other: str, an_sm_and_clock: float):
    def rate(name: str) -> float:
        device = gpu(name)
        found, chip = rates_of(configuration(), device), CHIPS[device.compute_capability or (0, 0)]
        return found.attention / found.matmul * (chip.tensor_flop or 0)

    assert rate(card) / rate(other) == pytest.approx(an_sm_and_clock)


@pytest.mark.parametrize(("method", "per_weight"), [(Method.FULL, 18), (Method.LORA, 6)])
def test_each_slice_of_logits_reads_the_head_and_adds_to_its_gradient(method: Method, per_weight: int) -> None:
    base: dict[str, Any] = {"method": method, "loss": LossHead.CHUNKED, "micro_batch": 4}
    few, many = (seconds(LLAMA_8B, loss_chunk_tokens=tokens, **base)["compute_s"] for tokens in (2048, 256))
    moved = (32 - 4) * per_weight * 128256 * 4096
    assert many - few == pytest.approx(moved / (constants.MEMORY_SHARE * 2039e9), rel=1e-6)


def test_padding_is_computed_and_not_counted() -> None:
    device, packed = gpu("1xA100-SXM4-80GB"), configuration(seq_len=1024, micro_batch=4)
    padded = replace(packed, policy=PolicyChoices(longest_seq=2048))
    longer = configuration(seq_len=2048, micro_batch=4)
    found = estimate_speed(LLAMA_8B, padded, device)
    assert found.parts == estimate_speed(LLAMA_8B, longer, device).parts
    assert found.tokens_per_s_per_gpu * found.step_s == pytest.approx(4 * 1024)


@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
def test_an_evaluation_is_about_a_third_of_training_on_the_same_tokens(method: Method) -> None:
    device, chosen = gpu("8xA100-SXM4-80GB"), configuration(Sharding.FSDP, num_ranks=8, micro_batch=4, method=method)
    trained = estimate_speed(LLAMA_8B, chosen, device)
    evaluated = evaluation_seconds(LLAMA_8B, chosen, device, 8 * 4 * 2048)
    assert 0.2 < evaluated / trained.step_s < 0.45
    assert evaluation_seconds(LLAMA_8B, chosen, device, 80 * 4 * 2048) == pytest.approx(10 * evaluated)


def test_a_pair_is_two_rows_and_its_reference_one_forward_of_them_where_it_is_the_frozen_base() -> None:
    device, one = gpu("1xA100-SXM4-80GB"), configuration(micro_batch=4, checkpointing=Checkpointing.FULL)
    pairs = replace(one, policy=PolicyChoices(rows_per_example=2))
    assert estimate_speed(LLAMA_8B, pairs, device) == estimate_speed(LLAMA_8B, replace(one, micro_batch=8), device)
    adapted, base = replace(pairs, method=Method.LORA), replace(one, micro_batch=8, method=Method.LORA)
    found, plain = estimate_speed(LLAMA_8B, adapted, device), estimate_speed(LLAMA_8B, base, device)
    forward_s = evaluation_seconds(LLAMA_8B, adapted, device, 8 * 2048)
    assert found.step_s - plain.step_s == pytest.approx(forward_s, rel=0.01)


def test_projecting_gradients_takes_products_and_now_and_then_a_decomposition() -> None:
    def optimizer_s(gap: int, rank: int) -> float:
        galore = GaloreJob(update_gap=gap, rank=rank)
        return seconds(MISTRAL_7B, method=Method.GALORE, galore=galore, precision=BF16)["optimizer_s"]

    # 7B: the decompositions of one update take minutes, as published
    update_s = (optimizer_s(1, 256) - optimizer_s(10**9, 256)) / (1 - 1e-9)
    assert 300 < update_s < 1200
    flops = 4 * 256 * MISTRAL_7B.num_layers * MISTRAL_7B.linear_parameters_per_block
    more_s = optimizer_s(10**9, 512) - optimizer_s(10**9, 256)
    assert more_s == pytest.approx(flops / (constants.MATMUL_SHARE * A100_FLOPS))


def test_muon_takes_five_rounds_of_products() -> None:
    plain, muon = (
        seconds(TINY, optimizer=each, precision=BF16)["optimizer_s"] for each in (Optimizer.SGD, Optimizer.MUON)
    )
    sizes = [(linear.num_inputs, linear.num_outputs) for linear in TINY.linears]
    flops = sum(4 * min(size) ** 2 * max(size) + 2 * min(size) ** 3 for size in sizes)
    passes = 2 * (9 - 4) * TINY.num_parameters / (constants.MEMORY_SHARE * 2039e9)
    rounds = 5 * TINY.num_layers * flops / (constants.MATMUL_SHARE * A100_FLOPS)
    assert muon - plain == pytest.approx(passes + rounds)


def test_paged_state_crosses_pcie_only_where_it_does_not_fit() -> None:
    def optimizer_s(spec: str, optimizer: Optimizer) -> float:
        chosen = configuration(optimizer=optimizer, precision=BF16, optimizer_in_backward=True)
        return estimate_speed(LLAMA_8B, chosen, gpu(spec)).parts["optimizer_s"]

    paged, plain = Optimizer.PAGED_ADAMW_8BIT, Optimizer.ADAMW_8BIT
    assert optimizer_s("1xA100-SXM4-80GB", paged) == optimizer_s("1xA100-SXM4-80GB", plain)
    card = GPU_SPECS["RTX-4090"]
    over = 4 * P + card.context_bytes - card.usable_bytes
    assert over < 2 * P
    extra = optimizer_s("1xRTX-4090", paged) - optimizer_s("1xRTX-4090", plain)
    assert extra == pytest.approx(2 * over / (constants.PCIE_SHARE * card.pcie_bytes_per_s))


def test_the_host_updates_what_is_offloaded_as_fast_as_its_software() -> None:
    def offload_s(sharding: Sharding, optimizer: Optimizer, offload: Offload = Offload.OPTIMIZER) -> float:
        fields: dict[str, Any] = {"num_ranks": 8, "offload": offload, "optimizer": optimizer}
        return seconds(LLAMA_8B, gpu("8xA100-SXM4-80GB"), sharding=sharding, **fields)["offload_s"]

    fast = offload_s(Sharding.ZERO2, Optimizer.DEEPSPEED_CPU_ADAM)
    assert fast > 28 * P / constants.HOST_ADAM_BYTES_PER_S
    assert offload_s(Sharding.FSDP, Optimizer.ADAMW) > 5 * fast
    on_disk = offload_s(Sharding.ZERO3, Optimizer.DEEPSPEED_CPU_ADAM, Offload.NVME_OPTIMIZER)
    in_memory = offload_s(Sharding.ZERO3, Optimizer.DEEPSPEED_CPU_ADAM)
    assert on_disk - in_memory == pytest.approx(24 * P / constants.NVME_BYTES_PER_S, rel=1e-3)


@pytest.mark.parametrize(
    ("spec", "cpu_name", "num_cores", "adam", "is_desktop"),
    [
        ("1xRTX-4090", None, None, constants.DDR4_ADAM_BYTES_PER_S, True),
        ("1xRTX-4090", "AMD Ryzen 9 7950X 16-Core Processor", 32, constants.DDR5_ADAM_BYTES_PER_S, True),
        ("1xRTX-4090", "13th Gen Intel(R) Core(TM) i5-13600K", 2, 2 * constants.CORE_ADAM_BYTES_PER_S, True),
        ("1xRTX-4090", "AMD EPYC 7543", 64, constants.HOST_ADAM_BYTES_PER_S, False),
        ("1xA10G", "AMD EPYC 7R32", 4, 4 * constants.CORE_ADAM_BYTES_PER_S, False),
        ("8xH100-SXM5-80GB", None, None, constants.HOST_ADAM_BYTES_PER_S, False),
        ("1xT4", "Intel(R) Core(TM) i7-8700 CPU @ 3.20GHz", 12, constants.DDR4_ADAM_BYTES_PER_S, True),
    ],
)
def test_a_host_updates_no_more_than_its_cores_and_memory_channels_move(spec, cpu_name, num_cores, adam, is_desktop):
    host = replace(UNKNOWN_HOST, cpu_name=cpu_name, num_cores=num_cores)
    rates = rates_of(configuration(), device_of(replace(hardware_from_spec(spec, local_host=lambda: host), host=host)))
    assert rates.host_adam == adam
    assert rates.nvme == (constants.DESKTOP_NVME_BYTES_PER_S if is_desktop else constants.NVME_BYTES_PER_S)


def test_sixteen_bit_state_halves_the_traffic_of_the_update_but_not_the_work_of_the_cores() -> None:
    def update_s(precision: Precision, num_cores: int | None) -> float:
        chosen = configuration(
            Sharding.FSDP, num_ranks=8, precision=precision, offload=Offload.OPTIMIZER_PARAMS,
            optimizer=Optimizer.ADAMW_FUSED,
        )  # fmt: skip
        device = replace(gpu("8xA100-SXM4-80GB"), num_cores=num_cores)
        rates, trained = rates_of(chosen, device), 8_000_000_000
        return offload_seconds(chosen, work_of(LLAMA_8B), rates, trained)[1] - 2 * trained / 8 / rates.pcie

    by_channels = [update_s(precision, None) for precision in (Precision.BF16_MIXED, Precision.BF16)]
    by_cores = [update_s(precision, 2) for precision in (Precision.BF16_MIXED, Precision.BF16)]
    assert by_channels[0] == pytest.approx(2 * by_channels[1])
    assert by_cores[0] == pytest.approx(by_cores[1])


def test_weights_that_stream_delay_activations_on_their_way_back_and_not_on_their_way_out() -> None:
    chosen = configuration(
        Sharding.FSDP, offload=Offload.OPTIMIZER_PARAMS, method=Method.LORA, checkpointing=Checkpointing.NONE,
        activation_offload=True,
    )  # fmt: skip
    device = gpu("1xRTX-4090")

    def waits_s(micro_s: float, moved_s: float) -> float:
        return activation_waits(LLAMA_8B, chosen, device, micro_s, moved_s)

    one_way_s = waits_s(0.0, 0.0) / 2
    hidden_s = 2 * one_way_s  # forward and backward take as long, so that all copies hide
    assert waits_s(hidden_s, 0.0) == pytest.approx(0, abs=1e-9)
    assert waits_s(hidden_s, one_way_s) == pytest.approx(one_way_s / 2)


def test_replicas_of_hybrid_sharding_share_no_offloaded_state() -> None:
    def offload_s(sharding: Sharding, num_nodes: int) -> float:
        device, offload = gpu(f"{num_nodes}x8xA100-SXM4-80GB"), Offload.OPTIMIZER
        return seconds(LLAMA_8B, device, sharding=sharding, num_ranks=8 * num_nodes, offload=offload)["offload_s"]

    one, hybrid, full = offload_s(Sharding.FSDP, 1), offload_s(Sharding.HSDP, 4), offload_s(Sharding.FSDP, 4)
    assert hybrid == pytest.approx(one, rel=0.05)
    assert full < 0.5 * hybrid


@pytest.mark.parametrize(
    ("measured", "part", "fields"),
    [
        ({"matmul_flops_per_s": 10**12}, "compute_s", {}),
        ({"measured_fp32_flops_per_s": 10**11}, "compute_s", {"precision": Precision.FP32}),
        ({"measured_fp8_flops_per_s": 10**12}, "compute_s",
         {"precision": Precision.FP8, "fp8_recipe": Fp8Recipe.TORCHAO_TENSORWISE}),
        ({"measured_attention_flops_per_s": 10**11}, "compute_s", {}),
        ({"measured_memory_bytes_per_s": 10**9}, "optimizer_s", {}),
        ({"measured_link_bytes_per_s": 10**8}, "communication_s", {"sharding": Sharding.FSDP}),
        ({"measured_network_bytes_per_s": 10**9}, "communication_s", {"sharding": Sharding.FSDP, "num_ranks": 16}),
        ({"measured_pcie_bytes_per_s": 10**8}, "offload_s", {"offload": Offload.OPTIMIZER}),
        ({"measured_host_adam_bytes_per_s": 10**9}, "offload_s", {"offload": Offload.OPTIMIZER}),
        ({"nvme_bytes_per_s": 10**8}, "offload_s", {"offload": Offload.NVME_OPTIMIZER}),
    ],
)  # fmt: skip
def test_each_measured_rate_replaces_its_share_of_the_datasheet(measured, part, fields):
    chosen = {"sharding": Sharding.ZERO3, "num_ranks": 2, **fields}
    rated = gpu("2x8xH100-SXM5-80GB" if chosen["num_ranks"] > 8 else "2xH100-SXM5-80GB")
    found = [seconds(LLAMA_8B, device, **chosen)[part] for device in (replace(rated, **measured), rated)]
    assert found[0] > 2 * found[1]


def test_a_capped_board_loses_less_than_in_proportion_and_a_halved_peak_is_come_nearer_to() -> None:
    def matmul(spec: str, **changes: Any) -> float:
        return rates_of(configuration(), replace(gpu(f"1x{spec}"), **changes)).matmul

    full, capped, unknown = (matmul("H100-SXM5-80GB", board_watts=watts) for watts in (700.0, 350.0, None))
    assert 0.5 < capped / full < 0.75 and unknown >= full
    halved = constants.HALVED_MATMUL_SHARE * GPU_SPECS["RTX-4090"].fp16_flops_per_s
    assert [matmul("RTX-4090"), matmul("A100-SXM4-80GB")] == pytest.approx(
        [halved, constants.MATMUL_SHARE * A100_FLOPS]
    )


def test_eager_selective_recomputation_asks_the_host_about_every_operator() -> None:
    """Six forwards more than recomputing all, which is one more than recomputing nothing; a compiler asks nothing."""

    def host_s(checkpointing: Checkpointing, **choices: Any) -> float:
        fields: dict[str, Any] = {"seq_len": 256, "loss": LossHead.EAGER, "checkpointing": checkpointing, **choices}
        return seconds(LLAMA_8B, cpu(), **fields)["host_s"]

    none, full, selective = (host_s(each) for each in (Checkpointing.NONE, FULL_AC, Checkpointing.SELECTIVE))
    assert full / none == pytest.approx(4 / 3)
    assert selective - full == pytest.approx(6 * none / 3)
    for compiled in ({"compile": True}, {"reference": "torchtitan"}):
        assert host_s(Checkpointing.SELECTIVE, **compiled) == pytest.approx(host_s(FULL_AC, **compiled))


def test_fused_in_plain_torch_lies_between_whole_logits_and_a_second_product() -> None:
    """It reads and writes a logit more often than eager, and multiplies with the head once rather than twice."""

    def compute_s(loss: LossHead, **choices: Any) -> float:
        return estimate_speed(LLAMA_8B, configuration(seq_len=8192, loss=loss, **choices), gpu()).parts["compute_s"]

    eager, fused, chunked = (compute_s(loss) for loss in (LossHead.EAGER, LossHead.FUSED, LossHead.CHUNKED))
    assert eager < fused < chunked
    moved = (66 - 40) * 8192 * LLAMA_8B.vocab_size / rates_of(configuration(), gpu()).memory
    assert fused - eager == pytest.approx(moved)
    assert compute_s(LossHead.FUSED, reference="hf-trainer+fused-kernels") < compute_s(LossHead.FUSED)


@pytest.mark.parametrize(("precision", "squares", "weights"), [(BF16, 4, 14), (Precision.BF16_MIXED, 12, 38)])
def test_dora_measures_every_weight_in_every_forward(precision: Precision, squares: int, weights: int) -> None:
    """Of a batch of one token nothing else is left: the identity's products, and weights through memory."""
    device = gpu()
    chosen = configuration(method=Method.LORA, precision=precision, seq_len=1, lora=LoraJob(targets=("down_proj",)))
    dora = replace(chosen, lora=LoraJob(targets=("down_proj",), dora=True))
    plain, measuring = (estimate_speed(LLAMA_8B, each, device).parts["compute_s"] for each in (chosen, dora))
    rates = rates_of(chosen, device)
    products = 2 * 16 * (14336**2 + 14336 * 4096) / rates.matmul
    moved = (squares * 14336**2 + weights * 14336 * 4096) / rates.memory
    assert measuring - plain == pytest.approx(32 * (products + moved), rel=0.001)
    again = replace(dora, checkpointing=FULL_AC)
    recomputed = estimate_speed(LLAMA_8B, again, device).parts["compute_s"]
    retained = estimate_speed(LLAMA_8B, replace(chosen, checkpointing=FULL_AC), device).parts["compute_s"]
    assert recomputed - retained == pytest.approx(2 * (measuring - plain), rel=0.001)


def test_compiled_blocks_leave_the_loss_head_to_torch() -> None:
    """Our runtime compiles blocks; another trainer compiles the whole model."""

    def head_s(reference: str, *, compiles: bool) -> float:
        chosen = configuration(seq_len=8192, compile=compiles, reference=reference)
        eager, linear = (
            estimate_speed(LLAMA_8B, replace(chosen, loss=loss), gpu()).parts["compute_s"]
            for loss in (LossHead.EAGER, LossHead.FUSED)
        )
        return eager - linear

    assert head_s("shardwise", compiles=True) == pytest.approx(head_s("shardwise", compiles=False))
    assert head_s("torchtitan", compiles=True) < head_s("torchtitan", compiles=False)


def test_flash_attention_3_is_faster_on_hopper_alone() -> None:
    stated = replace(configuration(), policy=PolicyChoices(flash_generation=3))
    second = replace(configuration(), policy=PolicyChoices(flash_generation=2))
    for card, gain in (("1xH100-SXM5-80GB", constants.FLASH_3_GAIN), ("1xB200", 1.0), ("1xA100-SXM4-80GB", 1.0)):
        rates = [rates_of(each, gpu(card)).attention for each in (stated, second, configuration())]
        assert rates == pytest.approx([gain * rates[1], rates[1], rates[1]]), card
    assert rates_of(stated, gpu("1xH100-SXM5-80GB")).attention < rates_of(stated, gpu("1xH100-SXM5-80GB")).matmul


def test_a_loop_over_experts_keeps_the_host_busy_with_each() -> None:
    pair = Linear(name="experts", num_inputs=64, num_outputs=64, num_copies=128, num_used=8, is_linear_module=False)
    experts = replace(TINY, linears=(*TINY.linears, pair), num_experts=128, experts_per_token=8)
    for method, count in ((Method.FULL, 5), (Method.LORA, 17)):
        grouped = configuration(method=method, micro_batch=1, seq_len=16)
        looped = replace(grouped, policy=PolicyChoices(loops_over_experts=True))
        hosts = [sum(estimate_speed(experts, each, gpu()).parts.values()) for each in (grouped, looped)]
        more = 3 * constants.OPERATOR_S * TINY.num_layers * 128 * count
        assert hosts[1] - hosts[0] == pytest.approx(more, rel=0.05), method
