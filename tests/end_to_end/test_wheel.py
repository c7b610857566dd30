"""A wheel installed elsewhere trains, also from a folder whose files have the names of our packages."""

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from workplace_factory import LIMIT_S, make_workplace

pytestmark = pytest.mark.cold  # pip in an environment of its own
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, REPOSITORY], check=True, timeout=LIMIT_S
    )
    (built,) = folder.glob("shardwise-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and our dependencies by path but not our sources."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", wheel], check=True, timeout=LIMIT_S)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return folder / "bin" / "shardwise"


def test_the_wheel_holds_what_runs_and_nothing_else(wheel: Path):
    import zipfile

    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in tops if not name.endswith(".dist-info")} == {
        "trainer", "launch", "slurm", "ds_configs", "fsdp_configs", "examples", "shardwise.py",
    }  # fmt: skip


def test_an_installed_shardwise_trains_beside_files_of_the_same_names(installed: Path, tmp_path: Path):
    place = make_workplace(tmp_path / "elsewhere")
    shutil.copy(REPOSITORY / "examples" / "quickstart.yaml", place.folder / "quickstart.yaml")
    for name in ("trainer.py", "launch.py", "slurm.py", "torch.py"):
        (place.folder / name).write_text("raise SystemExit('the wrong module was imported')\n")
    small = ("train.steps=3", "train.seq_len=32", "train.tokens_per_step=256", "data.train=text")
    answer = subprocess.run(
        [installed, "train", "quickstart.yaml", *small],
        cwd=place.folder, env=place.environment, capture_output=True, text=True, check=False, timeout=LIMIT_S,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "step 3 of 3" in answer.stdout
    where = subprocess.run(
        [installed.with_name("python"), "-P", "-c", "import trainer; print(trainer.__file__)"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert str(REPOSITORY) not in where.stdout
