"""A rank's safetensors files: each written in one pass that also hashes it, read in slices.

A rank that holds much writes several, side by side: one is hashed and written while another waits for the disk, and
they are hashed side by side when they are read.

The format (https://github.com/huggingface/safetensors#format): the header's length in 8 little-endian bytes, a JSON
header, then the tensors' bytes without gaps. The library's writer neither hashes nor takes a tensor in pieces, so the
header is written here; what is read, the library has checked before. Tensors of wider elements come first, so that each
begins at a multiple of its element size.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from trainer.runtime.checkpoint.files.manifest import Chunk, FileEntry, Manifest, TensorEntry
from trainer.runtime.checkpoint.files.ranges import Blocks, share_of_rank
from trainer.runtime.checkpoint.layout.pieces import Piece, type_of
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
    num_threads = 2 * own_cores()  # half of them wait for the disk
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
    """The pieces by files: of about the same size, one for each thread, none needlessly small and none huge."""
    total = sum(piece.num_bytes for piece in pieces)
    num_files = max(-(-total // _MOST_FILE_BYTES), min(num_threads, total // _LEAST_FILE_BYTES), 1)
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
            handle = open_header(folder / file, opened)
            keys = set(handle.keys())
            for chunk, tensor in chunks:
                _check_chunk(handle, chunk, tensor, keys, origin=f"{folder.name}/{file}")


class _Handle(Protocol):
    """What is used of safetensors' untyped `safe_open`."""

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
    """How the values of a chunk stand for its elements."""
    return Blocks(num_elements=chunk.num_elements, first_elements=chunk.first_elements, block=tensor.block)


def _check_chunk(handle: _Handle, chunk: Chunk, tensor: TensorEntry, keys: set[str], *, origin: str) -> None:
    if chunk.key not in keys:
        raise InputError(f"{origin}: has no {chunk.key}")
    saved = handle.get_slice(chunk.key)
    shape = [blocks_of(chunk, tensor).num_values]
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
    chunk = Chunk(
        file=file, key=key, start=piece.start, num_elements=piece.num_elements, first_elements=first
    )  # fmt: skip
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
