"""A checkout before its first `make train`: launch/bootstrap.sh runs for real, with a Python whose pip stands in.

Nothing is downloaded. What pip would install is there already: the environment that the script makes runs the tests'
own Python. What pip was asked for is noted, so that a test sees what came before the download.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

_LINKED = (
    "shardwise", "launch", "slurm", "trainer", "ds_configs", "fsdp_configs", "examples",
    "requirements.lock", "pyproject.toml",
)  # fmt: skip
_REPOSITORY = Path(__file__).parents[2]

# The Python that the script finds, and the one of the environment that it makes.
_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-m venv") mkdir -p "$3/bin" && ln "$0" "$3/bin/python" ;;
    "-m pip") shift 2; exec sh {pip} "$@" ;;
    "-m compileall") ;;
    *) exec {python} "$@" ;;
esac
"""
# As pip finds it: a version of PyTorch's index has the build in its name, and goes before the one of PyPI.
_PIP = """echo "$*" >> {asked}
case "${{PIP_EXTRA_INDEX_URL:-}}" in */cu126) build=+cu126 ;; *) build= ;; esac
case "$*" in
    *--report*) echo '{{"install": [{{"metadata": {{"name": "torch", "version": "2.13.0'"$build"'"}}}}]}}' ;;
    *"-e ."*) printf '#!/bin/sh\\nexec "%s" -P -m shardwise.launch.cli "$@"\\n' "$PWD/.venv/bin/python" \\
                  > .venv/bin/shardwise
              chmod +x .venv/bin/shardwise ;;
esac
"""


class Checkout(NamedTuple):
    """A folder with what git brings, and nothing installed."""

    folder: Path

    def train(self, *words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """`make train`, which is `sh launch/bootstrap.sh train`, with settings for the job."""
        return subprocess.run(
            ["/bin/sh", "launch/bootstrap.sh", "train", *words],
            cwd=self.folder,
            env={**os.environ, **environment, "SHARDWISE_PYTHON": str(self.folder / "tools" / "python")},
            capture_output=True,
            text=True,
            check=False,
        )

    @property
    def has_downloaded(self) -> bool:
        """Whether pip was asked for the packages."""
        return "-r requirements.lock" in (self.folder / "tools" / "asked").read_text()


def make_checkout(folder: Path) -> Checkout:
    """The checkout, and beside it the Python that the script is to take."""
    tools = folder / "tools"
    tools.mkdir(parents=True)
    for name in _LINKED:
        (folder / name).symlink_to(_REPOSITORY / name)
    pip, python, asked = tools / "pip.sh", tools / "python", tools / "asked"
    pip.write_text(_PIP.format(asked=shlex.quote(str(asked))))
    python.write_text(_PYTHON.format(pip=shlex.quote(str(pip)), python=shlex.quote(sys.executable)))
    python.chmod(0o755)
    return Checkout(folder)
