"""Lines that install what is missing: right for pip, for this Python, and for pyproject.toml."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import shardwise
from shardwise.trainer.spec.packages import EXTRAS, extra_line, pip_line

REPOSITORY = Path(__file__).parents[2]


def test_every_name_of_the_python_api_is_there():
    assert [name for name in shardwise.__all__ if not hasattr(shardwise, name)] == []


def test_the_extras_are_those_of_pyproject():
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(extras) - {"dev"}


def test_the_page_of_installation_has_every_extra_and_no_document_another():
    page = (REPOSITORY / "docs" / "install.md").read_text()
    rows = {
        extra
        for row in re.findall(r"^\| (`[^|]*`) \| [^|]* \|$", page, re.MULTILINE)
        for extra in row.strip("`").split("`, `")
    }
    assert {*EXTRAS, "dev"} <= rows
    for path in (REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")):
        named = re.findall(r"install[^\n`]* '(?:shardwise|\.)\[([^\]]*)\]'", path.read_text())
        assert {extra for each in named for extra in each.split(",")} <= {*EXTRAS, "dev"}, path


@pytest.mark.cold
def test_pip_takes_the_libraries_of_an_extra_from_the_shardwise_that_is_installed(tmp_path):
    """With no index to ask: what is installed satisfies the line, and nothing else is looked up."""
    extra = extra_line("train").split(" install ")[1].strip("'")
    argv = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet", "--report", "-", extra]
    ended = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout)["install"] == []


def test_a_python_whose_path_has_a_space_is_quoted():
    assert pip_line("onnx>=1.18", python="/my envs/bin/python") == "'/my envs/bin/python' -m pip install 'onnx>=1.18'"


def test_what_has_no_wheel_is_built_against_the_torch_that_is_installed():
    assert {extra for extra in EXTRAS if "--no-build-isolation" in extra_line(extra)} == {"flash", "fp8"}
