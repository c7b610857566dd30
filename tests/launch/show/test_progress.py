"""Progress is read from the run's own files and never more often than a reader can follow."""

import io
import json
from pathlib import Path
from typing import Any

from run_factory import metrics_row, write_attempt

from shardwise.launch.show.follow import Progress
from shardwise.launch.terminal import Console
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan


def write_rows(run_dir: Path, *rows: dict[str, object]) -> None:
    with (run_dir / "metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


def write_phase(attempt_dir: Path, phase: str) -> None:
    (attempt_dir / "status.json").write_text(json.dumps({"phase": phase, "step": 0}))


def make_progress(attempt_dir: Path, stream: io.StringIO, **more: Any) -> Progress:
    plan, environment = codec.read(attempt_dir / "plan.json", Plan), {"TERM": "xterm", "LC_ALL": "C"}
    more = {"clock": lambda: 100.0, **more}
    return Progress(Console(stream), attempt_dir=attempt_dir, plan=plan, environment=environment, **more)


def test_a_log_gets_a_line_every_ten_seconds_each_phase_every_evaluation_and_every_incident(tmp_path: Path):
    run_dir, stream, now = tmp_path / "run", io.StringIO(), [100.0]
    attempt_dir = write_attempt(run_dir, num_steps=4)
    write_phase(attempt_dir, "loading the model")
    with make_progress(attempt_dir, stream, clock=lambda: now[0]).shown() as progress:
        progress.tick()
        write_phase(attempt_dir, "training")
        write_rows(run_dir, metrics_row(1), {**metrics_row(2), "eval_loss": 4.5})
        progress.tick()
        write_rows(run_dir, metrics_row(3))
        now[0] += 9.0
        progress.tick()
        assert "3/4" not in stream.getvalue(), "nine seconds after the last"
        assert progress.view().incidents == ()
        now[0] += 1.0
        progress.tick()
        now[0] += 20.0
        progress.tick()
        write_rows(run_dir, {**metrics_row(4), "incidents": ["experts 1, 3 are idle"]})
    lines = stream.getvalue().splitlines()
    assert lines.pop(-2) == "step 4: experts 1, 3 are idle" and progress.view().incidents == ("experts 1, 3 are idle",)
    assert "loading the model" in lines[0] and "step 2" in lines[1] and "4.5000" in lines[1]
    bars = [f"[{'#' * 6 * step}{'-' * 6 * (4 - step)}] {step}/4" for step in (2, 3, 4)]
    assert [line.partition("  loss")[0] for line in lines[2:]] == bars
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_a_step_is_shown_once_and_with_its_own_figures(tmp_path: Path):
    """The ranks write their position before the line of metrics.jsonl, an evaluation between the two."""
    run_dir, stream = tmp_path / "run", io.StringIO()
    attempt_dir = write_attempt(run_dir, num_steps=4)
    with make_progress(attempt_dir, stream).shown() as progress:
        write_rows(run_dir, {**metrics_row(3), "loss": 3.0})
        (attempt_dir / "status.json").write_text(json.dumps({"phase": "training", "step": 4}))
        progress.tick()
        write_rows(run_dir, {**metrics_row(4), "loss": 2.0})
    shown = [line.split()[1:4:2] for line in stream.getvalue().splitlines() if line.startswith("[")]
    assert shown == [["3/4", "3.0000"], ["4/4", "2.0000"]]


def test_a_later_attempt_knows_the_steps_before_it(tmp_path: Path):
    run_dir, stream = tmp_path / "run", io.StringIO()
    write_attempt(run_dir, 1, steps=[1, 2, 3], num_steps=4)
    attempt_dir = write_attempt(run_dir, 2, num_steps=4)
    with make_progress(attempt_dir, stream, incidents=["step 3: a rank was killed"]).shown() as progress:
        progress.tick()
        assert "2/4" not in stream.getvalue() and "3/4" not in stream.getvalue(), "nothing of it was done yet"
        write_rows(run_dir, metrics_row(3, attempt=2))
        progress.tick()
    view = progress.view()
    assert [point.step for point in view.curve] == [1, 2, 3]
    assert (view.attempt, view.incidents) == (2, ("step 3: a rank was killed",))
    assert "1 restart" in stream.getvalue()
