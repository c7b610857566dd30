"""Looks at a rank whose memory ran out, for the report on it: what it holds, and what the allocator says.

Tensors that only autograd holds are seen by the GPU's counters alone: of a CPU, what is named is what Python holds.
Looking must never get in the way of the end: whatever fails here is left out.
"""

import gc
import resource
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.runtime.profile.memory_profile import anonymous_bytes, status_bytes, storage_bytes
from trainer.spec import codec
from trainer.spec.messages.heartbeat import read_heartbeat
from trainer.spec.messages.memory_state import MemoryState, memory_state_path

MOST_BLOCKS = 10


def write_memory_state(attempt_dir: Path, *, rank: int, step: int, data_limit: int) -> None:
    """Leaves the state beside the report of the rank, `data_limit` being the one that was in force."""
    try:
        codec.write(memory_state_path(attempt_dir, rank), memory_state(attempt_dir, rank, step, data_limit))
    except Exception as error:  # noqa: BLE001  # the end is being told: nothing may keep it from that
        print(f"what memory held could not be written: {type(error).__name__}: {error}")  # noqa: T201  # into its log


def memory_state(attempt_dir: Path, rank: int, step: int, data_limit: int) -> MemoryState:
    """What this process holds now."""
    beat = read_heartbeat(attempt_dir, rank)
    return MemoryState(
        rank=rank,
        phase="" if beat is None else beat.phase,
        step=step + 1,
        tensors=held_tensors(),
        host_bytes=anonymous_bytes(),
        data_bytes=status_bytes("VmData"),
        data_limit_bytes=None if data_limit == resource.RLIM_INFINITY else data_limit,
        **_allocator_state(),
    )


def held_tensors() -> dict[str, int]:
    """Bytes of the tensors that Python holds, each storage once."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # what torch.compile leaves behind warns that it has no storage
        found = list(_tensors())
    weights = [tensor for tensor in found if isinstance(tensor, nn.Parameter)]
    gradients = [weight.grad for weight in weights if weight.is_leaf and weight.grad is not None]
    held = {"weights": storage_bytes(weights), "gradients": storage_bytes(gradients)}
    return held | {"other tensors": storage_bytes([*found, *gradients]) - sum(held.values())}


def _tensors() -> Iterator[Tensor]:
    """By their types: asking a stranger's object what it is may run its code."""
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and _has_storage(thing):
            yield thing


def _has_storage(tensor: Tensor) -> bool:
    """Fake, meta and sparse ones have none; what is wrapped is counted by itself."""
    try:
        return tensor.device.type != "meta" and bool(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError, UserWarning):
        return False


def _allocator_state() -> dict[str, Any]:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    blocks = [block for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]]
    used = sorted((block["size"] for block in blocks if block["state"] == "active_allocated"), reverse=True)
    unused = [block["size"] for block in blocks if block["state"] == "inactive"]
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
        "free_device_bytes": free_bytes,
        "total_device_bytes": total_bytes,
        "largest_blocks": tuple(used[:MOST_BLOCKS]),
        "largest_free_bytes": max(unused, default=0),
        "summary": torch.cuda.memory_summary(),
    }
