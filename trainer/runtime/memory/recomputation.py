"""Activation checkpointing: which activations are saved for the backward pass, and which are recomputed.

    none       all activations are saved
    full       the input of every block is saved; the backward pass runs the block's forward again
    every_n    the first of every n blocks is recomputed, the others save everything. The peak is where the last block
               runs backward: a block that recomputes does so after the n - 1 blocks behind it have freed theirs
    attention  the attention module of every block is recomputed, everything around it is saved
    selective  each block keeps its input, the output of attention and of every second matrix product (the first, third,
               ... in execution order); the rest is recomputed from those

Recomputation is `torch.utils.checkpoint` with `use_reentrant=False`. It restores the state of the random number
generators, so that dropout masks are the same; a kernel with dropout inside attention is therefore always recomputed.

Under torch.compile the compiler traces the recomputation, and nothing here can count it.

Blocks and attention modules are found by what they are, not by what they are called. A block is what transformers
itself recomputes: a `GradientCheckpointingLayer`; in a model that has none, whose code is its own or old, one of the
list of modules that holds the most parameters. An attention module is the one in a block that knows its place in a
cache of keys and values (`layer_idx`) and how its heads are cut.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.strategy import Checkpointing

MAX_KINDS = 12  # of blocks; where there seem to be more, numbers in their modules do not count
_PLACE = re.compile(r"(?:.*_)?(?:layer_?)?(?:idx|id|index|number)")  # names of a block's place among the others
_HEAD_FIELDS = ("head_dim", "head_size", "num_heads", "n_heads")


def apply_checkpointing(
    model: PreTrainedModel, checkpointing: Checkpointing, *, every_n: int | None = None
) -> tuple["Recomputation", ...]:
    """Switches recomputation on; one value for each block that recomputes something. InputError where it cannot."""
    if checkpointing is Checkpointing.NONE:
        return ()
    blocks = blocks_of(model)
    if not blocks:
        raise InputError(f"pin.checkpointing: {type(model).__name__} has no blocks that can be recomputed; use none")
    recomputations = []
    for index in recomputed_blocks(checkpointing, len(blocks), every_n):
        block: Any = blocks[index]  # with transformers' own switches
        recomputation = Recomputation(checkpointing)
        if checkpointing is Checkpointing.ATTENTION:
            attention = attention_module(block)
            if attention is None:
                raise InputError(
                    f"pin.checkpointing: attention: {type(block).__name__} has no attention module; use full"
                )
            _recompute_module(attention, recomputation)
        elif not isinstance(blocks[index], GradientCheckpointingLayer):
            _recompute_module(block, recomputation)
        else:
            block.gradient_checkpointing = True
            block._gradient_checkpointing_func = recomputation
        recomputations.append(recomputation)
    return tuple(recomputations)


def recomputed_blocks(checkpointing: Checkpointing, num_blocks: int, every_n: int | None = None) -> range:
    """Indices of the blocks that recompute something: under every_n the first of each complete group of n."""
    if checkpointing is Checkpointing.NONE:
        return range(0)
    if checkpointing is not Checkpointing.EVERY_N:
        return range(num_blocks)
    if every_n is None or not 1 <= every_n <= num_blocks:
        raise InputError(f"pin.checkpointing_n is {every_n}, and the model has {num_blocks} blocks")
    return range(0, num_blocks // every_n * every_n, every_n)


def recomputation_facts(
    recomputations: Sequence["Recomputation"], *, num_blocks: int, is_compiled: bool
) -> dict[str, str]:
    """Text of what was recomputed in the steps so far; empty without checkpointing."""
    if not recomputations:
        return {}
    if is_compiled:
        return {"checkpointing": f"{len(recomputations)} of {num_blocks} blocks, inside what is compiled"}
    first = recomputations[0]
    seen = sum(each.num_forwards > 0 and each.num_repeats == each.num_forwards for each in recomputations)
    what = "attention recomputed in" if first.checkpointing is Checkpointing.ATTENTION else "recomputed:"
    text = f"{what} {seen} of {num_blocks} blocks"
    if first.checkpointing is Checkpointing.SELECTIVE:
        retained = first.policy
        text += f", but for {retained.num_retained_products} of {retained.num_products} matrix products"
        text += f" and {retained.num_retained_attentions} attention output in each"
    return {"checkpointing": text}


class Recomputation:
    """Runs a block's forward (or its attention) under checkpointing, and counts runs and repeats."""

    def __init__(self, checkpointing: Checkpointing) -> None:
        self.checkpointing = checkpointing
        self.num_forwards = 0
        self.num_runs = 0
        self.policy = SelectivePolicy()  # of the latest forward

    @property
    def num_repeats(self) -> int:
        return self.num_runs - self.num_forwards

    def __call__(self, function: Callable[..., Any], *inputs: Any) -> Any:  # noqa: ANN401  # the inputs of any module
        if torch.compiler.is_compiling():
            contexts: dict[str, Any] = {}
            if self.checkpointing is Checkpointing.SELECTIVE:
                contexts["context_fn"] = _selective_contexts
            return checkpoint(function, *inputs, use_reentrant=False, **contexts)
        self.num_forwards += 1
        return checkpoint(
            partial(self._count, function), *inputs, use_reentrant=False, preserve_rng_state=True, **self._contexts()
        )

    def _count(self, function: Callable[..., Any], *inputs: Any) -> Any:  # noqa: ANN401  # see __call__
        self.num_runs += 1
        return function(*inputs)

    def _contexts(self) -> dict[str, Any]:
        if self.checkpointing is not Checkpointing.SELECTIVE:
            return {}
        return {"context_fn": self._selective_contexts}

    def _selective_contexts(self) -> Any:  # noqa: ANN401  # a pair of torch's modes
        self.policy = SelectivePolicy()
        return create_selective_checkpoint_contexts(self.policy)


def _selective_contexts() -> Any:  # noqa: ANN401  # a pair of torch's modes
    """The contexts of a traced recomputation: the compiler calls a function without an object."""
    return create_selective_checkpoint_contexts(SelectivePolicy())


class SelectivePolicy:
    """Policy of one forward of a block: keeps the outputs of attention and of every second matrix product."""

    def __init__(self) -> None:
        self.num_products = self.num_retained_products = self.num_retained_attentions = 0
        self._num_batched = 0
        self._of_recomputation: SelectivePolicy | None = None

    def __call__(
        self,
        context: SelectiveCheckpointContext,
        operator: Any,  # noqa: ANN401  # as torch passes it
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> CheckpointPolicy:
        if not context.is_recompute:
            return self._decide(operator, args, kwargs)
        if self._of_recomputation is None:  # torch 2.11 calls the policy again, 2.13 does not
            self._of_recomputation = SelectivePolicy()
        return self._of_recomputation._decide(operator, args, kwargs)

    def _decide(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckpointPolicy:  # noqa: ANN401  # an operator and its arguments
        if operator in _PRODUCTS:
            self.num_products += 1
            if self.num_products % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
            self.num_retained_products += 1
            return CheckpointPolicy.MUST_SAVE
        self._num_batched += operator in _BATCHED_PRODUCTS
        is_unfused = operator in _BATCHED_PRODUCTS and self._num_batched == 2  # scores, then what they weigh
        if is_unfused or (_is_attention(operator) and not _drops(operator, args, kwargs)):
            self.num_retained_attentions += 1
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._grouped_mm.default)
_BATCHED_PRODUCTS = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)  # of attention without a fused kernel


def _is_attention(operator: Any) -> bool:  # noqa: ANN401  # an operator, which may be of higher order
    """True for fused attention of PyTorch or of flash-attn, on any device."""
    name = str(operator.name())
    if "::_scaled_dot_product" in name or "::_varlen_attn" in name:
        return True
    return "flash_attn" in name and ("forward" in name or "fwd" in name)


def _drops(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:  # noqa: ANN401  # see _is_attention
    """True if the kernel draws random numbers: skipping it would change every later mask."""
    names = [argument.name for argument in operator._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return any("dropout" in name and isinstance(value, float) and value > 0 for name, value in given.items())


def _recompute_module(module: nn.Module, recomputation: Recomputation) -> None:
    """Recomputes one module's forward. Keyword inputs are passed by position, as checkpointing keeps only those."""
    replaceable: Any = module

    def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the signature of the module
        own_forward = partial(type(module).forward, module)  # an engine may change the class
        if not (module.training and torch.is_grad_enabled()):
            return own_forward(*args, **kwargs)
        names, num_args = tuple(kwargs), len(args)

        def run(*inputs: Any) -> Any:  # noqa: ANN401  # see forward
            return own_forward(*inputs[:num_args], **dict(zip(names, inputs[num_args:], strict=True)))

        return recomputation(run, *args, *kwargs.values())

    replaceable.forward = forward


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks in the order they run; none where the model has no list of modules."""
    found: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if found:
        return found
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(max(lists, key=_num_parameters).children()) if lists else []


class Blocks(NamedTuple):
    """The blocks of a model by kind."""

    modules: list[nn.Module]  # the first of each kind
    order: tuple[int, ...]


def kinds_of(blocks: Sequence[nn.Module]) -> Blocks:
    """Blocks that are built alike: the same modules with the same sizes, switches and windows."""
    for counts_numbers in (True, False):
        forms = [_form(block, counts_numbers=counts_numbers) for block in blocks]
        kinds = list(dict.fromkeys(forms))
        if len(kinds) <= MAX_KINDS:
            break
    return Blocks([blocks[forms.index(kind)] for kind in kinds], tuple(kinds.index(form) for form in forms))


def _form(block: nn.Module, *, counts_numbers: bool) -> tuple[Any, ...]:
    kinds = (bool, str, int) if counts_numbers else (bool, str)
    return tuple(
        (
            path,
            type(module),
            tuple(
                (name, value)
                for name, value in vars(module).items()
                if isinstance(value, kinds) and name[0] != "_" and not _PLACE.fullmatch(name)
            ),
            tuple((name, tuple(weight.shape)) for name, weight in module.named_parameters(recurse=False)),
        )
        for path, module in block.named_modules()
    )


def _num_parameters(module: nn.Module) -> int:
    """Elements over all ranks, also of what ZeRO-3 has cut."""
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in module.parameters())


def attention_module(block: nn.Module) -> nn.Module | None:
    """The attention module of a block; None where none is to be seen."""
    for module in block.modules():
        knows_heads = any(hasattr(module, field) for field in _HEAD_FIELDS)
        if module is not block and hasattr(module, "layer_idx") and knows_heads:
            return module
    return None
