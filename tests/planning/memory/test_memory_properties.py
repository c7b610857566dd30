"""What holds for every setting, whatever the numbers are."""

from typing import Any

from estimate_factory import LLAMA_1B, LLAMA_2_7B, LLAMA_8B, OFFLOADS, QWEN_HALF_B, TINY, configurations_of, cpu, gpu
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shardwise.launch.inputs.model_files import known_models
from shardwise.trainer.planning.configuration import Configuration, PolicyChoices
from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.engines.engine import States
from shardwise.trainer.planning.memory import estimate_memory, least_bytes, needed_bytes, state_need, step_memory
from shardwise.trainer.planning.memory.activations import BlockActivations, block_activations
from shardwise.trainer.planning.memory.events import resident_bytes, step_events
from shardwise.trainer.planning.memory.states import LEAST_8BIT_ELEMENTS, model_states
from shardwise.trainer.planning.policy.precision_policy import dims_of, policy_of
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.model.readers import read_model_shape, supported_model_types
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method, Precision

PRESETS = [
    read_model_shape(model.config) for model in known_models() if model.config["model_type"] in supported_model_types()
]
SHAPES = st.sampled_from([TINY, QWEN_HALF_B, LLAMA_1B, LLAMA_2_7B, LLAMA_8B, *PRESETS])
DEVICES = st.sampled_from([gpu("8xA100-SXM4-80GB"), gpu("8xH200"), gpu("2xT4"), gpu("1xRTX-4090"), cpu(2)])
SHARDED = [Sharding.DDP, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3]


def states_of(shape: ModelShape, chosen: Configuration, device: Device) -> States:
    dims = dims_of(shape)
    return model_states(chosen, policy_of(chosen, device, dims), dims)


def on_device(found: States) -> int:
    retained = found.weights + found.quant_state + found.adapters + found.master_weights + found.optimizer_state
    return retained + found.gradients


@given(SHAPES, configurations_of(), DEVICES)
def test_parts_sum_to_the_peak_no_term_is_negative_and_figures_are_ordered(shape, chosen, device):
    found = estimate_memory(shape, chosen, device)
    assert sum(found.parts.values()) == found.peak_allocated_bytes == max(found.events.values())
    assert found.events[found.peak_event] == found.peak_allocated_bytes
    assert all(num_bytes > 0 for num_bytes in found.parts.values())
    for name, event in events_of(shape, chosen, device).items():
        assert min(event.values(), default=0) >= 0, name
    assert found.low_bytes <= found.peak_allocated_bytes <= found.high_bytes
    assert found.steady_allocated_bytes <= found.peak_allocated_bytes <= found.peak_reserved_bytes < found.device_bytes
    assert found.peak_allocated_bytes < found.need_bytes == needed_bytes(shape, chosen, device)
    assert min(found.pinned_bytes, found.host_bytes, found.nvme_bytes) >= 0
    full = replace(device, usable_bytes=found.need_bytes)
    assert estimate_memory(shape, chosen, full).device_bytes <= found.need_bytes, "what fits is not more than the card"


@given(SHAPES, configurations_of(), DEVICES)
def test_longer_rows_and_larger_micro_batches_never_need_less(shape, chosen, device):
    found = estimate_memory(shape, chosen, device)
    longer = estimate_memory(shape, replace(chosen, seq_len=2 * chosen.seq_len), device)
    larger = estimate_memory(shape, replace(chosen, micro_batch=chosen.micro_batch + 1), device)
    assert found.peak_allocated_bytes <= min(longer.peak_allocated_bytes, larger.peak_allocated_bytes)
    assert found.need_bytes <= larger.need_bytes


@given(SHAPES, configurations_of(), DEVICES)
def test_more_ranks_never_need_more_state_each_and_any_rise_is_a_buffer_with_a_name(shape, chosen, device):
    """FSDP2 pads what does not divide: 8 experts over 64 ranks are gathered and reduced as 64."""
    if chosen.strategy.sharding is Sharding.NONE:
        return
    more = replace(chosen, num_ranks=2 * chosen.num_ranks, ranks_per_node=min(8, 2 * chosen.num_ranks))
    few, many = states_of(shape, chosen, device), states_of(shape, more, device)
    assert many.weights + many.master_weights <= few.weights + few.master_weights
    assert many.gradients <= few.gradients
    # A share of few elements is not paged, and below LEAST_8BIT_ELEMENTS not kept in 8 bit.
    # Shards of FSDP2 are as many tensors as there are weights, each of which may be small.
    is_cut = chosen.strategy.optimizer.facts.is_8bit and chosen.strategy.sharding.uses_fsdp
    is_tiny = is_cut or many.num_trained // more.num_ranks < LEAST_8BIT_ELEMENTS
    assert is_tiny or many.optimizer_state + many.managed <= few.optimizer_state + few.managed
    before, after = events_of(shape, chosen, device), events_of(shape, more, device)
    # State of a partition that has become too small to be paged is counted by torch.
    named = NAMED_BUFFERS | ({"optimizer_state"} if "paged" in chosen.strategy.optimizer else set())
    for name, event in after.items():
        rise = sum(event.values()) - sum(before[name].values())
        assert rise <= sum(max(0, event.get(buffer, 0) - before[name].get(buffer, 0)) for buffer in named), name


@given(SHAPES, configurations_of(), DEVICES, st.sampled_from([2, 8, 64]))
def test_each_stage_of_zero_holds_no_more_state_than_the_one_before(shape, chosen, device, num_ranks):
    held = []
    for sharding in SHARDED:
        strategy = replace(chosen.strategy, sharding=sharding, offload=Offload.NONE)
        staged = replace(chosen, strategy=strategy, method=Method.FULL, num_ranks=num_ranks, ranks_per_node=2)
        held.append(on_device(states_of(shape, staged, device)))
    # An engine's masters cost more than they save where there is next to no optimizer state to shard.
    if chosen.strategy.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED):
        assert held[1] <= held[0]
    assert held[3] <= held[2] <= held[1]


def activations_of(shape: ModelShape, chosen: Configuration, device: Device) -> BlockActivations:
    dims = dims_of(shape)
    return block_activations(chosen, policy_of(chosen, device, dims), dims)


@given(SHAPES, configurations_of(), DEVICES)
def test_checkpointing_never_keeps_more_than_none(shape: ModelShape, chosen: Configuration, device: Device) -> None:
    found = {each: activations_of(shape, replace(chosen, checkpointing=each), device) for each in Checkpointing}
    retained = {checkpointing: each.retained + each.offloaded for checkpointing, each in found.items()}
    # Frozen products keep no input where nothing is recomputed; the output of every second one is more than that.
    others = set(Checkpointing) - ({Checkpointing.SELECTIVE} if chosen.method.freezes_base else set())
    assert all(retained[checkpointing] <= retained[Checkpointing.NONE] for checkpointing in others)
    assert retained[Checkpointing.FULL] == min(retained.values())


# What a sharding engine may hold beside the states it divides: gathered and waiting tensors, each with its name.
NAMED_BUFFERS = {"communication_buffers", "gathered_weights", "reduce_scatter", "gradient_copies", "fresh_gradients"}
HELD_AS_BUCKETS = {"gradients"}  # DDP's buckets are its gradients, from step to step


def events_of(shape: ModelShape, chosen: Configuration, device: Device) -> dict[str, dict[str, int]]:
    step = step_memory(shape, chosen, device)
    return step_events(step, resident_bytes(step))


@given(SHAPES, configurations_of(), DEVICES)
def test_any_rise_over_one_rank_is_a_buffer_with_a_name(shape, chosen, device):
    """At every event, all terms but the buffers of the engine are no larger than without it."""
    if chosen.strategy.sharding is Sharding.NONE or chosen.strategy.offload is not Offload.NONE:
        return
    # DeepSpeed and FSDP2 compute in a 16-bit model, which is compared with a 16-bit model.
    precision = Precision.FP32 if chosen.strategy.precision is Precision.FP32 else Precision.BF16
    strategy = replace(chosen.strategy, precision=precision)
    sharded = replace(chosen, strategy=strategy, method=Method.FULL, reference="shardwise", policy=PolicyChoices())
    alone = replace(sharded, strategy=replace(strategy, sharding=Sharding.NONE), num_ranks=1, ranks_per_node=1)
    without = events_of(shape, alone, device)
    has_buckets = strategy.sharding is Sharding.DDP or chosen.accumulation > 1
    buffers = NAMED_BUFFERS | (HELD_AS_BUCKETS if has_buckets else set())
    if strategy.sharding.uses_deepspeed:  # its flat partition is one tensor, larger than any of the model
        buffers = buffers | {"optimizer_temporaries"}
    for name, event in events_of(shape, sharded, device).items():
        if name == "block_backward_middle":  # a moment that only engines have; between the two others
            continue
        rise = sum(event.values()) - sum(without[name].values())
        # An engine's masters are the optimizer's, twice the weights they stand for in 16 bit.
        named = sum(event.get(buffer, 0) for buffer in (*buffers, "master_weights"))
        assert rise <= named, name


@given(SHAPES, configurations_of(), st.sampled_from([Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP]))
def test_offload_never_holds_more_state_on_the_device_nor_raises_the_peak_but_for_copies_on_their_way(
    shape: ModelShape, chosen: Configuration, sharding: Sharding
) -> None:
    base = replace(chosen, num_ranks=8, ranks_per_node=8, strategy=replace(chosen.strategy, sharding=sharding))
    retained, *others = (
        estimate_memory(shape, replace(base, strategy=replace(base.strategy, offload=each)), gpu())
        for each in OFFLOADS.get(sharding, [Offload.NONE, Offload.OPTIMIZER])
    )
    copies = 4 * dims_of(shape).largest_tensor  # an fp32 gradient on its way to the host
    for moved in others:
        assert moved.steady_allocated_bytes <= retained.steady_allocated_bytes
        assert moved.peak_allocated_bytes <= retained.peak_allocated_bytes + copies


@given(SHAPES, configurations_of(), DEVICES)
def test_activation_offload_moves_bytes_to_pinned_host_ram(shape, chosen, device):
    with_it, without = (
        activations_of(shape, replace(chosen, activation_offload=each), device) for each in (True, False)
    )
    assert without.offloaded == 0
    moved = with_it.retained + with_it.offloaded
    # Query and key of a fused projection are views that the device counts once each, and one copy in host RAM.
    is_fused = any("query_key_value" in each.name or "qkv" in each.name for each in shape.linears)
    assert moved <= without.retained if is_fused else moved == without.retained


STARTS = st.fixed_dictionaries(
    {
        "checkpointing": st.sampled_from(list(Checkpointing)), "loss": st.sampled_from(list(LossHead)),
        "micro_batch": st.integers(1, 64), "accumulation": st.integers(1, 16),
    }
)  # fmt: skip


@given(SHAPES, configurations_of(), DEVICES, STARTS)
def test_the_need_without_activations_is_the_same_in_every_start_and_at_every_size_and_never_above_the_need(
    shape: ModelShape, chosen: Configuration, device: Device, start: dict[str, Any]
) -> None:
    without = state_need(shape, chosen, device)
    assert without <= needed_bytes(shape, chosen, device)
    if chosen.reference == "shardwise":  # adapters of other stacks may follow their loss head
        other = replace(chosen, loss_chunk_tokens=128, **start)
        assert state_need(shape, other, device) == without <= needed_bytes(shape, other, device)


@given(SHAPES, configurations_of(), DEVICES, st.integers(1, 64), st.integers(1, 16), st.sampled_from(list(LossHead)))
def test_the_least_need_of_a_start_is_below_the_need_at_every_size_and_loss_head(
    shape: ModelShape, start: Configuration, device: Device, micro_batch: int, accumulation: int, loss: LossHead
) -> None:
    least = least_bytes(shape, start, device)(micro_batch, accumulation)
    other = replace(start, micro_batch=micro_batch, accumulation=accumulation, loss_chunk_tokens=128)
    assert least <= needed_bytes(shape, other, device)
    if start.reference == "shardwise":  # kernels of other stacks may follow their loss head
        other = replace(other, loss=loss)
        assert least <= needed_bytes(shape, other, device)
        assert least_bytes(shape, other, device)(micro_batch, accumulation) == least
