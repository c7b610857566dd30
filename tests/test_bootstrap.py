"""The set-up script on machines that lack something: it names what, and how to get it."""

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


def write_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def bare_path(folder: Path, **programs: str) -> str:
    """A PATH with ordinary tools, no Python, and the given stand-in programs."""
    tools = folder / "tools"
    tools.mkdir()
    for name in filter(shutil.which, TOOLS):
        (tools / name).symlink_to(str(shutil.which(name)))
    for name, script in programs.items():
        write_program(tools / name, script)
    return str(tools)


def run(project: Path, target: str, path: str, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", project / "launch" / "bootstrap.sh", target, *more],
        env={"PATH": path, "HOME": str(project / "home"), **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("programs", "environment", "fact"),
    [
        ({}, {}, "apt install python3"),
        ({"python3": "exit 1"}, {}, "no Python 3.11, 3.12 or 3.13"),
        ({}, {"SHARDWISE_PYTHON": "/nowhere/python"}, "SHARDWISE_PYTHON=/nowhere/python"),
    ],
)
def test_without_a_python_that_fits_nothing_is_made_and_the_answer_names_what_brings_one(
    project: Path, programs: dict[str, str], environment: dict[str, str], fact: str
):
    answer = run(project, "install", bare_path(project, **programs), **environment)
    assert answer.returncode == 4 and fact in answer.stderr
    assert not (project / ".venv").exists()


def test_an_unknown_target_lists_the_known_ones(project: Path):
    answer = run(project, "trian", bare_path(project))
    assert answer.returncode == 2 and "uninstall" in answer.stderr


def test_the_makefile_and_the_script_have_the_same_targets():
    (targets,) = re.findall(r"^TARGETS = ((?:.*\\\n)*.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    usage = subprocess.run(["/bin/sh", SCRIPT, "help"], capture_output=True, text=True, check=True).stdout
    rows = [row for row in usage.splitlines() if not row.startswith(" ")]  # a row may name several
    assert targets.replace("\\", "").split() == [name for row in rows for name in row.split("  ")[0].split(", ")]


def test_uninstall_removes_the_environment_and_the_cache_and_keeps_runs_and_state(project: Path):
    for name in (".venv/bin", "runs/a", "home/.cache/shardwise/data", "home/.local/state/shardwise"):
        (project / name).mkdir(parents=True)
    answer = run(project, "uninstall", bare_path(project))
    assert answer.returncode == 0, answer.stderr
    assert not (project / ".venv").exists() and not (project / "home/.cache/shardwise").exists()
    assert (project / "runs/a").is_dir() and (project / "home/.local/state/shardwise").is_dir()


def installed(project: Path) -> Path:
    write_program(project / ".venv" / "bin" / "python", 'echo "$@"')
    for name, other in (("installed", "pyproject.toml"), ("installed-dev", "requirements-dev.lock")):
        checksum = f"cat requirements.lock {other} | cksum | tr ' ' '-'"
        answer = subprocess.run(["/bin/sh", "-c", checksum], cwd=project, capture_output=True, check=True)
        (project / ".venv" / f".{name}").write_bytes(answer.stdout)
    return project


def on_machine(project: Path, name: str, *, torch: str = "2.13.0", **environment: str) -> tuple[int, str, bool]:
    """What `install` answers on a machine with GPUs, what it said, and whether anything was downloaded."""
    downloaded = project / "downloaded"
    script = f"""case "$*" in
    *"pip install"*--dry-run*) echo '"version": "{torch}",' ;;
    *"pip install"*) echo "$*" >>{shlex.quote(str(downloaded))}
        printf '  Downloading %s\n' 'torch-2.13.0.whl (530.7 MB)' 'six-1.17.0.whl (11 kB)' ;;
    *compileall*) ;;
    *) exec {shlex.quote(sys.executable)} "$@" ;;
esac"""
    python = write_program(project / ".venv" / "bin" / "python", script)
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
    assert ("GPU 1 (NVIDIA GeForce GTX 1050 Ti" in said) is (name == "rtx4090_and_old_card")


@pytest.mark.parametrize("has_triton", [True, False])
def test_ligers_kernels_are_installed_with_a_torch_that_brings_triton(project: Path, has_triton: bool):
    if has_triton:
        (project / "triton.py").touch()
    code, said, _ = on_machine(project, "cuda_compat_h100")
    assert code == 0, said
    asked = [line.split()[-2:] for line in (project / "downloaded").read_text().splitlines() if "liger" in line]
    assert asked == [["--no-deps", "liger-kernel>=0.8.5,<0.9"]] * has_triton


@pytest.mark.parametrize(
    ("name", "facts", "downloads"),
    [
        ("v100", ("V100", "7.0", "2.13.0", "CUDA 12", "PIP_EXTRA_INDEX_URL=", "CUDA_VISIBLE_DEVICES="), False),
        ("old_driver", ("580.65.06",), True),
    ],
)
def test_a_card_without_code_is_refused_before_the_download_and_an_old_driver_after_it(project, name, facts, downloads):
    code, said, is_downloaded = on_machine(project, name)
    assert (code, is_downloaded) == (4, downloads)
    assert [fact for fact in facts if fact not in said] == []


@pytest.mark.parametrize("remedy", [{"torch": "2.13.0+cu126"}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_the_remedies_for_a_card_without_code_lead_to_the_download(project: Path, remedy):
    assert on_machine(project, "v100", **remedy)[2]


@pytest.mark.parametrize(("target", "adds"), [("test", ""), ("test-quick", " --quick")])
def test_the_tests_run_on_workers_and_their_failure_is_that_of_the_command(project: Path, target: str, adds: str):
    write_program(installed(project) / ".venv/bin/python", 'echo "ran $@ with $OMP_NUM_THREADS"; exit 1')
    answer = run(project, target, bare_path(project))
    (ran,) = [line for line in answer.stdout.splitlines() if line.startswith("ran -m pytest")]
    assert re.search(" -n [234] ", ran) and ran.endswith(f"{adds} --budget {target} with 1") and answer.returncode == 1


def test_a_part_that_is_named_runs_alone(project: Path):
    answer = run(installed(project), "test", bare_path(project), "tests/launch", "-x")
    assert answer.stdout.splitlines()[-1] == "-m pytest -m not long and not gpu tests/launch -x"


def test_the_lowest_versions_are_those_that_pyproject_allows():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    required = map(Requirement, (*project["dependencies"], *project["optional-dependencies"]["train"]))
    lowest = lowest_versions("train")
    for each in required:
        below = str(each.specifier).replace(">=", ">")
        assert lowest[each.name] in each.specifier and lowest[each.name] not in SpecifierSet(below), each


def test_the_lock_pins_torch_without_hash_and_without_local_tag():
    lines = [line for line in (REPOSITORY / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert all("==" in line and "--hash" not in line and "+" not in line for line in lines)
    brought_by_torch = [line for line in lines if line.startswith(("nvidia", "cuda", "triton"))]
    assert brought_by_torch == ["nvidia-ml-py==13.615.71"], "but for this, which asks the driver and holds no CUDA"


@pytest.mark.parametrize(
    ("version", "code", "fact"), [("5.23.0", 0, "new_transformers.py llama"), ("9.9", 4, "9.9 was not")]
)
def test_a_release_of_transformers_is_tried_or_is_not_found(project: Path, version: str, code: int, fact: str):
    python = installed(project) / ".venv" / "bin" / "python"
    write_program(
        python,
        f"""case "$*" in
    *metadata*) echo 5.23.0 ;;
    *"-m venv"*) mkdir -p .venv-transformers/bin && ln -s {shlex.quote(str(python))} .venv-transformers/bin/python ;;
    *"pip install"*) echo "ERROR: No matching distribution found for transformers==9.9" >&2; exit 1 ;;
    *) echo "$@" ;;
esac""",
    )
    answer = run(project, "transformers", f"{bare_path(project)}:/usr/bin:/bin", "llama", VERSION=version)
    assert answer.returncode == code and fact in answer.stdout + answer.stderr
