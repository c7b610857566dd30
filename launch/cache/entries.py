"""What shardwise keeps outside of run directories, entry by entry, and which of it is stale.

    <cache>/data/FINGERPRINT       prepared data           locks/FINGERPRINT is held by whoever makes it
    <cache>/data/.partial-...      a preparation at work, or one that was killed
    <cache>/streams/NAME           windows of a stream     locks/NAME is held by its run
    <cache>/models/KEY             models with room for new tokens; `.KEY.PID` is one being written
    <cache>/operators/NAME         DeepSpeed's operators, for one set of versions, one CPU and one environment
    <cache>/trials/NAME            logs of candidates that failed a trial
    <cache>/fp8/KEY.json           what FP8 was timed to gain
    <scratch>/shardwise/staged/... copies on a node's own disk (slurm.stage)
    <state>/calibration.jsonl      what runs measured

Stale is what can be made again and is of no use as it stands: leftovers of what was killed, operators for other
versions or another CPU, and what was not used for so many days. What is measured is never stale.
"""

import re
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from launch.cache.use import Storage, is_lock_free, is_used, read_extent
from launch.engine.operators import find_stale_locks
from launch.rundir.process_record import read_records, read_state
from trainer.spec.value import Value

DAY_S = 86400.0
_WRITING = re.compile(r"\..+\.[0-9a-f]{8}")  # of codec.write_bytes
_GROWING = re.compile(r"\.[0-9a-f]{32}\.(\d+)")  # of grow_vocabulary


class Kind(StrEnum):
    """In the order that they are shown."""

    DATA = "prepared data"
    STREAM = "stream windows"
    MODEL = "extended models"
    OPERATORS = "operators"
    TRIALS = "failed trials"
    STAGED = "staged copies"
    LEFTOVER = "leftovers"
    FP8 = "FP8 timings"
    CALIBRATION = "calibration"
    OTHER = "other files"
    HUB = "hub's cache"


class State(StrEnum):
    """What `--prune` does with it."""

    KEPT = "kept"
    HELD = "in use"
    STALE = "stale"


class Entry(Value, frozen=True, kw_only=True):
    """One thing that is kept."""

    kind: Kind
    path: str
    num_bytes: int
    num_files: int
    last_used_s: float  # seconds of the epoch
    state: State
    why: str = ""
    lock: str | None = None  # held by whoever makes or uses it


class Survey(Value, frozen=True, kw_only=True):
    """Where to look, and what is current."""

    cache: Path
    state: Path
    hub: Path
    scratch: Path | None = None
    operators: Path  # the folder of the operators for this environment
    older_than_days: int = 30
    is_age_stated: bool = False  # by the command line
    storage: Storage
    used: frozenset[str]  # paths that processes have open
    now_s: float


def read_entries(survey: Survey) -> tuple[Entry, ...]:
    """Everything that is there, by kind, the largest first."""
    found = [*_data(survey), *_streams(survey), *_models(survey), *_operators(survey), *_trials(survey)]
    found += [*_staged(survey), *_leftovers(survey), *_measured(survey), *_others(survey), *_hub(survey)]
    order = list(Kind)
    return tuple(sorted(found, key=lambda entry: (order.index(entry.kind), -entry.num_bytes, entry.path)))


def _data(survey: Survey) -> Iterator[Entry]:
    root = survey.cache / "data"
    for path in _entries(root, but=("locks", "index")):
        if path.name.startswith(".partial-"):
            lock = root / "locks" / path.name.removeprefix(".partial-")
            yield _leftover(survey, path, lock, "a preparation that was cut off")
        elif path.is_dir():
            yield _by_age(survey, Kind.DATA, path, root / "locks" / path.name)


def _streams(survey: Survey) -> Iterator[Entry]:
    root = survey.cache / "streams"
    for path in _entries(root, but=("locks",)):
        lock = root / "locks" / path.name
        state, why = (State.STALE, "its run has ended") if is_lock_free(lock) else (State.HELD, "its run is at work")
        yield _entry(survey, Kind.STREAM, path, state, why, lock)


def _models(survey: Survey) -> Iterator[Entry]:
    for path in _entries(survey.cache / "models"):
        writer = _GROWING.fullmatch(path.name)
        if writer is None:
            yield _by_age(survey, Kind.MODEL, path, None)
        elif survey.storage.is_shared and not _is_old(survey, path, days=1):
            yield _entry(survey, Kind.MODEL, path, State.HELD, "is being written, perhaps on another machine")
        elif read_state(int(writer[1])) is not None:
            yield _entry(survey, Kind.MODEL, path, State.HELD, "is being written")
        else:
            yield _entry(survey, Kind.LEFTOVER, path, State.STALE, "a model whose writing was cut off")


def _operators(survey: Survey) -> Iterator[Entry]:
    for path in _entries(survey.cache / "operators"):
        lock = path / ".builder"
        if path == survey.operators:
            held = is_lock_free(lock)
            words = "for this environment" if held else "are being built"
            yield _entry(survey, Kind.OPERATORS, path, State.KEPT if held else State.HELD, words, lock)
        elif _without_environment(path.name) == _without_environment(survey.operators.name):
            yield _by_age(survey, Kind.OPERATORS, path, lock)
        else:
            yield _of_others(survey, path, lock)
        for stale in find_stale_locks(path):
            yield _entry(survey, Kind.LEFTOVER, stale, State.STALE, "the lock of a build that was killed", None)


def _of_others(survey: Survey, path: Path, lock: Path) -> Entry:
    """For other versions or another CPU, which on a shared disk may be another machine's of today."""
    if survey.storage.is_shared and not _is_old(survey, path, days=1):
        return _entry(survey, Kind.OPERATORS, path, State.KEPT, "used within a day, perhaps on another machine", lock)
    return _unless_held(survey, Kind.OPERATORS, path, lock, "for other versions or another CPU")


def _trials(survey: Survey) -> Iterator[Entry]:
    for path in _entries(survey.cache / "trials"):
        records = [record for pids in path.glob("*/attempts/*/pids") for record in read_records(pids).values()]
        if any(record.is_alive for record in records):
            yield _entry(survey, Kind.TRIALS, path, State.HELD, "is at work")
        else:
            yield _by_age(survey, Kind.TRIALS, path, None)


def _staged(survey: Survey) -> Iterator[Entry]:
    if survey.scratch is None:
        return
    for path in _entries(survey.scratch / "shardwise" / "staged"):
        yield _by_age(survey, Kind.STAGED, path, path / ".lock")


def _leftovers(survey: Survey) -> Iterator[Entry]:
    """Files that were being replaced when their writer died, and locks of data that is gone."""
    for folder in (survey.cache / "data" / "index", survey.cache / "fp8", survey.state):
        for path in _entries(folder):
            if _WRITING.fullmatch(path.name) and _is_old(survey, path, days=1):
                yield _entry(survey, Kind.LEFTOVER, path, State.STALE, "a file whose writing was cut off")
    locks = survey.cache / "data" / "locks"
    for path in _entries(locks):
        is_orphan = not any((locks.parent / name).exists() for name in (path.name, f".partial-{path.name}"))
        if is_orphan and _is_old(survey, path, days=1) and is_lock_free(path):
            yield _entry(survey, Kind.LEFTOVER, path, State.STALE, "the lock of data that is gone", path)


def _measured(survey: Survey) -> Iterator[Entry]:
    timings = survey.cache / "fp8"
    if timings.is_dir():
        yield _entry(survey, Kind.FP8, timings, State.KEPT, "measured")
    calibration = survey.state / "calibration.jsonl"
    if calibration.is_file():
        yield _entry(survey, Kind.CALIBRATION, calibration, State.KEPT, "measured by runs; plans are corrected by it")


def _others(survey: Survey) -> Iterator[Entry]:
    known = ("data", "streams", "models", "operators", "trials", "fp8")
    for path in _entries(survey.cache, but=known):
        yield _entry(survey, Kind.OTHER, path, State.KEPT, "not of a kind that this version makes")


def _hub(survey: Survey) -> Iterator[Entry]:
    if survey.hub.is_dir():
        yield _entry(
            survey, Kind.HUB, survey.hub, State.KEPT, "other programs use it: hf cache ls, hf cache rm, hf cache prune"
        )


def last_used_s(kind: Kind, path: Path) -> float:
    """Of a trial it is when it was last written: to see whether one is at work, its files are read."""
    extent = read_extent(path)
    return extent.last_written_s if kind is Kind.TRIALS else extent.last_used_s


def _by_age(survey: Survey, kind: Kind, path: Path, lock: Path | None) -> Entry:
    """Stale once it was not used for so many days."""
    if not _is_old(survey, path, days=survey.older_than_days, kind=kind):
        return _entry(survey, kind, path, State.KEPT, "", lock)
    if not survey.storage.keeps_reads and not survey.is_age_stated:
        words = "the disk keeps no times of reading (noatime): --older-than goes by writing"
        return _entry(survey, kind, path, State.KEPT, words, lock)
    return _unless_held(survey, kind, path, lock, f"not used for {survey.older_than_days} days")


def _leftover(survey: Survey, path: Path, lock: Path, why: str) -> Entry:
    if is_lock_free(lock):
        return _entry(survey, Kind.LEFTOVER, path, State.STALE, why, lock)
    return _entry(survey, Kind.DATA, path, State.HELD, "is being prepared", lock)


def _unless_held(survey: Survey, kind: Kind, path: Path, lock: Path | None, why: str) -> Entry:
    if lock is not None and not is_lock_free(lock):
        return _entry(survey, kind, path, State.HELD, "its lock is held", lock)
    return _entry(survey, kind, path, State.STALE, why, lock)


def _entry(survey: Survey, kind: Kind, path: Path, state: State, why: str = "", lock: Path | None = None) -> Entry:
    extent = read_extent(path)
    if state is State.STALE and is_used(path, survey.used):
        state, why = State.HELD, "a process has it open"
    return Entry(
        kind=kind,
        path=str(path),
        num_bytes=extent.num_bytes,
        num_files=extent.num_files,
        last_used_s=last_used_s(kind, path),
        state=state,
        why=why,
        lock=None if lock is None else str(lock),
    )


def _is_old(survey: Survey, path: Path, *, days: int, kind: Kind = Kind.OTHER) -> bool:
    return survey.now_s - last_used_s(kind, path) >= days * DAY_S


def _without_environment(name: str) -> str:
    return name.rpartition("-env-")[0]


def _entries(folder: Path, *, but: tuple[str, ...] = ()) -> Iterator[Path]:
    try:
        yield from sorted(path for path in folder.iterdir() if path.name not in but)
    except OSError:  # not there, or not ours
        return
