"""A workplace for each test, and one finished run that the tests share."""

from pathlib import Path

import pytest
from workplace_factory import Workplace, make_workplace


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path / "work place")  # with a space in every path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workplace, Path, str]:
    """One finished run, with what it printed; the tests that only read it share it."""
    place = make_workplace(tmp_path_factory.mktemp("trained") / "work place")
    output = place.run("train", "job.yaml").stdout
    return place, place.only_run(), output
