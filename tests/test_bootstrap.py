"""The set-up script on machines that lack something: it names what, and how to get it."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fake_torch import FakeTorch
from gpu_machines import GPU_MACHINES, lay_out_gpus
from lowest_versions import lowest_versions
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from warm_python import SWITCH

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "launch" / "bootstrap.sh"
TOOLS = ("sh", "dirname", "cat", "cksum", "date", "tr", "sed", "head", "grep", "rm", "printf", "mktemp", "nice")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "launch").mkdir()
    shutil.copy(SCRIPT, tmp_path / "launch")
    for name in ("requirements.lock", "requirements-dev.lock", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    return tmp_path


def bare_path(folder: Path, **programs: str) -> str:
    """A PATH with ordinary tools, no Python, and the given stand-in programs."""
    tools = folder / "tools"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        if found is not None:
            (tools / name).symlink_to(found)
    for name, script in programs.items():
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    return str(tools)


def run(project: Path, target: str, path: str, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", project / "launch" / "bootstrap.sh", target, *more],
        env={"PATH": path, "HOME": str(project / "home"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_no_python_names_the_packages_that_bring_one(project: Path):
    answer = run(project, "install", bare_path(project))
    assert answer.returncode == 4
    assert "no Python 3.11, 3.12 or 3.13" in answer.stderr and "apt install python3" in answer.stderr
    assert not (project / ".venv").exists()


def test_a_python_that_does_not_fit_is_passed_over(project: Path):
    answer = run(project, "install", bare_path(project, python3="exit 1"))
    assert answer.returncode == 4 and "no Python 3.11" in answer.stderr


def test_a_named_python_that_does_not_fit_is_refused(project: Path):
    answer = run(project, "install", bare_path(project), SHARDWISE_PYTHON="/nowhere/python")
    assert answer.returncode == 4 and "SHARDWISE_PYTHON=/nowhere/python" in answer.stderr


def test_an_unknown_target_lists_the_known_ones(project: Path):
    answer = run(project, "trian", bare_path(project))
    assert answer.returncode == 2 and "uninstall" in answer.stderr


def test_the_makefile_and_the_script_have_the_same_targets():
    (line,) = [line for line in (REPOSITORY / "Makefile").read_text().splitlines() if line.startswith("TARGETS")]
    usage = subprocess.run(["/bin/sh", SCRIPT, "help"], capture_output=True, text=True, check=True).stdout
    assert line.partition("=")[2].split() == [row.split()[0] for row in usage.splitlines()]


def test_uninstall_removes_the_environment_and_the_cache_and_keeps_runs_and_state(project: Path):
    for name in (".venv/bin", "runs/a", "home/.cache/shardwise/data", "home/.local/state/shardwise"):
        (project / name).mkdir(parents=True)
    answer = run(project, "uninstall", bare_path(project))
    assert answer.returncode == 0, answer.stderr
    assert not (project / ".venv").exists() and not (project / "home/.cache/shardwise").exists()
    assert (project / "runs/a").is_dir() and (project / "home/.local/state/shardwise").is_dir()


def installed(project: Path) -> Path:
    """An environment that is up to date, whose Python says what it is asked to run."""
    python = project / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    for name, other in (("installed", "pyproject.toml"), ("installed-dev", "requirements-dev.lock")):
        checksum = f"cat requirements.lock {other} | cksum | tr ' ' '-'"
        answer = subprocess.run(["/bin/sh", "-c", checksum], cwd=project, capture_output=True, check=True)
        (project / ".venv" / f".{name}").write_bytes(answer.stdout)
    return project


def on_machine(project: Path, name: str, *, torch: str = "2.13.0", **environment: str) -> tuple[int, str, bool]:
    """What `install` answers on a machine with GPUs, what it said, and whether anything was downloaded.

    pip is replaced: it would take `torch`, and installs nothing. Every other Python is the one that runs this.
    """
    python, downloaded = project / ".venv" / "bin" / "python", project / "downloaded"
    python.parent.mkdir(parents=True)
    python.write_text(f"""#!/bin/sh
case "$*" in
    *"pip install"*--dry-run*) echo '"version": "{torch}",' ;;
    *"pip install"*) echo "$*" >>{shlex.quote(str(downloaded))}
        printf '  Downloading %s\n' 'torch-2.13.0.whl (530.7 MB)' 'six-1.17.0.whl (11 kB)' ;;
    *compileall*) ;;
    *) exec {shlex.quote(sys.executable)} "$@" ;;
esac
""")
    python.chmod(0o755)
    (python.parent / "shardwise").symlink_to("/bin/true")
    for folder in ("trainer/spec", "launch"):
        shutil.copytree(REPOSITORY / folder, project / folder, dirs_exist_ok=True)
    machine = lay_out_gpus(project / "machine", name)
    fake = FakeTorch(project / "torch")
    fake.write(GPU_MACHINES[name])
    path = f"{machine.programs}:{bare_path(project)}"
    answer = run(project, "install", path, PYTHONPATH=f"{REPOSITORY}:{fake.folder}", **{SWITCH: "0"}, **environment)
    return answer.returncode, answer.stderr, downloaded.exists()


@pytest.mark.parametrize("name", ["rtx4090_and_old_card", "cuda_compat_h100", "wsl_rtx3080", "vgpu", "amd"])
def test_a_machine_with_a_card_that_torch_uses_is_set_up(project: Path, name: str):
    code, said, is_downloaded = on_machine(project, name)
    assert (code, is_downloaded) == (0, True), said
    assert "\n  torch-2.13.0.whl (530.7 MB)\n" in said and "six" not in said, "large downloads are named as they start"


@pytest.mark.parametrize("has_triton", [True, False])
def test_ligers_kernels_are_installed_with_a_torch_that_brings_triton(project: Path, has_triton: bool):
    if has_triton:
        (project / "triton.py").touch()
    code, said, _ = on_machine(project, "cuda_compat_h100")
    asked = (project / "downloaded").read_text().splitlines()
    assert code == 0, said
    assert [line for line in asked if "liger" in line] == (
        ["-m pip install --disable-pip-version-check --progress-bar off --no-deps liger-kernel>=0.8.5,<0.9"]
        * has_triton
    )


def test_a_second_card_that_is_too_old_is_named(project: Path):
    assert "GPU 1 (NVIDIA GeForce GTX 1050 Ti" in on_machine(project, "rtx4090_and_old_card")[1]


def test_a_card_without_code_in_the_locked_torch_is_refused_before_the_download(project: Path):
    code, said, is_downloaded = on_machine(project, "v100")
    assert (code, is_downloaded) == (4, False)
    for fact in ("V100", "7.0", "2.13.0", "CUDA 12", "PIP_EXTRA_INDEX_URL=", "CUDA_VISIBLE_DEVICES="):
        assert fact in said


def test_a_driver_that_is_too_old_is_refused_with_the_one_that_is_not(project: Path):
    code, said, _ = on_machine(project, "old_driver")
    assert code == 4 and "580.65.06" in said


@pytest.mark.parametrize("remedy", [{"torch": "2.13.0+cu126"}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_the_remedies_for_a_card_without_code_lead_to_the_download(project: Path, remedy):
    assert on_machine(project, "v100", **remedy)[2]


@pytest.mark.parametrize(
    ("environment", "keeps"),
    [
        ({}, r"pytest -m long"),
        ({"SHARDWISE_OUTCOME": "1"}, r"pytest -m long --outcome=\S+/test-long-20\d\d-\d\d-\d\d.json"),
    ],
)
def test_the_outcome_of_the_long_tests_is_kept_where_it_is_asked_for(project: Path, environment, keeps):
    answer = run(installed(project), "test-long", bare_path(project), **environment)
    assert re.search(rf"^-m {keeps}$", answer.stdout, re.MULTILINE), answer.stdout + answer.stderr


@pytest.mark.parametrize(("target", "adds"), [("test", ""), ("test-quick", " --quick")])
def test_the_tests_run_on_workers_and_their_failure_is_that_of_the_command(project: Path, target: str, adds: str):
    python = installed(project) / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "ran $@ with $OMP_NUM_THREADS"\nexit 1\n')
    answer = run(project, target, bare_path(project))
    (ran,) = [line for line in answer.stdout.splitlines() if line.startswith("ran -m pytest")]
    assert " -n auto " in ran and ran.endswith(f"{adds} with 1") and answer.returncode == 1


def test_a_part_that_is_named_runs_alone(project: Path):
    answer = run(installed(project), "test", bare_path(project), "tests/launch", "-x")
    assert answer.stdout.splitlines()[-1] == "-m pytest -m not long and not gpu tests/launch -x"


@pytest.mark.parametrize(
    ("target", "installs", "runs"),
    [
        ("newest", "--upgrade -r .venv-newest/names", "tests/distributed/test_workarounds.py"),
        ("oldest", "-c .venv-oldest/constraints -e .[train,dev]", "-W default --outcome=benchmarks/results/oldest-20"),
    ],
)
def test_other_versions_are_tried_in_an_environment_of_their_own(project: Path, target, installs, runs):
    installed(project)
    python = project / f".venv-{target}" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$*" >>{shlex.quote(str(project / "asked"))}\n')
    python.chmod(0o755)
    answer = run(project, target, bare_path(project), SHARDWISE_OUTCOME="1")
    asked = (project / "asked").read_text().splitlines()
    assert answer.returncode == 0, answer.stderr
    assert asked[0].endswith(installs) and runs in asked[-1] and asked[-1].startswith("-m pytest")


def test_the_lowest_versions_are_those_that_pyproject_allows():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    required = map(Requirement, (*project["dependencies"], *project["optional-dependencies"]["train"]))
    lowest = lowest_versions("train")
    for each in required:
        below = str(each.specifier).replace(">=", ">")
        assert lowest[each.name] in each.specifier and lowest[each.name] not in SpecifierSet(below), each


def test_the_script_is_posix_shell():
    shell = shutil.which("dash") or "/bin/sh"
    assert subprocess.run([shell, "-n", SCRIPT], check=False).returncode == 0
    assert os.access(SCRIPT, os.R_OK)


def test_the_lock_pins_torch_without_hash_and_without_local_tag():
    lines = [line for line in (REPOSITORY / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert all("==" in line and "--hash" not in line and "+" not in line for line in lines)
    brought_by_torch = [line for line in lines if line.startswith(("nvidia", "cuda", "triton"))]
    assert brought_by_torch == ["nvidia-ml-py==13.615.71"], "but for this, which asks the driver and holds no CUDA"
