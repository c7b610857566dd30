"""A run with three steps, which no tracker has read yet."""

from pathlib import Path

import pytest
from tracker_factory import append_steps, write_plan


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run dir"
    write_plan(path)
    append_steps(path, [1, 2, 3])
    return path
