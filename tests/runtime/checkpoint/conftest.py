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
from torch import nn

from shardwise.trainer.runtime.checkpoint import CheckpointFolder, find_checkpoint

_PROGRAM = Path(__file__).with_name("tiny_run.py")


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_run", _PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def run_tiny() -> Callable[..., subprocess.CompletedProcess[str]]:

    def run(*arguments: object, returns: int = 0) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(_PROGRAM), *map(str, arguments)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=False)
        assert done.returncode == returns, done.stderr[-6000:]
        return done

    return run


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Bitwise claims compare like with like, and the machine has other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def trained(tiny: ModuleType) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tiny.build_model()
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=1)
    return model, optimizer


@pytest.fixture(scope="session")
def newest() -> Callable[[Path], CheckpointFolder]:

    def find(root: Path) -> CheckpointFolder:
        found = find_checkpoint(root, on_skip=pytest.fail)
        assert found is not None
        return found

    return find
