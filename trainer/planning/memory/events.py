"""The events of one training step, each a dict of named byte terms; the peak of the step is the largest sum.

    load                    the model arrives on the device and is sharded; no optimizer state yet
    forward_end             the loss of the last token: every block's activations and the logits
    loss_backward           backward of cross-entropy
    head_backward           backward of lm_head's matrix product, where that is a moment of its own
    norm_backward           backward of the last RMSNorm, a chain of fp32 operations
    block_backward_top      backward of the last block: all activations are saved, few gradients exist
    block_backward_middle   of the one before, where the gradients of the last are being reduced meanwhile
    block_backward_bottom   backward of the first: few activations, nearly all gradients
    gradients_complete      backward of the embedding
    optimizer_step          states, gradients and the optimizer's temporaries

Between top and bottom both change linearly with the block, so one of the two is the larger. The events are those of
the second and later steps (the optimizer state exists) and of the last micro batch.

A gradient is fresh until it is added to an earlier one, reduced, or complete. Where gradients are reduced by groups, a
block's become this rank's share as soon as the block is done. What is gathered, reduced and copied at an event
is decided by the engine (`planning/engines`).
"""

from shardwise.trainer.planning import engines
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.engines.engine import Event, PlannedEngine, StateMemory, Widths
from shardwise.trainer.planning.memory.activations import (
    NORM_BACKWARD_BYTES,
    POSITION_BYTES,
    TOKEN_BYTES,
    BlockActivations,
    HeadMemory,
)
from shardwise.trainer.planning.memory.traced import (
    places,
    retained,
    run_of,
    worst_block,
    worst_end,
    worst_forward,
)
from shardwise.trainer.planning.policy.precision_policy import PrecisionPolicy
from shardwise.trainer.spec.model.blocks import TracedBlocks
from shardwise.trainer.spec.model.shape import Norm
from shardwise.trainer.spec.strategy import AttentionKernel, Checkpointing, LossHead
from shardwise.trainer.spec.units import MIB


class StepMemory(StateMemory, frozen=True, kw_only=True):
    """The parts that the events of a step consist of."""

    blocks: BlockActivations
    head: HeadMemory

    @property
    def waits_for_last_micro_batch(self) -> bool:
        """True if whole gradients stay on this rank until the last micro batch reduces them."""
        return engine_of(self).waits_for_last_micro_batch(self.configuration, self.policy)


def engine_of(step: StateMemory) -> PlannedEngine:
    """The planner's side of the engine that runs the step."""
    return engines.engine_of(step.configuration.strategy.sharding)


def accumulated_gradients(
    configuration: Configuration, policy: PrecisionPolicy, num_trained: int, gradients: int
) -> int:
    """Gradients of earlier micro batches, alive in every forward and backward but the first."""
    if configuration.accumulation == 1 or policy.updates_in_backward:
        return 0
    engine = engines.engine_of(configuration.strategy.sharding)
    return engine.earlier_gradients(configuration, policy, num_trained, gradients)


def head_gradient(step: StepMemory) -> int:
    """The gradient of lm_head while the blocks run backwards, where it is not counted among earlier ones."""
    policy, dims = step.policy, step.dims
    if policy.is_frozen or (step.policy.updates_in_backward and not dims.is_tied):
        return 0
    is_added = step.holds_earlier_gradients and not dims.is_tied
    return engine_of(step).gradient_widths(policy, is_added=is_added).made * dims.embedding


def block_gradient(step: StepMemory) -> int:
    """Gradients that a block has at its worst moment, where they are not added to earlier ones.

    That of down_proj, the first; where attention keeps all scores, those of everything behind them.
    """
    policy, dims = step.policy, step.dims
    if policy.is_frozen:
        return 0
    num_elements = dims.hidden * dims.ffn
    if step.blocks.peaks_at_scores:
        num_elements = dims.block - dims.attention + dims.query * dims.hidden
    return engine_of(step).gradient_widths(policy, is_added=step.holds_earlier_gradients).made * num_elements


def gradients_at_top(step: StepMemory, backward: Event) -> Event:
    """In the backward of the last block, where the head's gradient may have been reduced already."""
    if not step.sharding.reduce_head or step.policy.updates_in_backward:
        return {}
    reduced = _share_of(step, step.dims.head)
    if step.waits_for_last_micro_batch:
        return {"gradients": backward["gradients"] - step.policy.reduce_bytes * step.dims.head + reduced}
    return {} if step.holds_earlier_gradients else {"gradients": reduced}


def gradients_at_bottom(step: StepMemory, backward: Event) -> Event:
    """In the backward of the first block: nearly all."""
    finished = (step.dims.layers - 1) * gradients_of_block(step)
    if step.sharding.reduce_head:
        finished += _share_of(step, step.dims.head)
    if step.waits_for_last_micro_batch and not step.policy.is_frozen:
        waiting = step.policy.reduce_bytes * (step.dims.block + step.dims.root)
        return {"gradients": min(backward["gradients"], waiting) + finished}
    if not step.holds_earlier_gradients and not step.policy.updates_in_backward:
        return {"gradients": finished}
    if step.sharding.holds_gradients and "gradients" in backward:
        return {"gradients": _gradients_with_buckets(step, gradients_of_block(step) + _table(step))}
    return {}


def gradients_at_end(step: StepMemory, backward: Event) -> Event:
    """When the embedding's gradient is there."""
    if step.waits_for_last_micro_batch:
        return {}  # of a micro batch before the last: all are whole
    if not step.holds_earlier_gradients and not step.policy.updates_in_backward:
        return {"gradients": step.states.gradients}
    if step.sharding.holds_gradients and "gradients" in backward:
        return {"gradients": _gradients_with_buckets(step, _table(step))}
    return {}


def table_gradients(step: StepMemory) -> int:
    """Gradients of embedding and head beyond their place among the complete gradients."""
    return 0 if step.policy.is_frozen else engine_of(step).table_gradients(step)


def _gradients_with_buckets(step: StepMemory, not_yet_copied: int) -> int:
    """DDP's buckets, and of the sums of earlier micro batches those that wait for their last share."""
    is_accumulating = (
        step.configuration.accumulation > 1 and step.configuration.strategy.sharding.facts.keeps_gradient_buckets
    )
    return step.states.gradients + (min(step.states.gradients, not_yet_copied) if is_accumulating else 0)


def _table(step: StepMemory) -> int:
    """The gradient of the embedding."""
    return 0 if step.policy.is_frozen else step.policy.weight_bytes * step.dims.embedding


def gradients_of_block(step: StepMemory) -> int:
    """Gradients of one finished block on this rank."""
    if step.policy.is_frozen:
        return step.states.gradients // step.dims.layers
    return _share_of(step, step.dims.block)


def _share_of(step: StepMemory, num_elements: int) -> int:
    """Of the complete gradients on this rank, those of so many parameters."""
    return step.states.gradients * num_elements // step.dims.parameters


CUBLAS_WORKSPACE_BYTES = 8_519_680  # of one handle before Hopper; two threads own one each
CUBLAS_WORKSPACE_BYTES_HOPPER = 32 * MIB
TE_WORKSPACE_BYTES, TE_WORKSPACE_BYTES_HOPPER = 4 * MIB, 32 * MIB  # of Transformer Engine's own products


def step_events(step: StepMemory, resident: Event) -> dict[str, Event]:
    """Every event of a step, in the order they happen; `resident` is what is on the device between steps."""
    forward = {**resident, "inputs": _input_bytes(step)}
    accumulated = accumulated_gradients(step.configuration, step.policy, step.states.num_trained, step.states.gradients)
    if accumulated:
        forward["gradients"] = accumulated
    backward = dict(forward)
    if step.sharding.buffers_backward:
        backward["communication_buffers"] = step.sharding.buffers + step.sharding.buffers_backward
    events = {
        "load": _load(step, resident),
        "forward_end": _forward_end(step, forward),
        **_loss_backward(step, backward),
        **_block_backward(step, backward),
        "gradients_complete": _gradients_complete(step, backward),
    }
    if not step.policy.updates_in_backward:
        events["optimizer_step"] = optimizer_step(step, resident)
    return events


def resident_bytes(step: StateMemory) -> Event:
    """Bytes on the device between steps."""
    states, sharding, policy = step.states, step.sharding, step.policy
    event = {
        "weights": states.weights,
        "master_weights": states.master_weights,
        "quant_state": states.quant_state,
        "adapters": states.adapters,
        "optimizer_state": states.optimizer_state,
        "communication_buffers": sharding.buffers,
        "gradients": states.gradients if sharding.holds_gradients else 0,
        "workspace": _workspace(policy),
        "mask": step.dims.mask_buffer,
    }
    return {name: num_bytes for name, num_bytes in event.items() if num_bytes}


def _workspace(policy: PrecisionPolicy) -> int:
    if not policy.is_cuda:
        return 0
    of_torch = 2 * (CUBLAS_WORKSPACE_BYTES_HOPPER if policy.is_hopper_or_later else CUBLAS_WORKSPACE_BYTES)
    if not policy.multiplies_by_te:
        return of_torch
    return of_torch + (TE_WORKSPACE_BYTES_HOPPER if policy.is_hopper_or_later else TE_WORKSPACE_BYTES)


def _input_bytes(step: StepMemory) -> int:
    """Ids and labels, cosines and sines of rotary embeddings, and eager attention's mask for blocks that run again.

    Packed rows have positions of their own, and so cosines and sines each; some model types are given a mask of theirs.
    """
    policy, dims = step.policy, step.dims
    if dims.traced is not None:  # what the model makes of them is in the trace
        return (TOKEN_BYTES + (POSITION_BYTES if policy.is_packed else 0)) * policy.tokens
    width, seq_len = policy.residual_bytes, policy.seq_len
    is_masked = policy.kernel is AttentionKernel.EAGER and step.configuration.checkpointing is not Checkpointing.NONE
    mask = width * policy.tokens * seq_len if is_masked else 0
    positions = policy.tokens if policy.is_packed else seq_len
    if policy.is_packed:
        mask += POSITION_BYTES * policy.tokens
        if dims.masks_documents and policy.kernel is not AttentionKernel.EAGER:
            mask += policy.tokens * seq_len  # one byte a pair
    return TOKEN_BYTES * policy.tokens + 2 * width * positions * dims.rotary_dim + mask


def _load(step: StepMemory, resident: Event) -> Event:
    """Weights are built in host RAM; what is wider than its place on the device passes through it in pieces."""
    retained = ("weights", "master_weights", "quant_state", "adapters")
    event = {name: num_bytes for name, num_bytes in resident.items() if name in retained}
    return {**event, **engine_of(step).load(step)}


def _retained(step: StepMemory, running: Event, gathered: int) -> Event:
    """Bytes alive between the forward and the backward."""
    event = {**running, "activations": step.blocks.retained, "head_activations": step.head.retained}
    return with_gathered(event, gathered)


def with_gathered(event: Event, gathered: int) -> Event:
    return {**event, "gathered_weights": gathered} if gathered else event


def _forward_end(step: StepMemory, forward: Event) -> Event:
    """The end of the forward, or the block in it with most weights gathered ahead, if that is more."""
    event = _forward_of_head(step, forward)
    if not step.sharding.gathered_in_forward:
        return event
    # Of the block at work the stream of the compute holds a copy; the others are in the stream that gathers.
    gathered = min(step.sharding.gathered_in_forward, step.sharding.gathered_top)
    in_block = _retained(step, forward, gathered) | {"head_activations": 0}
    temporaries = max(step.blocks.recomputed_by_last, step.blocks.norms.forward)  # not more than these
    in_block["block_temporaries"] = temporaries + step.sharding.gathered_in_forward - gathered
    return max(event, in_block, key=_total)


def _forward_of_head(step: StepMemory, forward: Event) -> Event:
    event = {**_retained(step, forward, step.sharding.gathered_forward), "logits": step.head.forward_logits}
    policy, dims = step.policy, step.dims
    if policy.is_autocast:
        # The cache of cast weights lives until the forward ends; what is not recomputed keeps them anyway.
        event["cast_weights"] = step.blocks.cached_casts
        event["head_temporaries"] = policy.residual_bytes * dims.hidden * policy.tokens
    if dims.traced is not None:
        in_blocks = {**event, "head_activations": 0, "logits": 0, "head_temporaries": 0}
        in_blocks["block_temporaries"] = traced_forward(step)
        return max(event, in_blocks, key=_total)
    norms = step.blocks.norms
    if not norms.alone:
        return event
    in_last = norms.alone if step.blocks.recomputed_by_last else norms.forward
    before_head = {**event, "head_activations": 0, "logits": 0, "head_temporaries": 0, "block_temporaries": in_last}
    return max(event, before_head, key=_total)


def _loss_backward(step: StepMemory, backward: Event) -> dict[str, Event]:
    head, sharding = step.head, step.sharding
    # A loss that is computed inside the head runs backwards with the head.
    is_in_head = not head.gradient_logits or step.configuration.loss is LossHead.CHUNKED
    retained = _retained(step, backward, sharding.gathered_head if is_in_head else sharding.gathered_loss)
    events = {"loss_backward": {**retained, "logits": head.backward_logits, "head_temporaries": head.backward_extra}}
    if head.gradient_logits or head.gradient_extra:
        retained = with_gathered(retained, sharding.gathered_head)
        events["head_backward"] = {**retained, "logits": head.gradient_logits, "head_temporaries": head.gradient_extra}
    return {**events, "norm_backward": _norm_backward(step, backward)}


def _norm_backward(step: StepMemory, backward: Event) -> Event:
    """The chain of fp32 operations of the last norm, or the reduction of the head's gradient right after it."""
    policy, dims, sharding = step.policy, step.dims, step.sharding
    retained = _retained(step, backward, sharding.gathered_head) | {"head_activations": 0}
    if dims.traced is not None:
        return _worst_norm(step, backward, retained)
    chain = NORM_BACKWARD_BYTES if dims.norm is Norm.RMS else 2 * policy.residual_bytes
    event = {
        **retained,
        "block_temporaries": chain * dims.hidden * policy.tokens,
        "fresh_gradients": head_gradient(step),
    }
    return _or_reduced(step, backward, retained, event)


def _worst_norm(step: StepMemory, backward: Event, retained: Event) -> Event:
    run = run_of(step.configuration, step.policy, step.dims)
    event = {
        **retained,
        "block_temporaries": round(worst_end(run, run.trace.after).held),
        "fresh_gradients": head_gradient(step),
    }
    return _or_reduced(step, backward, retained, event)


def _or_reduced(step: StepMemory, backward: Event, retained: Event, event: Event) -> Event:
    """The event, or the reduction of the head's gradient right after it."""
    policy, dims, sharding = step.policy, step.dims, step.sharding
    if not sharding.reduce_head:
        return event
    is_added = step.waits_for_last_micro_batch
    reduced = {
        **with_gathered(retained, sharding.gathered_head - policy.compute_bytes * dims.head_group),
        "block_temporaries": policy.residual_bytes * dims.hidden * policy.tokens,
        "fresh_gradients": 0 if is_added else policy.compute_bytes * dims.head,
        "reduce_scatter": sharding.reduce_head,
        **gradients_at_top(step, backward),
    }
    return max(event, reduced, key=_total)


def _block_backward(step: StepMemory, backward: Event) -> dict[str, Event]:
    """The backward of the last block and that of the first."""
    if step.dims.traced is not None:
        return _traced_block_backward(step, step.dims.traced, backward)
    blocks, sharding = step.blocks, step.sharding
    recomputing = max(blocks.temporaries, blocks.norms.again)
    common = {
        **backward,
        "fresh_gradients": (0 if sharding.reduce_head else head_gradient(step)) + block_gradient(step),
    }
    at_top = {
        "block_temporaries": recomputing if blocks.recomputed_by_last else blocks.temporaries,
        "recomputed_block": blocks.recomputed_by_last,
        "activations": blocks.retained + blocks.fetched,
    }
    at_bottom = {
        "block_temporaries": recomputing if blocks.recomputed else blocks.temporaries,
        "recomputed_block": blocks.recomputed,
        "activations": blocks.retained_by_first,
        **_retained_inputs(step),
    }
    top = with_gathered({**common, **at_top}, sharding.gathered_top)
    bottom = with_gathered({**common, **at_bottom}, sharding.gathered_bottom)
    top.update(gradients_at_top(step, backward))
    bottom.update(gradients_at_bottom(step, backward))
    if not sharding.reduce_block:
        return {"block_backward_top": top, "block_backward_bottom": bottom}
    middle = _middle(step, top, bottom)
    top["reduce_scatter"], bottom["reduce_scatter"] = sharding.reduce_head, sharding.reduce_block
    events = {"block_backward_top": top, "block_backward_middle": middle, "block_backward_bottom": bottom}
    return {name: max(event, _mlp_finished(step, event), key=_total) for name, event in events.items()}


def traced_forward(step: StepMemory) -> int:
    """The most that a block holds in its forward, beyond what all blocks retain; it is not recomputed."""
    run = run_of(step.configuration, step.policy, step.dims)
    found = retained(step.configuration, run)
    if step.blocks.offloaded:
        return 0
    moments = (
        found.before[place] + worst_forward(run, run.order[place]) - found.before[-1]
        for place in range(len(run.order))
        if not found.recomputed[place]
    )
    return max(0, round(max(moments, default=0.0)))


def _traced_block_backward(step: StepMemory, traced: TracedBlocks, backward: Event) -> dict[str, Event]:
    """The worst blocks: the last, one before it, the first; the third too, if two are gathered ahead of it."""
    last, of_kinds = len(traced.order) - 1, set(places(traced))
    if step.sharding.blocks_ahead > 1:
        of_kinds.add(min(2, last))
    events = {place: _traced_block(step, traced, backward, place) for place in sorted(of_kinds)}
    middle = max((event for place, event in events.items() if 0 < place < last), key=_total, default=None)
    named = {"block_backward_top": events[last]}
    if middle is not None:
        named["block_backward_middle"] = middle
    return named | ({"block_backward_bottom": events[0]} if last else {})


def _traced_block(step: StepMemory, traced: TracedBlocks, backward: Event, place: int) -> Event:
    """The worst moment of the block at a place, with what the blocks after it have left."""
    configuration, policy, sharding = step.configuration, step.policy, step.sharding
    run, kind = run_of(configuration, policy, step.dims), traced.order[place]
    found = retained(configuration, run)
    worst = worst_block(run, kind, _gradient_widths(step), is_recomputed=found.recomputed[place])
    earlier = found.before[place]
    if step.blocks.offloaded:  # the block before is on its way back
        earlier = run.before + (found.of_blocks[place - 1] if place else 0.0)
    event = {
        **backward,
        "activations": round(earlier + found.of_blocks[place]),
        "block_temporaries": round(worst.held - found.of_blocks[place]),
        "fresh_gradients": (0 if sharding.reduce_head else head_gradient(step)) + round(worst.gradients),
    }
    if event["block_temporaries"] < 0:  # the block saves its output, and its backward begins when that is freed
        event["activations"] += event.pop("block_temporaries")
    after = sum(traced.kinds[each].num_parameters for each in traced.order[place + 1 :])
    event.update(_finished(step, backward, after, sum(traced.kinds[each].num_parameters for each in traced.order)))
    gathered = engine_of(step).traced_block(step, traced, place)
    if gathered.reduced is not None:
        event["reduce_scatter"] = gathered.reduced
    return with_gathered(event, gathered.weights)


def _gradient_widths(step: StepMemory) -> Widths:
    """Bytes of an element of a gradient that the block at work has made."""
    is_added = step.holds_earlier_gradients or step.policy.updates_in_backward
    return engine_of(step).gradient_widths(step.policy, is_added=is_added)


def _finished(step: StepMemory, backward: Event, after: int, in_blocks: int) -> Event:
    """Gradients of blocks with `after` of all `in_blocks` parameters, which are complete, and of the head."""
    policy, dims, states = step.policy, step.dims, step.states
    if policy.is_frozen:
        finished = states.gradients * after // in_blocks
    else:
        finished = _share_of(step, after + (dims.head if step.sharding.reduce_head else 0))
    if step.waits_for_last_micro_batch and not policy.is_frozen:
        waiting = in_blocks - after + dims.root - (dims.head if step.sharding.reduce_head else 0)
        return {"gradients": min(backward["gradients"], policy.reduce_bytes * waiting) + finished}
    if not step.holds_earlier_gradients and not policy.updates_in_backward:
        return {"gradients": finished}
    if step.sharding.holds_gradients and "gradients" in backward:
        not_yet = 0 if policy.is_frozen else policy.weight_bytes * (in_blocks - after)
        return {"gradients": _gradients_with_buckets(step, not_yet + _table(step))}
    return {}


def _middle(step: StepMemory, top: Event, bottom: Event) -> Event:
    """The block after the last or one before the first, while the gradients of its neighbour are being reduced.

    If two blocks are gathered ahead, the one before the second is the last that has both.
    """
    blocks, sharding, one = step.blocks, step.sharding, gradients_of_block(step)
    given_up = step.policy.reduce_bytes * step.dims.block if step.waits_for_last_micro_batch else 0
    after_last = {
        **with_gathered(top, sharding.gathered_top - sharding.freed_by_last),
        "activations": blocks.retained - blocks.retained_by_last + blocks.fetched,
        "recomputed_block": blocks.recomputed_after_last,
        "gradients": max(0, top.get("gradients", 0) - given_up) + one,
        "reduce_scatter": sharding.reduce_block,
    }
    nearest = [(1, sharding.gathered_top - sharding.freed_before_first)]
    if step.sharding.blocks_ahead > 1 and step.dims.layers > 3:
        nearest.append((2, sharding.gathered_top - sharding.freed_before_second))
    before = (
        {
            **with_gathered(bottom, gathered),
            "activations": min(
                blocks.retained + blocks.fetched, blocks.retained_by_first + place * blocks.retained_by_last
            ),
            "gradients": max(0, bottom.get("gradients", 0) - place * one),
            "reduce_scatter": sharding.reduce_block,
        }
        for place, gathered in nearest
    )
    return max(after_last, *before, key=_total)


def _mlp_finished(step: StepMemory, event: Event) -> Event:
    """The same block when the gradients of its feed-forward half exist and the activations of that half are freed."""
    policy, dims = step.policy, step.dims
    trained = 0 if policy.is_frozen else policy.compute_bytes * (dims.block - dims.attention)
    # The gradient of a token comes back from each of its experts.
    tokens = policy.tokens * max(1, dims.experts_per_token)
    fresh = event["fresh_gradients"] - block_gradient(step) + trained
    return {
        **event,
        "recomputed_block": min(event["recomputed_block"], step.blocks.recomputed_without_mlp),
        "block_temporaries": policy.compute_bytes * dims.hidden * tokens,
        "fresh_gradients": fresh,
    }


def _total(event: Event) -> int:
    return sum(event.values())


def _retained_inputs(step: StepMemory) -> Event:
    """Inputs of frozen blocks and their gradients, which FSDP1 holds until the backward ends."""
    policy, blocks = step.policy, step.blocks
    if not (step.sharding.retains_frozen_inputs and policy.is_frozen and policy.is_checkpointed):
        return {}
    # One of the gradients is the output gradient of the block at work.
    return {"activations": blocks.retained, "retained_gradients": max(0, step.dims.layers - 2) * blocks.boundary}


def _gradients_complete(step: StepMemory, backward: Event) -> Event:
    is_split = bool(step.sharding.reduce_head)
    event = {**backward, "activations": 0 if is_split else step.blocks.boundary}
    event["fresh_gradients"] = table_gradients(step)
    if step.dims.traced is not None:
        run = run_of(step.configuration, step.policy, step.dims)
        worst = worst_end(run, run.trace.before)
        others = max(0, round(worst.gradients) - step.dims.embedding)
        event["activations"] = round(worst.held)
        event["fresh_gradients"] += 0 if step.policy.is_frozen else step.policy.weight_bytes * others
    return {**with_gathered(event, step.sharding.gathered_end), **gradients_at_end(step, backward)}


def optimizer_step(step: StateMemory, resident: Event) -> Event:
    """States, gradients and temporaries while the optimizer updates the weights after the backward."""
    states = step.states
    event = {**resident, "gradients": states.gradients, "optimizer_temporaries": states.optimizer_temporaries}
    return engine_of(step).update(step, event)
