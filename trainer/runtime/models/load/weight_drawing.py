"""New weights tensor by tensor, bitwise those of a model that is built as a whole.

A whole build draws twice: `nn.Linear` and its like when they are made, transformers' `_init_weights` once a model is
complete, and the second draws depend on how many numbers the first took. So the model is made on the meta device, with
every random number that a whole build would draw and throw away drawn into scratch memory; when `_init_weights` comes
to a module, just the tensors that it writes get memory, are handed over, and lose it again.

Which tensors a call writes, and which call is the last to write one, is found out by making the model once on the meta
device alone. A model whose tensors are not all written whole by `_init_weights` (values that its constructor computes,
or code that reads weights) cannot be drawn so: it is built as a whole.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

Build = Callable[[], PreTrainedModel]
"""Makes the model on torch's default device."""

_OVERWRITES = frozenset(
    f"aten::{name}_" for name in ("normal", "uniform", "zero", "fill", "copy", "random", "exponential", "log_normal")
)


class Drawing(NamedTuple):
    """What the calls of `_init_weights` write, in their order."""

    writes: tuple[tuple[str, ...], ...]
    """Of each call, the tensors by their names relative to its module."""
    finals: tuple[dict[str, str], ...]
    """Of each call, those that no later call writes: the relative name, and the one in the model."""


def plan_drawing(build: Build) -> Drawing | None:
    """How to draw a model tensor by tensor; None where only a whole build has its weights."""
    seen = _Writes()
    calls: list[_Call] = []

    def note(owner: PreTrainedModel, module: nn.Module) -> None:
        names = {_storage(tensor): name for name, tensor in _named_tensors(module)}
        with seen.noting() as written, torch.device("cpu"):
            owner._init_weights(module)
        if not written.keys() <= names.keys():
            raise _NotDrawableError
        calls.append(_Call(module, {names[key]: is_whole for key, is_whole in written.items()}))

    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"), _initialising(note), seen:
            model = build()
    except (_NotDrawableError, NotImplementedError, RuntimeError):
        return None
    paths = {id(module): path for path, module in model.named_modules()}
    last: dict[str, tuple[int, bool]] = {}
    for number, call in enumerate(calls):
        for name, is_whole in call.written.items():
            last[_join(paths.get(id(call.module), "?"), name)] = (number, is_whole)
    if not all(last.get(name, (0, False))[1] for name, _ in _named_tensors(model)):
        return None
    finals = tuple(
        {name: full for name in call.written if last[full := _join(paths.get(id(call.module), "?"), name)][0] == number}
        for number, call in enumerate(calls)
    )
    return Drawing(writes=tuple(tuple(call.written) for call in calls), finals=finals)


def draw(build: Build, drawing: Drawing, put: Callable[[str, Tensor], None]) -> None:
    """Hands each tensor of the model over once, by its name, with the numbers that torch's generator stands at.

    It is to be copied: its memory is used again for the next. A tied tensor comes under each of its names; the one that
    `named_parameters` gives first is the one that counts.
    """
    number, scratch = 0, _Scratch()

    def make(owner: PreTrainedModel, module: nn.Module) -> None:
        nonlocal number
        made, finals = drawing.writes[number], drawing.finals[number]
        before = {name: _tensor(module, name) for name in made}
        for (name, tensor), memory in zip(before.items(), scratch.like(list(before.values())), strict=True):
            is_parameter = isinstance(tensor, nn.Parameter)
            _set_tensor(module, name, nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory)
        with torch.device("cpu"):
            owner._init_weights(module)
            with torch.random.fork_rng(devices=[]):
                for name, full in finals.items():
                    put(full, _tensor(module, name).detach())
        for name, tensor in before.items():
            _set_tensor(module, name, tensor)
        number += 1

    with torch.device("meta"), _initialising(make), _Discarding(scratch):
        build()


_ALIGNMENT = 64  # bytes


class _NotDrawableError(Exception):
    """A call writes what is no tensor of its module."""


class _Call(NamedTuple):
    module: nn.Module
    written: dict[str, bool]  # relative name to whether the call makes it anew as a whole


class _Writes(TorchDispatchMode):
    """Notes which storages are written, and whether the first writing leaves nothing of what was there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._written: dict[int, bool] | None = None

    @contextmanager
    def noting(self) -> Iterator[dict[int, bool]]:
        """What is written meanwhile, by storage; of temporary tensors on the CPU nothing."""
        self._written = {}
        yield self._written
        self._written = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        kwargs = kwargs or {}
        if self._written is not None:
            for tensor in _written_tensors(func, args, kwargs):
                is_whole = tensor.numel() * tensor.itemsize == tensor.untyped_storage().nbytes()
                overwrites = is_whole and func._schema.name in _OVERWRITES
                if tensor.is_meta:
                    self._written.setdefault(_storage(tensor), overwrites)
        return func(*args, **kwargs)


class _Scratch:
    """Memory that is used again and again: blocks that come and go would leave holes in the heap, which stay."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors on the CPU of the same shapes and types, with whatever was there before."""
        sizes = [-(-tensor.numel() * tensor.itemsize // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        if sum(sizes) > self._bytes.numel():
            self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")  # first, so that there are not two
            self._bytes = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        parts = self._bytes[: sum(sizes)].split(sizes)
        return [
            part[: tensor.numel() * tensor.itemsize].view(tensor.dtype).view(tensor.shape)
            for tensor, part in zip(tensors, parts, strict=True)
        ]


class _Discarding(TorchDispatchMode):
    """Draws what is drawn into a tensor without memory into scratch memory, so that the generator moves on."""

    def __init__(self, scratch: _Scratch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._scratch = scratch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and args and isinstance(args[0], Tensor) and args[0].is_meta:
            func(*self._scratch.like(args[:1]), *args[1:], **kwargs)
            return args[0]
        return func(*args, **kwargs)


@contextmanager
def _initialising(visit: Callable[[PreTrainedModel, nn.Module], None]) -> Iterator[None]:
    """Calls `visit` where transformers would initialise a module, also on the meta device, where it would not."""
    classes: Any = PreTrainedModel
    originals = classes.init_weights, classes._initialize_weights

    def init_weights(model: Any) -> None:  # noqa: ANN401  # a PreTrainedModel
        model.initialize_weights()
        model.tie_weights(recompute_mapping=False)

    def initialise(owner: PreTrainedModel, module: Any, is_custom_code: bool = False) -> None:  # noqa: ANN401, FBT001, FBT002  # as transformers calls it
        if not getattr(module, "_is_hf_initialized", False):
            visit(owner, module)
            module._is_hf_initialized = True

    try:
        classes.init_weights, classes._initialize_weights = init_weights, initialise
        yield
    finally:
        classes.init_weights, classes._initialize_weights = originals


def _written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:  # noqa: ANN401  # torch's operator
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            if isinstance(value, Tensor):
                yield value


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    tensor = getattr(module.get_submodule(path), leaf)
    assert isinstance(tensor, Tensor)
    return tensor


def _set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(module.get_submodule(path), leaf, tensor)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
