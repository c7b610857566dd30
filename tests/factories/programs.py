"""Programs of Python that tests start, and what they print."""

import os
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 1200


def printed_by(*arguments: object, cwd: str | Path | None = None, **environment: str) -> str:
    """The output of a program that succeeds: the path of a script, or `-c` and a text, and its arguments."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env={**os.environ, **environment}, cwd=cwd, capture_output=True,
        text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done.stdout
