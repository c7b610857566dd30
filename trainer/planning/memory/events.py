"""The events of one training step, each a dict of named byte terms; the peak of the step is the largest sum.

    load                    the model arrives on the device and is sharded; no optimizer state yet
    forward_end             the loss of the last token: every block's activations and the logits
    loss_backward           backward of cross-entropy
    head_backward           backward of lm_head's matrix product, where that is a moment of its own
    norm_backward           backward of the last RMSNorm, a chain of fp32 operations
    block_backward_top      backward of the last block: all activations are kept, few gradients exist
    block_backward_bottom   backward of the first: few activations, nearly all gradients
    gradients_complete      backward of the embedding
    optimizer_step          states, gradients and the optimizer's temporaries

Between top and bottom both change linearly with the block, so one of the two is the larger. The events are those of
the second and later steps (the optimizer state exists) and of the last micro batch.

A tied head: the gradient of lm_head waits in autograd's buffer for the embedding's. Both are summed in place, so two
tables are alive at `gradients_complete` where one remains; out of place, three, where the waiting one is a view (the
gradient of a plain linear layer is the transpose of a product). With accumulation the remaining one is separate.
"""

from trainer.planning.memory.activations import NORM_BACKWARD_BYTES, BlockActivations
from trainer.planning.memory.loss_head import TOKEN_BYTES, HeadMemory
from trainer.planning.memory.recipe import Dims, Kernel, Recipe
from trainer.planning.memory.sharding import ShardingMemory, accumulated_gradients
from trainer.planning.memory.states import States
from trainer.planning.setting import Setting
from trainer.spec.strategy import Checkpointing, LossHead, Precision, Sharding
from trainer.spec.units import MIB
from trainer.spec.value import Value

Event = dict[str, int]
CUBLAS_WORKSPACE_BYTES = 8_519_680  # of one handle before Hopper; two threads own one each
CUBLAS_WORKSPACE_BYTES_HOPPER = 32 * MIB


class StepMemory(Value, frozen=True, kw_only=True):
    """Everything that the events of a step are put together from."""

    setting: Setting
    recipe: Recipe
    dims: Dims
    states: States
    blocks: BlockActivations
    head: HeadMemory
    sharding: ShardingMemory

    @property
    def holds_earlier_gradients(self) -> bool:
        """Whether a new gradient is added to one that is there: DDP's bucket, or that of an earlier micro batch."""
        is_accumulating = self.setting.accumulation > 1 and not self.setting.optimizer_in_backward
        return is_accumulating or self.sharding.holds_gradients


def step_events(step: StepMemory, resident: Event) -> dict[str, Event]:
    """Every event of a step, in the order they happen; `resident` is what is on the device between steps."""
    forward = {**resident, "inputs": _input_bytes(step)}
    accumulated = accumulated_gradients(step.setting, step.recipe, step.states.num_trained, step.states.gradients)
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
    if not step.setting.optimizer_in_backward:
        events["optimizer_step"] = _optimizer_step(step, resident)
    return events


def resident_bytes(step: StepMemory) -> Event:
    """What is on the device between steps."""
    states, sharding, recipe = step.states, step.sharding, step.recipe
    event = {
        "weights": states.weights,
        "master_weights": states.master_weights,
        "quant_state": states.quant_state,
        "adapters": states.adapters,
        "optimizer_state": states.optimizer_state,
        "communication_buffers": sharding.buffers,
        "gradients": states.gradients if sharding.holds_gradients else 0,
        "workspace": _workspace(recipe),
    }
    if step.setting.strategy.precision is Precision.FP8:
        # An fp8 copy of each weight and its transpose, kept from micro batch to micro batch.
        event["fp8_weights"] = (
            2 * step.dims.layers * step.dims.linear // (recipe.shard_degree if recipe.uses_fsdp else 1)
        )
    return {name: num_bytes for name, num_bytes in event.items() if num_bytes}


def _workspace(recipe: Recipe) -> int:
    if not recipe.is_cuda:
        return 0
    return 2 * (CUBLAS_WORKSPACE_BYTES_HOPPER if recipe.is_hopper_or_later else CUBLAS_WORKSPACE_BYTES)


def _input_bytes(step: StepMemory) -> int:
    """Ids and labels, cosines and sines of rotary embeddings, and eager attention's mask for blocks that run again."""
    recipe, dims = step.recipe, step.dims
    width, seq_len = recipe.residual_bytes, recipe.seq_len
    is_masked = recipe.kernel is Kernel.EAGER and step.setting.checkpointing is not Checkpointing.NONE
    mask = width * recipe.tokens * seq_len if is_masked else 0
    return TOKEN_BYTES * recipe.tokens + 2 * width * seq_len * (dims.query // dims.heads) + mask


def _load(step: StepMemory, resident: Event) -> Event:
    """Weights are built in host RAM; what is wider than its place on the device passes through it in pieces."""
    recipe, dims, sharding = step.recipe, step.dims, step.setting.strategy.sharding
    kept = ("weights", "master_weights", "quant_state", "adapters")
    event: Event = {name: num_bytes for name, num_bytes in resident.items() if name in kept}
    if recipe.uses_fsdp:
        # fully_shard moves a whole group to the device before it cuts its shard.
        event["gathered_weights"] = recipe.weight_bytes * max(dims.block, dims.root)
    elif sharding is Sharding.ZERO3:
        event["gathered_weights"] = recipe.weight_bytes * dims.largest_tensor
    elif recipe.uses_deepspeed and step.states.master_weights:
        # Zeros in the masters' type that initialise the optimizer's state.
        event["gradients"] = -(-recipe.master_bytes * step.states.num_trained // recipe.shard_degree)
    return event


def _kept(step: StepMemory, running: Event) -> Event:
    """What is alive between the forward and the backward."""
    event = {**running, "activations": step.blocks.kept, "head_activations": step.head.kept}
    if step.sharding.gathered_forward:
        event["gathered_weights"] = step.sharding.gathered_forward
    return event


def _forward_end(step: StepMemory, forward: Event) -> Event:
    event = {**_kept(step, forward), "logits": step.head.forward_logits}
    recipe, dims = step.recipe, step.dims
    if recipe.is_autocast:
        # The cache of cast weights lives until the forward ends; without checkpointing the blocks keep them anyway.
        is_kept = step.setting.checkpointing is Checkpointing.NONE
        event["cast_weights"] = 0 if is_kept else dims.layers * step.blocks.cast_weights
        event["head_temporaries"] = recipe.residual_bytes * dims.hidden * recipe.tokens
    return event


def _loss_backward(step: StepMemory, backward: Event) -> dict[str, Event]:
    kept, head = _kept(step, backward), step.head
    events = {"loss_backward": {**kept, "logits": head.backward_logits, "head_temporaries": head.backward_extra}}
    if head.gradient_logits or head.gradient_extra:
        events["head_backward"] = {**kept, "logits": head.gradient_logits, "head_temporaries": head.gradient_extra}
    norm = NORM_BACKWARD_BYTES * step.dims.hidden * step.recipe.tokens
    gradient = {"fresh_gradients": _head_gradient(step)}
    events["norm_backward"] = {**kept, "head_activations": 0, "block_temporaries": norm, **gradient}
    return events


def _block_backward(step: StepMemory, backward: Event) -> dict[str, Event]:
    """The backward of the last block and that of the first."""
    blocks, sharding = step.blocks, step.sharding
    common = {
        **backward,
        "recomputed_block": blocks.recomputed,
        "block_temporaries": blocks.temporaries,
        "fresh_gradients": _head_gradient(step) + _down_gradient(step),
    }
    if sharding.reduce_block:
        common["reduce_scatter"] = sharding.reduce_block
    top = {**common, "activations": blocks.kept}
    bottom = {**common, "activations": blocks.kept_by_one}
    if sharding.gathered_top:
        top["gathered_weights"], bottom["gathered_weights"] = sharding.gathered_top, sharding.gathered_bottom
    if not step.holds_earlier_gradients and not step.setting.optimizer_in_backward:
        bottom["gradients"] = (step.dims.layers - 1) * _gradients_of_block(step)
    elif sharding.holds_gradients and "gradients" in bottom:
        bottom["gradients"] = _gradients_beside_buckets(step, _gradients_of_block(step) + _table(step))
    return {"block_backward_top": top, "block_backward_bottom": bottom}


def _gradients_complete(step: StepMemory, backward: Event) -> Event:
    event = {**backward, "activations": step.blocks.boundary, "fresh_gradients": _table_gradients(step)}
    if step.sharding.gathered_end:
        event["gathered_weights"] = step.sharding.gathered_end
    if not step.holds_earlier_gradients and not step.setting.optimizer_in_backward:
        event["gradients"] = step.states.gradients
    elif step.sharding.holds_gradients and "gradients" in event:
        event["gradients"] = _gradients_beside_buckets(step, _table(step))
    return event


def _gradients_beside_buckets(step: StepMemory, not_yet_copied: int) -> int:
    """DDP's buckets, and of the sums of earlier micro batches those that wait for their last share."""
    is_accumulating = step.setting.accumulation > 1 and step.setting.strategy.sharding is Sharding.DDP
    return step.states.gradients + (min(step.states.gradients, not_yet_copied) if is_accumulating else 0)


def _table(step: StepMemory) -> int:
    """The gradient of the embedding."""
    return 0 if step.recipe.is_frozen else step.recipe.weight_bytes * step.dims.embedding


def _head_gradient(step: StepMemory) -> int:
    """The gradient of lm_head while the blocks run backwards, where it is not counted among earlier ones."""
    recipe, dims = step.recipe, step.dims
    if recipe.is_frozen or step.setting.optimizer_in_backward:
        return 0
    if recipe.uses_fsdp:
        return recipe.compute_bytes * dims.embedding  # whole, until the root is reduced
    is_added = step.holds_earlier_gradients and not dims.is_tied
    return 0 if is_added else recipe.weight_bytes * dims.embedding


def _down_gradient(step: StepMemory) -> int:
    """The first gradient of a block, that of down_proj, where it is not added to an earlier one."""
    recipe, dims = step.recipe, step.dims
    if recipe.is_frozen:
        return 0
    if recipe.uses_fsdp:
        return recipe.compute_bytes * dims.hidden * dims.ffn
    return 0 if step.holds_earlier_gradients else recipe.weight_bytes * dims.hidden * dims.ffn


def _gradients_of_block(step: StepMemory) -> int:
    """Gradients that one finished block leaves behind on this rank."""
    if step.recipe.is_frozen:
        return step.states.gradients // step.dims.layers
    return step.states.gradients * step.dims.block // step.dims.parameters


def _table_gradients(step: StepMemory) -> int:
    """Gradients of embedding and head beyond their place among the complete gradients."""
    recipe, dims = step.recipe, step.dims
    if recipe.is_frozen:
        return 0
    if recipe.uses_fsdp:
        if not recipe.is_cuda:  # gloo's copy of the reduce-scatter's input, by when only the head's gradient is left
            return 2 * recipe.master_bytes * dims.root + recipe.compute_bytes * dims.embedding
        return (recipe.compute_bytes + recipe.master_bytes) * dims.root  # and the input of their reduce-scatter
    table = _table(step)
    if not dims.is_tied:
        return table if step.holds_earlier_gradients or step.setting.optimizer_in_backward else 0
    is_view = step.setting.loss is LossHead.EAGER and not recipe.is_autocast
    return (step.holds_earlier_gradients + (2 if is_view else 1)) * table


def _optimizer_step(step: StepMemory, resident: Event) -> Event:
    recipe, states = step.recipe, step.states
    event = {**resident, "gradients": states.gradients, "optimizer_temporaries": states.optimizer_temporaries}
    if recipe.uses_deepspeed and states.master_weights:
        # The engine copies its partition of the gradients into one flat tensor of the masters' type.
        event["gradient_copies"] = -(-recipe.master_bytes * states.num_trained // recipe.shard_degree)
    return event
