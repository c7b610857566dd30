"""Pieces of a checkpoint: flat ranges of named tensors together with the live memory that holds them.

Names are those of the model's author, without those of wrappers. Of a model with adapters a checkpoint holds the
adapters alone: the frozen base is where it came from, and identified by its fingerprint. Adapters are recognised by
PEFT's names, which stand where the base's layers are (`q_proj.lora_A.default.weight`).

Memory that an engine keeps on a disk is brought in for one piece after the other: the result of `at_hand` is valid
until another piece is brought in. Such pieces are used inside `put_away_after`.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.trainer.runtime.checkpoint.manifest import Blocks, TensorType
from shardwise.trainer.spec.errors import InputError

_LEADING_WRAPPERS = re.compile(r"^(?:module\.|base_model\.model\.)+")  # DistributedDataParallel, DeepSpeed; PEFT
_INNER_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module)\.")  # torch.compile; checkpointing


_ADAPTER = re.compile(r"(?:^|\.)lora_[^.]+\.")


class NamedTensor(NamedTuple):
    """A parameter or persistent buffer under its canonical name; one that shares another's tensor is tied to it."""

    tensor: torch.Tensor
    tied_to: str | None
    is_buffer: bool


def canonical_name(name: str) -> str:
    """The name without the prefixes that wrappers add."""
    return _LEADING_WRAPPERS.sub("", _INNER_WRAPPERS.sub("", name))


def named_state(model: nn.Module) -> dict[str, NamedTensor]:
    """Everything of a model that a checkpoint holds, in the model's order; the first name of a tied tensor owns it.

    Parameters and persistent buffers; of a model with adapters, the adapters. FSDP2 keeps weights gathered after a
    forward without a backward, as in an evaluation: they are cut again, so that they are the optimizer's.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    owners: dict[int, str] = {}
    found: dict[str, NamedTensor] = {}
    for full_name, tensor, is_buffer in _parameters_and_buffers(model):
        name = canonical_name(full_name)
        if name in found:
            raise ValueError(f"two tensors are named {name} once wrapper prefixes are stripped; one is {full_name}")
        owner = owners.setdefault(id(tensor), name)
        found[name] = NamedTensor(tensor=tensor, tied_to=None if owner == name else owner, is_buffer=is_buffer)
    return found


def _parameters_and_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor, bool]]:
    parameters: list[tuple[str, torch.Tensor, bool]] = [
        (name, tensor, False) for name, tensor in model.named_parameters(remove_duplicate=False)
    ]
    buffers = [
        (f"{path}.{name}" if path else name, tensor, True)
        for path, module in model.named_modules(remove_duplicate=False)
        for name, tensor in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set
    ]
    adapters = [item for item in parameters if _ADAPTER.search(item[0])]
    return adapters or parameters + buffers


_TYPES: dict[torch.dtype, TensorType] = {
    torch.float64: TensorType.F64, torch.float32: TensorType.F32,
    torch.float16: TensorType.F16, torch.bfloat16: TensorType.BF16,
    torch.int64: TensorType.I64, torch.int32: TensorType.I32, torch.int16: TensorType.I16,
    torch.int8: TensorType.I8, torch.uint8: TensorType.U8, torch.bool: TensorType.BOOL,
}  # fmt: skip
_DTYPES = {type_: dtype for dtype, type_ in _TYPES.items()}


class Elsewhere(Protocol):
    """Source of a piece's memory, to which it is written back if it was filled."""

    def bring(self, num_elements: int, *, to_fill: bool) -> torch.Tensor:
        """The values, until another piece is brought."""

    def put_away(self) -> None:
        """Gives back what was brought last, by whichever piece; written first if it was filled."""


class Coded(NamedTuple):
    """One moment as an 8-bit optimizer keeps it, flat: an element is `table[code]` times the scale of its block."""

    codes: torch.Tensor  # uint8
    scales: torch.Tensor  # fp32, one for each block
    table: torch.Tensor  # fp32, 256 values in ascending order, among them zero


class Replica(NamedTuple):
    """Number of this rank among those that hold the same values; each of them writes only its share."""

    number: int
    num_replicas: int


class Piece(NamedTuple):
    """Elements [start, start + num_elements) of a parameter (`state` None) or of one of its optimizer states."""

    name: str
    state: str | None
    start: int
    values: torch.Tensor  # one dimension, contiguous; on `meta` where the memory is elsewhere
    is_shared: bool = False  # every rank holds it, so that each writes only its share
    replica: Replica | None = None  # some ranks hold it, so that each of these writes only its share
    may_round: bool = False  # a copy in the computing type, of which a checkpoint may hold more bits
    elsewhere: Elsewhere | None = None
    blocks: Blocks | None = None  # of values that stand for several elements each; None: one for each
    coded: Coded | None = None  # of 8-bit codes: the moment that they are a stretch of, from `offset` on
    offset: int = 0

    @property
    def num_elements(self) -> int:
        return self.values.numel() if self.blocks is None else self.blocks.num_elements

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.element_size()

    def at_hand(self, *, to_fill: bool = False) -> torch.Tensor:
        """The values themselves, in memory."""
        if self.elsewhere is None:
            return self.values
        return self.elsewhere.bring(self.values.numel(), to_fill=to_fill)

    def part(self, offset: int, num_values: int) -> "Piece":
        """A stretch of this piece's values, which are in memory."""
        assert self.elsewhere is None, "what every rank holds is in memory"
        values, blocks = self.values[offset : offset + num_values], self.blocks
        if blocks is None:
            return self._replace(start=self.start + offset, values=values)
        begin, end = blocks.begin_of(offset), blocks.begin_of(offset + num_values)
        first = blocks.begin_of(offset + 1) - begin
        cut = Blocks(num_elements=end - begin, first_elements=first, block=blocks.block)
        return self._replace(start=self.start + begin, values=values, blocks=cut)

    @property
    def title(self) -> str:
        return self.name if self.state is None else f"{self.name} ({self.state})"


@contextmanager
def put_away_after(pieces: Iterable[Piece]) -> Iterator[None]:
    """Frees what the block brought in, also after an error."""
    try:
        yield
    finally:
        for piece in pieces:
            if piece.elsewhere is not None:
                piece.elsewhere.put_away()


def flat(tensor: torch.Tensor, *, name: str) -> torch.Tensor:
    """A view of the tensor's elements in row-major order; InputError where they lie otherwise in memory."""
    if not tensor.is_contiguous():
        raise InputError(f"{name}: is not contiguous in memory; a checkpoint needs it to be")
    return tensor.detach().view(-1)


def spread(values: torch.Tensor, blocks: Blocks, *, start: int, num_elements: int) -> torch.Tensor:
    """One value for each of the elements [start, start + num_elements), of the values of all blocks these lie in."""
    counts = torch.full((len(values),), blocks.block)
    first, last = blocks.value_of(start), blocks.value_of(start + num_elements - 1)
    counts[0] = blocks.begin_of(first + 1) - start
    counts[-1] = start + num_elements - max(blocks.begin_of(last), start)
    return torch.repeat_interleave(values, counts)


def type_of(tensor: torch.Tensor) -> TensorType:
    """The name of a tensor's element type in the format; ValueError for one that has none."""
    type_ = _TYPES.get(tensor.dtype)
    if type_ is None:
        raise ValueError(f"tensors of {tensor.dtype} have no place in a checkpoint")
    return type_


def dtype_of(type_: TensorType) -> torch.dtype:
    """The torch type of an element type in the format."""
    return _DTYPES[type_]
