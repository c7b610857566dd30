"""Hashes of model and optimizer state: what proves that it arrived as it left, bit for bit."""

import hashlib

import torch
from torch import nn

from trainer.runtime.checkpoint.files.manifest import CheckpointFolder, named_tensors
from trainer.runtime.checkpoint.files.shard_reader import OpenShards
from trainer.runtime.checkpoint.layout.pieces import dtype_of, put_away_after, type_of
from trainer.runtime.checkpoint.layout.table import engine_of
from trainer.runtime.optimizers import unwrapped
from trainer.spec.strategy import Sharding

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
