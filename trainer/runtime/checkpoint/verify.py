"""Proof that state arrives as it was saved, bit for bit: hashes of live and saved state, and reading a save back.

Reading back is the rehearsal of a save: the checkpoint just written is read from the disk and compared with memory. It
is done once, after the first step, when the cost of finding out is least: a faulty file system, a lost name, a missing
adapter would otherwise show when the run has to be resumed.
"""

import hashlib
import os
from pathlib import Path

import torch
from torch import nn

from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint, verified
from shardwise.trainer.runtime.checkpoint.layout.engines import engine_of
from shardwise.trainer.runtime.checkpoint.layout.pieces import Piece, dtype_of, put_away_after, spread, type_of
from shardwise.trainer.runtime.checkpoint.manifest import CheckpointFolder, ParameterEntry, TensorEntry, named_tensors
from shardwise.trainer.runtime.checkpoint.ranks import Ranks, on_first, together
from shardwise.trainer.runtime.checkpoint.shards import BLOCK_BYTES, OpenShards
from shardwise.trainer.runtime.optimizers import unwrapped
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.strategy import Sharding

_BLOCK_ELEMENTS = 1 << 20


def state_digest(model: nn.Module, optimizer: object, *, sharding: Sharding) -> str:
    """Hash over every weight, moment and step count this rank holds, by name: equal where all bits are equal."""
    engine, inner = engine_of(sharding), unwrapped(optimizer)
    digest = hashlib.sha256()
    for name, entry in sorted(engine.describe(model, inner).items()):
        digest.update(f"{name} {entry.tied_to} {entry.step}\n".encode())
    pieces = sorted(engine.held_pieces(model, inner), key=lambda piece: piece.title)
    with put_away_after(pieces):
        for piece in pieces:
            digest.update(f"{piece.title} {piece.start} {type_of(piece.values)} {piece.num_elements}\n".encode())
            digest.update(piece.at_hand().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checkpoint_digest(checkpoint: CheckpointFolder) -> str:
    """Hash over every weight, state and step count of a checkpoint, by name.

    Equal for two checkpoints of equal state, however many ranks wrote them and under whatever engine.
    """
    digest = hashlib.sha256()
    with OpenShards(checkpoint) as shards:
        for name, entry in sorted(checkpoint.manifest.parameters.items()):
            digest.update(f"{name} {entry.tied_to} {entry.step} {entry.is_trained} {entry.group}\n".encode())
            for title, tensor in sorted(named_tensors(name, entry)):
                digest.update(f"{title} {tensor.type} {tensor.shape}\n".encode())
                for start in range(0, tensor.num_elements, _BLOCK_ELEMENTS):
                    size = min(_BLOCK_ELEMENTS, tensor.num_elements - start)
                    values = torch.empty(size, dtype=dtype_of(tensor.type))
                    shards.fill(values, tensor, start=start, what=title)
                    digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_read_back(folder: Path, *, model: nn.Module, optimizer: object, sharding: Sharding, ranks: Ranks) -> None:
    """EnvironmentFaultError, the same on every rank, unless the checkpoint holds what the ranks hold, bit for bit.

    Collective, and to be called before the state changes again. Rank 0 hashes every file, each rank compares what it
    holds; nothing is held twice but a block.
    """
    engine, inner = engine_of(sharding), unwrapped(optimizer)
    doing = f"{folder}: was written and cannot be read back"

    def hash_files() -> bytes:
        for path in folder.iterdir():
            _forget(path)
        return bytes(verified(folder).path)

    def compare() -> None:
        checkpoint = open_checkpoint(folder)
        pieces = engine.held_pieces(model, inner)
        with put_away_after(pieces), OpenShards(checkpoint) as shards:
            for piece in pieces:
                _compare(piece, checkpoint, shards)

    try:
        on_first(ranks, hash_files, doing=doing)
        together(ranks, compare, doing=doing)
    except InputError as error:
        raise EnvironmentFaultError(
            f"{error};\nthis checkpoint could not be resumed from, nor later ones: name another disk with output"
        ) from error


def _forget(path: Path) -> None:
    """Drops the file from the page cache, so that what is read comes from the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _compare(piece: Piece, checkpoint: CheckpointFolder, shards: OpenShards) -> None:
    """InputError unless the checkpoint's range has the bits of the piece."""
    entry = checkpoint.manifest.parameters.get(piece.name)
    tensor = None if entry is None else _tensor_of(entry, piece)
    if tensor is None:
        raise InputError(f"{checkpoint.path}: has no {piece.title}")
    held = piece.at_hand()
    blocks = piece.blocks
    block_elements = max(BLOCK_BYTES // held.element_size(), 1)
    for begin in range(0, piece.num_elements, block_elements):
        size = min(block_elements, piece.num_elements - begin)
        if blocks is None:
            part = held[begin : begin + size].cpu()
        else:
            values = held[blocks.value_of(begin) : blocks.value_of(begin + size - 1) + 1].cpu()
            part = spread(values, blocks, start=begin, num_elements=size)
        read = torch.empty_like(part)
        shards.fill(read, tensor, start=piece.start + begin, what=piece.title, may_round=piece.may_round)
        if not torch.equal(read.view(torch.uint8), part.view(torch.uint8)):
            raise InputError(f"{checkpoint.path}: {piece.title} was read back otherwise than it was written")


def _tensor_of(entry: ParameterEntry, piece: Piece) -> TensorEntry | None:
    return entry.weight if piece.state is None else entry.state.get(piece.state)
