"""Copies memory between GPUs and reads it: `python -m shardwise.trainer.runtime.tools.measure_peers OUT [SECONDS]`.

Over PCIe some machines announce peer access and then hang or deliver other bytes (an IOMMU or ACS settings between
the cards); a training run on them stops, or learns nothing. Every ordered pair is tried. The result is written before
and after each, so that a process that hangs has named the pair at work.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path

import torch
from msgspec.structs import replace

from shardwise.trainer.runtime.run.clock import best_seconds, wait_for
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.hardware import MeasuredRates, PeerCopy
from shardwise.trainer.spec.messages.worker_requests import Measurement
from shardwise.trainer.spec.units import MIB

NUM_BYTES = 128 * MIB
BUDGET_S = 0.2  # for each pair


def main(arguments: Sequence[str]) -> int:
    """Writes the result of every pair of visible GPUs, by their position, to the file named in `arguments`."""
    out, *rest = arguments
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    for copies in peer_copies(devices, budget_s=float(rest[0]) if rest else BUDGET_S):
        codec.write(Path(out), Measurement(rates=MeasuredRates(peer_copies=copies)))
    return 0


def peer_copies(devices: Sequence[torch.device], *, budget_s: float) -> Iterator[tuple[PeerCopy, ...]]:
    """The pairs so far, before and after each; the last is at work while it has no rate.

    A pair for which a card has no room is omitted.
    """
    done: tuple[PeerCopy, ...] = ()
    for a, b in permutations(range(len(devices)), 2):
        try:
            # Values that differ everywhere, so that a page that was not copied shows.
            there = torch.arange(NUM_BYTES // 4, dtype=torch.int32, device=devices[a])
            here = torch.zeros(NUM_BYTES // 4, dtype=torch.int32, device=devices[b])
            wait_for(devices[a])
            wait_for(devices[b])
        except torch.OutOfMemoryError:
            continue
        started = PeerCopy(a=a, b=b)
        yield (*done, started)
        done = (*done, _copied(started, there, here, budget_s))
        yield done


def _copied(pair: PeerCopy, there: torch.Tensor, here: torch.Tensor, budget_s: float) -> PeerCopy:
    seconds = best_seconds(lambda: here.copy_(there), here.device, budget_s)
    is_correct = bool(torch.equal(here.cpu(), there.cpu()))
    return replace(pair, bytes_per_s=round(there.nbytes / seconds), is_correct=is_correct)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
