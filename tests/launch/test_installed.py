"""Versions of installed packages: the standard library's answers, without its parsers."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from launch.installed import installed_version


def test_every_installed_package_has_the_version_of_its_metadata() -> None:
    expected = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    assert len(expected) > 20
    assert {name: installed_version(name) for name in expected} == expected


@pytest.mark.parametrize("spelling", ["some-package", "Some_Package", "some.package"])
def test_a_name_is_found_in_any_spelling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str) -> None:
    (tmp_path / "Some_Package-1.0+cu130.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_version(spelling) == "1.0+cu130"


def test_of_two_versions_the_one_that_an_import_takes_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, version in (("later", "2.0"), ("first", "1.0")):
        (tmp_path / folder / f"twice-{version}.egg-info").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert installed_version("twice") == "1.0"


def test_what_is_not_there_has_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path / "missing")
    assert installed_version("no-such-package") is None


def test_no_mail_parser_is_loaded_for_it() -> None:
    code = "import sys, launch.installed as i; i.installed_version('torch'); sys.exit('email' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
