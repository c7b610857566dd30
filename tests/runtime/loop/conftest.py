"""Rows to train on, and a process in which another plan can be built afterwards."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from attempt_runs import reset_accelerate
from rank_factory import write_rows


@pytest.fixture(scope="package")
def cache_dir(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows")


@pytest.fixture(autouse=True)
def no_accelerate_state() -> Iterator[None]:
    """Accelerate's state is global."""
    yield
    reset_accelerate()
