"""Lines that a person pastes to install what is missing.

They name the library itself, since no package index has shardwise and its extras, and pip by the Python that runs this
program, since the `pip` on PATH often belongs to another environment: so a line holds in a checkout and in an installed
wheel alike.
"""

import shlex
import sys
from functools import cache

# The optional libraries, each as in [project.optional-dependencies] of pyproject.toml (tested).
REQUIREMENTS = {
    "flash": ("flash-attn>=2.8",),
    "hub-kernels": ("transformers[kernels]",),
    "fp8": ("transformer-engine[core_cu13,pytorch]>=2.10",),
    "torchao": ("torchao>=0.18",),
    "liger": ("liger-kernel>=0.6.2",),
    "tensorboard": ("tensorboard>=2.19",),
    "onnx": ("onnx>=1.18", "onnxscript>=0.5", "onnxruntime>=1.20"),
}
# Compiled on the machine against the torch that is installed: from PyPI both are sources alone.
_BUILDS = ("flash", "fp8")


def pip_line(*words: str, command: str = "install", python: str | None = None) -> str:
    """`/path/to/python -m pip install WORDS`, quoted for a shell."""
    return shlex.join([python or sys.executable, "-m", "pip", command, *words])


def extra_words(extra: str) -> tuple[str, ...]:
    """Arguments of pip that install an extra."""
    return (*(("--no-build-isolation",) if extra in _BUILDS else ()), *REQUIREMENTS[extra])


def extra_line(extra: str) -> str:
    """The line that installs an extra beside this Python."""
    return pip_line(*extra_words(extra))


@cache
def extra_lines() -> dict[str, str]:
    """The line of every extra, by its name."""
    return {extra: extra_line(extra) for extra in REQUIREMENTS}
