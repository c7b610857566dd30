"""Stop requests at the worst moments: nothing is lost, and the run goes on from where it was."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fault_factory import Fault, run_plan, with_faults
from kill_factory import losses
from rank_factory import rank_plan, write_rows
from workplace_factory import LIMIT_S, Workplace, wait_for

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.rundir.process_record import descendants, read_records
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.messages.rank_files import read_heartbeat
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Report
from shardwise.trainer.spec.strategy import LossHead


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    rows = write_rows(tmp_path_factory.mktemp("data") / "rows")
    return rank_plan(
        rows, Sharding.DDP, num_ranks=2, accumulation=1, num_steps=6, checkpoint_every_steps=2, loss=LossHead.EAGER
    )


def run_beside(plan: Plan, run_dir: Path, work: Callable[[Callable[[], bool]], None], stop: StopRequest) -> Report:
    """The report of a run while `work` disturbs it; it is asked to end by what it is called with."""
    is_over = threading.Event()
    thread = threading.Thread(target=work, args=(is_over.is_set,))
    thread.start()
    try:
        outcome, printed = run_plan(plan, run_dir, stop=stop)
    finally:
        is_over.set()
        thread.join()
    assert outcome.report is not None and outcome.exit_code is ExitCode.REQUEUE, printed
    return outcome.report


@pytest.mark.parametrize(
    "start",
    [
        "with the libraries loaded",
        pytest.param("with imports", marks=[pytest.mark.cold, pytest.mark.long, pytest.mark.kills]),
    ],
)
def test_signals_to_one_rank_from_its_first_moment_to_its_last_stop_all_at_one_step(plan, tmp_path, start):
    """Through the meeting of the ranks, loading, and the save that they ask for."""
    sent = 0

    def storm(is_over: Callable[[], bool]) -> None:
        nonlocal sent
        while not is_over():
            rank = read_records(tmp_path / "run" / "attempts" / "1" / "pids").get("rank-1")
            sent += rank is not None and rank.send(signal.SIGUSR1)
            time.sleep(0.005)

    stopped = run_beside(plan, tmp_path / "run", storm, StopRequest())
    assert sent > (50 if start == "with imports" else 10)
    assert stopped.ending is Ending.PREEMPTED and stopped.checkpoint == f"checkpoints/step-{stopped.step:08d}"
    attempt = codec.read(tmp_path / "run/attempts/1/report.json", Report)
    assert (attempt.ending, attempt.exit_code, attempt.step) == (Ending.PREEMPTED, ExitCode.REQUEUE, stopped.step)
    outcome, printed = run_plan(plan, tmp_path / "run", resume=True)
    assert outcome.exit_code is ExitCode.DONE and outcome.report is not None, printed
    assert [each.ending for each in outcome.report.history] == [Ending.PREEMPTED, Ending.FINISHED]
    run_plan(plan, tmp_path / "straight")
    assert losses(tmp_path / "run") == losses(tmp_path / "straight"), "bit by bit"


def test_a_request_during_a_save_waits_for_it_and_saves_what_came_after(plan, tmp_path):
    stop = StopRequest()

    def ask_in_a_save(is_over: Callable[[], bool]) -> None:
        while not is_over() and stop.kind is None:
            beat = read_heartbeat(tmp_path / "run" / "attempts" / "1", 0)
            if beat is not None and beat.phase == "saving a checkpoint" and beat.step == 2:
                stop.note(signal.SIGTERM, None)
            time.sleep(0.005)

    slow = with_faults(plan, tmp_path, [Fault("slow disk", 0, 1)])
    stopped = run_beside(slow, tmp_path / "run", ask_in_a_save, stop)
    assert stopped.ending is Ending.PREEMPTED and 2 <= stopped.step < 6
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert saved[-1] == f"step-{stopped.step:08d}" and "step-00000002" in saved


@pytest.mark.cold
@pytest.mark.long
@pytest.mark.kills
def test_a_request_while_the_data_is_prepared_ends_in_order(workplace: Workplace):
    process = workplace.start("train", "job.yaml")
    wait_for(lambda: descendants(process.pid), "a process of the preparation", process)
    family = descendants(process.pid)
    os.kill(process.pid, signal.SIGTERM)
    output = process.communicate(timeout=LIMIT_S)[0]
    assert process.returncode == ExitCode.REQUEUE and "Traceback" not in output, output
    wait_for(lambda: not any(each.is_alive for each in family), "the end of its helpers")
