"""One rank of an all-gather: `python -m shardwise.trainer.runtime.tools.measure_gather FOLDER RANK WORLD cuda|cpu`.

The ranks meet through a file in FOLDER, gather a block of each other several times, check every value, and each
writes `RANK.json`. Rates are those of one device in a ring: each rank receives the blocks of all others. If a rank is
missing, the others wait until the caller ends them.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import distributed

from shardwise.trainer.runtime.run.clock import wait_for
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.worker_requests import GatherResult
from shardwise.trainer.spec.units import MIB

REPETITIONS = 5  # the same on every rank
BLOCK_BYTES = {DeviceKind.CUDA: 64 * MIB, DeviceKind.CPU: 8 * MIB}  # of each rank
BACKENDS = {DeviceKind.CUDA: "nccl", DeviceKind.CPU: "gloo"}


def main(arguments: Sequence[str]) -> int:
    """Runs the rank named in `arguments`."""
    folder, rank, world, kind = Path(arguments[0]), int(arguments[1]), int(arguments[2]), DeviceKind(arguments[3])
    device = torch.device("cuda", rank) if kind is DeviceKind.CUDA else torch.device("cpu")
    if kind is DeviceKind.CUDA:
        torch.cuda.set_device(device)
    distributed.init_process_group(
        BACKENDS[kind], init_method=f"file://{(folder / 'meeting').absolute()}", rank=rank, world_size=world
    )
    codec.write(folder / f"{rank}.json", gather(device, rank, world, num_bytes=BLOCK_BYTES[kind]))
    distributed.destroy_process_group()
    return 0


def gather(device: torch.device, rank: int, world: int, *, num_bytes: int) -> GatherResult:
    """Gathers a block of every rank and looks at all of them; every rank of the default group calls it."""
    mine = _block(rank, num_bytes // 4, device)
    everything = torch.empty(world * mine.numel(), dtype=mine.dtype, device=device)
    best_s = float("inf")
    for repetition in range(REPETITIONS + 1):  # the first opens connections
        wait_for(device)
        started = time.perf_counter()
        distributed.all_gather_into_tensor(everything, mine)
        wait_for(device)
        if repetition:
            best_s = min(best_s, time.perf_counter() - started)
    expected = torch.cat([_block(other, mine.numel(), torch.device("cpu")) for other in range(world)])
    return GatherResult(
        bytes_per_s=round((world - 1) * mine.nbytes / best_s), is_correct=torch.equal(everything.cpu(), expected)
    )


def _block(rank: int, num_elements: int, device: torch.device) -> torch.Tensor:
    """Values that differ by rank and position."""
    return torch.arange(num_elements, dtype=torch.int32, device=device) * 31 + rank


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
