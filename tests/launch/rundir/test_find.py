"""An argument of the command line is a run, the points of a sweep, or a job; anything else is an error."""

import os
from pathlib import Path

import pytest
from run_factory import write_attempt, write_start, write_submission

from shardwise.launch.rundir.files import read_run
from shardwise.launch.rundir.find import belongs_to, find_runs, one_run, run_dirs_of, runs_below
from shardwise.slurm.jobs import QueuedJob
from shardwise.trainer.spec.errors import InputError

NO_SLURM = {"PATH": "/nonexistent"}


@pytest.fixture(params=["0.7", "now"])
def place(tmp_path: Path, monkeypatch, request) -> Path:
    """A working directory with a run and a sweep of eleven points, whose numbers version 0.7 did not write."""
    monkeypatch.chdir(tmp_path)
    write_submission(tmp_path / "runs" / "one", "12")
    write_submission(tmp_path / "runs" / "sweep", "20")
    script = str(tmp_path / "runs" / "sweep" / "train.sbatch")
    for number in range(1, 12):
        point = {} if request.param == "0.7" else {"point": number}
        write_submission(tmp_path / "runs" / "sweep" / f"point-{number}", f"20_{number}", script=script, **point)
    write_attempt(tmp_path / "runs" / "local", steps=[1])
    return tmp_path


def names(found) -> list[str]:
    return [files.run_dir.name for files in found.runs]


def test_a_directory_is_its_run_and_a_sweep_its_points_in_their_order(place: Path):
    assert names(find_runs("runs/one", NO_SLURM)) == ["one"]
    assert names(find_runs(str(place / "runs" / "local"), NO_SLURM)) == ["local"]
    sweep = find_runs("runs/sweep/", NO_SLURM)
    assert sweep.is_sweep and names(sweep) == [f"point-{number}" for number in range(1, 12)]
    with pytest.raises(InputError, match=r"11 points.* runs/sweep/point-1$"):
        one_run(sweep, "runs/sweep")


def test_a_point_is_known_by_its_number_whatever_its_folder_is_called(tmp_path: Path):
    for name, number in (("small", 2), ("large", 1), ("point-7", None)):
        write_submission(tmp_path / "sweep" / name, "20", point=number)
    found = find_runs(str(tmp_path / "sweep"), NO_SLURM)
    assert names(found) == ["large", "small"] and [files.point for files in found.runs] == [1, 2]
    assert read_run(tmp_path / "sweep" / "point-7").point is None
    (tmp_path / "sweep" / "point-7" / "submission.json").write_text("{")  # of a later version, or damaged
    assert names(find_runs(str(tmp_path / "sweep"), NO_SLURM)) == ["large", "small", "point-7"]


def test_a_job_is_found_by_the_files_of_its_run(place: Path):
    write_start(place / "runs" / "one", "31")  # submitted again by hand
    assert names(find_runs("12", NO_SLURM)) == names(find_runs("31", NO_SLURM)) == ["one"]
    assert names(find_runs("20_3", NO_SLURM)) == ["point-3"]
    found = find_runs("20", NO_SLURM)
    assert found.is_sweep and names(found)[-1] == "point-11"


@pytest.mark.parametrize(
    ("word", "fact"),
    [
        ("runs/none", "id of a job"),
        ("runs", "run directory"),
        ("99", "no Slurm"),
        ("20_99", "no Slurm"),
        ("12; ls", "id of a job"),
    ],
)
def test_an_argument_without_a_run_is_an_error(place: Path, word, fact):
    with pytest.raises(InputError, match=f"{word}.*{fact}"):
        find_runs(word, NO_SLURM)


def test_runs_below_a_folder_have_the_points_in_place_of_their_sweep(place: Path):
    found = sorted(path.name for path in runs_below(Path("runs")))
    assert found == sorted(["local", "one", *(f"point-{number}" for number in range(1, 12))])
    assert runs_below(Path("nowhere")) == []


def test_a_job_belongs_to_the_run_whose_script_it_is(place: Path):
    one, point = read_run(place / "runs" / "one"), read_run(place / "runs" / "sweep" / "point-3")
    script, sweep = str(place / "runs" / "one" / "train.sbatch"), str(place / "runs" / "sweep" / "train.sbatch")

    def job(job_id: str, script: str) -> QueuedJob:
        return QueuedJob(job_id=job_id, state="RUNNING", script=script)

    assert belongs_to(job("12", ""), one), "by its id"
    assert belongs_to(job("99", script), one) and belongs_to(job("99", f"{script} 1"), one), "by its script"
    assert not belongs_to(job("99", sweep), one) and not belongs_to(job("99", f"{script}2"), one)
    assert belongs_to(job("99_3", sweep), point) and not belongs_to(job("99_4", sweep), point)


def test_the_queue_leads_to_runs_of_other_folders(place: Path):
    jobs = [
        QueuedJob(job_id="20_2", state="RUNNING", script=f"{place}/runs/sweep/train.sbatch"),
        QueuedJob(job_id="12", state="PENDING", script=f"{place}/runs/one/train.sbatch"),
        QueuedJob(job_id="12", state="PENDING", script=f"{place}/gone/train.sbatch"),
        QueuedJob(job_id="5", state="RUNNING", script="/bin/other"),
    ]
    os.chdir("/")
    assert run_dirs_of(jobs) == [place / "runs" / "sweep" / "point-2", place / "runs" / "one"]
