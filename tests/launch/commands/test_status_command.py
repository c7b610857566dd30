"""`shardwise status` from files alone, as on a machine without Slurm, or one that does not answer."""

import io
import json
import os
from pathlib import Path

import pytest
from run_factory import age, write_attempt, write_checkpoint, write_holder, write_report, write_start, write_submission

from shardwise.launch.commands.follow import run_status
from shardwise.launch.options import StatusOptions
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.report import Ending

NO_SLURM = {"PATH": "/nonexistent"}


def status(run: str | None = None, *, as_json: bool = False, environment=NO_SLURM) -> str:
    out = io.StringIO()
    assert run_status(StatusOptions(run, as_json), Console(out), environment=environment) is ExitCode.DONE
    return out.getvalue()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def test_a_run_is_shown_with_all_that_its_files_tell(runs: Path):
    run_dir = runs / "one"
    write_attempt(run_dir, 1, steps=[1, 2])
    write_report(run_dir, Ending.FAILED, step=2, incidents=("step 2: a rank was killed; the same again",))
    write_attempt(run_dir, 2, steps=[2, 3])
    write_checkpoint(run_dir, 2)
    write_holder(run_dir, 5, "n3")
    lines = status("runs/one").splitlines()
    assert lines[0].startswith("runs/one: unknown") and "3 of 100" in lines[0] and "process 5 on n3" in lines[1]
    facts = (
        "none+none/fp32", "loss 4.9700", "0.0003", "1.23k tokens/s", "7 MiB", "2 attempts, 1 incident",
        "    step 2: a rank was killed; the same again", "runs/one/checkpoints/step-00000002", "rank 0 did step 3",
        "runs/one/attempts/2/logs",
    )  # fmt: skip
    assert [fact for fact in facts if fact not in "\n".join(lines)] == []


def test_all_runs_of_a_folder_the_newest_first(runs: Path):
    assert f"no runs in {runs}" in status() and json.loads(status(as_json=True)) == []
    for name, hour in (("old", 1), ("new", 3), ("middle", 2)):
        write_submission(runs / name, name, submitted=f"2026-11-22T0{hour}:00:00Z")
    write_attempt(runs / "local", steps=[4])
    age(runs / "local" / "plan.json", 10**9)
    (runs / "notes").mkdir()
    lines = status().splitlines()
    assert [line.split()[0] for line in lines[:4]] == [f"runs/{name}" for name in ("new", "middle", "old", "local")]
    assert "4/100" in lines[3] and "no Slurm here" in lines[4]


def test_points_of_a_sweep_have_a_line_each_with_what_they_vary(runs: Path):
    script = str(runs / "sweep" / "train.sbatch")
    write_submission(runs / "sweep", "20", script=script)
    for number in (1, 2, 10):
        folder = runs / "sweep" / f"point-{number}"
        write_submission(folder, f"20_{number}", script=script, overrides=(f"train.lr={number}e-4",))
        write_attempt(folder, steps=[number])
        write_report(folder, Ending.FINISHED, step=number)
    lines = status("runs/sweep").splitlines()
    assert [line.split()[0] for line in lines] == [f"runs/sweep/point-{number}" for number in (1, 2, 10)]
    assert all(line.split()[1] == "finished" and line.endswith("e-4") for line in lines)
    assert lines == status("20").splitlines(), "by the id of the array too"
    assert [line.split()[0] for line in status().splitlines()[:3]] == [line.split()[0] for line in lines]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_runs_of_others_are_counted_and_shown_when_named(runs: Path):
    write_attempt(runs / "mine", steps=[1])
    write_attempt(runs / "theirs", steps=[1])
    os.chown(runs / "theirs", 12345, -1)
    text = status()
    assert "runs/mine" in text and "runs/theirs" not in text
    (others,) = [line for line in text.splitlines() if "others" in line]
    assert ": 1" in others
    assert "runs/theirs: lost" in status("runs/theirs")


def test_without_slurm_a_submitted_run_says_that_nobody_can_tell(runs: Path):
    write_submission(runs / "one", "12")
    write_start(runs / "one", "12")
    write_attempt(runs / "one", steps=[1])
    (runs / "one" / "slurm-12.out").write_text("planning\nstep 1\x1b[2K\n\n")
    text = status("runs/one")
    assert "no Slurm here" in text
    assert "last line: step 1\\u001b[2K" in text and "logs: runs/one/slurm-12.out" in text
