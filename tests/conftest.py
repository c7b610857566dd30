"""What every test has in common: a state folder of its own, so that plans do not learn from this machine's runs.

Threads that wait for each other sleep rather than spin: beside other tests, spinning makes a small model several times
slower. Ctrl-C works in what they start: a suite that a shell started in the background ignores it, and so would they.
And `--outcome FILE`, which keeps what a run came to, and a real Slurm for those that ask for it. However a run ends,
also by KILL, nothing that it started goes on running (`suite_end`).
"""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator

import pytest
from hypothesis import HealthCheck, settings
from warm_python import SWITCH, start_warm_python

sys.dont_write_bytecode = False  # of tests with rewritten assertions, which takes as long as their collection
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded, here or in a process of its own
start_warm_python()  # before the product is imported, which takes sys.executable as it finds it

from slurm_cluster import slurm, slurm_cluster  # noqa: E402

__all__ = ["slurm", "slurm_cluster", "state_folder_of_the_tests"]
pytest_plugins = ["suite_end", "outcome_file", "durations", "long_groups", "product_coverage", "changed_tests"]

signal.signal(signal.SIGINT, signal.default_int_handler)
# The same examples on every run, and no limit of time that a busy machine would miss.
settings.register_profile("suite", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The collector of garbage passes over what lives until the end, ten thousand tests, neither now nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Whatever a test marked `cold` starts, its fixtures included, is a new interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("cold") is not None:
            patch.setenv(SWITCH, "0")
        return (yield)


@pytest.fixture(autouse=True, scope="session")
def state_folder_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Empty, and nothing that a test trains is added to the calibration of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
