"""`shardwise cache`: lists what is stored outside of run directories, and what for; `--rm` removes folders or entries.

    <cache>/data/FINGERPRINT       locks/FINGERPRINT is held while it is made, as `.partial-FINGERPRINT`
    <cache>/streams/NAME           locks/NAME is held by its run
    <cache>/models/KEY             `.KEY.PID` is one being written
    <cache>/operators/NAME         NAME/.builder is held while they are compiled
    <scratch>/shardwise/staged/... `.lock` is held while files are copied

Only entries that a listing finds are removed, and links are not followed. An entry in use stays: its lock (flock) is
held, or a process of this machine has it open or mapped. On a disk of several machines, whose processes are not
visible, an entry stays until it was unused for 30 days. A folder is renamed while its lock is held and then removed, so
that no reader sees half of it. Calibration and the hub's cache are listed and never removed.
"""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwise.launch.inputs.hub import hub_cache
from shardwise.launch.job import cache_home, config_home, site_config, state_home
from shardwise.launch.job.layers import read_personal_folders
from shardwise.launch.options import CacheOptions
from shardwise.launch.probe.disks import mount_of
from shardwise.launch.probe.host import parse_mountinfo, read_text
from shardwise.launch.rundir.process_record import read_records, read_state
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from shardwise.trainer.spec.units import format_bytes
from shardwise.trainer.spec.value import Value

DAY_S = 86400.0
_HELD = "a process makes or uses it"
_SHARED_DAYS = 30
_EXTENDING = re.compile(r"\.[0-9a-f]{32}\.(\d+)")  # of extend_vocabulary
_REMOVING = ".partial-"  # of data: a prefix that `data_cache` treats as abandoned
_SHARED = frozenset(
    {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "cifs", "smb3", "fuse.sshfs"}
)
FOLDERS = {  # that `--rm` may name, and what each is for
    "data": "prepared data, rows of token ids",
    "streams": "windows of running streams",
    "models": "models with rows for new tokens",
    "traces": "shapes of models that were traced",
    "operators": "DeepSpeed's operators, compiled for one machine and its versions",
    "trials": "logs of candidates that failed a trial",
    "fp8": "measured gains of FP8",
    "staged": "copies on this node's own disk (slurm.stage)",
}
RETAINED = {  # that it may not
    "calibration": "measurements of runs, which correct plans",
    "hub": "the Hugging Face hub's cache, which other programs use too: hf cache ls, hf cache rm, hf cache prune",
    "other": "not made by this version",
}


class Entry(Value, frozen=True, kw_only=True):
    """One file or folder that is stored."""

    folder: str  # of FOLDERS or RETAINED
    path: str
    num_bytes: int
    last_used_s: float  # seconds of the epoch
    in_use: str | None = None  # the reason why it stays

    @property
    def name(self) -> str:
        """The argument of `--rm`."""
        return f"{self.folder}/{Path(self.path).name}"


class CacheResult(Value, frozen=True, kw_only=True):
    """Output of `--json`: the entries found, and those of them that were removed."""

    entries: tuple[Entry, ...]
    removed: tuple[str, ...] = ()


class Places(NamedTuple):
    """Folders of a user on this machine."""

    cache: Path
    state: Path
    hub: Path
    scratch: Path | None
    is_shared: bool  # other machines may use the files of the cache
    keeps_reads: bool  # its disk records times of reading


def run_cache(options: CacheOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> ExitCode:
    """Lists or removes entries; EnvironmentFaultError, after the others are removed, for those that stay."""
    places = read_places(environment)
    entries = read_entries(places)
    chosen = _chosen(options.remove, entries)
    removed, problems = remove_entries(chosen)
    if options.as_json:
        console.json(CacheResult(entries=entries, removed=tuple(entry.path for entry in removed)))
    elif options.remove:
        lines = [f"{format_bytes(entry.num_bytes):>9}  {entry.name}" for entry in removed]
        console.line("\n".join([*lines, f"removed {format_bytes(sum(entry.num_bytes for entry in removed))}"]))
    else:
        console.line(render_entries(entries, now_s=time.time()))
    if problems:
        more = [f"and {len(problems) - 2} more"] if len(problems) > 2 else []
        raise EnvironmentFaultError("\n".join([*problems[:2], *more]))
    return ExitCode.DONE


def read_places(environment: Mapping[str, str]) -> Places:
    """The user's folders on this machine."""
    named = read_personal_folders(config_home=config_home(environment), site_config=site_config(environment))
    cache = cache_home(environment, configured=named.get("cache"))
    hub_home, scratch = named.get("huggingface"), named.get("scratch")
    mount = mount_of(cache.absolute(), parse_mountinfo(read_text(Path("/proc/self/mountinfo"))))
    return Places(
        cache=cache,
        state=state_home(environment),
        hub=hub_cache(Path(hub_home) if hub_home else None, environment),
        scratch=Path(scratch) if scratch else None,
        is_shared=mount is not None and mount.filesystem in _SHARED,
        keeps_reads=mount is None or "noatime" not in mount.options,
    )


def read_entries(places: Places) -> tuple[Entry, ...]:
    """Every entry, by folder, the largest first."""
    used, order = used_paths(), [*FOLDERS, *RETAINED]
    entries = (_entry(folder, path, places, used) for folder, path in _stored(places))
    return tuple(sorted(entries, key=lambda entry: (order.index(entry.folder), -entry.num_bytes, entry.path)))


def _stored(places: Places) -> Iterator[tuple[str, Path]]:
    """Folder and path of every entry."""
    for folder in FOLDERS:
        root = places.cache / folder
        if folder == "staged":
            if places.scratch is None:
                continue
            root = places.scratch / "shardwise" / "staged"
        yield from ((folder, path) for path in _entries(root) if path.name not in ("locks", "index"))
    others = [("other", path) for path in _entries(places.cache) if path.name not in FOLDERS]
    for folder, path in (("calibration", places.state / "calibration.jsonl"), ("hub", places.hub), *others):
        if path.exists():
            yield folder, path


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:  # not there, or not ours
        return []


def _entry(folder: str, path: Path, places: Places, used: frozenset[str]) -> Entry:
    num_bytes, last_used_s = read_extent(path)
    entry = Entry(folder=folder, path=str(path), num_bytes=num_bytes, last_used_s=last_used_s)
    if folder in RETAINED:
        return entry
    with _held_lock(_lock_of(entry)) as is_free:
        reason = None if is_free else _HELD
    return replace(entry, in_use=reason or _use_of(entry, used) or _use_elsewhere(entry, places))


def _lock_of(entry: Entry) -> Path | None:
    """The lock that a process holds while it makes or uses the entry."""
    path = Path(entry.path)
    if entry.folder in ("data", "streams"):
        return path.with_name("locks") / path.name.removeprefix(_REMOVING)
    return {"operators": path / ".builder", "staged": path / ".lock"}.get(entry.folder)


def _use_of(entry: Entry, used: frozenset[str]) -> str | None:
    """How a process of this machine uses an entry whose lock is free; None if none does."""
    path = Path(entry.path)
    if is_used(path, used):
        return "a process has it open"
    writer = _EXTENDING.fullmatch(path.name) if entry.folder == "models" else None
    if writer is not None and read_state(int(writer[1])) is not None:
        return "it is being written"
    records = path.glob("*/attempts/*/pids") if entry.folder == "trials" else ()
    is_at_work = any(record.is_alive for pids in records for record in read_records(pids).values())
    return "it is at work" if is_at_work else None


def _use_elsewhere(entry: Entry, places: Places) -> str | None:
    """Why other machines may use an entry that they need not lock; None if it was unused for long."""
    if not places.is_shared or entry.folder in ("streams", "staged"):
        return None
    if not places.keeps_reads:
        return "other machines may use it: its disk records no times of reading"
    is_recent = time.time() - entry.last_used_s < _SHARED_DAYS * DAY_S
    return f"other machines may use it: last used less than {_SHARED_DAYS} days ago" if is_recent else None


def _chosen(names: Sequence[str], entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """The entries that are named, alone or with their folder; InputError for a name that is not stored."""
    chosen = []
    for name in names:
        folder = name.partition("/")[0]
        if folder in RETAINED:
            raise InputError(f"--rm {name}: shardwise does not remove it ({RETAINED[folder]})")
        found = [entry for entry in entries if name.rstrip("/") in (entry.folder, entry.name)]
        if folder not in FOLDERS or (not found and name.rstrip("/") != folder):
            raise InputError(f"--rm {name}: is not stored; `shardwise cache` lists the folders and their entries")
        chosen += found
    return tuple(dict.fromkeys(chosen))


def render_entries(entries: Sequence[Entry], *, now_s: float) -> str:
    """By folder, what it is for and each entry with its size and its last use."""
    lines: list[str] = []
    for folder, purpose in (FOLDERS | RETAINED).items():
        own = [entry for entry in entries if entry.folder == folder]
        if own:
            lines.append(f"{format_bytes(sum(entry.num_bytes for entry in own)):>9}  {folder}: {purpose}")
            lines += [f"  {_line(entry, now_s)}" for entry in own]
    if not lines:
        return "nothing is stored"
    return "\n".join([*lines, "", "to remove folders or entries: shardwise cache --rm data operators/NAME"])


def _line(entry: Entry, now_s: float) -> str:
    days = int(max(0.0, now_s - entry.last_used_s) // DAY_S)
    used = "used today" if days == 0 else f"{days} day{'s' if days > 1 else ''} ago"
    name = entry.name if entry.folder in FOLDERS else entry.path
    reason = "" if entry.in_use is None else f"  ({entry.in_use})"
    return f"{format_bytes(entry.num_bytes):>9}  {used:>13}  {name}{reason}"


def remove_entries(entries: Sequence[Entry]) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """The entries that were removed, and the reason for each that was not."""
    removed, problems = [], []
    for entry in entries:
        try:
            reason = entry.in_use or _remove(entry)
        except OSError as error:
            reason = f"{error.strerror}; make it yours (sudo chown -R $USER), or remove it"
        if reason is None:
            removed.append(entry)
        else:
            problems.append(f"{entry.path}: {reason}")
    return tuple(removed), tuple(problems)


def _remove(entry: Entry) -> str | None:
    """Removes an entry unless a process uses it since it was listed; returns the reason why it stays."""
    path, lock, used = Path(entry.path), _lock_of(entry), used_paths()  # before this process has the lock open
    with _held_lock(lock) as is_free:
        reason = _use_of(entry, used) if is_free else _HELD
        if reason is not None or not os.path.lexists(path):
            return reason
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(_renamed(path))
        else:
            path.unlink()
        if lock is not None and lock.parent.name == "locks":
            lock.unlink(missing_ok=True)
    return None


def _renamed(path: Path) -> Path:
    """The folder, renamed so that no reader finds it."""
    if path.name.startswith(_REMOVING):
        return path
    removing = path.with_name(f"{_REMOVING}{path.name}")
    shutil.rmtree(removing, ignore_errors=True)
    return path.rename(removing)


def read_extent(path: Path) -> tuple[int, float]:
    """Bytes and last use (written or read) of a path and all below; no links are followed, no file counts twice."""
    sizes: dict[tuple[int, int], int] = {}
    used_s = 0.0
    for status in _statuses(path):
        sizes[status.st_dev, status.st_ino] = status.st_size
        used_s = max(used_s, status.st_mtime, status.st_atime)
    return sum(sizes.values()), used_s


def _statuses(path: Path) -> Iterator[os.stat_result]:
    """The status of a file, or of each file below a folder; of a folder without files its own."""
    is_empty = True
    for folder, _, names in () if path.is_symlink() else os.walk(path):
        for name in names:
            with suppress(OSError):  # removed meanwhile
                yield Path(folder, name).lstat()
                is_empty = False
    if is_empty:
        with suppress(OSError):
            yield path.lstat()


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
def _held_lock(path: Path | None) -> Iterator[bool]:
    """True if the lock was free; the block then holds it. A lock without a file is free, one that is not ours held."""
    if path is None or not path.is_file():
        yield True
        return
    with ExitStack() as opened:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            opened.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
