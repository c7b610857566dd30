"""Which prediction cases describe something that cannot run, each with the sentence that says why.

What two settings, or a setting and a chip, rule out stands in the tables of incompatibilities: all of them bind our own
runtime, and those that reach `ALL` bind other software too, so a case with another `stack` is answered where only we
could not. A combination that is merely pointless (FSDP on one GPU) runs, and is answered as well. Here stands what is
wrong with a value by itself: a field that belongs to another choice, a number beyond the model's.
"""

from collections.abc import Callable

from trainer.planning.cases.reading import TrainInput
from trainer.planning.device import Device
from trainer.planning.rules.combination import Reach, capability_words, combination_of, facts_of, first_broken
from trainer.planning.rules.incompatible_rows import LAYOUTS, ROWS
from trainer.planning.rules.incompatible_settings import RECIPE_CAPABILITY, SETTINGS
from trainer.planning.setting import OUR_STACK, Setting
from trainer.spec.model.shape import ModelShape, Positions
from trainer.spec.strategy import Checkpointing, LossHead, Method, Precision

Check = Callable[[ModelShape, Setting], str | None]

_INCOMPATIBILITIES = (*LAYOUTS, *ROWS, *SETTINGS)
# A case has GPUs where a plan has ranks.
_IN_OTHER_WORDS = {
    "several_ranks_share_nothing": "sharding: none would train {num_ranks} different models on {num_ranks} GPUs",
    "hsdp_needs_nodes": "sharding: hsdp shards inside a node and replicates across nodes; on one node it is fsdp",
}


def impossibility(shape: ModelShape, device: Device, setting: Setting) -> str | None:
    """Why this setting cannot run on this device, or None where it can."""
    is_ours = setting.stack == OUR_STACK
    combination = combination_of(setting, shape, device, trusts_unknown_cards=True)
    broken = first_broken(_INCOMPATIBILITIES, combination, reach=Reach.OURS if is_ours else Reach.ALL)
    if broken is not None:
        said = _IN_OTHER_WORDS.get(broken.name, broken.reason).format(**facts_of(combination))
        return said if broken.instead is None else f"{said}; use {broken.instead_of(combination)}"
    return next((sentence for check in VALUES if (sentence := check(shape, setting)) is not None), None)


def misplaced(train: TrainInput, device: Device) -> str | None:
    """Why a field does not go with the others or with the chip, of those that no `Setting` keeps; None where all do."""
    if train.quant is not None and train.method is not Method.QLORA:
        return f"train.quant is of method: qlora, not of {train.method}"
    if train.fp8_recipe is None:
        return None
    if train.precision is not Precision.FP8:
        return f"train.fp8_recipe is of precision: fp8, not of {train.precision}"
    least, capability = RECIPE_CAPABILITY.get(train.fp8_recipe, (8, 9)), device.compute_capability
    if capability is not None and capability < least:
        version = f"{least[0]}.{least[1]}"
        return f"train.fp8_recipe: {train.fp8_recipe} needs compute capability {version}; {capability_words(device)}"
    return None


def _layerwise(_shape: ModelShape, setting: Setting) -> str | None:
    is_misplaced = setting.galore.layerwise and setting.method is not Method.GALORE
    return "layerwise is of method: galore" if is_misplaced else None


def _every_n(shape: ModelShape, setting: Setting) -> str | None:
    num_blocks, is_every_n = setting.checkpoint_every_n, setting.checkpointing is Checkpointing.EVERY_N
    if num_blocks is None:
        return (
            "checkpointing: every_n needs n, the number of blocks from one checkpoint to the next"
            if is_every_n
            else None
        )
    if not is_every_n:
        return f"n is of checkpointing: every_n, not of {setting.checkpointing}"
    return f"n is {num_blocks}, and the model has {shape.num_layers} blocks" if num_blocks > shape.num_layers else None


def _slices(_shape: ModelShape, setting: Setting) -> str | None:
    if setting.loss_chunk_tokens is None or setting.loss is LossHead.CHUNKED:
        return None
    return f"loss_chunk_tokens is of loss: chunked, not of {setting.loss}"


def _positions(shape: ModelShape, setting: Setting) -> str | None:
    longest = setting.recipe.longest_seq or setting.seq_len
    if shape.positions is not Positions.LEARNED or shape.max_positions is None or longest <= shape.max_positions:
        return None
    return f"a sequence of {longest} tokens is longer than the model's table of {shape.max_positions} positions"


def _longest(_shape: ModelShape, setting: Setting) -> str | None:
    longest = setting.recipe.longest_seq
    if longest is None or longest >= setting.seq_len:
        return None
    return f"recipe.longest_seq is {longest}, less than train.seq_len {setting.seq_len}"


def _targets(shape: ModelShape, setting: Setting) -> str | None:
    """PEFT passes over a name that no layer has, as long as another name finds one; so may any foreign stack."""
    if not setting.method.freezes_base or setting.lora.targets == ("all-linear",):
        return None
    names = tuple(dict.fromkeys(linear.name for linear in shape.linears))
    unknown = [target for target in setting.lora.targets if target not in names]
    is_foreign = setting.stack != OUR_STACK
    if setting.lora.targets and (not unknown or (is_foreign and len(unknown) < len(setting.lora.targets))):
        return None
    said = repr(unknown[0]) if unknown else "an empty list"
    return f"lora_targets: {said} names no linear layer of this model; it has {', '.join(names)}, or all-linear"


VALUES: tuple[Check, ...] = (_layerwise, _every_n, _slices, _positions, _longest, _targets)
