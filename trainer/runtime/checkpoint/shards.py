"""A rank's safetensors files: each written in one pass that also hashes it, read in slices.

A rank that holds much writes several, side by side: one is hashed and written while another waits for the disk, and
they are hashed side by side when they are read.

The format (https://github.com/huggingface/safetensors#format): the header's length in 8 little-endian bytes, a JSON
header, then the tensors' bytes without gaps. The library's writer neither hashes nor takes a tensor in pieces, so the
header is written here; what is read, the library has checked before. Tensors of wider elements come first, so that each
begins at a multiple of its element size.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from trainer.runtime.checkpoint.manifest import CheckpointFolder, Chunk, FileEntry, Manifest, TensorEntry, TensorType
from trainer.runtime.checkpoint.pieces import Piece, dtype_of, spread, type_of
from trainer.runtime.checkpoint.ranges import Blocks, covered_in_order, overlap, share_of_rank
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.value import Value

BLOCK_BYTES = 4 << 20  # written, hashed and checked at a time; fits a core's cache
_LEAST_FILE_BYTES, _MOST_FILE_BYTES = 64 << 20, 4 << 30


class NonFiniteStateError(EnvironmentFaultError):
    """The weights, the optimizer state or an evaluation loss hold NaN or infinity: nothing was saved."""


class PlacedChunk(Value, frozen=True, kw_only=True):
    """Where a piece of a tensor was put."""

    name: str
    state: str | None
    chunk: Chunk


class ShardRecord(Value, frozen=True, kw_only=True):
    """One file that a rank wrote."""

    file: str
    entry: FileEntry
    placed: tuple[PlacedChunk, ...]


class ShardRecords(Value, frozen=True, kw_only=True):
    """What one rank wrote, as it tells rank 0."""

    files: tuple[ShardRecord, ...]


def shard_name(number: int) -> str:
    """`shard-00003.safetensors`."""
    return f"shard-{number:05d}.safetensors"


def write_shards(
    folder: Path, pieces: Sequence[Piece], *, rank: int, world_size: int, on_point: Callable[[str], None]
) -> tuple[ShardRecord, ...]:
    """Writes this rank's files and returns when they are on the disk; NonFiniteStateError for NaN and infinity.

    They are numbered `rank`, `rank + world_size` and so on; a rank without pieces writes an empty one.
    """
    num_threads = own_cores()
    files = list(enumerate(_dealt(pieces, num_threads)))

    def write(item: tuple[int, Sequence[Piece]]) -> ShardRecord:
        index, own = item
        return _write_shard(folder, own, name=shard_name(rank + index * world_size), on_point=on_point)

    if len(files) == 1:
        return (write(files[0]),)
    with ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix="shard") as writers:
        return tuple(writers.map(write, files))


def own_cores() -> int:
    """Threads that a rank may use for its files: its share of the cores, at most eight."""
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(len(os.sched_getaffinity(0)) // ranks_here, 8))


def _dealt(pieces: Sequence[Piece], num_threads: int) -> list[Sequence[Piece]]:
    """The pieces by files: of about the same size, two for each thread, none needlessly small and none huge."""
    total = sum(piece.num_bytes for piece in pieces)
    num_files = max(-(-total // _MOST_FILE_BYTES), min(2 * num_threads, total // _LEAST_FILE_BYTES), 1)
    if num_files == 1 or any(piece.elsewhere is not None for piece in pieces):
        return [pieces]  # what is brought in is brought in one after the other
    sizes = [(piece.values.numel(), piece.values.element_size()) for piece in pieces]
    return [
        [pieces[share.position].part(share.start, share.num_elements) for share in shares]
        for number in range(num_files)
        if (shares := share_of_rank(sizes, rank=number, world_size=num_files))
    ]


def _write_shard(folder: Path, pieces: Sequence[Piece], *, name: str, on_point: Callable[[str], None]) -> ShardRecord:
    ordered = sorted(pieces, key=lambda piece: -piece.values.element_size())
    keys = [f"{piece.name}|{piece.state or 'weight'}|{piece.start}" for piece in ordered]
    digest, num_bytes = hashlib.sha256(), 0
    with (folder / name).open("xb") as file, ThreadPoolExecutor(max_workers=1) as hasher:
        for block in _blocks(keys, ordered):
            hashed = hasher.submit(digest.update, block)  # beside the write: both release the interpreter's lock
            file.write(block)
            hashed.result()
            if num_bytes == 0:
                file.flush()
                on_point("mid-file")
            num_bytes += len(block)
        file.flush()
        os.fsync(file.fileno())
    on_point("shard-written")
    return ShardRecord(
        file=name,
        entry=FileEntry(size_bytes=num_bytes, sha256=digest.hexdigest()),
        placed=tuple(_placed(piece, file=name, key=key) for key, piece in zip(keys, ordered, strict=True)),
    )


def check_shards(folder: Path, manifest: Manifest) -> None:
    """InputError unless every chunk of the manifest is a key of its file, of its type and size."""
    wanted: dict[str, list[tuple[Chunk, TensorEntry]]] = {}
    for tensor in _tensors(manifest):
        for chunk in tensor.chunks:
            wanted.setdefault(chunk.file, []).append((chunk, tensor))
    for file, chunks in wanted.items():
        with ExitStack() as opened:
            handle = _open(folder / file, opened)
            keys = set(handle.keys())
            for chunk, tensor in chunks:
                _check_chunk(handle, chunk, tensor, keys, origin=f"{folder.name}/{file}")


class OpenShards:
    """A checkpoint's files, opened when first needed, read by ranges; a context manager."""

    def __init__(self, checkpoint: CheckpointFolder) -> None:
        self._folder = checkpoint.path
        self._opened = ExitStack()
        self._files: dict[str, _ShardFile] = {}

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
        saved = dtype_of(tensor.type)
        if not may_round and torch.promote_types(saved, values.dtype) != values.dtype:
            raise InputError(f"{what}: is {tensor.type} in the checkpoint; as {type_of(values)} it would be rounded")
        if start + values.numel() > tensor.num_elements:
            raise InputError(f"{what}: has {tensor.num_elements} elements, {start + values.numel()} are wanted")
        for chunk in covered_in_order(tensor.chunks, num_elements=tensor.num_elements, what=what):
            shared = overlap(chunk, start=start, num_elements=values.numel())
            if shared is not None:
                target = values[shared.in_wanted : shared.in_wanted + shared.num_elements]
                self._fill_from(chunk, _blocks_of(chunk, tensor), target, offset=shared.in_chunk, what=what)

    def _fill_from(self, chunk: Chunk, blocks: Blocks, target: torch.Tensor, *, offset: int, what: str) -> None:
        if chunk.file not in self._files:
            self._files[chunk.file] = self._opened.enter_context(_ShardFile(self._folder / chunk.file))
        file = self._files[chunk.file]
        block_elements = max(BLOCK_BYTES // target.element_size(), 1)
        for begin in range(0, len(target), block_elements):
            part = target[begin : begin + block_elements]
            if not _is_finite(_fill_part(file, chunk.key, blocks, part, start=offset + begin)):
                raise InputError(f"{what}: the checkpoint holds NaN or infinity")


def _fill_part(file: "_ShardFile", key: str, blocks: Blocks, part: torch.Tensor, *, start: int) -> torch.Tensor:
    """Fills a part of a tensor with what stands for elements from `start` on of a chunk; answers what was read."""
    saved = file.dtype_of(key)
    if blocks.block == 1 and part.dtype is saved and part.device.type == "cpu" and part.is_contiguous():
        return file.read(key, start, part)
    if blocks.block == 1:
        read = file.read(key, start, torch.empty(len(part), dtype=saved))
    else:
        first, last = blocks.value_of(start), blocks.value_of(start + len(part) - 1)
        values = file.read(key, first, torch.empty(last + 1 - first, dtype=saved))
        read = spread(values, blocks, start=start, num_elements=len(part))
    part.copy_(read)
    return read


class _Place(msgspec.Struct, frozen=True):
    """Of a tensor, as a header has it."""

    dtype: TensorType
    data_offsets: tuple[int, int]


class _ShardFile:
    """A file whose header the library has checked, read straight into the memory that is to be filled.

    The library copies what is read twice, through pages that are mapped for it; a context manager.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with ExitStack() as opened:
            _open(path, opened)  # checks the header
        self._file = path.open("rb", buffering=0)
        header_bytes = int.from_bytes(self._file.read(8), "little")
        header = msgspec.json.decode(self._file.read(header_bytes), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        self._places = {key: msgspec.json.decode(place, type=_Place) for key, place in header.items()}
        self._data_begin = 8 + header_bytes

    def __enter__(self) -> "_ShardFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def dtype_of(self, key: str) -> torch.dtype:
        """The element type of a tensor."""
        return dtype_of(self._place(key).dtype)

    def _place(self, key: str) -> _Place:
        if key not in self._places:
            raise InputError(f"{self._path}: has no {key}")
        return self._places[key]

    def read(self, key: str, start: int, values: torch.Tensor) -> torch.Tensor:
        """Fills `values`, contiguous memory of the saved type, with the elements from `start` on; answers them."""
        begin, end = self._place(key).data_offsets
        missing = memoryview(values.view(torch.uint8).numpy().data)
        position = self._data_begin + begin + start * values.element_size()
        if position + len(missing) > self._data_begin + end:
            raise InputError(f"{self._path}: {key} is shorter than the manifest says")
        while missing:
            count = os.preadv(self._file.fileno(), [missing], position)
            if not count:
                raise InputError(f"{self._path}: ends before what its header says")
            missing, position = missing[count:], position + count
        return values


class _Handle(Protocol):
    """What is used of safetensors' untyped `safe_open`."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> Any: ...  # noqa: ANN401  # the library's slice object is not typed


def _open(path: Path, opened: ExitStack) -> _Handle:
    try:
        handle: _Handle = opened.enter_context(safe_open(path, framework="pt", device="cpu"))
    except SafetensorError as error:
        raise InputError(f"{path.parent.name}/{path.name}: is not a safetensors file: {error}") from error
    return handle


def _blocks_of(chunk: Chunk, tensor: TensorEntry) -> Blocks:
    return Blocks(num_elements=chunk.num_elements, first_elements=chunk.first_elements, block=tensor.block)


def _check_chunk(handle: _Handle, chunk: Chunk, tensor: TensorEntry, keys: set[str], *, origin: str) -> None:
    if chunk.key not in keys:
        raise InputError(f"{origin}: has no {chunk.key}")
    saved = handle.get_slice(chunk.key)
    shape = [_blocks_of(chunk, tensor).num_values]
    if saved.get_dtype() != tensor.type or saved.get_shape() != shape:
        raise InputError(
            f"{origin}: {chunk.key} is {saved.get_dtype()} {saved.get_shape()}, the manifest says {tensor.type} {shape}"
        )


def _tensors(manifest: Manifest) -> Iterator[TensorEntry]:
    for entry in manifest.parameters.values():
        if entry.weight is not None:
            yield entry.weight
        yield from entry.state.values()


def _blocks(keys: Sequence[str], pieces: Sequence[Piece]) -> Iterator[memoryview]:
    yield memoryview(_header(keys, pieces))
    for piece in pieces:
        values = piece.at_hand()
        block_elements = BLOCK_BYTES // values.element_size()
        for start in range(0, len(values), block_elements):
            block = values[start : start + block_elements].cpu()
            if not _is_finite(block):
                raise NonFiniteStateError(f"{piece.title} holds NaN or infinity, so nothing was saved")
            yield block.view(torch.uint8).numpy().data


def _header(keys: Sequence[str], pieces: Sequence[Piece]) -> bytes:
    """The length and the header, padded with spaces to a multiple of 8 bytes."""
    position, entries = 0, {}
    for key, piece in zip(keys, pieces, strict=True):
        end = position + piece.num_bytes
        entries[key] = {
            "dtype": type_of(piece.values),
            "shape": [piece.values.numel()],
            "data_offsets": [position, end],
        }
        position = end
    assert len(entries) == len(pieces), "two pieces have the same key"
    header = msgspec.json.encode(entries)
    header = header.ljust(-(-len(header) // 8) * 8)
    return len(header).to_bytes(8, "little") + header


def _placed(piece: Piece, *, file: str, key: str) -> PlacedChunk:
    first = 1 if piece.blocks is None else piece.blocks.first_elements
    chunk = Chunk(
        file=file, key=key, start=piece.start, num_elements=piece.num_elements, first_elements=first
    )  # fmt: skip
    return PlacedChunk(name=piece.name, state=piece.state, chunk=chunk)


def _is_finite(values: torch.Tensor) -> bool:
    """One pass without a temporary: minimum and maximum carry a NaN through."""
    if not values.is_floating_point():
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) and torch.isfinite(high))
