"""Times a model's blocks in bf16 and FP8: `python -m shardwise.trainer.runtime.tools.fp8_gain REQUEST RESULT`.

The first block of each kind runs forward and backward on a micro batch of random values, under bf16 autocast, in the
form in which it would run: compiled, or eager where a recipe's layers cut what is compiled (`RecipeFacts.is_compiled`).
Repetitions are queued, as a run queues its blocks (`queued_seconds`). Every recipe of the request is compared with bf16
in its faster form. The result lists the fastest recipe with the others, or why nothing was timed.

The inputs of a block are those that it gets in a forward of the whole model on `meta`, with random values, and no mask:
a row is one document. Weights are fp32 and trained. Not covered: windows, and blocks that read values of earlier ones.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from shardwise.trainer.runtime.memory.recomputation import blocks_of, kinds_of
from shardwise.trainer.runtime.models.build import model_from_config
from shardwise.trainer.runtime.precision.fp8 import Region, fp8_layers, fp8_region, library_of, replace_layer
from shardwise.trainer.runtime.run.clock import queued_seconds
from shardwise.trainer.runtime.run.process import run_request_and_exit
from shardwise.trainer.spec.errors import InputError, ShardwiseError
from shardwise.trainer.spec.fp8 import FP8_RECIPES
from shardwise.trainer.spec.messages.worker_requests import Fp8GainRequest
from shardwise.trainer.spec.plan import BlockTimes, Fp8Gain
from shardwise.trainer.spec.strategy import Attention, Fp8Recipe

BUDGET_S = 0.5  # of each kind of block, recipe and form, after it was compiled


class TimedBlock(NamedTuple):
    """The first block of a kind, on `meta`, and what it is called with."""

    name: str
    block: nn.Module
    num_blocks: int  # of this kind in the model
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Converted(NamedTuple):
    """Linear layers of a block that a recipe converts, by their names inside of the block."""

    region: Region
    names: tuple[str, ...]
    elements: int


def measure_gain(request: Fp8GainRequest) -> Fp8Gain:
    """The gain on this machine's GPU; a problem if there is none."""
    if not torch.cuda.is_available():
        return Fp8Gain(recipe=request.recipes[0], tokens=request.tokens, problem="there is no CUDA device")
    return time_recipes(request, torch.device("cuda"))


def time_recipes(request: Fp8GainRequest, device: torch.device, *, budget_s: float = BUDGET_S) -> Fp8Gain:
    """The fastest recipe of the request on a device, with the others; those that fail have their problem."""
    try:
        model = _model_on_meta(request.model_config)
        blocks = tuple(timed_blocks(model, tokens=request.tokens, seq_len=request.seq_len))
        clock = BlockClock(blocks, device, budget_s)
        compiles = request.compiles and clock.compiles()
        gains = [_gain_of(recipe, model, clock, request.tokens, compiles=compiles) for recipe in request.recipes]
    except _FAILURES as error:
        return Fp8Gain(recipe=request.recipes[0], tokens=request.tokens, problem=_line(error))
    fastest, *others = sorted(gains, key=lambda gain: -(gain.speedup or 0.0))
    return replace(fastest, others=tuple(others))


_FAILURES = (ShardwiseError, RuntimeError, TypeError, ValueError, AttributeError, LookupError)  # of a model's own code


def _line(error: BaseException) -> str:
    if isinstance(error, ShardwiseError):
        return " ".join(str(error).split())
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _model_on_meta(model_config: dict[str, Any]) -> nn.Module:
    with torch.device("meta"):
        model = model_from_config(model_config, dtype=torch.bfloat16, attention=Attention.SDPA)  # as experts want it
    model.config.use_cache = False
    return model


def timed_blocks(model: nn.Module, *, tokens: int, seq_len: int) -> Iterator[TimedBlock]:
    """A block of each kind with its inputs for a micro batch of `tokens`, in rows of `seq_len` or a single shorter one.

    InputError if the model has no blocks.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise InputError(f"{type(model).__name__} has no blocks that can be timed")
    kinds, calls = kinds_of(blocks), dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]]()

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[block] = args, {name: None if name == "attention_mask" else value for name, value in kwargs.items()}

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in kinds.modules]
    width = min(tokens, seq_len)
    with FakeTensorMode(allow_non_fake_inputs=True):  # no tensor has values
        model(input_ids=torch.zeros(tokens // width, width, dtype=torch.long, device="meta"), logits_to_keep=1)
    for handle in handles:
        handle.remove()
    names = {module: name for name, module in model.named_modules()}
    for place, block in enumerate(kinds.modules):
        yield TimedBlock(names[block], block, kinds.order.count(place), *calls[block])


class BlockClock:
    """Seconds of blocks on a device; those of bf16 are measured once in each form."""

    def __init__(self, blocks: tuple[TimedBlock, ...], device: torch.device, budget_s: float) -> None:
        self.blocks, self._device, self._budget_s = blocks, device, budget_s
        self._bf16: dict[bool, tuple[float, ...]] = {}

    def compiles(self) -> bool:
        """True if every block runs compiled in bf16."""
        try:
            return bool(self.bf16(is_compiled=True))
        except RuntimeError:  # of the compiler
            return False

    def bf16(self, *, is_compiled: bool) -> tuple[float, ...]:
        """Seconds of each kind in bf16."""
        if is_compiled not in self._bf16:
            self._bf16[is_compiled] = tuple(self.seconds(each, None, is_compiled=is_compiled) for each in self.blocks)
        return self._bf16[is_compiled]

    def seconds(self, timed: TimedBlock, converted: Converted | None, *, is_compiled: bool) -> float:
        """Seconds of one forward and backward of a block, with these layers in FP8."""
        block = _with_values(timed.block, self._device)
        if converted is not None:
            for name in converted.names:
                linear = block.get_submodule(name)
                assert isinstance(linear, nn.Linear)
                replace_layer(block, name, converted.region.converted(linear))
        if is_compiled:
            torch.compiler.reset()  # graphs of another block of this class
            block.compile()
        try:
            return queued_seconds(_step(block, timed, converted, self._device), self._device, self._budget_s)
        finally:
            del block
            if self._device.type == "cuda":
                torch.cuda.empty_cache()


def _gain_of(recipe: Fp8Recipe, model: nn.Module, clock: BlockClock, tokens: int, *, compiles: bool) -> Fp8Gain:
    is_compiled = FP8_RECIPES[recipe].is_compiled and compiles
    try:
        region, chosen = fp8_region(recipe), fp8_layers(model, recipe).chosen
        if not chosen:
            raise InputError("no layer of this model fits its tiles")
        plain, fastest = clock.bf16(is_compiled=is_compiled), clock.bf16(is_compiled=compiles)
        blocks = []
        for number, timed in enumerate(clock.blocks):
            converted = _converted(timed, region, chosen)
            fp8_s = clock.seconds(timed, converted, is_compiled=is_compiled)
            flops = 3.0 * 2 * tokens * converted.elements
            bf16_s = min(plain[number], fastest[number])
            blocks.append(
                BlockTimes(count=timed.num_blocks, flops=flops, bf16_s=bf16_s, plain_s=plain[number], fp8_s=fp8_s)
            )
    except _FAILURES as error:
        return Fp8Gain(recipe=recipe, tokens=tokens, compile=is_compiled, problem=_line(error))
    library = library_of(recipe)
    return Fp8Gain(recipe=recipe, tokens=tokens, library=library, compile=is_compiled, blocks=tuple(blocks))


def _converted(timed: TimedBlock, region: Region, chosen: dict[str, nn.Linear]) -> Converted:
    inside = {name.removeprefix(f"{timed.name}."): each for name, each in chosen.items() if _is_in(name, timed.name)}
    return Converted(region, tuple(inside), sum(each.weight.numel() for each in inside.values()))


def _is_in(name: str, block: str) -> bool:
    return name.startswith(f"{block}.")


def _step(block: nn.Module, timed: TimedBlock, converted: Converted | None, device: torch.device) -> Callable[[], None]:
    """One forward and backward of a block, with the gradients of its input and its weights."""
    args, kwargs = tree_map_only(Tensor, lambda each: _random(each, device), (timed.args, timed.kwargs))
    for each in args[:1]:
        each.requires_grad_()
    gradients: list[Tensor] = []

    def step() -> None:
        opened = nullcontext() if converted is None else converted.region.opened()
        with torch.autocast(device.type, dtype=torch.bfloat16), opened:
            out = block(*args, **kwargs)
        hidden: Tensor = out[0] if isinstance(out, tuple) else out
        gradients[:] = gradients or [torch.randn_like(hidden)]
        hidden.backward(gradients[0])
        block.zero_grad()

    return step


def _with_values(block: nn.Module, device: torch.device) -> nn.Module:
    made = copy.deepcopy(block).float().to_empty(device=device)
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                tensor.normal_(std=0.02)
            else:
                tensor.zero_()
    return made.train()


def _random(like: Tensor, device: torch.device) -> Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, device=device)
    return torch.ones(like.shape, dtype=like.dtype, device=device)


if __name__ == "__main__":
    run_request_and_exit(Fp8GainRequest, measure_gain)
