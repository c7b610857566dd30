"""`shardwise cache`: lists what is stored outside of run directories; `--prune` frees stale entries.

    <cache>/data/FINGERPRINT       prepared data           locks/FINGERPRINT is held while it is made
    <cache>/data/.partial-...      a preparation at work, or one that was killed
    <cache>/streams/NAME           windows of a stream     locks/NAME is held by its run
    <cache>/models/KEY             models with room for new tokens; `.KEY.PID` is one being written
    <cache>/traces/KEY.json        shapes of models that were traced, for one set of versions
    <cache>/operators/NAME         DeepSpeed's operators, for one set of versions, one CPU and one environment
    <cache>/trials/NAME            logs of candidates that failed a trial
    <cache>/fp8/KEY.json           measured gains of FP8
    <scratch>/shardwise/staged/... copies on a node's own disk (slurm.stage)
    <state>/calibration.jsonl      measurements of runs

An entry is stale if it can be made again and is of no use as it is: leftovers of killed processes, operators for other
versions or another CPU, and entries unused for some days. Calibration and timings are never stale. An entry is in use
if a process of this machine has it open or mapped, or holds its lock (flock). Last use is the latest read or write
that the file system records; one mounted with `noatime` records no reads.

A stale entry is freed while its lock is held, after a second check. A folder is renamed first, so that no reader ever
sees half of it; after a kill it is a leftover under its new name. The hub's cache is listed with its own command.
"""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path

from shardwise.launch.engine.operators import extensions_dir, find_stale_locks
from shardwise.launch.inputs.hub import hub_cache
from shardwise.launch.job import cache_home, config_home, site_config, state_home
from shardwise.launch.job.layers import read_personal_folders
from shardwise.launch.options import CacheOptions
from shardwise.launch.plan.gather import recorded_versions
from shardwise.launch.probe.disks import mount_of
from shardwise.launch.probe.host import parse_mountinfo, read_host, read_text
from shardwise.launch.rundir.process_record import read_records, read_state
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from shardwise.trainer.spec.units import format_bytes
from shardwise.trainer.spec.value import Value

DEFAULT_DAYS = 30
DAY_S = 86400.0
_WRITING = re.compile(r"\..+\.[0-9a-f]{8}")  # of codec.write_bytes
_EXTENDING = re.compile(r"\.[0-9a-f]{32}\.(\d+)")  # of extend_vocabulary
_REMOVING = ".partial-"  # of data: a prefix that `data_cache` and the next prune treat as abandoned
_SHARED = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "cifs", "smb3", "fuse.sshfs"}
)


class Kind(StrEnum):
    """In the order that they are shown."""

    DATA = "prepared data"
    STREAM = "stream windows"
    MODEL = "extended models"
    TRACE = "traced models"
    OPERATORS = "operators"
    TRIALS = "failed trials"
    STAGED = "staged copies"
    LEFTOVER = "leftovers"
    FP8 = "FP8 timings"
    CALIBRATION = "calibration"
    OTHER = "other files"
    HUB = "hub's cache"


class State(StrEnum):
    """Treatment of an entry by `--prune`."""

    RETAINED = "kept"
    HELD = "in use"
    STALE = "stale"


class Entry(Value, frozen=True, kw_only=True):
    """One file or folder that is stored."""

    kind: Kind
    path: str
    num_bytes: int
    num_files: int
    last_used_s: float  # seconds of the epoch
    state: State
    why: str = ""
    lock: str | None = None  # held by a process while it makes or uses the entry


class CacheResult(Value, frozen=True, kw_only=True):
    """Output of `--json`: the entries found, and those that were freed."""

    entries: tuple[Entry, ...]
    freed: tuple[str, ...] = ()
    freed_bytes: int = 0


class Extent(Value, frozen=True, kw_only=True):
    """Size and times of a file or a folder."""

    num_bytes: int
    num_files: int
    last_written_s: float  # of the epoch
    last_used_s: float  # written or read


class Storage(Value, frozen=True, kw_only=True):
    """The file system below a folder."""

    is_shared: bool  # other machines may use its files
    keeps_reads: bool


class Scan(Value, frozen=True, kw_only=True):
    """Folders to list, and the current versions."""

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


def run_cache(options: CacheOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> ExitCode:
    """Lists or frees entries; EnvironmentFaultError, after the others are freed, for those that cannot be removed."""
    if options.dry_run and not options.prune:
        raise InputError("--dry-run shows what --prune would free: shardwise cache --prune --dry-run")
    entries = read_entries(read_scan(options, environment))
    stale = tuple(entry for entry in entries if entry.state is State.STALE)
    freed, problems = prune(stale) if options.prune and not options.dry_run else ((), ())
    if options.as_json:
        result = CacheResult(
            entries=entries,
            freed=tuple(entry.path for entry in freed),
            freed_bytes=sum(entry.num_bytes for entry in freed),
        )
        console.json(result)
    elif not options.prune:
        console.line(render_entries(entries, now_s=time.time()))
    else:
        console.line(_render_freed(stale if options.dry_run else freed, "would free" if options.dry_run else "freed"))
    if problems:
        raise EnvironmentFaultError("\n".join([*problems[:2], "make them yours (sudo chown -R $USER), or remove them"]))
    return ExitCode.DONE


def read_scan(options: CacheOptions, environment: Mapping[str, str]) -> Scan:
    """The user's folders, and the current versions of this machine."""
    named = read_personal_folders(config_home=config_home(environment), site_config=site_config(environment))
    cache = cache_home(environment, configured=named.get("cache"))
    hub_home, scratch = named.get("huggingface"), named.get("scratch")
    return Scan(
        cache=cache,
        state=state_home(environment),
        hub=hub_cache(Path(hub_home) if hub_home else None, environment),
        scratch=Path(scratch) if scratch else None,
        operators=extensions_dir(cache, recorded_versions(), read_host().cpu_flags),
        older_than_days=DEFAULT_DAYS if options.older_than_days is None else options.older_than_days,
        is_age_stated=options.older_than_days is not None,
        storage=read_storage(cache),
        used=used_paths(),
        now_s=time.time(),
    )


def render_entries(entries: Sequence[Entry], *, now_s: float) -> str:
    """By kind, each entry with its size, its last use and its state."""
    lines: list[str] = []
    for kind in Kind:
        own = [entry for entry in entries if entry.kind is kind]
        if own:
            lines.append(f"{kind}: {format_bytes(sum(entry.num_bytes for entry in own))}")
            lines += [f"  {_line(entry, now_s)}" for entry in own]
    stale = [entry for entry in entries if entry.state is State.STALE]
    if not lines:
        return "nothing is stored"
    size = format_bytes(sum(entry.num_bytes for entry in stale))
    can = f"{size} in {_counted(len(stale))} can be freed: shardwise cache --prune" if stale else "nothing is stale"
    return "\n".join([*lines, "", can])


def _line(entry: Entry, now_s: float) -> str:
    state = "" if entry.state is State.RETAINED else f"{entry.state}: "
    reason = f"  ({state}{entry.why})" if entry.why else ""
    return f"{format_bytes(entry.num_bytes):>9}  {_ago(now_s - entry.last_used_s):>14}  {entry.path}{reason}"


def _ago(seconds: float) -> str:
    days = int(max(0.0, seconds) // DAY_S)
    return "used today" if days == 0 else f"{days} day{'s' if days > 1 else ''} ago"


def _render_freed(entries: Sequence[Entry], verb: str) -> str:
    if not entries:
        return "nothing is stale"
    lines = [f"{format_bytes(entry.num_bytes):>9}  {entry.path}  ({entry.why})" for entry in entries]
    return "\n".join([*lines, f"{verb} {format_bytes(sum(entry.num_bytes for entry in entries))} in "
                              f"{_counted(len(entries))}"])  # fmt: skip


def _counted(number: int) -> str:
    return f"{number} entr{'y' if number == 1 else 'ies'}"


def read_entries(scan: Scan) -> tuple[Entry, ...]:
    """Every entry, by kind, the largest first."""
    found = [*_data(scan), *_streams(scan), *_models(scan), *_traces(scan), *_operators(scan)]
    found += [*_trials(scan), *_staged(scan), *_leftovers(scan), *_never_freed(scan)]
    order = list(Kind)
    return tuple(sorted(found, key=lambda entry: (order.index(entry.kind), -entry.num_bytes, entry.path)))


def _data(scan: Scan) -> Iterator[Entry]:
    root = scan.cache / "data"
    for path in _entries(root, but=("locks", "index")):
        if path.name.startswith(".partial-"):
            lock = root / "locks" / path.name.removeprefix(".partial-")
            if is_lock_free(lock):
                yield _entry(scan, Kind.LEFTOVER, path, State.STALE, "a preparation that was cut off", lock)
            else:
                yield _entry(scan, Kind.DATA, path, State.HELD, "is being prepared", lock)
        elif path.is_dir():
            yield _by_age(scan, Kind.DATA, path, root / "locks" / path.name)


def _streams(scan: Scan) -> Iterator[Entry]:
    root = scan.cache / "streams"
    for path in _entries(root, but=("locks",)):
        lock = root / "locks" / path.name
        state, why = (State.STALE, "its run has ended") if is_lock_free(lock) else (State.HELD, "its run is at work")
        yield _entry(scan, Kind.STREAM, path, state, why, lock)


def _models(scan: Scan) -> Iterator[Entry]:
    for path in _entries(scan.cache / "models"):
        writer = _EXTENDING.fullmatch(path.name)
        if writer is None:
            yield _by_age(scan, Kind.MODEL, path, None)
        elif scan.storage.is_shared and not _is_old(scan, path, days=1):
            yield _entry(scan, Kind.MODEL, path, State.HELD, "is being written, perhaps on another machine")
        elif read_state(int(writer[1])) is not None:
            yield _entry(scan, Kind.MODEL, path, State.HELD, "is being written")
        else:
            yield _entry(scan, Kind.LEFTOVER, path, State.STALE, "a model whose writing was cut off")


def _traces(scan: Scan) -> Iterator[Entry]:
    for path in _entries(scan.cache / "traces"):
        if not _WRITING.fullmatch(path.name):
            yield _by_age(scan, Kind.TRACE, path, None)


def _operators(scan: Scan) -> Iterator[Entry]:
    for path in _entries(scan.cache / "operators"):
        lock = path / ".builder"
        if path == scan.operators:
            is_free = is_lock_free(lock)
            reason = "for this environment" if is_free else "are being built"
            yield _entry(scan, Kind.OPERATORS, path, State.RETAINED if is_free else State.HELD, reason, lock)
        elif _without_environment(path.name) == _without_environment(scan.operators.name):
            yield _by_age(scan, Kind.OPERATORS, path, lock)
        elif scan.storage.is_shared and not _is_old(scan, path, days=1):
            why = "used within a day, perhaps on another machine"
            yield _entry(scan, Kind.OPERATORS, path, State.RETAINED, why, lock)
        else:
            yield _unless_held(scan, Kind.OPERATORS, path, lock, "for other versions or another CPU")
        for stale in find_stale_locks(path):
            yield _entry(scan, Kind.LEFTOVER, stale, State.STALE, "the lock of a build that was killed", None)


def _trials(scan: Scan) -> Iterator[Entry]:
    for path in _entries(scan.cache / "trials"):
        records = [record for pids in path.glob("*/attempts/*/pids") for record in read_records(pids).values()]
        if any(record.is_alive for record in records):
            yield _entry(scan, Kind.TRIALS, path, State.HELD, "is at work")
        else:
            yield _by_age(scan, Kind.TRIALS, path, None)


def _staged(scan: Scan) -> Iterator[Entry]:
    if scan.scratch is None:
        return
    for path in _entries(scan.scratch / "shardwise" / "staged"):
        yield _by_age(scan, Kind.STAGED, path, path / ".lock")


def _leftovers(scan: Scan) -> Iterator[Entry]:
    """Files that were being replaced when their writer ended, and locks of data that was removed."""
    for folder in (scan.cache / "data" / "index", scan.cache / "fp8", scan.cache / "traces", scan.state):
        for path in _entries(folder):
            if _WRITING.fullmatch(path.name) and _is_old(scan, path, days=1):
                yield _entry(scan, Kind.LEFTOVER, path, State.STALE, "a file whose writing was cut off")
    locks = scan.cache / "data" / "locks"
    for path in _entries(locks):
        is_orphan = not any((locks.parent / name).exists() for name in (path.name, f".partial-{path.name}"))
        if is_orphan and _is_old(scan, path, days=1) and is_lock_free(path):
            yield _entry(scan, Kind.LEFTOVER, path, State.STALE, "the lock of data that was removed", path)


def _never_freed(scan: Scan) -> Iterator[Entry]:
    known = ("data", "streams", "models", "traces", "operators", "trials", "fp8")
    others = [(Kind.OTHER, path, "not of a kind that this version makes") for path in _entries(scan.cache, but=known)]
    for kind, path, why in (
        (Kind.FP8, scan.cache / "fp8", "measured"),
        (Kind.CALIBRATION, scan.state / "calibration.jsonl", "measured by runs; plans are corrected by it"),
        (Kind.HUB, scan.hub, "other programs use it: hf cache ls, hf cache rm, hf cache prune"),
        *others,
    ):
        if path.exists():
            yield _entry(scan, kind, path, State.RETAINED, why)


def last_used_s(kind: Kind, path: Path) -> float:
    """Time of the last use; for a trial that of the last write, because a look at its state reads its files."""
    extent = read_extent(path)
    return extent.last_written_s if kind is Kind.TRIALS else extent.last_used_s


def _by_age(scan: Scan, kind: Kind, path: Path, lock: Path | None) -> Entry:
    """An entry that is stale once it was unused for some days."""
    if not _is_old(scan, path, days=scan.older_than_days, kind=kind):
        return _entry(scan, kind, path, State.RETAINED, "", lock)
    if not scan.storage.keeps_reads and not scan.is_age_stated:
        reason = "the disk records no times of reading (noatime): --older-than uses those of writing"
        return _entry(scan, kind, path, State.RETAINED, reason, lock)
    return _unless_held(scan, kind, path, lock, f"not used for {scan.older_than_days} days")


def _unless_held(scan: Scan, kind: Kind, path: Path, lock: Path | None, why: str) -> Entry:
    if lock is not None and not is_lock_free(lock):
        return _entry(scan, kind, path, State.HELD, "its lock is held", lock)
    return _entry(scan, kind, path, State.STALE, why, lock)


def _entry(scan: Scan, kind: Kind, path: Path, state: State, why: str = "", lock: Path | None = None) -> Entry:
    extent = read_extent(path)
    if state is State.STALE and is_used(path, scan.used):
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


def _is_old(scan: Scan, path: Path, *, days: int, kind: Kind = Kind.OTHER) -> bool:
    return scan.now_s - last_used_s(kind, path) >= days * DAY_S


def _without_environment(name: str) -> str:
    return name.rpartition("-env-")[0]


def _entries(folder: Path, *, but: tuple[str, ...] = ()) -> Iterator[Path]:
    try:
        yield from sorted(path for path in folder.iterdir() if path.name not in but)
    except OSError:  # not there, or not ours
        return


def prune(entries: tuple[Entry, ...]) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """The stale entries that were freed, and the reason for each that was not."""
    freed, problems, used = [], [], used_paths()
    for entry in entries:
        try:
            if not is_used(Path(entry.path), used) and _remove(entry):
                freed.append(entry)
        except OSError as error:
            problems.append(f"{entry.path}: {error.strerror}")
    return tuple(freed), tuple(problems)


def _remove(entry: Entry) -> bool:
    """False if another process holds the lock, or has used or removed the entry, meanwhile."""
    path = Path(entry.path)
    with ExitStack() as held:
        if entry.lock is not None and not held.enter_context(held_lock(Path(entry.lock))):
            return False
        if not (path.exists() or path.is_symlink()) or last_used_s(entry.kind, path) > entry.last_used_s:
            return False
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(_renamed(entry, path))
        else:
            path.unlink()
        if entry.lock is not None and Path(entry.lock).parent.name == "locks":
            Path(entry.lock).unlink(missing_ok=True)
    return True


def _renamed(entry: Entry, path: Path) -> Path:
    """The folder, renamed so that no reader finds it."""
    if entry.kind is not Kind.DATA:
        return path
    removing = path.with_name(f"{_REMOVING}{path.name}")
    shutil.rmtree(removing, ignore_errors=True)
    return path.rename(removing)


def read_extent(path: Path) -> Extent:
    """Sizes and times of everything below a path; links are not followed, and a file with two names counts once."""
    seen: set[tuple[int, int]] = set()
    num_bytes, written, used = 0, 0.0, 0.0
    for status in _statuses(path):
        key = (status.st_dev, status.st_ino)
        if key not in seen:
            seen.add(key)
            num_bytes += status.st_size
            written = max(written, status.st_mtime)
            used = max(used, status.st_mtime, status.st_atime)
    empty_s = 0.0 if seen else _changed_s(path)
    return Extent(
        num_bytes=num_bytes, num_files=len(seen), last_written_s=written or empty_s, last_used_s=used or empty_s
    )


def _statuses(path: Path) -> Iterator[os.stat_result]:
    if path.is_symlink() or not path.is_dir():
        yield path.lstat()
        return
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                yield Path(folder, name).lstat()
            except OSError:  # removed meanwhile
                continue


def _changed_s(path: Path) -> float:
    """Time at which the folder itself last changed; 0 if it was removed."""
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def read_storage(folder: Path) -> Storage:
    """Properties of the file system that holds `folder`; the folder need not exist."""
    mount = mount_of(folder.absolute(), parse_mountinfo(read_text(Path("/proc/self/mountinfo"))))
    if mount is None:
        return Storage(is_shared=False, keeps_reads=True)
    return Storage(is_shared=mount.filesystem in _SHARED, keeps_reads="noatime" not in mount.options)


def used_paths() -> frozenset[str]:
    """Paths that processes of this machine have open, mapped or as working directory, as far as readable."""
    return frozenset(_used())


def _used() -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = [process / "cwd", *(process / "fd").iterdir()]
            mapped = (process / "maps").read_text(errors="replace")
        except OSError:  # ended meanwhile, or another user's
            continue
        for link in links:
            try:
                yield str(link.readlink())
            except OSError:
                continue
        yield from (line[line.index("/") :] for line in mapped.splitlines() if "/" in line)


def is_used(path: Path, used: frozenset[str]) -> bool:
    """True if a used path is this one or below it."""
    whole = str(path.resolve())
    return any(each == whole or each.startswith(f"{whole}/") for each in used)


@contextmanager
def held_lock(path: Path) -> Iterator[bool]:
    """True if the lock was free; the block then holds it. A lock file that does not exist is free."""
    if not path.is_file():
        yield True
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def is_lock_free(path: Path) -> bool:
    """True if no process holds the lock; one that cannot be opened counts as held."""
    try:
        with held_lock(path) as is_free:
            return is_free
    except OSError:
        return False
