"""A disk that is full is reported at once, and costs no step that a resume cannot repeat."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_factory import Fault, run_plan, with_faults
from msgspec.structs import replace
from rank_factory import rank_plan, write_rows
from small_disk import mounted_disk

from shardwise.launch.rundir.metrics import MetricsTail
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Report
from shardwise.trainer.spec.strategy import LossHead

NUM_STEPS = 14


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    rows = write_rows(tmp_path_factory.mktemp("data") / "rows")
    return rank_plan(
        rows, micro_batch=8, accumulation=1, num_steps=NUM_STEPS, checkpoint_every_steps=2, loss=LossHead.EAGER
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB: three checkpoints of this model."""
    with mounted_disk(tmp_path / "small", "8m") as folder:
        yield folder


def test_a_disk_that_fills_up_costs_checkpoints_and_nothing_else(plan: Plan, small_disk: Path) -> None:
    """Full from step 5 to step 9: what could not be written then is made up for, or told."""
    outcome, printed = run_plan(
        with_faults(plan, small_disk, [Fault("full disk", 0, 5)], free_at=9), small_disk / "run"
    )
    assert outcome.exit_code is ExitCode.DONE and outcome.report is not None, printed
    assert len(outcome.report.history) == 1
    steps = [row["step"] for row in MetricsTail(small_disk / "run" / "metrics.jsonl").read_new()]
    assert steps == list(range(1, NUM_STEPS + 1)), "every line of metrics came"
    first, more = (line for line in outcome.report.incidents if "no checkpoint at step " in line)
    assert first.startswith("no checkpoint at step 6: ") and "no checkpoint at step 8: " in more
    assert "no checkpoint at step " in printed, "the newest of those that failed since the last look"
    assert "checkpoints are saved again" in printed
    assert outcome.report.checkpoint == f"checkpoints/step-{NUM_STEPS:08d}"


def test_a_disk_that_stays_full_ends_the_run_with_an_error_and_a_resume_saves_its_end(plan, small_disk):
    run_dir = small_disk / "run"
    full = with_faults(plan, small_disk, [Fault("full disk", 0, 5)], free_at=NUM_STEPS + 1)
    outcome, printed = run_plan(full, run_dir)
    first = printed.index("no checkpoint at step ")  # the newest of those that failed since the last look
    assert outcome.exit_code is ExitCode.ENVIRONMENT, printed
    ended = codec.read(run_dir / "report.json", Report)
    assert (ended.ending, ended.step, len(ended.history)) == (Ending.FAILED, NUM_STEPS, 1)
    assert ended.checkpoint == "checkpoints/step-00000004"
    assert ended.error is not None and "add --resume" in ended.error
    assert ended.incidents[0].startswith("no checkpoint at step 6: ")
    assert first < printed.index(f"step {NUM_STEPS} with "), "before the end of the run"
    (small_disk / "marks" / "filler").unlink()
    outcome, printed = run_plan(replace(full, resume=True), run_dir, resume=True)
    assert outcome.exit_code is ExitCode.DONE and outcome.report is not None, printed
    assert outcome.report.checkpoint == f"checkpoints/step-{NUM_STEPS:08d}"
    assert outcome.report.export == "export"
    rows = MetricsTail(run_dir / "metrics.jsonl").read_new()
    assert {row["step"] for row in rows if row["attempt"] == 2} == set(range(5, NUM_STEPS + 1))
