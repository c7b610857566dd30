"""Every reader of metrics.jsonl and of logs: while they are written, damaged, or very long."""

import json
from pathlib import Path

import pytest
from run_factory import metrics_row

from shardwise.launch.rundir.metrics import MetricsTail, Step, first_step, last_lines, read_steps, tail_lines, tail_rows
from shardwise.launch.show.recorded_run import observed


@pytest.mark.parametrize(
    "damaged",
    [
        '{"step": 3, "lr": "x"}\n', '{"step": 3, "los', "\n\n", "null\n", '{"step": 3} trailing\n', "\x00\x00\x00\n",
        "\xff\xfe\n", "[1]\n", '{"loss": 1}\n', '{"step": 1, "lo{"step": 2}\n', '{"step": "x"}\n', "[" * 10**4 + "\n",
        f'{{"step": {1 << 64}}}\n', f'{{"step": 3, "tokens": {1 << 64}}}\n',
    ],
)  # fmt: skip
def test_a_line_that_is_half_written_or_damaged_is_left_out_by_every_reader(tmp_path: Path, damaged: str):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 5.0, "new_figure": 3}\n{"step": 2, "loss": null, "attempt": 2}\n')
    with path.open("a", encoding="latin-1") as stream:
        stream.write(damaged)
    assert read_steps(path).steps == (Step(step=1, loss=5.0), Step(step=2, attempt=2))
    assert [row["step"] for row in tail_rows(path)] == [1, 2]
    assert [row["step"] for row in MetricsTail(path).read_new()] == [1, 2]
    assert (first_step(path, 2), first_step(path, 3)) == (2, None)


def test_the_tail_returns_each_whole_step_once(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.read_new() == [], "no file yet"
    for text, rows in (
        ('{"step": 1}\n{"step": 2}\n{"step"', [{"step": 1}, {"step": 2}]),
        (": 3}\n", [{"step": 3}]),
        ('{"step": 1, "lo{"step": 2}\n\n[1]\n{"step": "x"}\n{"loss": 1.0}\n\xff\xfe\n{"step": 4}\n', [{"step": 4}]),
    ):
        with path.open("a", encoding="latin-1") as stream:
            stream.write(text)
        assert tail.read_new() == rows
    path.write_text('{"step": 7}\n')
    assert tail.read_new() == [{"step": 7}], "written anew"


def test_only_the_end_of_a_long_file_is_read_and_lines_stay_whole(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(metrics_row(step)) + "\n" for step in range(1, 2001)))
    rows = tail_rows(path, limit=2000)
    assert [row["step"] for row in rows] == list(range(2001 - len(rows), 2001)) and 5 < len(rows) < 20
    path.write_text("aaa\nbbb\nccc\n")
    for limit, num_lines in ((7, 1), (8, 2), (12, 3), (1000, 3)):
        assert tail_lines(path, limit=limit) == ["aaa", "bbb", "ccc"][-num_lines:]
    assert tail_lines(tmp_path / "none") == last_lines(tmp_path / "none", 3) == []
    path.write_text("".join(f"{number} {'x' * 2000}\n" for number in range(100)))
    assert [line.split()[0] for line in last_lines(path, 60)] == [str(number) for number in range(40, 100)]
    assert len(last_lines(path, 500)) == 100 and last_lines(path, 0) == [], "however long they are"


def test_of_a_long_run_every_spike_score_save_and_skipped_step_is_kept(tmp_path: Path) -> None:
    """What is left out changes neither the number of steps nor their time."""
    count, path = 60_000, tmp_path / "metrics.jsonl"
    rows: list[dict[str, object]] = [
        {"step": step, "loss": 4.0, "step_s": 0.5, "memory_peak_bytes": 100} for step in range(1, count + 1)
    ]
    rows[30_000] |= {"loss": 99.0}
    rows[30_100] |= {"loss": None, "skipped": True, "skipped_rows": [1]}
    rows[30_200] |= {"eval_loss": 3.0}
    rows[30_300] |= {"checkpoint_s": 2.0}
    rows[30_400] |= {"memory_peak_bytes": 900}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "x" * (3 << 20) + '\n{"step": 60001}\n')
    recorded = read_steps(path)
    kept = {step.step: step for step in recorded.steps}
    assert len(kept) < count / 4 and {1, 2, count, count + 1} <= kept.keys()
    assert {30_001, 30_101, 30_201, 30_301, 30_401} <= kept.keys() and kept[30_001].loss == 99.0
    assert (recorded.num_steps, recorded.training_s) == (count + 1, count / 2)
    seen = observed(recorded.steps, num_steps=recorded.num_steps, training_s=recorded.training_s)
    assert (seen.num_saves, seen.num_skipped, seen.num_steps) == (1, 1, count + 1)
    assert seen.saving_share == pytest.approx(2 / (count / 2 + 2))
    tail = MetricsTail(path)
    assert {row["step"] for row in tail.read_new()} == kept.keys()
    with path.open("a") as stream:
        stream.write('{"step": 60002}\n')
    assert tail.read_new() == [{"step": 60_002}]
