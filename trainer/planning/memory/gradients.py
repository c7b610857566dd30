"""Gradients while the backward runs: what of them is there at each event, and what is new.

A gradient is fresh until it is where it stays: added to an earlier one, reduced, or complete. Under FSDP2 a block's
gradients become this rank's share as soon as the block is done; the head with the last norm and the embedding are
groups of their own, unless the head is tied to the embedding. Without synchronisation (accumulation) whole gradients
wait in the reduce type for the last micro batch, which reduces them group by group.

A tied head: the gradient of lm_head waits in autograd's buffer for the embedding's. Both are summed in place, so two
tables are alive when gradients are complete where one remains; out of place, three, where the waiting one is a view
(the gradient of a plain linear layer is the transpose of a product). With accumulation the remaining one is separate.
"""

from trainer.planning.memory.step_memory import Event, StepMemory
from trainer.spec.strategy import LossHead, Sharding


def head_gradient(step: StepMemory) -> int:
    """The gradient of lm_head while the blocks run backwards, where it is not counted among earlier ones."""
    recipe, dims = step.recipe, step.dims
    if recipe.is_frozen or (step.recipe.updates_in_backward and not dims.is_tied):
        return 0
    if recipe.uses_fsdp:
        return recipe.compute_bytes * dims.embedding  # whole, until its group is reduced
    is_added = step.holds_earlier_gradients and not dims.is_tied
    return 0 if is_added else recipe.weight_bytes * dims.embedding


def block_gradient(step: StepMemory) -> int:
    """Gradients that a block has at its worst moment, where they are not added to earlier ones.

    That of down_proj, the first; where attention keeps all scores, those of everything behind them.
    """
    recipe, dims = step.recipe, step.dims
    if recipe.is_frozen:
        return 0
    num_elements = dims.hidden * dims.ffn
    if step.blocks.peaks_at_scores:
        num_elements = dims.block - dims.attention + dims.query * dims.hidden
    if recipe.uses_fsdp:
        return recipe.compute_bytes * num_elements
    return 0 if step.holds_earlier_gradients else recipe.weight_bytes * num_elements


def gradients_at_top(step: StepMemory, backward: Event) -> Event:
    """In the backward of the last block, where the head's gradient may have been reduced already."""
    if not step.sharding.reduce_head or step.recipe.updates_in_backward:
        return {}
    reduced = _share_of(step, step.dims.head)
    if step.waits_for_last_micro_batch:
        return {"gradients": backward["gradients"] - step.recipe.reduce_bytes * step.dims.head + reduced}
    return {} if step.holds_earlier_gradients else {"gradients": reduced}


def gradients_at_bottom(step: StepMemory, backward: Event) -> Event:
    """In the backward of the first block: nearly all."""
    finished = (step.dims.layers - 1) * gradients_of_block(step)
    if step.sharding.reduce_head:
        finished += _share_of(step, step.dims.head)
    if step.waits_for_last_micro_batch and not step.recipe.is_frozen:
        waiting = step.recipe.reduce_bytes * (step.dims.block + step.dims.root)
        return {"gradients": min(backward["gradients"], waiting) + finished}
    if not step.holds_earlier_gradients and not step.recipe.updates_in_backward:
        return {"gradients": finished}
    if step.sharding.holds_gradients and "gradients" in backward:
        return {"gradients": _gradients_beside_buckets(step, gradients_of_block(step) + _table(step))}
    return {}


def gradients_at_end(step: StepMemory, backward: Event) -> Event:
    """When the embedding's gradient is there."""
    if step.waits_for_last_micro_batch:
        return {}  # of a micro batch before the last: all are whole
    if not step.holds_earlier_gradients and not step.recipe.updates_in_backward:
        return {"gradients": step.states.gradients}
    if step.sharding.holds_gradients and "gradients" in backward:
        return {"gradients": _gradients_beside_buckets(step, _table(step))}
    return {}


def table_gradients(step: StepMemory) -> int:
    """Gradients of embedding and head beyond their place among the complete gradients."""
    recipe, dims = step.recipe, step.dims
    if recipe.is_frozen:
        return 0
    if recipe.uses_fsdp:
        return _gathered_table_gradients(step)
    table = _table(step)
    is_view = dims.is_tied and step.setting.loss is LossHead.EAGER and not recipe.is_autocast
    if step.recipe.updates_in_backward:
        return max((1 + dims.is_tied + is_view) * table, table + step.states.table_temporaries)
    if not dims.is_tied:
        return table if step.holds_earlier_gradients else 0
    return (step.holds_earlier_gradients + (2 if is_view else 1)) * table


def _gathered_table_gradients(step: StepMemory) -> int:
    """The whole gradient of the last group, and the input of its reduce-scatter."""
    recipe, dims = step.recipe, step.dims
    if not recipe.is_cuda:  # gloo's copy of the reduce-scatter's input, by when only the head's gradient is left
        return 2 * recipe.master_bytes * dims.root + recipe.compute_bytes * dims.embedding
    if recipe.stack.uses_fsdp1:
        return recipe.compute_bytes * dims.root
    group = dims.root - (dims.head + dims.hidden if step.sharding.reduce_head else 0)
    return (recipe.compute_bytes + (0 if step.waits_for_last_micro_batch else recipe.reduce_bytes)) * group


def _gradients_beside_buckets(step: StepMemory, not_yet_copied: int) -> int:
    """DDP's buckets, and of the sums of earlier micro batches those that wait for their last share."""
    is_accumulating = step.setting.accumulation > 1 and step.setting.strategy.sharding is Sharding.DDP
    return step.states.gradients + (min(step.states.gradients, not_yet_copied) if is_accumulating else 0)


def _table(step: StepMemory) -> int:
    """The gradient of the embedding."""
    return 0 if step.recipe.is_frozen else step.recipe.weight_bytes * step.dims.embedding


def gradients_of_block(step: StepMemory) -> int:
    """Gradients that one finished block leaves behind on this rank."""
    if step.recipe.is_frozen:
        return step.states.gradients // step.dims.layers
    return _share_of(step, step.dims.block)


def _share_of(step: StepMemory, num_elements: int) -> int:
    """Of the complete gradients on this rank, those of so many parameters."""
    return step.states.gradients * num_elements // step.dims.parameters
