"""A wheel installed elsewhere trains, also beside files and packages that have the names of our folders."""

import os
import shutil
import site
import stat
import subprocess
import sys
import venv
import zipfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
from workplace_factory import LIMIT_S, make_workplace

pytestmark = pytest.mark.cold  # pip in an environment of its own
REPOSITORY = Path(__file__).parents[2]
CASE = """\
{"id": "a", "name": "llama-3.1-8b", "hardware": {"gpu": "H100-SXM5-80GB"}, "train": {"method": "full", \
"sharding": "none", "precision": "bf16-mixed", "optimizer": "adamw_fused", "micro_batch": 1, "seq_len": 4096, \
"checkpointing": "full", "attention": "sdpa", "loss": "chunked"}}"""
FOLDERS = ("trainer", "launch", "slurm", "ds_configs", "fsdp_configs", "examples")


class Built(NamedTuple):
    source: Path
    wheel: Path


def _build(folder: Path, *options: str) -> None:
    argv = [sys.executable, "-m", "build", "--no-isolation", *options, "--outdir", str(folder), str(REPOSITORY)]
    answer = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("dist")
    _build(folder)
    (source,), (wheel,) = folder.glob("shardwise-*.tar.gz"), folder.glob("shardwise-*.whl")
    return Built(source, wheel)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and our dependencies by path but not our sources."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder)
    pip: list[str | Path] = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    # With another project, whose wheel installs a top-level `trainer`.
    argv = [*pip, "install", "-q", "--no-deps", built.wheel, "coqui-tts-trainer"]
    subprocess.run(argv, check=True, timeout=LIMIT_S)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return folder / "bin" / "shardwise"


def test_the_wheel_has_one_top_level_name_and_every_file_that_git_has(built: Built):
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.split()
    expected = {"shardwise/__init__.py", *(f"shardwise/{name}" for name in listed)}
    found = _contents(built.wheel)
    about = {name.partition(".dist-info/")[2] for name in found if ".dist-info/" in name}
    assert {name for name in found if ".dist-info/" not in name} == expected
    assert about == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    links = [
        entry.filename for entry in zipfile.ZipFile(built.wheel).infolist() if stat.S_ISLNK(entry.external_attr >> 16)
    ]
    assert links == []


@pytest.mark.long
@pytest.mark.products
def test_the_index_would_accept_what_is_built_and_the_repository_builds_the_same(built: Built, tmp_path: Path):
    argv: list[str | Path] = [sys.executable, "-m", "twine", "--no-color", "check", "--strict", *built]
    answer = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert (answer.returncode, answer.stdout.count("PASSED")) == (0, 2), answer.stdout + answer.stderr
    _build(tmp_path, "--wheel")
    (direct,) = tmp_path.iterdir()
    assert _contents(direct) == _contents(built.wheel)


def _contents(wheel: Path) -> dict[str, bytes]:
    archive = zipfile.ZipFile(wheel)
    return {name: archive.read(name) for name in archive.namelist() if "__pycache__" not in name}


def test_an_installed_shardwise_trains_beside_files_and_packages_of_the_names_of_its_folders(installed, tmp_path):
    place = make_workplace(tmp_path / "elsewhere")
    shutil.copy(REPOSITORY / "examples" / "quickstart.yaml", place.folder / "quickstart.yaml")
    (place.folder / "launch").mkdir()
    for name in ("trainer.py", "launch/__init__.py", "slurm.py", "torch.py"):
        (place.folder / name).write_text("raise SystemExit('the wrong module was imported')\n")
    small = ("train.steps=3", "train.seq_len=32", "train.tokens_per_step=256", "data.train=text")
    assert "step 3 of 3" in place.execute(installed, "train", "quickstart.yaml", *small, check=True).stdout
    program = (
        "import shardwise; print(shardwise.__file__)\n"
        "from importlib.metadata import files\n"
        "for file in files('coqui-tts-trainer'): file.hash and print(file, file.locate().is_file(), file.size)"
    )
    place_of_ours, *of_theirs = subprocess.run(
        [installed.with_name("python"), "-P", "-c", program],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert str(REPOSITORY) not in place_of_ours
    assert any(line.startswith("trainer/trainer.py True") for line in of_theirs)
    assert not [line for line in of_theirs if " True " not in line]


@pytest.mark.long
@pytest.mark.products
def test_without_torch_it_plans_and_training_ends_with_the_line_that_installs_it(built: Built, tmp_path: Path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", built.wheel], check=True, timeout=LIMIT_S)
    place = make_workplace(tmp_path / "elsewhere")
    shutil.copy(REPOSITORY / "examples" / "quickstart.yaml", place.folder / "quickstart.yaml")

    run = partial(place.execute, python.with_name("shardwise"), text=CASE)

    finished = REPOSITORY / "tests" / "captured" / "run_of_0_7" / "run"
    job = ("quickstart.yaml", "data.train=text")
    for words in (("probe",), ("plan", *job), ("estimate", "-"), ("report", finished)):
        answer = run(*words)
        assert (answer.returncode, answer.stderr) == (0, ""), f"{words}: {answer.stdout}{answer.stderr}"
    everything_missing, first_missing = ("torch", "accelerate", "deepspeed"), ("torch",)
    for command, missing in (("train", everything_missing), ("plan --simulate", first_missing)):
        refused = run(*command.split(), *job)
        assert refused.returncode == 4, refused.stderr
        assert all(name in refused.stderr for name in missing), refused.stderr
        assert "-m pip install 'shardwise[train]'" in refused.stderr
    assert not (place.folder / "runs").exists()
