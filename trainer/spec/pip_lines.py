"""Lines that a person pastes to install what is missing.

They name pip by the Python that runs this program, since the `pip` on PATH often belongs to another environment. An
extra is asked of the installed shardwise, in a checkout and from a wheel alike: pip reads what it needs from its
metadata, and asks no index for shardwise itself.
"""

import shlex
import sys
from functools import cache

EXTRAS = ("train", "flash", "hub-kernels", "fp8", "torchao", "liger", "tensorboard", "onnx")  # as in pyproject.toml
# Compiled on the machine against the torch that is installed: from PyPI both are sources alone.
_BUILDS = ("flash", "fp8")


def pip_line(*words: str, command: str = "install", python: str | None = None) -> str:
    """`/path/to/python -m pip install WORDS`, quoted for a shell."""
    return shlex.join([python or sys.executable, "-m", "pip", command, *words])


def extra_words(extra: str) -> tuple[str, ...]:
    """Arguments of pip that install an extra."""
    return (*(("--no-build-isolation",) if extra in _BUILDS else ()), f"shardwise[{extra}]")


def extra_line(extra: str, *, python: str | None = None) -> str:
    """The line that installs an extra, beside this Python unless another is given."""
    return pip_line(*extra_words(extra), python=python)


@cache
def extra_lines() -> dict[str, str]:
    """The line of every extra, by its name."""
    return {extra: extra_line(extra) for extra in EXTRAS}
