"""Reads what ranks write as it grows, metrics.jsonl and status.json, on whichever machine sees the files.

Of metrics.jsonl whole lines alone; what is half written is there at the next look.
"""

from pathlib import Path
from typing import Any

import msgspec

_CHUNK_BYTES = 8 << 20


class MetricsTail:
    """New whole lines of a metrics file since the last look; what is damaged is left out."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._offset = path.stat().st_size if from_end and path.is_file() else 0
        self._rest = b""

    def read_new(self) -> list[dict[str, Any]]:
        """Rows in the order of the file; none while it cannot be read. A file that became shorter is read anew."""
        rows: list[dict[str, Any]] = []
        try:
            with self.path.open("rb") as stream:
                if stream.seek(0, 2) < self._offset:
                    self._offset, self._rest = 0, b""
                stream.seek(self._offset)
                while content := stream.read(_CHUNK_BYTES):
                    self._offset += len(content)
                    *lines, self._rest = (self._rest + content).split(b"\n")
                    rows += [row for line in lines if (row := parse_row(line)) is not None]
        except OSError:  # not there yet, or out of sight for a while
            return rows
        return rows


def parse_row(line: bytes) -> dict[str, Any] | None:
    """The step's figures in a line; None where that is no object with a step."""
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_phase(attempt_dir: Path) -> str | None:
    """What the ranks of an attempt do; None where they have not said, or are saying it now."""
    try:
        status = msgspec.json.decode((attempt_dir / "status.json").read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    phase = status.get("phase") if isinstance(status, dict) else None
    return phase if isinstance(phase, str) else None
