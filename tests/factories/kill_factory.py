"""Runs whose processes are killed with SIGKILL at random moments of their lives, and that are then resumed."""

import ctypes
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from outcome_file import FAULT_NUMBERS, FAULTS
from workplace_factory import Workplace, read_metrics

from shardwise.launch.rundir.paths import next_attempt
from shardwise.launch.rundir.process_record import ProcessRecord, read_records, record_of

VICTIMS = ("supervisor", "launcher", "rank-0", "rank-1", "all")
OUTLIVING_S = 10.0  # that a process may outlive its supervisor
LIMIT_S = 400.0
STEPS = 12
_MARK = "KILLED_RUN"
_PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def reaping_nothing() -> Iterator[None]:
    """Makes this process the parent of every process below it that loses its own, and waits for none while it lasts."""
    libc = ctypes.CDLL(None)
    before = set(_children())
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
        for pid in set(_children()) - before:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()]


class Life(NamedTuple):
    """Seconds from the start of an undisturbed run: when each process begins, and the end of all."""

    begins: dict[str, float]
    end: float
    losses: list[float]


@dataclass(slots=True)
class Count:
    tried: int = 0
    survived: int = 0
    lost: int = 0  # steps or checkpoints, or other losses than without a kill
    hung: int = 0
    tracebacks: int = 0
    outlived: int = 0  # runs of which a process outlived its supervisor
    notes: list[str] = field(default_factory=list)

    def add(self, other: "Count") -> None:
        for name in (*FAULT_NUMBERS, "notes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def row(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in FAULT_NUMBERS}


def check(counts: Mapping[str, Count], record_property: Callable[[str, object], None]) -> None:
    record_property(FAULTS, {kind: count.row() for kind, count in counts.items()})
    failures = [note for count in counts.values() for note in count.notes]
    assert not failures, "\n\n".join(failures)


def prepare(place: Workplace) -> None:
    """A plan of two ranks, with three checkpoints before the last."""
    place.write_job(train={"steps": STEPS}, checkpoint={"every": "3 steps"}, eval={"every": "1000 steps"})
    answer = place.run("plan", "job.yaml", "pin.sharding=ddp", "--hardware", "2xCPU", "--json")
    (place.folder / "two.json").write_text(answer.stdout)


def undisturbed(place: Workplace) -> Life:
    """A run to its end; the process of each kind is looked for all the time."""
    started, begins = time.monotonic(), {"supervisor": 0.0, "all": 0.0}
    process = _start(place, "straight", "straight")
    while process.poll() is None:
        for name in _recorded(place.folder / "straight"):
            begins.setdefault(name, time.monotonic() - started)
        time.sleep(0.01)
    assert process.returncode == 0
    return Life(begins, time.monotonic() - started, losses(place.folder / "straight"))


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for _, row in sorted(read_metrics(run_dir).items())]


def kill_and_resume(
    place: Workplace, name: str, victims: list[str], life: Life, chance: random.Random
) -> list[tuple[str, Count]]:
    """Kills the victims, one after another, each at a random moment of its life; then lets the run end.

    A killed rank or launcher belongs to an attempt, which the same supervisor follows with another; a killed supervisor
    is started again. A victim of which the run had ended before its moment came is not counted.
    """
    counts: list[tuple[str, Count]] = []
    run_dir = place.folder / name
    process = _start(place, name, name)
    for victim in victims:
        if process.poll() == 0:
            break
        if process.poll() is not None:
            process = _start(place, name, name)
        if _strike(process, run_dir, victim, chance.uniform(0.0, life.end - life.begins[victim])):
            counts.append((victim, Count(tried=1)))
            if victim in ("supervisor", "all"):
                _end_of(process, name)
                counts[-1][1].outlived = len(_outliving(name))
    codes = [_end_of(process, name)]
    if codes[-1] != 0:
        codes.append(_end_of(_start(place, name, name), name))
    text = (place.folder / f"{name}.log").read_text()
    is_whole = codes[-1] == 0 and losses(run_dir) == life.losses
    for _, count in counts:
        count.lost, count.hung, count.tracebacks = int(not is_whole), int(None in codes), int("Traceback" in text)
        count.survived = int(is_whole and not (count.hung or count.tracebacks or count.outlived))
        count.notes += [] if count.survived else [f"{name} {victims}: exit codes {codes}\n{text}"]
    return counts


def _start(place: Workplace, run: str, mark: str) -> subprocess.Popen[bytes]:
    words = ["train", "two.json", "--run-dir", run, *(["--resume"] if (place.folder / run).is_dir() else [])]
    with (place.folder / f"{run}.log").open("ab") as log:
        return subprocess.Popen(
            place.command(*words), cwd=place.folder, env={**place.environment, _MARK: mark}, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def _strike(process: subprocess.Popen[bytes], run_dir: Path, victim: str, moment: float) -> bool:
    first = next_attempt(run_dir)  # records of earlier attempts are of other processes
    is_late = victim in ("supervisor", "all")
    begun = time.monotonic() if is_late else None
    while process.poll() is None:
        found = None if is_late else _recorded(run_dir, first).get(victim)
        if begun is None and found is not None:
            begun = time.monotonic()
        if begun is not None and time.monotonic() - begun >= moment:
            if is_late:
                process.kill()
                for record in _living(run_dir.name) if victim == "all" else ():
                    record.send(signal.SIGKILL)
                return True
            if found is not None and found.send(signal.SIGKILL):
                return True
        time.sleep(0.005)
    return False


def _recorded(run_dir: Path, first: int = 1) -> dict[str, ProcessRecord]:
    number = next_attempt(run_dir) - 1
    return read_records(run_dir / "attempts" / str(number) / "pids") if number >= first else {}


def _end_of(process: subprocess.Popen[bytes], mark: str) -> int | None:
    """The exit code; None if it hung, and was killed with all its processes."""
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        for record in _living(mark):
            record.send(signal.SIGKILL)
        process.wait()
        return None


def _outliving(mark: str) -> list[ProcessRecord]:
    """The processes of a run that are there for longer than they may be; they are killed then."""
    deadline = time.monotonic() + OUTLIVING_S
    while (living := _living(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for record in living:
        record.send(signal.SIGKILL)
    return living


def _living(mark: str) -> list[ProcessRecord]:
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                record = record_of(int(entry.name))
                found += [record] if record is not None and record.is_alive else []
    return found
