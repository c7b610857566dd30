"""What every test has in common: a state folder of its own, so that plans do not learn from this machine's runs.

Threads that wait for each other sleep rather than spin: beside other tests, spinning makes a small model several times
slower. Ctrl-C works in what they start: a suite that a shell started in the background ignores it, and so would they.
And `--outcome FILE`, which keeps what a run came to, and a real Slurm for those that ask for it. However a run ends,
also by KILL, nothing that it started goes on running (`suite_end`).
"""

import os
import signal
from collections.abc import Iterator

import pytest
from outcome_file import pytest_addoption, pytest_configure
from slurm_fixture import slurm, slurm_cluster
from suite_end import pytest_sessionfinish, pytest_sessionstart

__all__ = [
    "pytest_addoption",
    "pytest_configure",
    "pytest_sessionfinish",
    "pytest_sessionstart",
    "slurm",
    "slurm_cluster",
    "state_folder_of_the_tests",
]


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded, here or in a process of its own
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def state_folder_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Empty, and nothing that a test trains is added to the calibration of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
