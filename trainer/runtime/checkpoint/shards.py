"""A rank's safetensors files: written in one pass that also hashes them, read by ranges or whole.

A rank that holds much writes several files, side by side: one is hashed and written while another waits for the disk,
and they are hashed side by side when they are read. What is read goes straight into the memory that is to be filled:
the library would copy it twice, through pages that are mapped for it.

The format (https://github.com/huggingface/safetensors#format): the header's length in 8 little-endian bytes, a JSON
header, then the tensors' bytes without gaps. The library's writer neither hashes nor accepts a tensor in pieces, so the
header is written here; the library checks it before a file is read. Tensors of wider elements come first, so that each
begins at a multiple of its element size.
"""

import hashlib
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from shardwise.trainer.runtime.checkpoint.manifest import (
    Blocks,
    CheckpointFolder,
    Chunk,
    FileEntry,
    Manifest,
    Overlap,
    TensorEntry,
    TensorType,
    covered_in_order,
    named_tensors,
    overlap,
    share_of_rank,
)
from shardwise.trainer.runtime.checkpoint.pieces import Piece, dtype_of, spread, type_of
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.value import Value

BLOCK_BYTES = 4 << 20  # written, hashed and checked at a time; fits a core's cache
_LEAST_FILE_BYTES, _MOST_FILE_BYTES = 64 << 20, 4 << 30


class NonFiniteStateError(EnvironmentFaultError):
    """The weights, the optimizer state or an evaluation loss hold NaN or infinity: nothing was saved."""


class PlacedChunk(Value, frozen=True, kw_only=True):
    """Location of a piece of a tensor."""

    name: str
    state: str | None
    chunk: Chunk


class ShardRecord(Value, frozen=True, kw_only=True):
    """One file that a rank wrote."""

    file: str
    entry: FileEntry
    placed: tuple[PlacedChunk, ...]


class ShardRecords(Value, frozen=True, kw_only=True):
    """Files that one rank wrote, as sent to rank 0."""

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
    num_threads = 2 * own_cores()  # half of them wait for the disk
    files = list(enumerate(_by_files(pieces, num_threads)))

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


def _by_files(pieces: Sequence[Piece], num_threads: int) -> list[Sequence[Piece]]:
    """The pieces by files: of about the same size, one for each thread, none needlessly small and none huge."""
    total = sum(piece.num_bytes for piece in pieces)
    num_files = max(-(-total // _MOST_FILE_BYTES), min(num_threads, total // _LEAST_FILE_BYTES), 1)
    if num_files == 1 or any(piece.elsewhere is not None for piece in pieces):
        return [pieces]  # what is brought in is brought in one after the other
    parts = (dealt(pieces, number, num_files) for number in range(num_files))
    return [part for part in parts if part]


def dealt(pieces: Sequence[Piece], number: int, num_parts: int) -> list[Piece]:
    """One of so many parts of the pieces, of about the same size."""
    sizes = [(piece.values.numel(), piece.values.element_size()) for piece in pieces]
    shares = share_of_rank(sizes, rank=number, world_size=num_parts)
    return [pieces[share.position].part(share.start, share.num_elements) for share in shares]


def _write_shard(folder: Path, pieces: Sequence[Piece], *, name: str, on_point: Callable[[str], None]) -> ShardRecord:
    ordered = sorted(pieces, key=lambda piece: -piece.values.element_size())
    keys = [f"{piece.name}|{piece.state or 'weight'}|{piece.start}" for piece in ordered]
    digest, num_bytes = hashlib.sha256(), 0
    with (folder / name).open("xb") as file, ThreadPoolExecutor(max_workers=1) as hasher:
        for block in _blocks(keys, ordered):
            hashed = hasher.submit(digest.update, block)  # during the write: both release the interpreter's lock
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
    for name, entry in manifest.parameters.items():
        for _, tensor in named_tensors(name, entry):
            for chunk in tensor.chunks:
                wanted.setdefault(chunk.file, []).append((chunk, tensor))
    for file, chunks in wanted.items():
        with ExitStack() as opened:
            handle = open_header(folder / file, opened)
            keys = set(handle.keys())
            for chunk, tensor in chunks:
                _check_chunk(handle, chunk, tensor, keys, origin=f"{folder.name}/{file}")


class _Handle(Protocol):
    """The used part of safetensors' untyped `safe_open`."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> Any: ...  # noqa: ANN401  # the library's slice object is not typed


def open_header(path: Path, opened: ExitStack) -> _Handle:
    """The file as the library opens it, which checks its header; InputError where that is damaged."""
    try:
        handle: _Handle = opened.enter_context(safe_open(path, framework="pt", device="cpu"))
    except SafetensorError as error:
        raise InputError(f"{path.parent.name}/{path.name}: is not a safetensors file: {error}") from error
    return handle


def blocks_of(chunk: Chunk, tensor: TensorEntry) -> Blocks:
    """Blocks of elements for which the values of a chunk stand."""
    return Blocks(num_elements=chunk.num_elements, first_elements=chunk.first_elements, block=tensor.block)


def _check_chunk(handle: _Handle, chunk: Chunk, tensor: TensorEntry, keys: set[str], *, origin: str) -> None:
    if chunk.key not in keys:
        raise InputError(f"{origin}: has no {chunk.key}")
    saved = handle.get_slice(chunk.key)
    shape = [blocks_of(chunk, tensor).num_values]
    if saved.get_dtype() != tensor.type or saved.get_shape() != shape:
        raise InputError(
            f"{origin}: {chunk.key} is {saved.get_dtype()} {saved.get_shape()}, the manifest has {tensor.type} {shape}"
        )


def _blocks(keys: Sequence[str], pieces: Sequence[Piece]) -> Iterator[memoryview]:
    yield memoryview(_header(keys, pieces))
    for piece in pieces:
        values = piece.at_hand()
        block_elements = BLOCK_BYTES // values.element_size()
        for start in range(0, len(values), block_elements):
            block = values[start : start + block_elements].cpu()
            if not is_finite(block):
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
    chunk = Chunk(file=file, key=key, start=piece.start, num_elements=piece.num_elements, first_elements=first)
    return PlacedChunk(name=piece.name, state=piece.state, chunk=chunk)


def is_finite(values: torch.Tensor) -> bool:
    """One look without a temporary: minimum and maximum carry a NaN through.

    By NumPy where it has the type: torch would spread 4 MiB over threads that hashing needs, and wait for them.
    """
    if not values.is_floating_point():
        return True
    if values.dtype is torch.float32:
        array = values.numpy()
        return math.isfinite(array.min()) and math.isfinite(array.max())
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) and torch.isfinite(high))


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

    A file that is hashed is read once, from begin to end, also for a part of it. Errors of `OpenShards.fill`.
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
        results = list(readers.map(read, parts.items()))
    return {name: result for name, result in zip(parts, results, strict=True) if result}


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
    """Entry of a tensor in a header."""

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
        """Fills a tensor with what stands for elements from `start` on; returns the values read."""
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
        """Fills `values`, contiguous memory of the saved type, with the values from `start` on; returns them."""
        begin, end = self._place(key).data_offsets
        begin += start * values.element_size()
        if begin + values.numel() * values.element_size() > end:
            raise InputError(f"{self._path}: {key} is shorter than in the manifest")
        self._read_at(self._data_begin + begin, values)
        return values

    def _read_at(self, position: int, values: torch.Tensor) -> None:
        missing = memoryview(values.view(torch.uint8).numpy().data)
        while missing:
            count = os.preadv(self._file.fileno(), [missing], position)
            if not count:
                raise InputError(f"{self._path}: is shorter than its header declares")
            missing, position = missing[count:], position + count


def _in_blocks(values: torch.Tensor) -> Iterable[tuple[int, torch.Tensor]]:
    """Stretches that fit a core's cache, and where each begins; none wider than a block of bytes in any saved type."""
    num_elements = BLOCK_BYTES // 8
    return ((begin, values[begin : begin + num_elements]) for begin in range(0, len(values), num_elements))
