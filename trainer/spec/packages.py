"""Packages to install: the lines that a person pastes, and facts of the torch build in requirements.lock.

They name pip by the Python that runs this program, since the `pip` on PATH often belongs to another environment. An
extra is one of the installed shardwise, in a checkout and from a wheel alike: pip reads its requirements from the
metadata, and looks up shardwise itself in no index.
"""

import shlex
import sys
from collections.abc import Iterable
from functools import cache

# As in pyproject.toml.
EXTRAS = ("train", "flash", "hub-kernels", "fp8", "torchao", "liger", "tensorboard", "workspace", "onnx", "gguf")
# Packages with kernels for layers that transformers otherwise computes operation by operation, as pip names them.
KERNEL_PACKAGES = ("causal-conv1d", "mamba-ssm", "flash-linear-attention")
# Compiled on the machine against the torch that is installed: from PyPI both are sources alone.
_BUILDS = ("flash", "fp8")


def kernel_packages(libraries: Iterable[str]) -> tuple[str, ...]:
    """Those of KERNEL_PACKAGES among libraries."""
    names = {name.replace("_", "-").lower() for name in libraries}
    return tuple(name for name in KERNEL_PACKAGES if name in names)


def pip_line(*arguments: str, command: str = "install", python: str | None = None) -> str:
    """`/path/to/python -m pip install ARGUMENTS`, quoted for a shell."""
    return shlex.join([python or sys.executable, "-m", "pip", command, *arguments])


def extra_text(extra: str) -> tuple[str, ...]:
    """Arguments of pip that install an extra."""
    return (*(("--no-build-isolation",) if extra in _BUILDS else ()), f"shardwise[{extra}]")


def extra_line(extra: str, *, python: str | None = None) -> str:
    """The command line that installs an extra, in this Python's environment unless another is given."""
    return pip_line(*extra_text(extra), python=python)


@cache
def extra_lines() -> dict[str, str]:
    """The line of every extra, by its name."""
    return {extra: extra_line(extra) for extra in EXTRAS}


# The torch that requirements.lock names. From 2.11 on PyPI's wheels are built for CUDA 13, without a local tag in their
# version; that of 2.13.0 has code for sm_75, sm_80, sm_86, sm_90, sm_100 and sm_120 (its libtorch_cuda.so). Builds for
# CUDA 12 have code for older cards (V100 is 7.0, P100 6.0, GTX 10 6.1); PyTorch's own index has them.
TORCH_VERSION = "2.13.0"
OLDEST_CAPABILITY = (7, 5)
CUDA_12_INDEX = "https://download.pytorch.org/whl/cu126"


def lacks_code(torch_version: str, capability: tuple[int, int]) -> bool:
    """True if this torch version is a build without code for a card of this capability; False if unknown."""
    tag = torch_version.partition("+")[2]
    return (not tag or tag.startswith("cu13")) and capability < OLDEST_CAPABILITY
