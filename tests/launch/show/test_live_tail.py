"""A file of metrics is read as it grows, by whole lines; what is damaged is passed over."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from shardwise.launch.show.live.view import MetricsTail, read_phase


def write_rows(path: Path, *rows: Mapping[str, object]) -> None:
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


def test_lines_that_are_no_steps_are_passed_over(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "lo{"step": 2}\n\n[1]\n{"step": "x"}\n{"loss": 1.0}\n\xff\xfe\n{"step": 3}\n')
    assert MetricsTail(path).read_new() == [{"step": 3}]


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    write_rows(path, {"step": 1}, {"step": 2})
    tail.read_new()
    path.write_text('{"step": 7}\n')
    assert tail.read_new() == [{"step": 7}]


def test_a_file_that_is_larger_than_a_chunk_is_read_whole(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("shardwise.launch.show.live.view._CHUNK_BYTES", 10)
    path = tmp_path / "metrics.jsonl"
    write_rows(path, *({"step": step} for step in range(50)))
    assert [row["step"] for row in MetricsTail(path).read_new()] == list(range(50))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"step": 1}', b'{"phase": 3}', b"\xff"])
def test_a_half_written_status_is_left_for_the_next_look(tmp_path: Path, content):
    (tmp_path / "status.json").write_bytes(content)
    assert read_phase(tmp_path) is None


def test_the_phase_is_what_the_ranks_said_last(tmp_path: Path):
    assert read_phase(tmp_path) is None
    (tmp_path / "status.json").write_text('{"phase": "evaluating", "step": 3}')
    assert read_phase(tmp_path) == "evaluating"
