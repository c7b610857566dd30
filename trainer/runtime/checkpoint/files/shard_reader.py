"""Reading a checkpoint's files: ranges of tensors in any cut, or whole files in one pass that also hashes them.

What is read goes straight into the memory that is to be filled: the library would copy it twice, through pages that
are mapped for it.
"""

import hashlib
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from trainer.runtime.checkpoint.files.manifest import CheckpointFolder, Chunk, TensorEntry, TensorType
from trainer.runtime.checkpoint.files.ranges import Blocks, Overlap, covered_in_order, overlap
from trainer.runtime.checkpoint.files.shards import BLOCK_BYTES, blocks_of, is_finite, open_header, own_cores
from trainer.runtime.checkpoint.layout.pieces import Piece, dtype_of, spread, type_of
from trainer.spec.errors import InputError


class _Part(NamedTuple):
    """A stretch of one key of a file, and the memory it goes into."""

    key: str
    start: int  # in the key, in elements
    values: torch.Tensor
    what: str


def read_pieces(
    checkpoint: CheckpointFolder, wanted: Iterable[tuple[Piece, TensorEntry]], *, hashed: Collection[str] = ()
) -> dict[str, str]:
    """Fills pieces that are in memory, file by file, files side by side; the sha256 of each file of `hashed`.

    A file that is hashed is read once, from begin to end, whatever is wanted of it. Errors of `OpenShards.fill`.
    """
    parts: dict[str, list[_Part]] = {name: [] for name in hashed}
    for piece, tensor in wanted:
        values = piece.at_hand(to_fill=True)
        for chunk, shared in _chunks_for(
            values, tensor, start=piece.start, what=piece.title, may_round=piece.may_round
        ):
            target = values[shared.in_wanted : shared.in_wanted + shared.num_elements]
            parts.setdefault(chunk.file, []).append(_Part(chunk.key, shared.in_chunk, target, piece.title))

    def read(item: tuple[str, Sequence[_Part]]) -> str:
        name, own = item
        with ShardFile(checkpoint.path / name) as file:
            if name in hashed:
                return file.read_and_hash(own)
            for part in own:
                file.fill(part)
        return ""

    if not parts:
        return {}
    num_threads = min(2 * own_cores(), len(parts))  # half of them wait for the disk
    with ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="shard") as readers:
        answers = list(readers.map(read, parts.items()))
    return {name: answer for name, answer in zip(parts, answers, strict=True) if answer}


def _chunks_for(
    values: torch.Tensor, tensor: TensorEntry, *, start: int, what: str, may_round: bool
) -> Iterable[tuple[Chunk, Overlap]]:
    """The chunks that hold elements [start, start + len) of a saved tensor, and what of them is wanted.

    InputError where the range has holes, or where `values` has fewer bits than were saved and may not be rounded to.
    """
    saved = dtype_of(tensor.type)
    if not may_round and torch.promote_types(saved, values.dtype) != values.dtype:
        raise InputError(f"{what}: is {tensor.type} in the checkpoint; as {type_of(values)} it would be rounded")
    if start + values.numel() > tensor.num_elements:
        raise InputError(f"{what}: has {tensor.num_elements} elements, {start + values.numel()} are wanted")
    for chunk in covered_in_order(tensor.chunks, num_elements=tensor.num_elements, what=what):
        shared = overlap(chunk, start=start, num_elements=values.numel())
        if shared is not None:
            yield chunk, shared


class OpenShards:
    """A checkpoint's files, opened when first needed, read by ranges; a context manager."""

    def __init__(self, checkpoint: CheckpointFolder) -> None:
        self._folder = checkpoint.path
        self._opened = ExitStack()
        self._files: dict[str, ShardFile] = {}

    def __enter__(self) -> "OpenShards":
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def fill(
        self, values: torch.Tensor, tensor: TensorEntry, *, start: int, what: str, may_round: bool = False
    ) -> None:
        """Fills a flat tensor with elements [start, start + len) of a saved one.

        Where one saved value stands for several elements, each of them gets it.
        InputError where the range has holes, for NaN and infinity, or where `values` has fewer bits than were saved
        and may not be rounded to.
        """
        for chunk, shared in _chunks_for(values, tensor, start=start, what=what, may_round=may_round):
            target = values[shared.in_wanted : shared.in_wanted + shared.num_elements]
            blocks = blocks_of(chunk, tensor)
            self._file(chunk.file).fill(_Part(chunk.key, shared.in_chunk, target, what), blocks)

    def _file(self, name: str) -> "ShardFile":
        if name not in self._files:
            self._files[name] = self._opened.enter_context(ShardFile(self._folder / name))
        return self._files[name]


class _Place(msgspec.Struct, frozen=True):
    """Of a tensor, as a header has it."""

    dtype: TensorType
    data_offsets: tuple[int, int]


class ShardFile:
    """A file whose header the library has checked; a context manager."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with ExitStack() as opened:
            open_header(path, opened)  # checks the header
        self._file = path.open("rb", buffering=0)
        header_bytes = int.from_bytes(self._file.read(8), "little")
        header = msgspec.json.decode(self._file.read(header_bytes), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        self._places = {key: msgspec.json.decode(place, type=_Place) for key, place in header.items()}
        self._data_begin = 8 + header_bytes

    def __enter__(self) -> "ShardFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def fill(self, part: _Part, blocks: Blocks | None = None) -> None:
        """Fills a part; of a tensor of which a value stands for several elements, each of these."""
        for begin, values in _in_blocks(part.values):
            if not is_finite(self._read(part.key, part.start + begin, values, blocks)):
                raise InputError(f"{part.what}: the checkpoint holds NaN or infinity")

    def read_and_hash(self, parts: Iterable[_Part]) -> str:
        """Reads the whole file once, each part into its place; its sha256."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        digest, position = hashlib.sha256(), 0
        scratch = torch.empty(BLOCK_BYTES, dtype=torch.uint8)
        for part in sorted(parts, key=self._position_of):
            begin = self._position_of(part)
            if begin < position:
                raise InputError(f"{self._path}: {part.what} is wanted twice")
            self._hash(digest, position, begin, scratch)
            dtype = dtype_of(self._place(part.key).dtype)
            for _, values in _in_blocks(part.values):
                is_straight = values.dtype is dtype and values.device.type == "cpu" and values.is_contiguous()
                read = values if is_straight else scratch.view(dtype)[: len(values)]
                self._read_at(begin, read)
                digest.update(read.view(torch.uint8).numpy().data)
                if not is_finite(read):
                    raise InputError(f"{part.what}: the checkpoint holds NaN or infinity")
                if not is_straight:
                    values.copy_(read)
                begin += read.numel() * read.element_size()
            position = begin
        self._hash(digest, position, os.fstat(self._file.fileno()).st_size, scratch)
        return digest.hexdigest()

    def _hash(self, digest: "hashlib._Hash", begin: int, end: int, scratch: torch.Tensor) -> None:
        for position in range(begin, end, BLOCK_BYTES):
            block = scratch[: min(BLOCK_BYTES, end - position)]
            self._read_at(position, block)
            digest.update(block.numpy().data)

    def _position_of(self, part: _Part) -> int:
        place = self._place(part.key)
        return self._data_begin + place.data_offsets[0] + part.start * place.dtype.element_bytes

    def _read(self, key: str, start: int, part: torch.Tensor, blocks: Blocks | None) -> torch.Tensor:
        """Fills a tensor with what stands for elements from `start` on; answers what was read."""
        saved = dtype_of(self._place(key).dtype)
        if blocks is not None and blocks.block > 1:
            first, last = blocks.value_of(start), blocks.value_of(start + len(part) - 1)
            values = self._read_values(key, first, torch.empty(last + 1 - first, dtype=saved))
            read = spread(values, blocks, start=start, num_elements=len(part))
        elif part.dtype is saved and part.device.type == "cpu" and part.is_contiguous():
            return self._read_values(key, start, part)
        else:
            read = self._read_values(key, start, torch.empty(len(part), dtype=saved))
        part.copy_(read)
        return read

    def _place(self, key: str) -> _Place:
        if key not in self._places:
            raise InputError(f"{self._path}: has no {key}")
        return self._places[key]

    def _read_values(self, key: str, start: int, values: torch.Tensor) -> torch.Tensor:
        """Fills `values`, contiguous memory of the saved type, with the values from `start` on; answers them."""
        begin, end = self._place(key).data_offsets
        begin += start * values.element_size()
        if begin + values.numel() * values.element_size() > end:
            raise InputError(f"{self._path}: {key} is shorter than the manifest says")
        self._read_at(self._data_begin + begin, values)
        return values

    def _read_at(self, position: int, values: torch.Tensor) -> None:
        missing = memoryview(values.view(torch.uint8).numpy().data)
        while missing:
            count = os.preadv(self._file.fileno(), [missing], position)
            if not count:
                raise InputError(f"{self._path}: ends before what its header says")
            missing, position = missing[count:], position + count


def _in_blocks(values: torch.Tensor) -> Iterable[tuple[int, torch.Tensor]]:
    """Stretches that fit a core's cache, and where each begins; none wider than a block of bytes in any saved type."""
    num_elements = BLOCK_BYTES // 8
    return ((begin, values[begin : begin + num_elements]) for begin in range(0, len(values), num_elements))
