"""The images of examples/container copy what the set-up needs, and run it; no daemon builds them here."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "examples" / "container"
TOP = "/opt/shardwise"  # of the project in an image
SYSTEM = ("apt-get", "useradd")  # commands that are for the image alone
BASE = "python:3.12-slim-bookworm"


class Image(NamedTuple):
    base: str
    copied: frozenset[str]
    commands: tuple[str, ...]

    def lay_out(self, folder: Path, *, follows_links: bool = False) -> Path:
        folder.mkdir(parents=True)
        ignored = shutil.ignore_patterns("__pycache__")
        for source in (REPOSITORY / name for name in self.copied):
            if source.is_dir():
                shutil.copytree(source, folder / source.name, symlinks=not follows_links, ignore=ignored)
            else:
                shutil.copy(source, folder)
        return folder

    def lines_in(self, folder: Path) -> list[str]:
        """The commands, with the folders of the image below `folder`; without those that change the system."""
        lines = [line for line in self.commands if not line.startswith(SYSTEM)]
        return [line.replace(TOP, str(folder / "top")).replace("/usr/local/bin", str(folder)) for line in lines]


def docker() -> Image:
    lines = re.sub(r"^#.*\n|\\\n", "", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE).splitlines()
    steps = [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]
    assert ("COPY", f". {TOP}") in steps
    ignored, *kept = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()[1:]
    assert (ignored, kept.pop()) == ("*", "**/__pycache__")
    ((base),) = [rest for word, rest in steps if word == "FROM"]
    commands = tuple(rest for word, rest in steps if word == "RUN")
    return Image(base, frozenset(name.removeprefix("!") for name in kept), commands)


def apptainer() -> Image:
    head, *parts = re.split(r"^%", (FOLDER / "shardwise.def").read_text(), flags=re.MULTILINE)
    sections = {name: [line.strip() for line in lines if line.strip()] for name, *lines in map(str.splitlines, parts)}
    copies = dict(line.split() for line in sections["files"])
    assert all(target == f"{TOP}/{source}" for source, target in copies.items())
    (base,) = re.findall(r"^From: (\S+)$", head, re.MULTILINE)
    return Image(base, frozenset(copies), tuple(sections["post"]))


def test_both_images_hold_the_same() -> None:
    assert docker().copied == apptainer().copied
    assert [line for line in docker().commands if "useradd" not in line] == list(apptainer().commands)
    assert docker().base == apptainer().base == BASE


def test_the_image_has_no_root_and_a_python_that_fits() -> None:
    users = re.findall(r"^USER (\w+)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    assert users[-1:] == ["shardwise"] and any(line.endswith(" shardwise") for line in docker().commands)
    classifiers = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["classifiers"]
    assert f"Programming Language :: Python :: {BASE.split(':')[1].split('-')[0]}" in classifiers


@pytest.mark.parametrize(
    "follows_links",
    [
        pytest.param(False, id="as Docker copies"),
        pytest.param(True, id="as Apptainer does", marks=[pytest.mark.long, pytest.mark.documents]),
    ],
)
def test_what_is_copied_installs(follows_links: bool, tmp_path: Path) -> None:
    """With a pip that only notes what it is asked for: the lock file, then the project, which builds from the copy."""
    image = docker()
    top = image.lay_out(tmp_path / "top", follows_links=follows_links)
    bin_folder = top / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "shardwise").symlink_to("/bin/true")
    notes = f'case "$*" in *"pip install"*) echo "$*" >>{tmp_path}/pip ;; *) exec {sys.executable} "$@" ;; esac'
    (bin_folder / "python").write_text(f"#!/bin/sh\n{notes}\n")
    (bin_folder / "python").chmod(0o755)
    subprocess.run(["sh", "-ec", "\n".join(image.lines_in(tmp_path))], check=True, capture_output=True)
    calls = (tmp_path / "pip").read_text()
    assert "-r requirements.lock" in calls and "--no-deps -e ." in calls
    assert os.access(tmp_path / "shardwise", os.X_OK)
    argv = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path / "dist"), str(top)]
    subprocess.run(argv, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    folders = [name for name in image.copied if (REPOSITORY / name).is_dir() and name != "shardwise"]
    listed = subprocess.run(["git", "ls-files", *folders], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"shardwise/{name}" for name in listed.stdout.split()} <= set(names)


@pytest.mark.long
@pytest.mark.documents
@pytest.mark.cold
@pytest.mark.timeout(3600)
def test_the_built_image_trains_as_any_user(tmp_path: Path) -> None:
    """The commands of the Dockerfile, in a folder and an empty environment; then a run by a user without a name."""
    image = docker()
    image.lay_out(tmp_path / "top")
    home = tmp_path / "home"
    home.mkdir()
    empty = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(home), "USER": "shardwise"}
    subprocess.run(["sh", "-ec", "\n".join(image.lines_in(tmp_path))], env=empty, check=True)
    small = ("train.steps=3", "train.seq_len=32", "train.tokens_per_step=256")
    job = tmp_path / "top" / "examples" / "quickstart.yaml"
    anyone = ("unshare", "--user", "--map-user=12345", "--map-group=12345")
    argv = [*anyone, str(tmp_path / "shardwise"), "train", str(job), *small]
    answer = subprocess.run(argv, cwd=home, env=empty, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "step 3 of 3" in answer.stdout
