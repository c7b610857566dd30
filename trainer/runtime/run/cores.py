"""CPU cores of a rank: where the CPU updates weights, every rank of a machine has cores of its own.

The threads of CPU Adam read and write the state of their rank with every step. Without a binding they move between
cores, and on a machine of several NUMA nodes away from the memory that they filled. DeepSpeed measured a step of 3B
parameters on two A100 1.16 times as fast with cores of its own for each rank (blog of ZenFlow).

The cores that this run was granted are shared out evenly, whole physical cores first, of the NUMA node of the rank's
GPU as long as it has some, else of the node with the most left: a node without a GPU has memory channels too. A rank
binds itself before torch starts its threads, which inherit the cores; memory that they touch first is on their node.

Nothing is bound where a rank has the machine to itself, where a quota of CPU time grants less than the cores that are
visible (other containers run on them), and where the user binds threads (`OMP_PROC_BIND` and its like).
"""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.plan import Plan

CORES = "SHARDWISE_CORES"  # in the environment of a rank that has bound itself: its cores, as 0-3,8
_USER_BINDS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
_CPUS = Path("/sys/devices/system/cpu")
_NODES = Path("/sys/devices/system/node")


class Core(NamedTuple):
    """A logical CPU, in the order in which they are shared out."""

    node: int
    physical: int  # the first logical CPU of the same core
    number: int


def bind_to_cores(plan: Plan) -> tuple[int, ...]:
    """Binds this rank to its share of the cores where the CPU updates weights; the share, empty if nothing is bound."""
    local_rank, ranks_here = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if plan.chosen.strategy.offload is Offload.NONE or any(name in os.environ for name in _USER_BINDS):
        return ()
    cores = granted_cores(os.sched_getaffinity(0))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if ranks_here < 2 or threads != str(len(cores) // ranks_here):
        return ()
    nodes = [gpu.numa_node for gpu in plan.hardware.gpus[:ranks_here]] or [None] * ranks_here
    share = shares(cores, nodes)[local_rank]
    try:
        os.sched_setaffinity(0, share)
    except OSError:  # a sandbox may forbid it
        return ()
    os.environ[CORES] = ranges(share)
    return share


def shares(cores: Sequence[Core], nodes: Sequence[int | None]) -> list[tuple[int, ...]]:
    """As many cores for each rank, by the NUMA node of its GPU (None: not known); no core is in two shares."""
    size = len(cores) // len(nodes)
    left: dict[int, list[int]] = {}
    for core in sorted(cores):
        left.setdefault(core.node, []).append(core.number)

    def taken(node: int, number: int) -> list[int]:
        cores = left.get(node, [])
        left[node] = cores[number:]
        return cores[:number]

    found = [taken(node, size) if node is not None and len(left.get(node, ())) >= size else [] for node in nodes]
    for share in found:
        while len(share) < size:
            share += taken(max(left, key=lambda node: len(left[node])), size - len(share))
    return [tuple(sorted(share)) for share in found]


def granted_cores(numbers: set[int], *, cpus: Path = _CPUS, nodes: Path = _NODES) -> list[Core]:
    """The place of each logical CPU; on one node, and a core of its own, where the system does not say."""
    node_of: dict[int, int] = {}
    for folder in nodes.glob("node[0-9]*"):
        with suppress(OSError):
            listed = numbers_of((folder / "cpulist").read_text())
            node_of |= dict.fromkeys(listed, int(folder.name.removeprefix("node")))

    def physical(number: int) -> int:
        with suppress(OSError):
            return min(numbers_of((cpus / f"cpu{number}/topology/thread_siblings_list").read_text()), default=number)
        return number

    return sorted(Core(node_of.get(number, 0), physical(number), number) for number in numbers)


def numbers_of(text: str) -> list[int]:
    """`0-3,8` as numbers."""
    parts = re.findall(r"(\d+)(?:-(\d+))?", text)
    return [number for first, last in parts for number in range(int(first), int(last or first) + 1)]


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as `0-3,8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def active_cores(environment: Mapping[str, str], num_threads: int) -> tuple[str, str] | None:
    """(cores and threads that this rank bound itself to, those that it has now) as text; None if it bound none."""
    if (planned := environment.get(CORES)) is None:
        return None
    return (
        f"{planned} with {len(numbers_of(planned))} threads",
        f"{ranges(tuple(os.sched_getaffinity(0)))} with {num_threads} threads",
    )
