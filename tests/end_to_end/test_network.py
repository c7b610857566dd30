"""The ports that a run opens, and the end of one whose ranks cannot reach each other."""

import re
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from fault_factory import run_plan
from network_factory import needs_own_network, without_loopback
from rank_factory import rank_plan, write_rows

from shardwise.launch.rundir.process_record import descendants, read_records
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode
from shardwise.trainer.spec.plan import Plan

pytestmark = [pytest.mark.long, pytest.mark.starts]
LISTENS = "0A"  # of the fourth column of /proc/net/tcp


def listening_addresses(pids: set[int]) -> Iterator[str]:
    inodes: set[str] = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                inodes.update(re.findall(r"socket:\[(\d+)\]", str(link.readlink())))
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path("/proc/net") / table
        for fields in map(str.split, path.read_text().splitlines()[1:] if path.exists() else ()):
            if fields[3] == LISTENS and fields[9] in inodes:
                content = bytes.fromhex(fields[1].partition(":")[0])
                numbers = struct.unpack(f"<{len(content) // 4}I", content)
                yield socket.inet_ntop(family, struct.pack(f">{len(numbers)}I", *numbers))


def two_ranks(folder: Path, sharding: Sharding) -> Plan:
    return rank_plan(
        write_rows(folder / "rows"), sharding, num_ranks=2, micro_batch=2, accumulation=1, sequences_per_step=4,
        num_steps=20,
    )  # fmt: skip


@pytest.mark.cold  # the processes below the launcher are looked at
@pytest.mark.parametrize("sharding", [Sharding.DDP, Sharding.FSDP, Sharding.ZERO2])
def test_two_ranks_of_one_machine_listen_on_its_loopback_alone(tmp_path: Path, sharding: Sharding):
    is_over, seen = threading.Event(), set[str]()
    attempt = tmp_path / "run" / "attempts" / "1"

    def look() -> None:
        while not is_over.wait(0.05):
            launcher = read_records(attempt / "pids").get("launcher")
            if launcher is not None:
                seen.update(listening_addresses({launcher.pid, *(each.pid for each in descendants(launcher.pid))}))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        outcome, printed = run_plan(two_ranks(tmp_path, sharding), tmp_path / "run")
    finally:
        is_over.set()
        thread.join()
    assert outcome.exit_code is ExitCode.DONE, printed
    assert seen == {"127.0.0.1"}


@needs_own_network
@pytest.mark.parametrize("sharding", [Sharding.DDP, Sharding.ZERO2])
def test_a_loopback_that_is_down_ends_the_run_and_is_named_with_its_remedy(tmp_path: Path, sharding: Sharding):
    plan = two_ranks(tmp_path, sharding)
    match = "ranks 0 to 1 cannot reach each other at 127.0.0.1.*\nsudo ip link set lo up"
    with pytest.raises(EnvironmentFaultError, match=match):
        without_loopback(lambda: run_plan(plan, tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run" / "attempts").iterdir()] == ["1"]
