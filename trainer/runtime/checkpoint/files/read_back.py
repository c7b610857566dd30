"""The rehearsal of a save: the checkpoint just written is read from the disk and held against what is in memory.

Done once, after the first step, when the cost of finding out is least: a file system that lies, a name that is lost, an
adapter that was left out would otherwise show when the run has to be resumed.
"""

import os
from pathlib import Path

import torch
from torch import nn

from trainer.runtime.checkpoint.agreement import on_first, together
from trainer.runtime.checkpoint.files.manifest import CheckpointFolder, ParameterEntry, TensorEntry
from trainer.runtime.checkpoint.files.search import open_checkpoint, verified
from trainer.runtime.checkpoint.files.shard_reader import OpenShards
from trainer.runtime.checkpoint.files.shards import BLOCK_BYTES
from trainer.runtime.checkpoint.layout.pieces import Piece, put_away_after, spread
from trainer.runtime.checkpoint.layout.table import engine_of
from trainer.runtime.checkpoint.ranks import Ranks
from trainer.runtime.optimizers import unwrapped
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.strategy import Sharding


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
