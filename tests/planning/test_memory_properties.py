"""What holds for every setting, whatever the numbers are."""

from typing import Any

from estimate_factory import LLAMA_1B, LLAMA_2_7B, LLAMA_8B, QWEN_HALF_B, TINY, cpu, gpu, setting
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from trainer.planning.device import Device
from trainer.planning.memory import estimate_memory
from trainer.planning.memory.activations import block_activations
from trainer.planning.memory.recipe import dims_of, recipe_of
from trainer.planning.memory.states import States, model_states
from trainer.planning.setting import Setting
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

SHAPES = st.sampled_from([TINY, QWEN_HALF_B, LLAMA_1B, LLAMA_2_7B, LLAMA_8B])
DEVICES = st.sampled_from([gpu("8xA100-SXM4-80GB"), gpu("8xH200"), gpu("2xT4"), gpu("1xRTX-4090"), cpu(2)])
OFFLOADS = {
    Sharding.ZERO2: [Offload.NONE, Offload.OPTIMIZER],
    Sharding.ZERO3: list(Offload),
    Sharding.FSDP: [Offload.NONE, Offload.OPTIMIZER_PARAMS],
}
SHARDED = [Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3]


@st.composite
def settings_of(draw: st.DrawFn) -> Setting:
    sharding = draw(st.sampled_from(list(Sharding)))
    num_ranks = 1 if sharding is Sharding.NONE else draw(st.sampled_from([2, 8, 64]))
    fields: dict[str, Any] = {
        "method": draw(st.sampled_from(list(Method))),
        "precision": draw(st.sampled_from(list(Precision))),
        "optimizer": draw(st.sampled_from(list(Optimizer))),
        "offload": draw(st.sampled_from(OFFLOADS.get(sharding, [Offload.NONE]))),
        "micro_batch": draw(st.sampled_from([1, 2, 7, 32])),
        "seq_len": draw(st.sampled_from([128, 1000, 4096])),
        "accumulation": draw(st.sampled_from([1, 4])),
        "checkpointing": draw(st.sampled_from(list(Checkpointing))),
        "checkpoint_every_n": 2,
        "attention": draw(st.sampled_from(list(Attention))),
        "loss": draw(st.sampled_from(list(LossHead))),
        "loss_chunk_tokens": draw(st.sampled_from([None, 128])),
        "optimizer_in_backward": draw(st.booleans()),
    }
    return setting(sharding, num_ranks=num_ranks, **fields)


def states_of(shape: ModelShape, chosen: Setting, device: Device) -> States:
    dims = dims_of(shape)
    return model_states(chosen, recipe_of(chosen, device, dims), dims)


def on_device(found: States) -> int:
    return found.persistent + found.gradients


@given(SHAPES, settings_of(), DEVICES)
def test_parts_sum_to_the_peak_and_no_part_is_negative(shape: ModelShape, chosen: Setting, device: Device) -> None:
    found = estimate_memory(shape, chosen, device)
    assert sum(found.parts.values()) == found.peak_allocated_bytes == max(found.events.values())
    assert found.events[found.peak_event] == found.peak_allocated_bytes
    assert all(num_bytes > 0 for num_bytes in found.parts.values())


@given(SHAPES, settings_of(), DEVICES)
def test_figures_are_ordered(shape: ModelShape, chosen: Setting, device: Device) -> None:
    found = estimate_memory(shape, chosen, device)
    assert found.low_bytes <= found.peak_allocated_bytes <= found.high_bytes
    assert found.steady_allocated_bytes <= found.peak_allocated_bytes <= found.peak_reserved_bytes
    assert found.peak_reserved_bytes < found.device_bytes
    assert found.peak_allocated_bytes < found.need_bytes
    assert min(found.pinned_bytes, found.host_bytes, found.nvme_bytes) >= 0


@given(SHAPES, settings_of(), DEVICES)
def test_longer_rows_and_larger_micro_batches_never_need_less(
    shape: ModelShape, chosen: Setting, device: Device
) -> None:
    found = estimate_memory(shape, chosen, device)
    longer = estimate_memory(shape, replace(chosen, seq_len=2 * chosen.seq_len), device)
    larger = estimate_memory(shape, replace(chosen, micro_batch=chosen.micro_batch + 1), device)
    assert found.peak_allocated_bytes <= longer.peak_allocated_bytes
    assert found.peak_allocated_bytes <= larger.peak_allocated_bytes
    assert found.need_bytes <= larger.need_bytes


@given(SHAPES, settings_of(), DEVICES)
def test_more_ranks_never_need_more_weights_gradients_or_state_each(
    shape: ModelShape, chosen: Setting, device: Device
) -> None:
    if chosen.strategy.sharding is Sharding.NONE:
        return
    more = replace(chosen, num_ranks=2 * chosen.num_ranks, ranks_per_node=min(8, 2 * chosen.num_ranks))
    few, many = states_of(shape, chosen, device), states_of(shape, more, device)
    assert many.weights + many.master_weights <= few.weights + few.master_weights
    assert many.gradients <= few.gradients
    assert many.optimizer_state <= few.optimizer_state


@given(SHAPES, settings_of(), DEVICES, st.sampled_from([2, 8, 64]))
def test_each_stage_of_zero_holds_no_more_state_than_the_one_before(
    shape: ModelShape, chosen: Setting, device: Device, num_ranks: int
) -> None:
    held = []
    for sharding in SHARDED:
        strategy = replace(chosen.strategy, sharding=sharding, offload=Offload.NONE)
        staged = replace(chosen, strategy=strategy, method=Method.FULL, num_ranks=num_ranks, ranks_per_node=2)
        held.append(on_device(states_of(shape, staged, device)))
    # An engine's masters cost more than they save where there is next to no optimizer state to shard.
    if chosen.strategy.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED):
        assert held[1] <= held[0]
    assert held[3] <= held[2] <= held[1]


@given(SHAPES, settings_of(), st.sampled_from([Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP]), st.sampled_from([2, 8]))
def test_offload_never_holds_more_state_on_the_device(
    shape: ModelShape, chosen: Setting, sharding: Sharding, num_ranks: int
) -> None:
    base = replace(chosen, num_ranks=num_ranks, ranks_per_node=num_ranks)
    kept = []
    for offload in (Offload.NONE, *OFFLOADS[sharding][1:]):
        strategy = replace(chosen.strategy, sharding=sharding, offload=offload)
        kept.append(estimate_memory(shape, replace(base, strategy=strategy), gpu()).steady_allocated_bytes)
    assert all(offloaded <= kept[0] for offloaded in kept[1:])


@given(SHAPES, settings_of(), DEVICES)
def test_checkpointing_never_keeps_more_than_none(shape: ModelShape, chosen: Setting, device: Device) -> None:
    dims = dims_of(shape)

    def kept(checkpointing: Checkpointing) -> int:
        other = replace(chosen, checkpointing=checkpointing)
        return block_activations(other, recipe_of(other, device, dims), dims).kept

    without = kept(Checkpointing.NONE)
    assert all(kept(checkpointing) <= without for checkpointing in Checkpointing)
    assert kept(Checkpointing.FULL) == min(kept(checkpointing) for checkpointing in Checkpointing)
