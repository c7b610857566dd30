"""A process in which another plan can be built after each test."""

from collections.abc import Iterator

import pytest
from attempt_runs import reset_accelerate


@pytest.fixture(autouse=True)
def no_accelerate_state() -> Iterator[None]:
    """Accelerate's state is global."""
    yield
    reset_accelerate()
