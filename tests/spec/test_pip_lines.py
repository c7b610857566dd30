"""Lines that install what is missing: right for pip, for this Python, and for what pyproject.toml says."""

import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pasted_pip import pasted

from shardwise.trainer.spec.pip_lines import REQUIREMENTS, extra_line, pip_line

REPOSITORY = Path(__file__).parents[2]


def test_the_optional_libraries_are_those_of_pyproject():
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name: list(words) for name, words in REQUIREMENTS.items()} == {
        name: words for name, words in extras.items() if name != "dev"
    }


@pytest.mark.parametrize("extra", REQUIREMENTS)
def test_a_pasted_line_installs_the_libraries_of_an_extra_beside_this_python(extra, tmp_path):
    assert extra_line(extra).startswith(f"{sys.executable} -m pip install ")
    assert pasted(extra_line(extra), tmp_path) == [Requirement(word) for word in REQUIREMENTS[extra]]


def test_a_python_whose_path_has_a_space_is_quoted():
    assert pip_line("onnx>=1.18", python="/my envs/bin/python") == "'/my envs/bin/python' -m pip install 'onnx>=1.18'"


def test_what_has_no_wheel_is_built_against_the_torch_that_is_installed():
    assert {extra for extra in REQUIREMENTS if "--no-build-isolation" in extra_line(extra)} == {"flash", "fp8"}


def test_no_message_of_the_product_asks_for_an_extra_of_shardwise():
    """No index has it: a checkout and a wheel both come without one."""
    sources = [path for room in ("launch", "slurm", "trainer") for path in (REPOSITORY / room).rglob("*.py")]
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")]
    asking = [path.name for path in [*sources, *pages] if "shardwise[" in path.read_text()]
    assert len(sources) > 100 and asking == []
