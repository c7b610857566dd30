"""Rows and a base that many tests of this folder only read: written once a session."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory) -> Path:
    from rank_factory import write_rows  # loads torch, which few tests need where they are collected

    return write_rows(tmp_path_factory.mktemp("data") / "rows")


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    from export_factory import write_base

    return write_base(tmp_path_factory.mktemp("models") / "base")
