"""Processes by pid and start time: the pid alone may belong to another process by the time it is signalled.

Each rank writes `attempts/N/pids/rank-R.json`; the launcher of the first machine is recorded in `launcher.json`, of the
second in `launcher-1.json`, all `{"pid": n, "start_time": ticks}`. The start time is field 22 of /proc/PID/stat (clock
ticks since boot). A record is valid on the machine that wrote it.
"""

import json
import os
import signal
from pathlib import Path
from typing import NamedTuple

from shardwise.trainer.spec.codec import read_file


class ProcessRecord(NamedTuple):
    """One process that was started for an attempt."""

    pid: int
    start_time: int

    @property
    def is_alive(self) -> bool:
        """True while this process exists and is not a zombie."""
        state = read_state(self.pid)
        return state is not None and state[1] == self.start_time and state[0] != "Z"

    def send(self, number: signal.Signals) -> bool:
        """Signals the process if it is still this one; returns True if the signal was delivered."""
        if not self.is_alive:
            return False
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def read_state(pid: int) -> tuple[str, int] | None:
    """(state letter, start time) of a process; None if it does not exist."""
    fields = _stat(pid)
    return None if fields is None else (fields[0], int(fields[19]))


def record_of(pid: int) -> ProcessRecord | None:
    """The record of a running process."""
    state = read_state(pid)
    return None if state is None else ProcessRecord(pid, state[1])


def write_record(path: Path, record: ProcessRecord) -> None:
    """Writes one record and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record._asdict()))


def launcher_record(attempt_dir: Path, node_rank: int) -> Path:
    """The file with the record of a machine's launcher."""
    return attempt_dir / "pids" / ("launcher.json" if node_rank == 0 else f"launcher-{node_rank}.json")


def read_records(folder: Path) -> dict[str, ProcessRecord]:
    """Records of an attempt by file stem; an incomplete one is skipped until the next read."""
    records = {}
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else ():
        try:
            content = json.loads(read_file(path))
            records[path.stem] = ProcessRecord(int(content["pid"]), int(content["start_time"]))
        except (ValueError, KeyError, TypeError, OSError):
            continue
    return records


def descendants(pid: int) -> list[ProcessRecord]:
    """Every living process below `pid`, in any session."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        fields = _stat(int(entry.name)) if entry.name.isdigit() else None
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        queue += below
        found += [record for child in below if (record := record_of(child)) is not None]
    return found


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name of the program: state, parent, ..."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
