"""Commands as they are typed, run in this process in an empty home."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from shardwise.launch.cli import main

PLACES = ("SHARDWISE_CACHE", "SHARDWISE_SITE_CONFIG", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME")


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """What was printed, without where lines were wrapped."""
        return " ".join(self.out.split())


Run = Callable[..., Answer]


def write_rows(folder: Path) -> Path:
    rows = folder / "rows.txt"
    rows.write_text("a row of text\n" * 1000)
    return rows


def in_empty_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    for name in PLACES:
        monkeypatch.delenv(name, raising=False)


def typed(capsys: pytest.CaptureFixture[str], *words: str) -> Answer:
    return Answer(main([*words]), *capsys.readouterr())
