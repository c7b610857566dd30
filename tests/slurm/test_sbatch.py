"""The text of `train.sbatch`: options as asked, values that arrive as they are, and shell that shellcheck passes."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from slurm_jobs import batch_job

from shardwise.slurm import sbatch
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.units import GIB

RUN_DIR = Path("/home/me/runs/tiny-20261122-180000")
IMAGE = "docker://nvcr.io/nvidia/pytorch:25.10-py3"


def options(**changes: object) -> list[str]:
    return sbatch.sbatch_options(batch_job(RUN_DIR, **changes))


def test_a_whole_job_in_its_options():
    whole = batch_job(
        RUN_DIR, num_nodes=4, gres="gpu:h100:8", uses_whole_nodes=True, time_limit_s=36 * 3600, warning_s=300,
        partition="h100", account="proj42", qos="long", constraint="ib&h100", reservation="week 48",
        mail="me@example.org", comment="a run", extra=("--nice=100", "-C a|b", "--licenses fs:1", "--contiguous"),
    )  # fmt: skip
    assert sbatch.sbatch_options(whole) == [
        "--job-name=tiny", "--partition=h100", "--account=proj42", "--qos=long", "--constraint=ib&h100",
        "--reservation=week 48", "--comment=a run", "--mail-user=me@example.org", "--mail-type=END,FAIL,REQUEUE",
        "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=h100:8", "--exclusive", "--mem=0", "--time=1-12:00:00",
        "--signal=B:USR1@300", "--requeue", "--chdir=/home/me/runs", f"--output={RUN_DIR}/slurm-%j.out",
        "--open-mode=append", "--nice=100", "-Ca|b", "--licenses=fs:1", "--contiguous",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gres": "gpu:8"}, "--gpus-per-node=8"),
        ({"gres": "gpu:1g.10gb:1", "uses_gres_option": True}, "--gres=gpu:1g.10gb:1"),
        ({"num_cores": 12}, "--cpus-per-task=12"),
        ({"memory_bytes": 3 * GIB + 1}, "--mem=3073M"),
        ({"requeue": False}, "--no-requeue"),
        ({"num_points": 3}, "--array=1-3"),
        ({"num_points": 3}, f"--output={RUN_DIR}/point-%a/slurm-%A_%a.out"),
    ],
)
def test_an_option_for_each_setting(changes, expected):
    assert expected in options(**changes)


def test_a_run_directory_is_no_pattern_of_slurm_and_one_that_it_cannot_write_to_is_refused():
    assert "--output=/r/100%%j/slurm-%j.out" in sbatch.sbatch_options(batch_job(Path("/r/100%j")))
    assert sbatch.sbatch_line('--comment=say "a\\b"') == '--comment="say \\"a\\\\b\\""'
    with pytest.raises(InputError, match="backslash"):
        sbatch.render_script(batch_job(Path("/a\\b")))


@pytest.mark.parametrize(
    ("step_s", "save_s", "time_limit_s", "expected"),
    [(1, 1, 86400, 122), (0.1, 0.1, 86400, 120), (200, 400, 86400, 720), (200, 400, 600, 300), (1e6, 1, None, 65535)],
)
def test_the_warning_leaves_time_for_a_step_and_a_save_and_half_of_the_job(step_s, save_s, time_limit_s, expected):
    assert sbatch.warning_s(step_s=step_s, save_s=save_s, time_limit_s=time_limit_s) == expected


@pytest.mark.parametrize(
    "setting", ["name", "partition", "account", "comment", "mail", "constraint", "workdir", "run_dir"]
)
def test_a_control_character_is_refused_in_every_setting(setting):
    for character in ("\n", "\r", "\0", "\t", "\x1b", "\x7f", "\x85", "\ud800"):
        text = f"/a{character}--wrap=b"
        job = batch_job(text, workdir="/a") if setting == "run_dir" else batch_job(RUN_DIR, **{setting: text})
        with pytest.raises(InputError, match="character"):
            sbatch.render_script(job)


@pytest.mark.parametrize(
    ("extra", "fact"),
    [
        ("touch x", "touch x"),
        ("--nice=1\n#SBATCH --wrap=x", "character"),
        ("--array=1-9", "--array"),
        ("-a1-9", "--array"),
        ("--output=x", "--output"),
        ("--wrap=x", "--wrap"),
    ],
)
def test_an_extra_option_that_is_none_or_not_ones_own_is_refused(extra, fact):
    with pytest.raises(InputError, match=fact):
        sbatch.render_script(batch_job(RUN_DIR, extra=(extra,)))


def variants() -> dict[str, sbatch.BatchJob]:
    odd = Path('/tmp/it\'s a "dir"; é #1 & more')  # no `$`: shellcheck would have it expanded
    container = sbatch.container_of(IMAGE, folders=["/data", "/home/me", "/home/me/runs"], has_pyxis=True)
    file = sbatch.container_of("/images/my image.sif", folders=["/data"], has_pyxis=True)
    return {
        "plain": batch_job(RUN_DIR),
        "odd paths": batch_job(odd, name="a\u2028b", summary="x\ny", workdir=str(odd), program_dir=str(odd)),
        "array": batch_job(RUN_DIR, num_points=2),
        "modules": batch_job(RUN_DIR, modules=("cuda/12.4", "a b"), is_offline=True, scratch="/local/my scratch"),
        "pyxis": batch_job(RUN_DIR, container=container),
        "apptainer": batch_job(RUN_DIR, container=file, modules=("apptainer",)),
    }


def test_shellcheck_accepts_the_script(tmp_path: Path):
    if shutil.which("shellcheck") is None:
        lacking = "shellcheck is missing: sudo apt-get install --no-install-recommends shellcheck"
        (pytest.fail if os.environ.get("SHARDWISE_CI") == "1" else pytest.skip)(lacking)
    for name, job in variants().items():
        (tmp_path / name).write_text(sbatch.render_script(job))
    answer = subprocess.run(["shellcheck", "--norc", *tmp_path.iterdir()], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout


def test_the_script_has_the_options_of_the_job():
    text = sbatch.render_script(variants()["modules"])
    assert text.startswith("#!/bin/bash -l\n")
    assert "module load cuda/12.4 'a b'" in text
    assert "export HF_HUB_OFFLINE=1 WANDB_MODE=offline" in text
    assert "TRITON_CACHE_DIR='/local/my scratch/triton'" in text
    plain = sbatch.render_script(variants()["plain"])
    assert not any(word in plain for word in ("module", "OFFLINE", "TRITON", "srun"))


@pytest.mark.parametrize(
    ("image", "has_pyxis", "expected"),
    [
        ("docker://nvcr.io/nvidia/pytorch:25.10", True, (sbatch.Runtime.PYXIS, "nvcr.io#nvidia/pytorch:25.10")),
        ("docker://ubuntu:24.04", True, (sbatch.Runtime.PYXIS, "ubuntu:24.04")),
        ("docker://org/image", True, (sbatch.Runtime.PYXIS, "org/image")),
        ("nvcr.io#nvidia/pytorch:25.10", True, (sbatch.Runtime.PYXIS, "nvcr.io#nvidia/pytorch:25.10")),
        ("/images/a.sqsh", True, (sbatch.Runtime.PYXIS, "/images/a.sqsh")),
        ("/images/a.sif", True, (sbatch.Runtime.APPTAINER, "/images/a.sif")),
        ("docker://ubuntu:24.04", False, (sbatch.Runtime.APPTAINER, "docker://ubuntu:24.04")),
    ],
)
def test_an_image_decides_its_runtime(image, has_pyxis, expected):
    container = sbatch.container_of(image, folders=[], has_pyxis=has_pyxis)
    assert (container.runtime, container.image) == expected


@pytest.mark.parametrize(
    ("image", "folders", "fact"),
    [("/images/a.sqsh", [], "--container-image"), ("a.sif", ["/a:b"], "comma"), ("a.sif", ["/a,b"], "comma")],
)
def test_an_image_that_nothing_here_starts_and_a_folder_that_a_mount_cannot_name_are_refused(image, folders, fact):
    with pytest.raises(InputError, match=fact):
        sbatch.container_of(image, folders=folders, has_pyxis=False)


def test_a_container_mounts_each_folder_once_and_is_quoted():
    folders = ["/home/me/runs", "/home/me", "/data/it's", "/home/me"]
    pyxis = sbatch.container_of(IMAGE, folders=folders, has_pyxis=True)
    assert pyxis.folders == ("/data/it's", "/home/me")
    found, before = sbatch.srun_parts(pyxis, workdir="/home/me/a b")
    assert before == [] and shlex.split(" ".join(found)) == [
        "--container-image=nvcr.io#nvidia/pytorch:25.10-py3",
        "--container-workdir=/home/me/a b",
        "--container-mounts=/data/it's:/data/it's,/home/me:/home/me",
    ]
    file = sbatch.Container(runtime=sbatch.Runtime.APPTAINER, image="/a b.sif", folders=("/home/me",))
    assert shlex.split(" ".join(sbatch.srun_parts(file, workdir="/home/me")[1])) == [
        "$apptainer", "exec", "--nv", "--bind", "/home/me:/home/me", "--pwd", "/home/me", "/a b.sif",
    ]  # fmt: skip
