"""CPU cores of ranks whose weights the CPU updates: shares, the system's lists, and a rank that binds itself."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some
from planning_factory import plan_of
from programs import printed_by

from shardwise.trainer.runtime.run.cores import CORES, Core, granted_cores, numbers_of, ranges, shares
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.job.sections import Allowance

NODE_OF = some.lists(some.integers(0, 3), min_size=1, max_size=64)
GPU_NODES = some.lists(some.none() | some.integers(0, 4), min_size=1, max_size=8)


@given(NODE_OF, GPU_NODES)
def test_every_rank_has_as_many_cores_and_none_twice(node_of, nodes):
    cores = [Core(node, number, number) for number, node in enumerate(node_of)]
    found = shares(cores, nodes)
    assert [len(share) for share in found] == [len(cores) // len(nodes)] * len(nodes)
    taken = [number for share in found for number in share]
    assert len(set(taken)) == len(taken)


def test_a_rank_has_the_cores_of_its_card_and_then_of_the_emptiest_node() -> None:
    """Two nodes of four cores with two threads each; logical CPUs 8 to 15 are the second threads."""
    cores = [Core(number % 8 // 4, number % 8, number) for number in range(16)]
    assert shares(cores, [1, 0, 1, 0]) == [(4, 5, 12, 13), (0, 1, 8, 9), (6, 7, 14, 15), (2, 3, 10, 11)]
    assert shares(cores, [0, 0, 0, None]) == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]
    # Threads of one core stay with one rank, also where the shares cross nodes.
    assert shares(cores[:12], [0, 0, 0]) == [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 6, 7)]


def test_the_place_of_cores_is_read_from_the_system(tmp_path: Path) -> None:
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        (tmp_path / f"nodes/node{node}").mkdir(parents=True)
        (tmp_path / f"nodes/node{node}/cpulist").write_text(f"{cpus}\n")
    for number in range(8):
        (tmp_path / f"cpus/cpu{number}/topology").mkdir(parents=True)
        siblings = f"{number % 4},{number % 4 + 4}\n"
        (tmp_path / f"cpus/cpu{number}/topology/thread_siblings_list").write_text(siblings)
    found = granted_cores({0, 2, 3, 4}, cpus=tmp_path / "cpus", nodes=tmp_path / "nodes")
    assert found == [Core(0, 0, 0), Core(0, 0, 4), Core(1, 2, 2), Core(1, 3, 3)]
    assert granted_cores({5}, cpus=tmp_path / "none", nodes=tmp_path / "none") == [Core(0, 5, 5)]
    assert numbers_of("0-1,4-5\n") == [0, 1, 4, 5] and ranges((5, 4, 0, 1, 7)) == "0-1,4-5,7"


SCRIPT = f"""
import os, sys
from pathlib import Path
from shardwise.trainer.runtime.run.cores import active_cores, bind_to_cores
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan
before = os.sched_getaffinity(0)
share = bind_to_cores(codec.read(Path(sys.argv[1]), Plan))
assert os.sched_getaffinity(0) == set(share or before)
print(len(share), active_cores(os.environ, len(share)), os.environ.get("{CORES}"))
"""
NUM_CORES = len(os.sched_getaffinity(0))
OFFLOAD = {"sharding": "zero3", "offload": "optimizer"}


@pytest.mark.parametrize(
    ("pin", "ranks", "environment", "binds"),
    [
        (OFFLOAD, 2, {}, True),
        (OFFLOAD, 1, {}, False),
        (OFFLOAD, 2, {"OMP_NUM_THREADS": str(NUM_CORES)}, False),  # a quota, or the user's own number
        (OFFLOAD, 2, {"OMP_PLACES": "cores"}, False),
        ({"sharding": "zero3"}, 2, {}, False),
    ],
)
def test_a_rank_binds_itself_where_the_cpu_updates(pin, ranks, environment, binds, tmp_path: Path) -> None:
    if NUM_CORES < 2:
        pytest.skip("needs two CPU cores")
    plan = plan_of("tiny", f"{ranks}xRTX-4090", allow=(Allowance.OFFLOAD_CPU,), pin=pin)
    codec.write(tmp_path / "plan.json", plan)
    launched = {"LOCAL_RANK": ranks - 1, "LOCAL_WORLD_SIZE": ranks, "OMP_NUM_THREADS": NUM_CORES // ranks}
    launched = {name: str(value) for name, value in launched.items()} | environment
    printed, size = printed_by("-c", SCRIPT, tmp_path / "plan.json", **launched), NUM_CORES // 2
    assert printed.startswith(f"{size} ('" if binds else "0 None None")
    assert printed.count(f"with {size} threads") == (2 if binds else 0)
