"""Ranks that train on a stream: killed in the middle of a window, a run goes on with the same losses."""

import os
import signal
import time
from pathlib import Path

import msgspec
import pytest
from lone_rank import ENDLESS, POLL_S, TIMEOUT_S, lines_of, start_rank, stop_after_step, wait_for_step
from rank_factory import write_attempt
from stream_factory import prepared_stream, stream_plan, write_files

LAST_STEP = 14  # by then the stream has begun again


@pytest.fixture(scope="module")
def profile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    write_files(folder / "rows", rows_of_file=30)
    return prepared_stream(folder / "rows", cache_root=folder / "cache")


def attempt(run_dir: Path, profile, *, number: int = 1, resume: bool = False) -> Path:
    plan = stream_plan(profile, num_steps=ENDLESS, checkpoint_every_steps=3, eval_every_steps=6)
    return write_attempt(run_dir, msgspec.structs.replace(plan, resume=resume), number=number)


def folders_of_runs(profile) -> list[Path]:
    return list(Path(profile.cache_dir).parent.parent.glob("streams/run-*"))


def test_a_run_that_was_killed_goes_on_with_the_losses_of_one_that_was_not(profile, tmp_path):
    process = start_rank(attempt(tmp_path / "killed", profile))
    wait_for_step(tmp_path / "killed", 5, process)
    (folder,) = folders_of_runs(profile)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + TIMEOUT_S
    while folder.exists():
        assert time.monotonic() < deadline, "the producer outlived its rank"
        time.sleep(POLL_S)

    last = max(max(lines_of(tmp_path / "killed")) + 6, LAST_STEP)
    resumed = stop_after_step(attempt(tmp_path / "killed", profile, number=2, resume=True), last)
    assert resumed.resumed_from_step is not None and resumed.resumed_from_step >= 3

    straight = stop_after_step(attempt(tmp_path / "straight", profile), last)
    assert [incident for incident in straight.incidents if "began again" in incident]
    assert [evaluation.step for evaluation in straight.evaluations[:2]] == [6, 12]
    lines, expected = lines_of(tmp_path / "killed"), lines_of(tmp_path / "straight")
    steps = range(1, last + 1)
    assert [lines[step]["loss"] for step in steps] == [expected[step]["loss"] for step in steps], "not bitwise equal"
    assert all("epoch" not in line for line in lines.values())
    assert folders_of_runs(profile) == []
