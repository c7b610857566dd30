"""Text of a user arrives at Slurm as it stands, and nothing of it is run: checked on a real Slurm."""

from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from slurm_jobs import batch_job, read_events, read_output, write_run

from shardwise.slurm.sbatch import render_script
from shardwise.slurm.submit import submit_script

MARKER = "was-run"
HOSTILE = [
    f"$(touch {MARKER})",
    f"`touch {MARKER}`",
    f"a; touch {MARKER}",
    f"a' ; touch {MARKER} ; '",
    f'a" ; touch {MARKER} ; "',
    f"a && touch {MARKER} #",
    "a #b",
    "#SBATCH --nodes=9",
    "--nodes=9",
    " --nodes=9 ",
    'back\\slash \\" \\',
    "$HOME ${PATH} ~ * ? [a] {b,c} ! | > < &",
    "%j %u %%",
    "naïve 中文 \U0001f600 \u202e",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_name_and_a_comment_arrive_literally(slurm: SlurmCluster, tmp_path: Path, text: str):
    job = batch_job(tmp_path / "run", name=text, summary=text, comment=f"<{text}>", extra=("--hold",))
    script = write_run(job, "0")
    shown = slurm.job(submit_script(script, job, None, environment=slurm.environment)).text
    assert f" JobName={text} UserId=" in shown
    assert f" Comment=<{text}> " in shown
    assert " NumNodes=1-1 " in shown


FOLDERS = [text.replace("/", "_") for text in HOSTILE if "\\" not in text]


def test_paths_of_any_letters_are_worked_in(slurm: SlurmCluster, tmp_path: Path):
    """All of them at once: the working directory, the run directory, the output and the program."""
    jobs = {}
    for folder in FOLDERS:
        workdir = tmp_path / folder
        job = batch_job(workdir / "run", workdir=str(workdir))
        script = write_run(job, "0")
        jobs[folder] = submit_script(script, job, None, environment=slurm.environment)
    for folder, job_id in jobs.items():
        slurm.wait_for(job_id, "COMPLETED")
        run_dir = tmp_path / folder / "run"
        assert len(read_events(run_dir)) == 1, folder
        assert f"--run-dir {run_dir} " in (run_dir / "events").read_text()
        assert read_output(run_dir) == "" and (run_dir / f"slurm-{job_id}.out").exists()
    assert not list(tmp_path.rglob(MARKER))


@pytest.mark.parametrize("setting", ["partition", "account", "qos", "constraint", "reservation"])
def test_values_for_slurm_are_refused_or_passed_and_never_run(slurm: SlurmCluster, tmp_path: Path, setting: str):
    for number, text in enumerate(HOSTILE):
        workdir = tmp_path / str(number)
        workdir.mkdir()
        job = batch_job(workdir / "run", **{setting: text}, extra=("--hold",), workdir=str(workdir))
        (workdir / "train.sbatch").write_text(render_script(job))
        command = 'cd "$1"; sbatch --test-only train.sbatch'
        answer = slurm.run("sh", "-c", command, "sh", workdir, check=False)
        assert answer.returncode in (0, 1, 255)
        assert "NumNodes=9" not in answer.stderr and "unrecognized" not in answer.stderr
    assert not list(tmp_path.rglob(MARKER))
