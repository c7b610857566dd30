"""One block of each kind, run forwards and backwards in every mode of a plan on a device that is not there.

The model is built whole on `meta`, and described. Blocks that are built alike are then one kind: the first of each kind
remains, in order, and the model runs with these alone. Every allocation of its forward and backward is recorded, with
the sizes of the tensor that was made. What they have in common with the tokens of the micro batch shows how the bytes
grow: the number of rows is a prime that no weight has as a factor, and the number of tokens is no size of the model.

    before   embeddings, masks, positions: until the first block begins
    block    until the next begins
    after    the last norm: until the input of the head is there

The forward ends there, and the backward begins with a gradient of the hidden states: the head and its loss have a
closed form. Functions of packages that the machine has are one kernel (`package_functions`); without the package
transformers' own operations run, and are counted a second time by themselves.

A model whose operations become more with the tokens loops over them: it is traced on shorter rows.
"""

import copy
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from msgspec.structs import replace
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from shardwise.trainer.runtime.attention.choice import attention_name
from shardwise.trainer.runtime.loss import LossForward, hidden_states
from shardwise.trainer.runtime.memory.recomputation import Blocks, kinds_of
from shardwise.trainer.runtime.models.build import make_trainable
from shardwise.trainer.runtime.models.methods import add_adapters, base_type, trained_parameters
from shardwise.trainer.runtime.run.types import compute_type
from shardwise.trainer.simulation.build import blocks_of, materialise, num_parameters
from shardwise.trainer.simulation.device_memory import Tracker
from shardwise.trainer.simulation.fake_device import (
    FakeDeviceMode,
    as_if_available,
    enable_fake_cuda,
    ready_backward_thread,
)
from shardwise.trainer.simulation.forked import in_fork
from shardwise.trainer.simulation.kernels import Kernels
from shardwise.trainer.simulation.package_functions import PackageFunction, as_installed
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.worker_requests import TraceRequest
from shardwise.trainer.spec.model.blocks import (
    Adapter,
    Amount,
    BlockKind,
    Kernel,
    Linear,
    Mode,
    ModeTrace,
    Moment,
    Part,
    TracedBlocks,
)
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method, Precision

_NUM_BLOCKS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_WINDOWS = ("sliding_window", "attention_chunk_size")
PRIMES = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)
UNIT_TOKENS = 256  # a traced row is a multiple: chunks of states are no longer
MAX_MOMENTS = 24  # of a part
_MERGED = 0.004  # moments that differ by less are one


def traced_blocks(
    model: PreTrainedModel,
    request: TraceRequest,
    linears_of: Callable[[nn.Module], tuple[Linear, ...]],
    *,
    may_fork: bool = False,
) -> TracedBlocks:
    """The blocks of a model on `meta` in every mode of the request; the model keeps one block of each kind.

    InputError for a model whose forward cannot be followed without values. `may_fork` as of `in_fork`.
    """
    if request.device_kind is DeviceKind.CUDA:
        enable_fake_cuda()
    blocks = blocks_of(model)
    kinds = kinds_of(blocks)
    places = _keep_one_of_each(model, blocks, kinds)
    described = [_described(block, linears_of) for block in kinds.modules]
    rows = _rows_of(model, request, _num_tokens(model, request))
    runs, rows = _runs(model, request, places, rows, may_fork=may_fork)
    runs = [_without_linears(run, described) for run in runs]
    return TracedBlocks(
        kinds=tuple(described),
        order=kinds.order,
        modes=tuple(runs),
        separates_documents=rows.document is not None,
        num_tokens=rows.length,
    )


def _keep_one_of_each(model: PreTrainedModel, blocks: list[nn.Module], kinds: Blocks) -> tuple[int, ...]:
    """Leaves as few blocks as can run, at least one of each kind; the place of each kind among them."""
    firsts = [kinds.order.index(kind) for kind in range(len(kinds.modules))]
    for attempt in (sorted(firsts), range(max(firsts) + 1), range(len(blocks))):
        restore = _keep(model, blocks, list(attempt))
        try:
            _operations(model, UNIT_TOKENS // 4)
        except _NOT_RUN as error:
            restore()
            problem = error
        else:
            return tuple(list(attempt).index(first) for first in firsts)
    raise InputError(_not_followed(model, problem)) from problem


# What a forward may end in that lacks a block, or needs the value of a tensor.
_NOT_RUN = (
    *(RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError),
    *(DataDependentOutputException, DynamicOutputShapeException, NotImplementedError),
)


# A field of a config that cannot be set: it follows from others, or has as many entries as there are blocks by chance.
_NOT_SET = (AttributeError, TypeError, NotImplementedError, StrictDataclassError)


def _not_followed(model: nn.Module, error: BaseException) -> str:
    sentence = (str(error).strip().splitlines() or [""])[0][:200]
    return f"{type(model).__name__} cannot be followed without values: {type(error).__name__}: {sentence}"


def _keep(model: PreTrainedModel, blocks: list[nn.Module], places: list[int]) -> Callable[[], None]:
    """Leaves the blocks at these places, and of every list in the config with an entry for each block those entries."""
    config, num_blocks = model.config.get_text_config(), len(blocks)
    before: list[tuple[Any, str, Any]] = []

    def change(owner: Any, name: str, value: Any) -> None:  # noqa: ANN401  # a config or a module, any field
        before.append((owner, name, getattr(owner, name)))
        try:
            setattr(owner, name, value)
        except _NOT_SET:
            before.pop()

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.ModuleList) and len(child) == num_blocks and child[0] is blocks[0]:
                change(module, name, nn.ModuleList([blocks[place] for place in places]))
    for name, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == num_blocks:
            change(config, name, type(value)(value[place] for place in places))
    for name in _NUM_BLOCKS:
        if getattr(config, name, None) == num_blocks:
            change(config, name, len(places))

    def restore() -> None:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)

    return restore


class _Rows(NamedTuple):
    """The micro batch of a trace."""

    num_rows: int
    length: int
    document: int | None  # tokens of each document of a row; None: a row is one

    def amounts(self, shape: Sequence[int], num_elements: int, size: float) -> tuple[float, ...]:
        """`size` of a tensor of this shape, as (constant, of a token, of a score, of a row, of a mask)."""
        tokens = self.num_rows * self.length
        num_lengths = sum(size in (self.length, self.length + 1) for size in shape)
        if num_elements % self.num_rows == 0:
            num_lengths += sum(size % tokens == 0 for size in shape if size)
            if num_lengths > 1:
                return (0.0, 0.0, size / (tokens * self.length), 0.0, 0.0)
            return (0.0, size / tokens, 0.0, 0.0, 0.0)
        if num_lengths:
            return (
                (0.0, 0.0, 0.0, size / self.length, 0.0)
                if num_lengths == 1
                else (
                    *(0.0, 0.0, 0.0, 0.0),
                    size / self.length**2,
                )
            )
        if self.document is not None and self.document in shape:  # of a document that is computed by itself
            return (0.0, size / tokens, 0.0, 0.0, 0.0)
        return (size, 0.0, 0.0, 0.0, 0.0)


def _rows_of(model: PreTrainedModel, request: TraceRequest, num_tokens: int) -> _Rows:
    """Rows whose numbers are no size of the model, and no factor of one."""
    sizes = {size for weight in model.parameters() for size in weight.shape} | {
        value for value in vars(model.config.get_text_config()).values() if isinstance(value, int)
    }
    num_rows = next((prime for prime in PRIMES if not any(size % prime == 0 for size in sizes if size)), PRIMES[-1])
    units = (UNIT_TOKENS, UNIT_TOKENS // 4, 8, 1)
    lengths = (
        length
        for unit in units
        for length in range(num_tokens // unit * unit, num_tokens // 2, -unit)
        if not {length, length + 1, length // 2} & sizes
    )
    length = next(lengths, num_tokens)
    return _Rows(num_rows, length, length // 2 if request.is_packed else None)


def _num_tokens(model: PreTrainedModel, request: TraceRequest) -> int:
    """Tokens of a traced row: as many as requested, fewer for a model that loops over them."""
    short, long = UNIT_TOKENS // 4, 3 * UNIT_TOKENS // 4
    if request.seq_len <= long:
        return request.seq_len
    more = (_operations(model, long) - _operations(model, short)) / (long - short)
    if more * request.seq_len < MAX_LOOPED:
        return request.seq_len
    windows = [getattr(module, name, None) or 0 for module in model.modules() for name in _WINDOWS]
    needed = max((window for window in windows if window < request.seq_len), default=0)
    fewest = UNIT_TOKENS if more * UNIT_TOKENS < MAX_LOOPED else short
    return min(request.seq_len, -(-(needed + 1) // fewest) * fewest)


MAX_LOOPED = 1000  # operations of a forward that a loop over tokens adds


def _operations(model: PreTrainedModel, length: int) -> int:
    """Operations of a forward over one row of so many tokens, on the CPU that is not there."""
    counter, whole = _Counter(), copy.deepcopy(model)
    with Kernels("cpu", (0, 0)).installed(), FakeDeviceMode(), torch.no_grad():
        materialise(whole, "cpu")
        ids = torch.zeros((1, length), dtype=torch.long)
        whole.eval()
        with counter:
            hidden_states(whole, ids)
    return counter.num_operations


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        self.num_operations += 1
        return func(*args, **(kwargs or {}))


def _described(block: nn.Module, linears_of: Callable[[nn.Module], tuple[Linear, ...]]) -> BlockKind:
    weights = [tuple(weight.shape) for weight in block.parameters()]
    windows = [getattr(module, name, None) for module in block.modules() for name in _WINDOWS]
    mixers = [
        type(child).__name__
        for child in block.children()
        if num_parameters(child) and "Norm" not in type(child).__name__
    ]
    return BlockKind(
        name=" + ".join(mixers),
        num_parameters=num_parameters(block),
        linears=linears_of(block),
        tensors=tuple((shape[0], prod(shape[1:]), count) for shape, count in Counter(weights).items() if shape),
        window=next((window for window in windows if window), None),
    )


def _runs(
    model: PreTrainedModel, request: TraceRequest, places: tuple[int, ...], rows: _Rows, *, may_fork: bool
) -> tuple[list[ModeTrace], _Rows]:
    """A run in each mode, half of them in a fork; of whole rows if documents cannot be separated."""
    middle = (len(request.modes) + 1) // 2
    first, second = (replace(request, modes=modes) for modes in (request.modes[:middle], request.modes[middle:]))
    waiting = in_fork(
        partial(_runs_here, model, second, places, rows),
        tuple[list[ModeTrace], _Rows],
        may_fork=may_fork and bool(second.modes),
    )
    runs, used = _runs_here(model, first, places, rows)
    more, used_there = waiting()
    if used != used_there:
        return _runs_here(model, request, places, rows._replace(document=None))
    return [*runs, *more], used


def _runs_here(
    model: PreTrainedModel, request: TraceRequest, places: tuple[int, ...], rows: _Rows
) -> tuple[list[ModeTrace], _Rows]:
    runs = []
    for mode in request.modes:
        try:
            runs.append(_traced(model, request, mode, places, rows))
        except _NOT_RUN as error:
            if rows.document is not None:
                return _runs_here(model, request, places, rows._replace(document=None))
            if not mode.method.freezes_base:
                raise InputError(_not_followed(model, error)) from error
        except InputError:  # adapters that PEFT refuses
            if not mode.method.freezes_base:
                raise
    return runs, rows


def _without_linears(run: ModeTrace, kinds: Sequence[BlockKind]) -> ModeTrace:
    """The run with the FLOPs of each block that its linear layers do not count; adapters' products count elsewhere."""

    def others(part: Part, kind: BlockKind) -> Part:
        linears = sum(2.0 * each.num_used * each.num_inputs * each.num_outputs for each in kind.linears)
        weights = 0.0 if run.mode.method.freezes_base else max(0.0, part.flops.constant - linears)
        return replace(part, flops=replace(part.flops, constant=0.0, token=part.flops.token + weights))

    blocks = tuple(others(part, kind) for part, kind in zip(run.blocks, kinds, strict=True))
    return replace(run, blocks=blocks)


def _precision(mode: Mode) -> Precision:
    if mode.is_autocast:
        return Precision.BF16_MIXED
    return Precision.BF16 if mode.compute_bytes == 2 else Precision.FP32


def _traced(
    model: PreTrainedModel, request: TraceRequest, mode: Mode, places: tuple[int, ...], rows: _Rows
) -> ModeTrace:
    whole, loss = _as_trained(copy.deepcopy(model), request, mode)
    device = request.device_kind.value
    recorder = _Recorder(device, rows, is_16_bit=mode.compute_bytes == 2)
    kernels = Kernels(device, request.compute_capability)
    with (
        as_if_available(request.compute_capability) if device == "cuda" else nullcontext(),
        kernels.installed(),
        as_installed(whole, request.packages, recorder, watch=recorder.watched, ran=recorder.ran_kernel),
        FakeDeviceMode(),
    ):
        if device == "cuda":
            ready_backward_thread()
        materialise(whole, device)
        boundary = _run(whole, loss, mode, rows, recorder)
    num_blocks = len(blocks_of(whole))
    parts = recorder.parts(num_blocks)
    blocks = blocks_of(whole)
    return ModeTrace(
        mode=mode,
        boundary=boundary,
        before=parts[_BEFORE],
        blocks=tuple(parts[place] for place in places),
        after=parts[_AFTER],
        adapters=tuple(_adapters(blocks[place]) for place in places) if mode.method.freezes_base else (),
    )


def _as_trained(model: PreTrainedModel, request: TraceRequest, mode: Mode) -> tuple[PreTrainedModel, LossForward]:
    """The model as a run of this mode trains it, and its loss."""
    precision = _precision(mode)
    model.set_attn_implementation(attention_name(mode.attention))
    dtype = base_type(mode.method, precision)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    with torch.device("meta"):
        if mode.method is Method.QLORA:
            from shardwise.trainer.simulation.nf4 import quantise  # bitsandbytes takes a second

            quantise(model, request.quant, dtype)
        if mode.method.freezes_base:
            add_adapters(model, request.lora, precision)
    installed = make_trainable(model, Checkpointing.NONE, LossHead.EAGER, loss_chunk_tokens=None)
    return model, installed.loss


_BEFORE, _AFTER = -1, -2


def _run(model: PreTrainedModel, of_loss: LossForward, mode: Mode, rows: _Rows, recorder: "_Recorder") -> Amount:
    """A forward and a backward; the bytes of a block's input."""
    device, blocks = recorder.device, blocks_of(model)
    boundary: list[Amount] = []
    ids = torch.zeros((rows.num_rows, rows.length), dtype=torch.long, device=device)
    inputs: dict[str, Any] = {}
    if rows.document is not None:
        starts = range(0, rows.num_rows * rows.length, rows.document)
        inputs = {"position_ids": torch.zeros_like(ids), "document_bounds": (*starts, rows.num_rows * rows.length)}

    def begin(place: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ANN401  # torch's
            hidden = args[0] if args else kwargs["hidden_states"]
            recorder.begin_part(place, is_forward=True)
            if place == 0:
                recorder.watch(hidden)
            hidden.register_hook(lambda _: recorder.begin_part(place - 1 if place else _BEFORE, is_forward=False))
            size = hidden.numel() * hidden.element_size()
            boundary.append(_amount(rows.amounts(hidden.shape, hidden.numel(), size)))

        return hook

    def end(_module: nn.Module, _inputs: Any, output: Any) -> None:  # noqa: ANN401  # torch's
        hidden = output if isinstance(output, Tensor) else output[0]
        recorder.watch_last(hidden)
        recorder.begin_part(_AFTER, is_forward=True)
        hidden.register_hook(lambda _: recorder.begin_part(len(blocks) - 1, is_forward=False))

    hooks = [block.register_forward_pre_hook(begin(place), with_kwargs=True) for place, block in enumerate(blocks)]
    hooks.append(blocks[-1].register_forward_hook(end))
    if mode.method.freezes_base:  # every block but the first hands a gradient on
        hooks.append(model.get_input_embeddings().register_forward_hook(lambda *of: of[2].requires_grad_()))
    recorder.omit([*model.parameters(), *model.buffers(), ids, *(v for v in inputs.values() if isinstance(v, Tensor))])
    with recorder:
        recorder.begin_part(_BEFORE, is_forward=True)
        asking = torch.autograd.graph.saved_tensors_hooks(recorder.save, recorder.use)
        with asking:
            autocast = torch.autocast(device, dtype=compute_type(Precision.BF16_MIXED))
            with autocast if mode.is_autocast else nullcontext():
                # No name holds the hidden states, nor their gradient: they are free as soon as they are used.
                loss = _Head.apply(of_loss.head_input(model, ids, **inputs), recorder)  # type: ignore[no-untyped-call]
        loss.backward()
        recorder.end_parts()
        recorder.note_gradients(trained_parameters(model))
    for hook in hooks:
        hook.remove()
    return boundary[0]


class _Head(torch.autograd.Function):
    """In place of a head and its loss: saves the hidden states, and makes their gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, recorder: "_Recorder") -> Tensor:  # noqa: ANN401  # torch's context
        recorder.end_parts()
        ctx.recorder = recorder
        ctx.save_for_backward(hidden)
        return hidden.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401  # torch's context
        (hidden,) = ctx.saved_tensors
        gradient = torch.ones_like(hidden)
        ctx.recorder.begin_part(_AFTER, is_forward=False)
        return gradient, None


def _adapters(block: nn.Module) -> tuple[Adapter, ...]:
    """The adapters of a block, by the layer that they are on; of experts in one tensor, by the tensor."""
    found = []
    for module in block.modules():
        own = [child for name, child in module.named_children() if name.startswith("lora_")]
        weights = [weight for child in own for weight in child.parameters() if weight.requires_grad]
        if weights:
            found.append(
                Adapter(
                    num_inputs=int(getattr(module, "in_features", 0) or 0),
                    num_outputs=int(getattr(module, "out_features", 0) or 0),
                    num_elements=sum(weight.numel() for weight in weights),
                    num_tensors=len(weights),
                )
            )
    return tuple(found)


class _Mark(NamedTuple):
    """The begin of a part in the trace of allocations."""

    position: int
    part: int | None
    is_forward: bool


class _Segment(NamedTuple):
    """One direction of a part; amounts by what they grow with, then elements of gradients."""

    left: list[float]
    allocations: list[tuple[float, ...]]  # each with what the part has added until then, and the elements of its own
    begun: list[float]  # what was alive
    used: list[float]  # what was alive when a backward first used what its forward has saved
    num_again: int  # allocations of a forward until the last tensor was saved


class _Costs:
    """What the operations of a part's forward cost."""

    def __init__(self) -> None:
        self.moved = [0.0] * 5
        self.flops = [0.0] * 5
        self.fp32_flops = [0.0] * 5
        self.weight_flops = 0.0  # of a token
        self.scored = 0.0  # of a token
        self.operators = 0


class _Calls:
    """Calls of a function of a missing package in one part."""

    def __init__(self, package: str) -> None:
        self.package = package
        self.costs = _Costs()
        self.passed = [0.0] * 5
        self.number = 0


class _Recorder(Tracker):
    """Allocations of a forward and a backward by part, with what they grow with, and the costs of the forward."""

    def __init__(self, device: str, rows: _Rows, *, is_16_bit: bool) -> None:
        super().__init__(device)
        self._is_16_bit = is_16_bit
        self.device = device
        self._rounding = 1
        self._rows = rows
        self._growth: dict[int, tuple[float, ...]] = {}  # by number of the storage
        self._marks: list[_Mark] = []
        self._saved: dict[int, int] = {}  # by part, the place in the trace
        self._used: dict[int, int] = {}
        self._gradients: dict[int, int] = {}  # elements, by number of the storage
        self._costs: dict[int, _Costs] = defaultdict(_Costs)
        self._calls: dict[tuple[int, str], _Calls] = {}
        self._kernel: _Costs | None = None
        self._first: int | None = None
        self._last: int | None = None

    def watch(self, hidden: Tensor) -> None:
        """Remembers the input of the first block, which lives as long as the decoder's forward."""
        self._first = self._live[hidden.untyped_storage()._cdata].number

    def watch_last(self, hidden: Tensor) -> None:
        """Remembers the output of the last block."""
        self._last = self._live[hidden.untyped_storage()._cdata].number

    def save(self, saved: Tensor) -> Tensor:
        """A tensor that a forward saves; remembers when each part does so last."""
        mark = self._marks[-1] if self._marks else None
        if mark is not None and mark.part is not None:
            self._saved[mark.part] = len(self.trace)
        return saved

    def use(self, saved: Tensor) -> Tensor:
        """A tensor that a backward uses; remembers when each part does so first."""
        mark = self._marks[-1] if self._marks else None
        if mark is not None and mark.part is not None and not mark.is_forward:
            self._used.setdefault(mark.part, len(self.trace))
        return saved

    def begin_part(self, part: int, *, is_forward: bool) -> None:
        """From here on allocations belong to the forward or the backward of a part."""
        self._marks.append(_Mark(len(self.trace), part, is_forward))

    def end_parts(self) -> None:
        """From here on allocations belong to no part."""
        self._marks.append(_Mark(len(self.trace), None, is_forward=False))

    def note_gradients(self, weights: Sequence[nn.Parameter]) -> None:
        """Marks the gradients of weights among the allocations."""
        for weight in weights:
            found = None if weight.grad is None else self._live.get(weight.grad.untyped_storage()._cdata)
            if found is not None:
                self._gradients[found.number] = weight.numel()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        result = super().__torch_dispatch__(func, types, args, kwargs)
        mark = self._marks[-1] if self._marks else None
        if mark is not None and mark.part is not None and mark.is_forward and not _is_view(func):
            tensors = [*_flat(args), *_flat(tuple((kwargs or {}).values()))]
            for costs in (self._costs[mark.part], *([] if self._kernel is None else [self._kernel])):
                self._count(costs, func, tensors, [*_flat((result,))])
        return result

    def _count(self, costs: _Costs, func: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:  # noqa: ANN401  # torch's
        name, tokens = func.__name__.partition(".")[0], self._rows.num_rows * self._rows.length
        costs.operators += not self.is_unseen
        if name in _ATTENTION:
            query, _, value = inputs[:3]
            costs.scored += query.numel() * (1 + value.shape[-1] / query.shape[-1]) / 2 / tokens
        elif name in _PRODUCTS and len(inputs) > 1:
            left, right = inputs[-2], inputs[-1]
            if name in _GROUPED:
                left, right = inputs[:2]
            sizes = (*left.shape, right.shape[-1])
            flops = 2.0 * prod(sizes)
            if right.numel() % self._rows.num_rows:  # a weight
                costs.weight_flops += flops / tokens
                return
            total = costs.fp32_flops if left.dtype == torch.float32 and self._is_16_bit else costs.flops
            _add(total, self._rows.amounts(sizes, prod(sizes), flops))
        elif not self.is_unseen:
            _add(costs.moved, self.bytes_of([*inputs, *outputs]))

    def bytes_of(self, tensors: Sequence[Tensor]) -> list[float]:
        """Bytes of tensors, by what they grow with."""
        total = [0.0] * 5
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            _add(total, self._rows.amounts(tensor.shape, tensor.numel(), size))
        return total

    def watched(self, function: PackageFunction, run: Callable[..., Any]) -> Callable[..., Any]:
        """`run`, whose operations also count for a function of a package that is missing."""

        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # the function's
            mark = self._marks[-1] if self._marks else None
            if mark is None or mark.part is None or not mark.is_forward or self._kernel is not None:
                return run(*args, **kwargs)
            key = (mark.part, function.name)
            calls = self._calls.setdefault(key, _Calls(function.package))
            calls.number += 1
            self._kernel = calls.costs
            try:
                result = run(*args, **kwargs)
            finally:
                self._kernel = None
            _add(calls.passed, self.bytes_of([*_flat(args), *_flat(tuple(kwargs.values())), *_flat((result,))]))
            return result

        return call

    def ran_kernel(self, tensors: Sequence[Tensor]) -> None:
        """Counts one operation that moves these tensors."""
        mark = self._marks[-1] if self._marks else None
        if mark is not None and mark.part is not None and mark.is_forward:
            costs = self._costs[mark.part]
            costs.operators += 1
            _add(costs.moved, self.bytes_of(tensors))

    def _see(self, tensor: Tensor) -> None:
        num_seen = self._num_seen
        super()._see(tensor)
        if self._num_seen == num_seen:
            return
        storage = tensor.untyped_storage()
        num_elements = storage.nbytes() // tensor.element_size()
        self._growth[self._num_seen] = self._rows.amounts(tensor.shape, num_elements, storage.nbytes())

    def parts(self, num_blocks: int) -> dict[int, Part]:
        """Every part by its place; ValueError if one did not run."""
        runs = self._segments()
        found = {}
        for place in (_BEFORE, *range(num_blocks), _AFTER):
            if (place, True) not in runs or (place, False) not in runs:
                raise ValueError("a block handed no gradient on")
            saved, forward, before, _, num_again = runs[place, True]
            _, backward, begun, used, _ = runs[place, False]
            costs = self._costs[place]
            found[place] = Part(
                saved=_amount(saved),
                begun=_amount([a - b for a, b in zip(begun, before, strict=True)][:5]),
                before_use=_amount([a - b for a, b in zip(used, begun, strict=True)][:5]),
                lost=self._lost(place),
                forward=_moments(forward),
                again=_moments(forward[:num_again]),
                backward=_moments(backward),
                moved=_amount(costs.moved),
                flops=_amount([costs.weight_flops, *costs.flops[1:]]),  # taken apart by `_without_linears`
                fp32_flops=_amount(costs.fp32_flops),
                scored=round(costs.scored, 3),
                operators=costs.operators,
                kernels=tuple(
                    Kernel(
                        name=name,
                        package=calls.package,
                        moved=_amount(calls.costs.moved),
                        passed=_amount(calls.passed),
                        operators=calls.costs.operators,
                        num_calls=calls.number,
                    )
                    for (part, name), calls in self._calls.items()
                    if part == place
                ),
            )
        return found

    def _lost(self, part: int) -> Amount:
        """Bytes that earlier parts made and that are freed between the begins of a part's forward and its backward.

        Of what runs before the blocks: what it hands to all of them, and no backward needs. Not the output of the last
        block, which is freed there as well where blocks run again.
        """
        begins = {(mark.part, mark.is_forward): mark.position for mark in self._marks}
        first, last = begins[0 if part == _BEFORE else part, True], begins[part, False]
        if part == _BEFORE:
            last = next(mark.position for mark in self._marks if mark.part is None)
        made = {event.number for event in self.trace[:first]} - {self._first, self._last}
        freed = [event.number for event in self.trace[first:last] if event.is_free and event.number in made]
        return _amount([sum(axis) for axis in zip([0.0] * 5, *(self._growth[number] for number in freed), strict=True)])

    def _segments(self) -> dict[tuple[int, bool], "_Segment"]:
        live = [0.0] * 7  # amounts, and elements of gradients
        found: dict[tuple[int, bool], _Segment] = {}
        released = self._first if self._first in self._freed_in_forward() else None
        marks = [*self._marks, _Mark(len(self.trace), None, is_forward=False)]
        for mark, after in pairwise(marks):
            begun, used, moments = list(live), list(live), []
            until = self.trace[mark.position : self._saved.get(mark.part, 0)] if mark.part is not None else []
            num_again = sum(not event.is_free for event in until)
            for position in range(mark.position, after.position):
                if not mark.is_forward and mark.part is not None and position == self._used.get(mark.part):
                    used = list(live)
                event = self.trace[position]
                sign = -1 if event.is_free else 1
                elements = self._gradients.get(event.number, 0)
                if elements:
                    live[5] += sign * elements
                else:
                    for axis, amount in enumerate(self._growth[event.number]):
                        live[axis] += sign * amount
                if not event.is_free:
                    held = [a - b for a, b in zip(live, begun, strict=True)]
                    moments.append((*held[:6], float(elements)))
            if mark.part is not None:
                left = [a - b for a, b in zip(live, begun, strict=True)][:5]
                if released is not None and mark.part == 0 and mark.is_forward:  # any other block would free its input
                    left = [a - b for a, b in zip(left, self._growth[released], strict=True)]
                found[mark.part, mark.is_forward] = _Segment(left, moments, begun, used, num_again)
        return found

    def _freed_in_forward(self) -> set[int]:
        end = next(mark.position for mark in self._marks if mark.part is None)
        return {event.number for event in self.trace[:end] if event.is_free}


_ATTENTION = frozenset(
    {
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_varlen_attn",
        "_scaled_dot_product_flash_attention_for_cpu",
    }
)  # fmt: skip
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm"})
_GROUPED = frozenset({"_grouped_mm"})  # with the ends of its groups behind its factors
_FREE = ("empty", "new_empty", "detach", "alias", "_unsafe_view")  # that write nothing


@cache
def _is_view(func: Any) -> bool:  # noqa: ANN401  # torch's
    if func.namespace == "prim" or func.__name__.startswith(_FREE):
        return True
    results = func._schema.returns
    return bool(results) and all(each.alias_info is not None and not each.alias_info.is_write for each in results)


def _add(total: list[float], more: Sequence[float]) -> None:
    for axis, amount in enumerate(more):
        total[axis] += amount


def _flat(values: Any) -> Iterator[Tensor]:  # noqa: ANN401  # what operations take and return
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _flat(value)


def _amount(values: Sequence[float]) -> Amount:
    constant, token, score, row, mask = (0.0 if abs(value) < 1e-3 else round(value, 3) for value in values)
    return Amount(constant=constant, token=token, score=score, row=row, mask=mask)


def _moments(moments: Sequence[tuple[float, ...]]) -> tuple[Moment, ...]:
    """The moments that may be the worst: none of them holds less of everything than another one."""
    retained: list[tuple[float, ...]] = []
    for moment in sorted(set(moments), key=lambda each: (-each[1], -each[0])):
        if not any(all(a >= b - abs(b) * _MERGED for a, b in zip(other, moment, strict=True)) for other in retained):
            retained.append(moment)
    retained = retained[:MAX_MOMENTS]
    return tuple(Moment(held=_amount(each[:5]), gradients=round(each[5]), fresh=round(each[6])) for each in retained)
