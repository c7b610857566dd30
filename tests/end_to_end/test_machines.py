"""Several machines without a scheduler: the same command on each, one run; each with its own network and name."""

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_factory import losses
from slurm_cluster import SlurmCluster
from workplace_factory import Workplace, make_workplace, read_metrics

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report

STEPS = 40
LIMIT_S = 500  # a machine may be busy; one that hangs is ended by the limit of the test
EXACT = {"precision": "fp32"}  # losses are compared: the planner would take bf16 on a CPU that multiplies it
RARELY = {"checkpoint": {"every": "4 steps"}, "eval": {"every": "1000 steps"}}
LONG = [pytest.param(time, marks=[pytest.mark.long, pytest.mark.slurm]) for time in range(2, 11)]


class Machines:
    def __init__(self, cluster: SlurmCluster, place: Workplace) -> None:
        self.cluster, self.place, self.run_dir = cluster, place, place.folder / "run"
        self.running: dict[int, subprocess.Popen[str]] = {}

    def start(self, rank: int, *more: str) -> None:
        words = ["train", "job.yaml", "--nodes", "2", "--node-rank", str(rank), "--head", "n1"]
        argv = self.cluster.on_node(f"n{rank + 1}", *self.place.command(*words, "--run-dir", self.run_dir, *more))
        with (self.place.folder / f"{rank}.out").open("a") as output:
            self.running[rank] = subprocess.Popen(
                argv, cwd=self.place.folder, env=self.place.environment, stdout=output, stderr=output, text=True
            )

    def told(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.place.folder.glob("*.out")))

    def wait_for_step(self, step: int) -> None:
        metrics = self.run_dir / "metrics.jsonl"

        def has_come() -> bool:
            assert all(process.poll() is None for process in self.running.values()), self.told()
            return metrics.is_file() and metrics.read_text().count("\n") > 0 and max(read_metrics(self.run_dir)) >= step

        self.cluster.wait_until(has_come, f"step {step}", LIMIT_S)

    def wait(self, code: int) -> Report:
        assert [self.running.pop(rank).wait(LIMIT_S) for rank in (0, 1)] == [code, code], self.told()
        return codec.read(self.run_dir / "report.json", Report)


@pytest.fixture
def machines(slurm: SlurmCluster, workplace: Workplace) -> Iterator[Machines]:
    workplace.write_job(train={"steps": STEPS}, pin={"sharding": "fsdp", **EXACT}, **RARELY)
    two = Machines(slurm, workplace)
    yield two
    for process in two.running.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("time", [1, *LONG])
def test_two_machines_train_one_run_through_a_stop_and_the_loss_of_one(machines: Machines, tmp_path: Path, time: int):
    """With the losses of one process, every step counted once."""
    for rank in (0, 1):
        machines.start(rank)
    machines.wait_for_step(3)
    machines.running[1].send_signal(signal.SIGTERM)
    stopped = machines.wait(75)
    assert stopped.ending is Ending.PREEMPTED and stopped.checkpoint is not None
    assert f"preempted at step {stopped.step}" in (machines.place.folder / "1.out").read_text()

    for rank in (0, 1):
        machines.start(rank, "--resume")
    machines.wait_for_step(max(stopped.step + 6, 9))
    machines.cluster.kill_all("n2")  # as a power cut
    machines.running[1].wait()
    machines.start(1, "--resume")
    report = machines.wait(0)
    assert report.ending is Ending.FINISHED and report.verified is not None and report.verified.world_size == 2
    assert any("n2 (node 1) was lost" in words for words in report.incidents)

    alone = make_workplace(tmp_path / "alone")
    alone.write_job(train={"steps": STEPS}, pin=EXACT, **RARELY)
    alone.run("train", "job.yaml")
    assert losses(machines.run_dir) == pytest.approx(losses(alone.only_run()), abs=1e-5)
    assert sorted(read_metrics(machines.run_dir)) == list(range(1, STEPS + 1))
    assert not (machines.run_dir / ".nodes.json").exists()


@pytest.mark.long
@pytest.mark.slurm
def test_an_interface_that_leads_nowhere_ends_the_run_on_both_machines_with_rank_address_and_remedy(machines: Machines):
    """As of an InfiniBand without a cable: each machine has the interface, and its packets do not arrive."""
    cluster, environment = machines.cluster, machines.place.environment
    environment["GLOO_SOCKET_IFNAME"] = "ib0"
    adding = (
        "ip link add ib0 type veth peer name ib1; ip addr add {}/24 dev ib0; ip link set ib0 up; ip link set ib1 up"
    )
    for node, address in (("n1", "10.99.0.1"), ("n2", "10.99.0.2")):
        cluster.run(*cluster.on_node(node, "sh", "-c", adding.format(address)))
    try:
        for rank in (0, 1):
            machines.start(rank)
        report = machines.wait(4)
    finally:
        for node in ("n1", "n2"):
            cluster.run(*cluster.on_node(node, "ip", "link", "delete", "ib0"))
    assert report.ending is Ending.FAILED and report.attempts == 1
    lines = (report.error or "").splitlines()
    assert re.fullmatch(
        r"rank (0 on n1|1 on n2) cannot reach rank (1 on n2|0 on n1) at 10\.99\.0\.[12] port \d+: .*", lines[0]
    )
    assert "unset GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME" in lines[1]
    assert lines[0] in machines.told()
