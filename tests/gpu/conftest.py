"""The GPU of this machine, for tests that are skipped where there is none."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files of GPU tests alone are not imported where those are deselected."""
    return True if "not gpu" in config.option.markexpr and collection_path.name.endswith("_gpu.py") else None


@pytest.fixture(scope="session")
def card() -> "torch.device":
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    return torch.device("cuda", 0)
