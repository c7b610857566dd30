"""Exact bytes where they can be derived by hand, and agreement with independent step-by-step simulations."""

from typing import Any

import pytest
from estimate_factory import (
    CUBLAS_BYTES,
    LLAMA_1B,
    LLAMA_2_7B,
    LLAMA_8B,
    TINY,
    config,
    configuration,
    cpu,
    gpu,
    shape_of,
)
from msgspec.structs import replace

from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.engines import engine_of
from shardwise.trainer.planning.engines.engine import States
from shardwise.trainer.planning.engines.zero import default_buckets
from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.planning.memory.activations import BlockActivations, block_activations, head_memory
from shardwise.trainer.planning.memory.states import model_states
from shardwise.trainer.planning.policy.precision_policy import attention_kernel, dims_of, policy_of
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import MemoryEstimate
from shardwise.trainer.spec.strategy import AttentionKernel, Checkpointing, LossHead, Method, Precision
from shardwise.trainer.spec.units import GIB

P = 8_030_261_248  # parameters of Llama-3.1-8B
MIXED, BF16, FP32 = Precision.BF16_MIXED, Precision.BF16, Precision.FP32
FULL = Checkpointing.FULL


def estimate(shape: ModelShape, chosen: Configuration, spec: str = "8xA100-SXM4-80GB") -> MemoryEstimate:
    return estimate_memory(shape, chosen, gpu(spec))


def states(chosen: Configuration, shape: ModelShape = LLAMA_8B) -> States:
    dims = dims_of(shape)
    return model_states(chosen, policy_of(chosen, gpu(), dims), dims)


def test_the_optimizers_of_bitsandbytes_keep_small_tensors_in_fp32_and_page_large_ones_alone() -> None:
    adapters: dict[str, Any] = {"method": Method.LORA, "lora": LoraJob(rank=8, targets=("k_proj", "v_proj"))}
    a, b = 64 * 8 * 4096, 64 * 8 * 1024  # 32,768 elements of each A and 8,192 of each B: 8 bit, and none paged
    found = states(configuration(optimizer=Optimizer.PAGED_ADAMW_8BIT, **adapters))
    assert (found.optimizer_state, found.managed) == (2 * round((1 + 4 / 256) * (a + b)), 0)
    adapters["lora"] = LoraJob(rank=2, targets=("k_proj", "v_proj"))  # 2,048 of each B: fp32
    found = states(configuration(optimizer=Optimizer.ADAMW_8BIT, **adapters))
    assert found.optimizer_state == 2 * round((1 + 4 / 256) * a / 4) + 8 * b // 4
    found = states(configuration(optimizer=Optimizer.PAGED_ADAMW, precision=Precision.BF16))
    assert (found.weights, found.managed, found.optimizer_state) == (2 * P, 8 * (P - 65 * 4096), 8 * 65 * 4096)


def test_fully_shard_gathers_head_and_embedding_as_groups_of_their_own() -> None:
    """8B over 64 ranks: every event is a sum of gathered groups, gradients on their way and one block's tensors."""
    chosen = configuration(Sharding.FSDP, num_ranks=64, checkpointing=FULL, seq_len=8192)
    found = estimate(LLAMA_8B, chosen)
    tokens, table, block = 8192, 128256 * 4096, LLAMA_8B.parameters_per_block
    held = found.steady_allocated_bytes + 24 * tokens + 2 * 2 * tokens * 128  # labels, cosines and sines
    boundaries, norm, head = 32 * 2 * 4096 * tokens, (8 * 4096 + 4) * tokens, 2 * (table + 4096)
    logits = 128256 * tokens
    assert found.events["loss_backward"] == held + boundaries + norm + head + 12 * logits
    assert found.events["forward_end"] == held + boundaries + norm + 2 * head + 10 * logits
    one = 200_840 * tokens + (4 * 14336 + 2 * 4096) * tokens + 2 * 4096 * 14336  # recomputed, gradients, down_proj's
    reduced = 4 * table + -(-4 * table // 64)
    top = held + boundaries + one + 2 * 2 * block + reduced
    assert found.events["block_backward_top"] == pytest.approx(top, abs=100)
    gradients = 4 * (table + 31 * block) // 64
    bottom = held + boundaries // 32 + one + 2 * (block + table) + 4 * block + gradients
    assert found.events["block_backward_bottom"] == pytest.approx(bottom, abs=100)


def block(**fields: Any) -> BlockActivations:
    chosen, dims = configuration(**fields), dims_of(LLAMA_8B)
    return block_activations(chosen, policy_of(chosen, gpu(), dims), dims)


def test_of_every_n_blocks_the_first_recomputes_and_what_fills_no_group_does_not() -> None:
    for every, num_recomputed in ((4, 8), (5, 6), (32, 1)):
        found = block(precision=BF16, checkpointing=Checkpointing.EVERY_N, checkpoint_every_n=every)
        assert found.retained == num_recomputed * 2 * 4096 * 2048 + (32 - num_recomputed) * found.whole


LOGITS = 128256 * 2048


@pytest.mark.parametrize(
    ("loss", "chunk", "forward", "backward"),
    [
        (LossHead.EAGER, None, 10 * LOGITS, 12 * LOGITS),
        (LossHead.CHUNKED, 512, 8 * LOGITS // 4, 6 * LOGITS // 4 + 24 * 512),
        (LossHead.CHUNKED, 4096, 8 * LOGITS, 6 * LOGITS + 24 * 2048),
        (LossHead.FUSED, None, 2 * LOGITS + 4 * LOGITS // 8, 2 * LOGITS + 4 * LOGITS // 8),  # slices of 256 tokens
        (LossHead.FUSED_LINEAR, None, 4 * 128256 * 4096 + 4 * 2048, 0),  # the head's gradient in fp32
    ],
)
def test_bytes_a_logit_of_each_loss_head(loss: LossHead, chunk: int | None, forward: int, backward: int) -> None:
    chosen = configuration(precision=BF16, loss=loss, loss_chunk_tokens=chunk)
    dims = dims_of(LLAMA_8B)
    found = head_memory(chosen, policy_of(chosen, gpu(), dims), dims)
    assert (found.forward_logits, found.backward_logits) == (forward, backward)


def test_parameter_offload_leaves_a_window_of_gathered_weights_on_the_device() -> None:
    chosen = configuration(
        Sharding.ZERO3, num_ranks=8, offload=Offload.OPTIMIZER_PARAMS, optimizer=Optimizer.DEEPSPEED_CPU_ADAM,
        checkpointing=FULL, loss=LossHead.CHUNKED,
    )  # fmt: skip
    found = estimate(LLAMA_8B, chosen)
    assert found.steady_allocated_bytes == 4 * 4096 * 4096 + CUBLAS_BYTES  # the reduction's bucket
    assert found.pinned_bytes == (4 + 8 + 4 + 2 + 2) * P
    live = replace(default_buckets(dims_of(LLAMA_8B)), live_parameters=2_000_000_000)
    wider = estimate(LLAMA_8B, replace(chosen, buckets=live))
    assert wider.peak_allocated_bytes - found.peak_allocated_bytes == 2 * 1_000_000_000


@pytest.mark.parametrize(("precision", "width", "to_fp32"), [(MIXED, 2, 4), (BF16, 2, 4), (FP32, 4, 0)])
def test_zero_2_reduces_from_two_buckets_and_converts_one_to_fp32(precision, width, to_fp32):
    dims = dims_of(LLAMA_8B)
    chosen = configuration(Sharding.ZERO2, precision=precision, num_ranks=8)
    bucket, largest = 4096 * 4096, 128256 * 4096  # the largest gradient is copied into a bucket
    found = engine_of(Sharding.ZERO2).memory(chosen, policy_of(chosen, gpu(), dims), dims)
    assert found.buffers_backward == (2 * width + to_fp32) * bucket + width * largest


def test_a_rank_loads_one_tensor_at_a_time_or_the_whole_model_for_engines_of_whole_weights_and_fp8() -> None:
    """The embedding, and one more like it on its way, in fp32; beside two GiB for the process."""

    def host_bytes(sharding: Sharding, num_ranks: int = 8, precision: Precision = MIXED) -> int:
        chosen = configuration(sharding, num_ranks=num_ranks, checkpointing=FULL, precision=precision)
        return estimate(LLAMA_8B, chosen).host_bytes

    for sharding in (Sharding.DDP, Sharding.FSDP, Sharding.ZERO3):
        assert host_bytes(sharding) == 8 * (2 * GIB + 2 * 4 * LLAMA_8B.embedding_parameters)
    assert host_bytes(Sharding.ZERO2) == 2 * host_bytes(Sharding.ZERO2, 4) > 8 * 4 * P
    assert host_bytes(Sharding.FSDP, precision=Precision.FP8) > 8 * 4 * P


@pytest.mark.parametrize(
    ("spec", "precision", "shape", "kernel"),
    [
        ("1xA100-SXM4-80GB", MIXED, LLAMA_8B, AttentionKernel.FLASH),
        ("1xA100-SXM4-80GB", FP32, LLAMA_8B, AttentionKernel.EFFICIENT),  # grouped heads are repeated for it
        ("1xA100-SXM4-80GB", FP32, LLAMA_2_7B, AttentionKernel.EFFICIENT),
        ("1xT4", Precision.FP16_MIXED, LLAMA_8B, AttentionKernel.EFFICIENT),
        ("1xV100-32GB", Precision.FP16_MIXED, LLAMA_2_7B, AttentionKernel.EFFICIENT),
    ],
)
def test_the_attention_kernel_depends_on_chip_and_type(spec, precision, shape, kernel):
    assert attention_kernel(configuration(precision=precision), gpu(spec), dims_of(shape)) is kernel


def test_two_handles_hold_a_larger_workspace_on_hopper() -> None:
    assert estimate(TINY, configuration(), "1xH200").parts["workspace"] == 64 * 2**20
    assert "workspace" not in estimate_memory(TINY, configuration(precision=FP32), cpu()).parts


def test_what_fits_is_decided_with_margin_context_and_communicators() -> None:
    found, device = estimate(LLAMA_8B, configuration(Sharding.FSDP, num_ranks=8, checkpointing=FULL)), gpu()
    assert found.usable_bytes == device.usable_bytes
    assert found.need_bytes > found.peak_allocated_bytes + device.context_bytes
    assert found.fits and not estimate(LLAMA_8B, configuration(checkpointing=FULL)).fits
    assert found.outside_bytes == found.device_bytes - found.peak_reserved_bytes > device.context_bytes


def test_the_margin_is_smaller_where_the_optimizer_step_is_the_peak() -> None:
    """4 % of activations and gradients, 19 % of logits that cannot be used again, 1 % of the step; 5 % on a CPU."""
    card, context_bytes = "1xA100-SXM4-80GB", gpu().context_bytes
    backward = estimate(LLAMA_1B, configuration(precision=BF16, micro_batch=4), card)
    logits = 12 * 128256 * 4 * 2048
    expected = 1.04 * backward.peak_allocated_bytes + 0.19 * logits + context_bytes
    assert backward.peak_event == "loss_backward" and backward.need_bytes == pytest.approx(expected, abs=2)
    chosen = configuration(precision=BF16, checkpointing=FULL, loss=LossHead.CHUNKED, optimizer=Optimizer.ADAMW)
    step = estimate(LLAMA_8B, chosen)
    expected = 1.01 * step.peak_allocated_bytes + context_bytes
    assert step.peak_event == "optimizer_step" and step.need_bytes == pytest.approx(expected, abs=2)
    found = estimate_memory(TINY, configuration(precision=FP32), cpu())
    assert found.need_bytes == pytest.approx(1.05 * found.peak_allocated_bytes + cpu().context_bytes, abs=2)
    assert found.peak_reserved_bytes == found.peak_allocated_bytes


def test_bf16_products_take_fp32_sums_where_the_cpu_has_no_bf16():
    """oneDNN's fp32 kernels: 4 bytes a logit beside the logits, where those of a slice stood otherwise."""
    shape = shape_of(config(32000, 256, 688, 4, 8, 4))
    rows: dict[str, Any] = {"loss": LossHead.FUSED, "checkpointing": FULL, "micro_batch": 8, "seq_len": 512}

    def found(precision: Precision, *flags: str) -> MemoryEstimate:
        return estimate_memory(shape, configuration(precision=precision, **rows), cpu(flags=flags))

    native, apart = found(BF16, "avx512f", "avx512_bf16"), found(BF16, "avx512f")
    assert (native.peak_event, apart.peak_event) == ("forward_end", "forward_end")
    assert apart.peak_allocated_bytes - native.peak_allocated_bytes == 4 * 32000 * (8 * 512 - 256)
    for other in (FP32, Precision.FP16_MIXED):
        assert found(other, "avx512f") == found(other)
