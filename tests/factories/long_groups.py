"""A pytest plugin: each test of `make test-long` belongs to one of its targets, by its own mark or by its folder.

A mark on the test (`pytest.mark.kills` beside `pytest.mark.long`) has precedence over the table. The mark `zoo` may be
on a test that is not long too: the target runs the types of `make test` as well, so that its outcome is of all.
"""

import pytest

ZOO = "zoo"
GROUPS: dict[str, tuple[str, ...]] = {  # the first with a prefix that fits
    "documents": ("tests/journeys/", "tests/test_container.py"),
    "slurm": ("tests/slurm/", "tests/end_to_end/test_machines.py"),
    "data": ("tests/runtime/data/", "tests/end_to_end/test_damaged_files.py"),
    "kills": ("tests/runtime/checkpoint/", "tests/end_to_end/", "tests/launch/"),
    "products": ("tests/",),
    "starts": (),
    ZOO: (),
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
        if is_long != (len(own) == 1) and own != [ZOO]:
            raise pytest.UsageError(f"{item.nodeid}: a test of make test-long is `long` and has one of {[*GROUPS]}")
