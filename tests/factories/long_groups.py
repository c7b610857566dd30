"""A pytest plugin: each test of `make test-long` belongs to one of its targets, by its own mark or by its folder.

A mark on the test (`pytest.mark.kills` beside `pytest.mark.long`) has precedence over the table.
"""

import pytest

GROUPS = ("documents", "kills", "products", "data", "slurm")
# The first prefix that fits decides.
_BY_PATH = {
    "tests/journeys/": "documents",
    "tests/test_container.py": "documents",
    "tests/slurm/": "slurm",
    "tests/end_to_end/test_machines.py": "slurm",
    "tests/runtime/data/": "data",
    "tests/runtime/checkpoint/": "kills",
    "tests/end_to_end/": "kills",
    "tests/launch/": "kills",
    "tests/cuda/": "products",
    "tests/distributed/": "products",
    "tests/planning/": "products",
    "tests/simulation/": "products",
    "tests/runtime/": "products",
    "tests/benchmarks/": "products",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the long tests, before `-m` selects; a long test without a group is an error, as no target would run it."""
    for item in items:
        own = [name for name in GROUPS if item.get_closest_marker(name) is not None]
        is_long = item.get_closest_marker("long") is not None
        if is_long and not own:
            own = [group for prefix, group in _BY_PATH.items() if item.nodeid.startswith(prefix)][:1]
            for group in own:
                item.add_marker(group)
        if is_long != (len(own) == 1):
            raise pytest.UsageError(f"{item.nodeid}: a test of make test-long has the mark `long` and one of {GROUPS}")
