"""Pastes the pip lines of a message into a shell, where a pip that stands in notes what it is asked for."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

_PIP = "import json, sys\nsys.stdout.write(json.dumps(sys.argv[1:]) + '\\n')\n"
_WORDS = r"(?: (?:'[^']+'|--?[a-z-]+|[\w.\[\]=<>-]+(?=[ ,;)\n]|$)))+"


def pasted(line: str, folder: Path) -> list[Requirement]:
    """What pip is asked to install by a line, each name as pip reads it."""
    package = folder / "pip"
    package.mkdir(exist_ok=True)
    (package / "__main__.py").write_text(_PIP)
    (package / "__init__.py").touch()
    answer = subprocess.run(
        ["sh", "-c", line], env={**os.environ, "PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    command, *words = json.loads(answer.stdout)
    assert command == "install", words
    return [each for word in words if not word.startswith("-") for each in _libraries(Requirement(word))]


def _libraries(asked: Requirement) -> list[Requirement]:
    """What pip installs for it: the libraries of an extra, where an extra of shardwise is asked for."""
    if asked.name != "shardwise":
        return [asked]
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    return [Requirement(line) for extra in asked.extras for line in project["optional-dependencies"][extra]]


def requirements_in(text: str, folder: Path) -> dict[str, Requirement]:
    lines = [found[0] for found in re.finditer(rf"{re.escape(sys.executable)} -m pip install{_WORDS}", text)]
    assert lines, f"no line to paste: {text}"
    return {each.name: each for line in lines for each in pasted(line, folder)}
