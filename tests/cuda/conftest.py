"""The launches of all tests of this folder, in one workplace."""

import pytest
from cuda_launches import Launches


@pytest.fixture(scope="session")
def launch(tmp_path_factory) -> Launches:
    return Launches(tmp_path_factory.mktemp("cuda") / "work place")  # with a space in every path
