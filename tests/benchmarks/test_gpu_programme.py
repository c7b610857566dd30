"""The programme of the GPU benchmark: steps are done once, in order, within the minutes, side by side if they fit."""

import io
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from on_gpu.case import Outcome, Row
from on_gpu.programme import Progress, Step, StepLog, calls_of, matching, run_steps

from shardwise.launch.attempt.supervisor import StopKind, StopRequest
from shardwise.launch.terminal import Console

VERSIONS = {"shardwise": "1", "torch": "2"}
WORK = Path("/home/me/work")
RAN: Row = {"outcome": "ran"}


class Bench(SimpleNamespace):
    """What the programme needs of a bench: a card of 100 bytes."""

    def __init__(self) -> None:
        super().__init__(work=WORK, stop=StopRequest(), console=Console(io.StringIO()), card_bytes=100)

    def end(self) -> None:
        self.stop.kind = self.stop.kind or StopKind.INTERRUPT


class Runs:
    """Steps that note when they run; `most` is how many ran at once."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.now = self.most = 0
        self._lock = threading.Lock()

    def step(self, name: str, *, run: Callable[[], Row] = lambda: dict(RAN), need: int | None = 0, **facts) -> Step:
        def noted() -> Row:
            with self._lock:
                self.names.append(name)
                self.now += 1
                self.most = max(self.most, self.now)
            try:
                return run() | {"result": {"measured": {"memory": {"device_bytes": 1}}}}
            finally:
                with self._lock:
                    self.now -= 1

        need_bytes = None if need is None else lambda: need
        given: dict[str, Any] = {"part": "part", "expected_s": 0.0, "need_bytes": need_bytes} | facts
        return Step(name=name, run=noted, **given)


@pytest.fixture
def runs() -> Runs:
    return Runs()


def go(steps: list[Step], folder: Path, *, together: int = 1, seconds: float = 600.0, bench: Bench | None = None):
    """(progress, rows of the part) of one call."""
    log = StepLog(folder / "steps.jsonl", versions=VERSIONS)
    until_s = time.monotonic() + seconds
    around: Any = bench or Bench()
    progress = run_steps(steps, around, log, until_s=until_s, together=together)
    return progress, StepLog(folder / "steps.jsonl", versions=VERSIONS).rows("part")


def fails() -> Row:
    raise OSError(f"{WORK}/rows is not there")


def test_the_next_call_goes_on_with_the_steps_that_are_left_and_other_versions_begin_anew(runs: Runs, tmp_path: Path):
    assert go([runs.step("a")], tmp_path)[0] == Progress(1, 0)
    assert go([runs.step("a"), runs.step("b")], tmp_path)[0] == Progress(1, 0)
    assert runs.names == ["a", "b"]
    path = tmp_path / "steps.jsonl"
    path.write_text(path.read_text() + '{"part": "part", "ver')
    assert set(StepLog(path, versions=VERSIONS).rows("part")) == {"a", "b"}
    assert StepLog(path, versions=VERSIONS | {"torch": "3"}).rows("part") == {}


def test_a_shorter_step_begins_in_place_of_one_that_would_end_after_the_minutes(runs: Runs, tmp_path: Path):
    steps = [runs.step("long", expected_s=60.0), runs.step("short")]
    assert go(steps, tmp_path, seconds=50.0)[0] == Progress(1, 1)
    assert runs.names == ["short"]
    steps = [runs.step(name, expected_s=seconds) for name, seconds in (("a", 50), ("b", 60), ("c", 30), ("d", 200))]
    calls = calls_of(steps, seconds=[100.0, 100.0])
    assert [[step.name for step in call] for call in calls] == [["a", "c"], ["b"]]


def test_what_still_runs_when_the_minutes_are_over_is_ended_and_left(runs: Runs, tmp_path: Path):
    bench = Bench()

    def run() -> Row:
        while bench.stop.kind is None:
            time.sleep(0.01)
        return dict(RAN)

    progress, rows = go([runs.step("a", run=run), runs.step("b")], tmp_path, seconds=5.2, bench=bench)
    assert (progress, rows) == (Progress(0, 2, is_time_over=True), {})


def test_a_step_that_raises_has_a_row_without_folders_and_the_others_go_on(runs: Runs, tmp_path: Path):
    steps = [runs.step("a", run=fails), runs.step("b"), runs.step("c", run=fails, need_bytes=fails)]
    _, rows = go(steps, tmp_path, together=2)
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "a": Outcome.FAILED, "b": "ran", "c": Outcome.FAILED
    }  # fmt: skip
    assert rows["a"]["error"] == rows["c"]["error"] == "OSError: .../rows is not there"


def test_steps_that_fit_the_card_run_side_by_side(runs: Runs, tmp_path: Path):
    both = threading.Barrier(2)

    def run() -> Row:
        both.wait(timeout=60)
        return dict(RAN)

    steps = [runs.step(name, run=run, need=50) for name in "ab"]
    progress, rows = go(steps, tmp_path, together=2)
    assert progress == Progress(2, 0)
    assert all(row["result"] == {"measured": {"memory": {}}, "is_shared": True} for row in rows.values())


@pytest.mark.parametrize("need", [60, None])
def test_steps_that_do_not_fit_together_or_are_timed_run_alone(runs: Runs, need: int | None, tmp_path: Path):
    def run() -> Row:
        time.sleep(0.01)
        return dict(RAN)

    steps = [runs.step(name, run=run, need=need) for name in "abc"]
    progress, rows = go(steps, tmp_path, together=3)
    assert progress == Progress(3, 0) and runs.most == 1
    assert all("is_shared" in row["result"] for row in rows.values()) is (need is not None)


def test_a_run_whose_memory_ran_out_beside_others_is_repeated_by_itself(runs: Runs, tmp_path: Path):
    step = runs.step("a", run=lambda: {"outcome": "out of memory"})
    _, rows = go([step], tmp_path, together=2)
    capped = runs.step("capped", run=lambda: {"outcome": "out of memory", "cap_bytes": 1})
    go([capped], tmp_path, together=2)
    assert runs.names == ["a", "a", "capped"], "what was to die is not repeated"
    assert "is_shared" not in rows["a"]["result"]


def test_steps_are_selected_by_part_and_name(runs: Runs):
    steps = [runs.step("a"), runs.step("b"), runs.step("a", part="other")]
    assert [step.name for step in matching(steps, "part: a")] == ["a"]
    assert [(step.part, step.name) for step in matching(steps, "", first=1)] == [("part", "a"), ("other", "a")]
    mixed = [runs.step("a"), runs.step("b", part="other"), runs.step("c")]
    assert matching(mixed, "") == mixed, "a part may go on after another one"
