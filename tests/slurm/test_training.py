"""Training on a real Slurm: submitted, interrupted in every way there is, and with the losses of one process."""

import json
import os
import signal
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kill_factory import losses
from slurm_cluster import SlurmCluster
from workplace_factory import Workplace, make_workplace

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.submission import JOBS_FILE
from shardwise.trainer.spec.report import Ending, Fault, Report

STEPS = 24
LONG_STEPS = 110
TWO_NODES = ("--nodes", "2", "--hardware", "2x2xCPU")
LIMIT_S = 500  # a machine may be busy; one that hangs is ended by the limit of the test
SLOW = """
import time
from pathlib import Path

def on_step(step, metrics):
    if not Path("quick").exists():
        time.sleep({pause})
"""
EVENLY = "0.6"
HARDLY_AT_LAST = "0.3 if step < 9 else 5"  # a test that is itself slow meets the run before its end all the same
# Losses are compared: the planner would take bf16 on a CPU that multiplies it.
PLAIN = {"pin": {"precision": "fp32"}, "checkpoint": {"every": "5 steps"}, "eval": {"every": "1000 steps"}}


class Submitted:
    """A job in the queue and its run directory."""

    def __init__(self, slurm: SlurmCluster, place: Workplace, *words: str) -> None:
        self.slurm, self.run_dir = slurm, place.folder / "run"
        on_login_node = Workplace(place.folder, {**place.environment, **slurm.environment, "HOME": str(place.folder)})
        answer = on_login_node.run("submit", "job.yaml", "--run-dir", self.run_dir, "--json", *words)
        (self.job,) = json.loads(answer.stdout)["job_ids"]

    @property
    def report(self) -> Report:
        return codec.read(self.run_dir / "report.json", Report)

    def lines(self) -> list[dict[str, Any]]:
        metrics = self.run_dir / "metrics.jsonl"
        whole = metrics.read_text().splitlines(keepends=True) if metrics.is_file() else []
        return [json.loads(line) for line in whole if line.endswith("\n")]

    def wait_for_step(self, step: int) -> int:
        """The number of the attempt that has come so far."""
        self.wait(lambda: any(line["step"] >= step for line in self.lines()), f"step {step}")
        return int(self.lines()[-1]["attempt"])

    def wait_for_attempt_after(self, attempt: int) -> int:
        """Until a later attempt has done two steps; its number."""
        self.wait(lambda: len([line for line in self.lines() if line["attempt"] > attempt]) >= 2, f"after {attempt}")
        return int(self.lines()[-1]["attempt"])

    def wait(self, claim: Callable[[], bool], words: str) -> None:
        self._with_output(lambda: self.slurm.wait_until(claim, words, LIMIT_S))

    def finish(self) -> Report:
        self._with_output(lambda: self.slurm.wait_for(self.job, "COMPLETED", timeout_s=LIMIT_S))
        return self.report

    def output(self) -> str:
        return (self.run_dir / f"slurm-{self.job}.out").read_text()

    def signal(self) -> None:
        self.slurm.run("scancel", "--batch", "--signal=USR1", self.job)

    def kill_rank(self, attempt: int, rank: int) -> None:
        record = json.loads((self.run_dir / "attempts" / str(attempt) / "pids" / f"rank-{rank}.json").read_text())
        os.kill(record["pid"], signal.SIGKILL)

    def check_steps(self, num_steps: int) -> None:
        """Each attempt begins where the last one stopped, or at the last checkpoint if it had a fault."""
        assert {line["step"] for line in self.lines()} == set(range(1, num_steps + 1))
        first_steps = {line["attempt"]: line["step"] for line in reversed(self.lines())}
        for before, record in pairwise(self.report.history):
            saved = (record.resumed_from_step or 0) + 1
            begins_at = first_steps.get(record.number, saved)  # or it was stopped before it did a step
            if before.fault is None:
                assert before.ending is Ending.PREEMPTED and begins_at == before.step + 1
            else:
                assert begins_at == saved <= before.step + 1

    def _with_output(self, wait: Callable[[], object]) -> None:
        try:
            wait()
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.slurm.job(self.job).text}\n{self.output()}") from error


def write_job(place: Workplace, steps: int, *, sharding: str | None = None, pause: str | None = None) -> None:
    """A job that others can be compared with; it pauses after each step until there is a file `quick`."""
    pin = PLAIN["pin"] | ({"sharding": sharding} if sharding else {})
    (place.folder / "slow.py").write_text(SLOW.format(pause=pause))
    more = {"extensions": "slow.py"} if pause else {}
    place.write_job(**{**PLAIN, "train": {"steps": steps}, "pin": pin, **more})


def losses_of_one_process(folder: Path, steps: int) -> list[float]:
    place = make_workplace(folder)
    write_job(place, steps)
    place.run("train", "job.yaml")
    return losses(place.only_run())


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path / "work place")  # with a space in every path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses_of_one_process(tmp_path_factory.mktemp("alone") / "place", STEPS)


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.parametrize("sharding", ["zero3", "fsdp", "hsdp"])
def test_two_nodes_of_two_ranks_have_the_losses_of_one_process(slurm: SlurmCluster, place: Workplace, sharding, alone):
    write_job(place, STEPS, sharding=sharding)
    run = Submitted(slurm, place, *TWO_NODES, "--partition", "cpu", "--time", "10")
    report = run.finish()
    assert report.ending is Ending.FINISHED and report.verified is not None and report.verified.world_size == 4
    assert losses(run.run_dir) == pytest.approx(alone, abs=1e-5)


def test_a_run_of_two_nodes_goes_on_after_the_loss_of_a_rank_and_after_a_requeue(slurm, place, alone):
    """The supervisor restarts after the loss, Slurm after the requeue; no step counts twice."""
    write_job(place, STEPS, sharding="fsdp", pause=HARDLY_AT_LAST)
    run = Submitted(slurm, place, *TWO_NODES, "--partition", "cpu", "--time", "10")
    attempt = run.wait_for_step(3)
    run.kill_rank(attempt, 2)
    run.wait_for_attempt_after(attempt)
    run.signal()
    run.wait(lambda: slurm.job(run.job).restarts == 1, "Slurm queues it again")
    (place.folder / "quick").touch()
    report = run.finish()
    assert report.ending is Ending.FINISHED and report.verified is not None and report.verified.world_size == 4
    assert losses(run.run_dir) == pytest.approx(alone, abs=1e-5)
    killed, preempted, _ = report.history
    assert (killed.fault, preempted.fault, preempted.ending) == (Fault.KILLED, None, Ending.PREEMPTED)
    run.check_steps(STEPS)
    assert "n1: ranks 0 to 1 meet at 10." in run.output() and "n2: ranks 2 to 3 meet at 10." in run.output()
    logs = {path.name for path in (run.run_dir / "attempts" / "1" / "logs").iterdir()}
    assert {"launcher.log", "launcher-1.log", "agents.log", *(f"rank-{rank}.log" for rank in range(4))} <= logs


@pytest.mark.long
@pytest.mark.slurm
@pytest.mark.parametrize("time", range(1, 11))
def test_a_run_goes_on_through_every_interruption_with_the_losses_of_one_process(slurm, place, tmp_path, time):
    """A rank is killed, the time is up, USR1 twice, preemption, a node without power: each restart learns on.

    The first restart is the supervisor's own, the others are Slurm's. No step counts twice.
    """
    write_job(place, LONG_STEPS, sharding="fsdp", pause=EVENLY)
    run = Submitted(slurm, place, "--nodes", "2", "--partition", "low", "--time", "2")
    attempt = run.wait_for_step(3)
    run.kill_rank(attempt, 1)
    attempt = run.wait_for_attempt_after(attempt)

    slurm.wait_for(run.job, "RUNNING", restarts=1, timeout_s=LIMIT_S)  # within two minutes the time is nearly up
    attempt = run.wait_for_attempt_after(attempt)
    run.signal()
    attempt = run.wait_for_attempt_after(attempt)

    urgent = slurm.submit("--partition=cpu", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    slurm.wait_for(urgent, "COMPLETED", timeout_s=LIMIT_S)
    attempt = run.wait_for_attempt_after(attempt)

    nodes = slurm.run("scontrol", "show", "hostnames", slurm.job(run.job).nodes).stdout.split()
    slurm.kill_node(nodes[1])
    run.wait_for_attempt_after(attempt)
    starts = run.run_dir / JOBS_FILE
    num_starts = starts.read_text().count("\n")
    run.signal()
    run.wait(lambda: starts.read_text().count("\n") > num_starts, "the script has begun again")
    run.signal()  # now before a library is imported
    report = run.finish()
    assert report.ending is Ending.FINISHED and report.step == LONG_STEPS
    assert losses(run.run_dir) == pytest.approx(losses_of_one_process(tmp_path / "alone", LONG_STEPS), abs=1e-5)
    assert [record.fault for record in report.history if record.fault] == [Fault.KILLED] * 2, report.history
    assert slurm.job(run.job).restarts >= 6
    run.check_steps(LONG_STEPS)
