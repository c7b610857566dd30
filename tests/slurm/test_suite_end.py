"""However a run of tests ends, nothing of it stays: no process, no network, no folder, no mount."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import slurm_cluster
import suite_remains
from slurm_cluster import SlurmCluster

FACTORIES = Path(slurm_cluster.__file__).parent
HOLDS_A_CLUSTER = """
import os, subprocess, time
from pathlib import Path
from small_disk import mounted_disk

def test_that_does_not_end(slurm, tmp_path):
    with mounted_disk(tmp_path / "small disk", "1m"):
        line = f"srun sh -c 'touch {tmp_path}/runs; exec sleep 1000'"
        slurm.submit("--output=/dev/null", f"--wrap={line}")
        slurm.wait_until((tmp_path / "runs").exists, "the job runs")
        subprocess.Popen(["sleep", "1001"], start_new_session=True)
        Path(os.environ["READY"]).write_text(str(slurm.folder))
        time.sleep(1000)
"""


class Suite(NamedTuple):
    """A run of tests that holds what `text` asks for, in a process group of its own."""

    process: subprocess.Popen[str]
    ready: Path

    @property
    def slot(self) -> int:
        return int(self.ready.read_text().rpartition("-")[2])

    @property
    def name(self) -> str:
        return suite_remains.suite_name(self.process.pid) or ""


def start_suite(folder: Path, text: str) -> Suite:
    (folder / "test_inner.py").write_text(text)
    ready = folder / "ready"
    options = ["-c", os.devnull, f"--rootdir={folder}", f"--basetemp={folder}/inner"]
    plugins = ["-p", "suite_end", "-p", "slurm_cluster", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(FACTORIES), os.environ.get("PYTHONPATH", "")])
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *plugins, "test_inner.py"],
            env={**os.environ, "PYTHONPATH": path, "READY": str(ready), "WARM_PYTHON": "0"}, cwd=folder, stdout=output,
            stderr=output, text=True, start_new_session=True,
        )  # fmt: skip
    return Suite(process, ready)


@pytest.fixture
def suite_with_cluster(slurm: SlurmCluster, tmp_path: Path) -> Iterator[Suite]:
    suite = start_suite(tmp_path, HOLDS_A_CLUSTER)
    slurm.wait_until(lambda: suite.ready.is_file() and bool(suite.ready.read_text()), "the inner tests hold a cluster")
    yield suite
    suite.process.kill()
    suite.process.wait()


def processes_of(suite: Suite) -> dict[int, str]:
    """Names by pid: daemons, jobs, whatever else its tests started, and the process that cleans up behind it."""
    marks = (f"shardwise-slurm-{suite.slot}/slurm.conf".encode(), f"={suite.name}".encode())
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words, environment = (folder / "cmdline").read_text().split("\0"), (folder / "environ").read_bytes()
            is_keeper = words[-2:-1] == [suite.name] and any("suite_remains.py" in word for word in words)
            if is_keeper or any(mark in environment for mark in marks):
                found[int(folder.name)] = "keeper" if is_keeper else (folder / "comm").read_text().strip()
    return found


def test_a_suite_that_is_killed_leaves_nothing(slurm: SlurmCluster, suite_with_cluster: Suite, tmp_path: Path):
    slot, before = suite_with_cluster.slot, processes_of(suite_with_cluster)
    assert {"munged", "slurmctld", "slurmd", "slurmstepd", "sleep", "keeper"} <= set(before.values())
    os.killpg(suite_with_cluster.process.pid, signal.SIGKILL)
    suite_with_cluster.process.wait()
    slurm.wait_until(lambda: not any(map(suite_remains.suite_name, before)), f"none of {before} runs")
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    if lock := suite_remains.lock_slot(slot):  # otherwise another run of tests has begun to use the place
        with lock:
            networks = [*Path("/run/netns").glob(f"swt{slot}-*"), *Path("/sys/class/net").glob(f"swt{slot}[a-z]*")]
            assert networks == [] and not suite_remains.cluster_folder(slot).exists()
    slurm.wait_for(slurm.submit("--output=/dev/null", "--wrap=srun true"), "COMPLETED")  # the one that still runs
