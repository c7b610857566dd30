"""Progress is read from the run's own files and never more often than a reader can follow."""

import io
import json
from pathlib import Path

from launch.console import Console
from launch.progress import MetricsTail, Progress, progress_line


def write_rows(path: Path, *rows: dict[str, object]) -> None:
    with path.open("a") as stream:
        for row in rows:
            stream.write(json.dumps(row) + "\n")


def test_the_tail_gives_each_whole_line_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read_new() == []
    write_rows(path, {"step": 1}, {"step": 2})
    with path.open("a") as stream:
        stream.write('{"step"')
    assert tail.read_new() == [{"step": 1}, {"step": 2}]
    with path.open("a") as stream:
        stream.write(": 3}\n")
    assert tail.read_new() == [{"step": 3}]


def test_a_resumed_run_starts_behind_the_old_lines(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    write_rows(path, {"step": 1})
    tail = MetricsTail(path, from_end=True)
    write_rows(path, {"step": 2})
    assert tail.read_new() == [{"step": 2}]


def test_the_line_shows_step_loss_speed_memory_and_time_left():
    row = {"step": 50, "loss": 4.125, "tokens_per_s": 6100.0, "memory_peak_bytes": 310 * 2**20}
    line = progress_line(row, num_steps=100, seconds_left=70)
    assert line == "[############------------] 50/100  loss 4.1250  6.1k tokens/s  310 MiB  1 min 10 s left"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_progress(tmp_path: Path, stream: io.StringIO) -> Progress:
    metrics = MetricsTail(tmp_path / "metrics.jsonl")
    return Progress(Console(stream), attempt_dir=tmp_path, metrics=metrics, num_steps=4)


def test_a_log_gets_plain_lines_and_every_evaluation(tmp_path: Path):
    stream = io.StringIO()
    progress = make_progress(tmp_path, stream)
    (tmp_path / "status.json").write_text('{"phase": "loading the model", "step": 0}')
    progress.tick()
    write_rows(tmp_path / "metrics.jsonl", {"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0, "eval_loss": 4.5})
    progress.tick()
    write_rows(tmp_path / "metrics.jsonl", {"step": 4, "loss": 3.0})
    progress.tick()
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "loading the model ..." and lines[1] == "step 2: held-out loss 4.5000"
    assert lines[-1].startswith("[########################] 4/4  loss 3.0000") and "\r" not in stream.getvalue()


def test_a_terminal_redraws_one_line_and_ends_it(tmp_path: Path):
    stream = Terminal()
    progress = make_progress(tmp_path, stream)
    write_rows(tmp_path / "metrics.jsonl", {"step": 1, "loss": 5.0})
    progress.tick()
    progress.close()
    assert stream.getvalue().startswith("\r\x1b[2K[######") and stream.getvalue().endswith("\n")


def test_a_half_written_status_is_left_for_the_next_look(tmp_path: Path):
    stream = io.StringIO()
    progress = make_progress(tmp_path, stream)
    (tmp_path / "status.json").write_text("{")
    progress.tick()
    assert stream.getvalue() == ""
