"""The tiny run of this folder, as a module and as a program."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

_PROGRAM = Path(__file__).with_name("tiny_run.py")


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """tiny_run.py as a module."""
    spec = importlib.util.spec_from_file_location("tiny_run", _PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def run_tiny() -> Callable[..., subprocess.CompletedProcess[str]]:
    """tiny_run.py as a program of its own."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(_PROGRAM), *map(str, arguments)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)

    return run


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Bitwise claims compare like with like, and the machine has other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
