"""Where a rank writes, and the second attempt on the same files."""

import json
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta

import pytest
from report_factory import make_report

from shardwise.trainer.runtime.loop.metrics import MetricsFile, StepMetrics
from shardwise.trainer.runtime.run.state import STATUS_INTERVAL_S, ReportWriter, run_paths, start_of_launch
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.rank_files import read_heartbeat
from shardwise.trainer.spec.report import Report

NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def paths(tmp_path):
    (tmp_path / "attempts" / "3").mkdir(parents=True)
    return run_paths(tmp_path / "attempts" / "3" / "plan.json", started_at=NOW)


def test_paths_follow_from_where_the_plan_lies_and_an_attempt_that_has_ended_is_written_beside(paths, tmp_path):
    folder = tmp_path / "attempts" / "3"
    assert (paths.run_dir, paths.attempt, paths.is_again) == (tmp_path, 3, False)
    assert paths.attempt_dir == paths.plan_dir == folder
    (folder / "report.json").write_text("{}")
    paths, again = run_paths(folder / "plan.json", started_at=NOW), folder / "again-20300102-030405"
    assert paths.is_again and paths.attempt_dir == paths.run_dir == again
    assert paths.resume_dir == tmp_path and paths.plan_dir == folder


def test_ranks_of_one_launcher_agree_on_when_it_started():
    imported = "from shardwise.trainer.runtime.run.state import start_of_launch"
    code = f"{imported}; print(start_of_launch(world_size=2).timestamp())"
    answers = {subprocess.check_output([sys.executable, "-c", code], text=True) for _ in range(2)}
    assert len(answers) == 1, "both have this process as their launcher"
    assert start_of_launch(world_size=1).timestamp() == float(answers.pop())
    assert timedelta(0) <= datetime.now(UTC) - start_of_launch(world_size=1) < timedelta(hours=12)


def test_each_rank_has_a_report_of_its_own_and_rank_0_writes_the_status(paths):
    for rank in (0, 2):
        writer = ReportWriter(paths, rank=rank)
        writer.write_report(make_report())
        writer.write_status(f"rank {rank}", step=rank)
    assert sorted(path.name for path in paths.attempt_dir.glob("report*")) == ["report-rank-2.json", "report.json"]
    assert codec.read(paths.attempt_dir / "report.json", Report) == make_report()
    assert json.loads((paths.attempt_dir / "status.json").read_text()) == {"phase": "rank 0", "step": 0}


def test_the_status_is_renewed_when_the_phase_changes_or_half_a_second_has_passed(paths):
    writer = ReportWriter(paths, rank=0)
    found: list[dict[str, object]] = []
    begin = time.monotonic()
    while not found or found[-1] == {"phase": "training", "step": 1}:
        assert time.monotonic() - begin < 10
        writer.write_status("training", step=1 + (time.monotonic() - begin > STATUS_INTERVAL_S / 2))
        found.append(json.loads((paths.attempt_dir / "status.json").read_text()))
    assert found[-1] == {"phase": "training", "step": 2}
    assert time.monotonic() - begin >= STATUS_INTERVAL_S
    sign = read_heartbeat(paths.attempt_dir, 0)
    assert sign is not None and sign.step == 2, "every call is a heartbeat"
    writer.write_status("evaluating", step=2)
    assert json.loads((paths.attempt_dir / "status.json").read_text()) == {"phase": "evaluating", "step": 2}


def line(step: int) -> StepMetrics:
    return StepMetrics(
        step=step, attempt=1, epoch=0.5, tokens=10, targets=9, loss=2.0, lr=0.1, grad_norm=None, step_s=1.0, data_s=0.0,
        forward_s=0.4, backward_s=0.5, optimizer_s=0.1, tokens_per_s=10.0, tokens_per_s_per_gpu=10.0, targets_per_s=9.0,
        host_rss_bytes=5,
    )  # fmt: skip


def test_metrics_are_appended_line_by_line_on_one_rank_and_leave_out_what_was_not_measured(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path, is_writer=False) as metrics:
        metrics.append(line(1))
    assert not path.exists()
    for step in (1, 2):
        with MetricsFile(path, is_writer=True) as metrics:
            metrics.append(line(step))
            lines = [json.loads(each) for each in path.read_text().splitlines()]
            assert [each["step"] for each in lines] == list(range(1, step + 1)), "a watcher reads it at once"
    assert "eval_loss" not in lines[0] and "mfu" not in lines[0] and lines[0]["grad_norm"] is None
