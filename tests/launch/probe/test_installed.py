"""Versions of installed packages: as the standard library reads them, without its parsers."""

import os
from importlib import metadata
from pathlib import Path

import pytest

from shardwise.launch.probe.installed import installed_ns, installed_version, unfit_version


def test_every_installed_package_has_the_version_of_its_metadata() -> None:
    expected = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    assert len(expected) > 20
    assert {name: installed_version(name) for name in expected} == expected


def test_a_name_is_found_in_any_spelling_as_an_import_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("later", "2.0"), ("first", "1.0+cu130")):
        (tmp_path / folder / f"Some_Package-{version}.dist-info").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / folder)
    monkeypatch.syspath_prepend(tmp_path / "missing")
    for spelling in ("some-package", "Some_Package", "some.package"):
        assert installed_version(spelling) == "1.0+cu130"
    os.utime(tmp_path / "first" / "Some_Package-1.0+cu130.dist-info", ns=(1, 10**18))
    assert installed_ns("some-package") == 10**18
    assert installed_ns("missing-here") is None and installed_version("missing-here") is None
    for name in ("Old-1.5-py3.11.egg-info", "~ip-9.0.dist-info", "unversioned.egg-info"):
        (tmp_path / "third" / name).mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path / "third")
    assert installed_version("old") == "1.5", "what follows it is the version of Python"
    assert installed_version("~ip") is None and installed_version("unversioned") is None, "left over by pip; no version"


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ('Requires-Dist: part<0.19,>=0.18.2; extra == "part"', ("part 0.17.2", "whole 5.0", "<0.19,>=0.18.2")),
        ("Requires-Dist: part>=0.17.2,<0.18", None),
        ("Requires-Dist: part", None),
        ("Requires-Dist: part-of-another>=1.0", None),
        ("", None),
    ],
)
def test_a_version_that_its_user_does_not_accept_is_named_with_the_required_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requirement: str, expected: tuple[str, ...] | None
) -> None:
    for name in ("part-0.17.2", "whole-5.0"):
        (tmp_path / f"{name}.dist-info").mkdir()
    (tmp_path / "whole-5.0.dist-info" / "METADATA").write_text(f"Name: whole\n{requirement}\n\nA description\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert unfit_version("part", user="no-such-package") is unfit_version("no-such-package", user="part") is None
    found = unfit_version("part", user="whole")
    if expected is None:
        assert found is None
    else:
        assert found is not None and found.required == expected[-1]
        assert [fact for fact in expected if fact not in found.sentence] == []
