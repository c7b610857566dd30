"""`doctor`: the folders that runs write to: whether they can be written, on what they lie, how much room, how fast.

Every look at a folder may hang where its file server is gone; `doctor` gives each check an end.
"""

import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launch.doctor.finding import Finding, fault, fine, warning
from launch.doctor.machine import Machine, Place
from launch.job import folders
from launch.probe.disks import mount_of, read_room
from launch.probe.host import Mount, parse_mountinfo, read_text
from launch.probe.measure import measure_folder
from trainer.spec.units import GIB, MIB, format_bytes, format_seconds

MEASURED_BYTES, BUDGET_S = 128 * MIB, 1.0
SLOW_BYTES_PER_S = 100 * 10**6
CHECKPOINT_BYTES = 16 * GIB  # of a model of one billion parameters, with AdamW's state in fp32, rounded
LEAST_ROOM_BYTES, LITTLE_ROOM_BYTES = 500 * MIB, 10 * GIB
LEAST_FILES = 1000
HOME_BYTES, LEAST_HOME_BYTES = 1 * GIB, 10 * MIB
_SHARED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "afs", "orangefs"})
_SLOW = frozenset({"cifs", "smb3", "9p", "fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "davfs", "drvfs"})


def folders_of(place: Place) -> dict[str, Path]:
    """What is written, by what it is to us."""
    environment, root = place.environment, place.root
    return {
        "the output": place.output,
        "the cache": place.cache,
        "the state": folders.state_home(environment),
        "the hub's cache": place.hub,
        "temporary files": Path(environment.get("TMPDIR") or root / "tmp"),
    }


def check_folders(machine: Machine) -> Iterator[Finding]:
    """Each can be written."""
    place, problems = machine.place, 0
    for what, folder in folders_of(place).items():
        problem = obstacle_in(folder)
        if problem is None:
            continue
        problems += 1
        yield fault(f"{what} cannot be written: {problem}", _REMEDIES[what])
    if not problems:
        yield fine("output, cache, state, the hub's cache and temporary files can be written")


_REMEDIES = {
    "the output": "name another folder with output or --run-dir, or make it yours: sudo chown $USER FOLDER",
    "the cache": "export SHARDWISE_CACHE=/a/folder, or folders: {cache: /a/folder} in config.yaml",
    "the state": "export XDG_STATE_HOME=/a/folder",
    "the hub's cache": "export HF_HOME=/a/folder, or folders: {huggingface: /a/folder} in config.yaml",
    "temporary files": "export TMPDIR=/a/folder",
}


def obstacle_in(folder: Path) -> str | None:
    """Why nothing can be written below a folder, which need not exist yet; None where it can."""
    for path in (folder.absolute(), *folder.absolute().parents):
        if path.is_symlink() and not path.exists():
            return f"{path} is a link to {path.readlink()}, which is not there"
        if path.exists():
            break
    if not path.is_dir():
        return f"{path} is a file"
    try:
        with tempfile.TemporaryFile(dir=path, prefix=".shardwise-doctor-") as file:
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as error:
        return f"{path}: {error.strerror}"
    return None


def check_room(machine: Machine) -> Iterator[Finding]:
    """Bytes and inodes below the output and the cache, quotas counted."""
    place = machine.place
    for what in ("the output", "the cache", "the hub's cache"):
        folder = folders_of(place)[what]
        room = read_room(folder, place.environment, root=place.root)
        words = f"{folder}: {format_bytes(room.free_bytes)} {room.bytes_limit}"
        mend = "make room (shardwise cache --prune, hf cache prune), or name another folder"
        if room.free_bytes < LEAST_ROOM_BYTES:
            yield fault(f"{words}; {what} needs more than that", mend)
        elif room.free_files is not None and room.free_files < LEAST_FILES:
            yield fault(f"{folder}: {room.free_files} inodes {room.files_limit}", mend)
        elif room.free_bytes < LITTLE_ROOM_BYTES:
            yield warning(f"{words}; a model of a billion parameters writes checkpoints of 12 GB", mend)
        else:
            yield fine(words)


def check_home(machine: Machine) -> Iterator[Finding]:
    """Many libraries write below the home directory, whatever folders are named."""
    place = machine.place
    home = Path(place.environment.get("HOME") or Path.home())
    problem = f"{home} is not there" if not home.is_dir() else obstacle_in(home)
    if problem is not None:
        yield warning(
            f"the home directory cannot be written: {problem}",
            "export HOME=/a/folder, or name cache folders: XDG_CACHE_HOME, HF_HOME, TRITON_CACHE_DIR",
        )
        return
    room = read_room(home, place.environment, root=place.root)
    words = f"{home}: {format_bytes(room.free_bytes)} {room.bytes_limit}"
    if room.free_bytes < HOME_BYTES:
        make = fault if room.free_bytes < LEAST_HOME_BYTES else warning
        yield make(
            f"the home directory is full: {words}",
            f"du -xh {shlex.quote(str(home))} | sort -h | tail shows what fills it",
        )
    else:
        yield fine(f"the home directory {words}")


def check_mounts(machine: Machine) -> Iterator[Finding]:
    """File systems that are slow for what we keep there."""
    place = machine.place
    mounts = parse_mountinfo(read_text(place.root / "proc/self/mountinfo"))
    for what, folder in folders_of(place).items():
        mount = mount_of(folder.absolute(), mounts)
        if mount is not None:
            yield from _judge_mount(what, folder, mount)


def _judge_mount(what: str, folder: Path, mount: Mount) -> Iterator[Finding]:
    where = f"{what} ({folder}) lies on {mount.filesystem} of {mount.source}"
    if "ro" in mount.options:
        yield fault(f"{what} ({folder}) lies on {mount.mount_point}, which is mounted read-only", _REMEDIES[what])
    elif mount.filesystem in _SLOW and not (mount.mount_point.startswith("/mnt/") and mount.filesystem == "9p"):
        yield warning(f"{where}, which is slow for many small files", _REMEDIES[what])
    elif mount.filesystem in _SHARED and what == "temporary files":
        yield warning(f"{where}: sockets and locks of the ranks go there", "export TMPDIR=/tmp, or another local disk")
    elif mount.filesystem in _SHARED:
        yield fine(f"{where}, which other machines see too")


def check_speed(machine: Machine) -> Iterator[Finding]:
    """Writing and reading of a short file, past the page cache."""
    places = folders_of(machine.place)
    devices: dict[int, str] = {}
    for what in ("the output", "the cache"):
        folder = _existing(places[what])
        if devices.setdefault(folder.stat().st_dev, what) != what:
            continue  # the same disk
        speed = measure_folder(folder, file_bytes=MEASURED_BYTES, budget_s=BUDGET_S)
        if speed is None:
            continue  # no room, or it cannot be written: said elsewhere
        write, read = speed.write_bytes_per_s, speed.read_bytes_per_s
        words = f"{folder}: writes {write / 1e6:.0f} MB/s, reads {read / 1e6:.0f} MB/s"
        if min(write, read) < SLOW_BYTES_PER_S:
            yield warning(
                f"{words}; a checkpoint of {format_bytes(CHECKPOINT_BYTES)} takes "
                f"{format_seconds(CHECKPOINT_BYTES / write)}",
                f"name a folder on a faster disk for {what}: {_REMEDIES[what]}",
            )
        else:
            yield fine(words)


def check_hub_cache(machine: Machine) -> Iterator[Finding]:
    """Models in the hub's cache whose files are gone."""
    broken: dict[str, int] = {}
    for link in machine.place.hub.glob("*--*/snapshots/*/*"):
        if link.is_symlink() and not link.exists():
            broken[link.parents[2].name] = broken.get(link.parents[2].name, 0) + 1
    for repository, number in sorted(broken.items()):
        kind, _, name = repository.partition("--")
        shown = f"{kind.removesuffix('s')}/{name.replace('--', '/', 1)}"
        yield fault(
            f"{shown} in {machine.place.hub} is broken: {number} file{'s' if number > 1 else ''} of it "
            f"{'are links' if number > 1 else 'is a link'} to nothing",
            f"hf cache rm {shown}, and fetch it again",
        )


def _existing(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
