"""A pytest plugin: each test of `make test-long` belongs to one of its targets, by its own mark or by its folder.

A mark on the test (`pytest.mark.kills` beside `pytest.mark.long`) has precedence over the table.
"""

import pytest

GROUPS = {  # the first with a prefix that fits
    "documents": ("tests/journeys/", "tests/test_container.py"),
    "slurm": ("tests/slurm/", "tests/end_to_end/test_machines.py"),
    "data": ("tests/runtime/data/", "tests/end_to_end/test_damaged_files.py"),
    "kills": ("tests/runtime/checkpoint/", "tests/end_to_end/", "tests/launch/"),
    "products": ("tests/",),
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the long tests, before `-m` selects; one of two groups is an error, and so is a group of one not long."""
    for item in items:
        own = [name for name in GROUPS if item.get_closest_marker(name) is not None]
        is_long = item.get_closest_marker("long") is not None
        if is_long and not own:
            own = [group for group, prefixes in GROUPS.items() if item.nodeid.startswith(prefixes)][:1]
            for group in own:
                item.add_marker(group)
        if is_long != (len(own) == 1):
            raise pytest.UsageError(f"{item.nodeid}: a test of make test-long is `long` and has one of {[*GROUPS]}")
