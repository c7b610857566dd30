"""`doctor`: limits of the kernel for a process (memory, open files, processes), and the folders that runs write to.

Limits come from the kernel's files below `root` (proc(5), cgroups(7)). A call on a folder may hang if its file server
is gone; `doctor` gives each check a time limit.
"""

import os
import re
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardwise.launch.doctor.finding import Finding, Machine, Place, fault, fine, warning
from shardwise.launch.job import folders
from shardwise.launch.probe.disks import mount_of, read_room
from shardwise.launch.probe.host import (
    Mount,
    is_wsl,
    locks_without_limit,
    parse_meminfo,
    parse_mountinfo,
    read_cgroup_limits,
    read_text,
)
from shardwise.launch.probe.measure import measure_folder
from shardwise.trainer.spec.units import GIB, MIB, format_bytes, format_seconds
from shardwise.trainer.spec.value import Value

LEAST_FILES, USUAL_FILES, FILES_OF_MANY_GPUS = 256, 1024, 4096
LEAST_PROCESSES, USUAL_PROCESSES = 256, 2048
SMALL_SHM_BYTES = 256 * MIB  # Docker gives 64 MiB
FULL_SHM_BYTES = 64 * MIB
SMALL_GROUP_SHARE = 0.5  # of the machine's RAM
LEAST_AVAILABLE_BYTES = 2 * GIB
SHM = "/dev/shm"  # noqa: S108  # looked at, nothing is written


class Limits(Value, frozen=True, kw_only=True):
    """Limits of this process; None if unlimited or unknown."""

    open_files: int | None = None
    open_files_hard: int | None = None
    processes: int | None = None
    processes_of_group: int | None = None  # pids.max
    locked_bytes: int | None = None
    core_bytes: int | None = 0
    address_bytes: int | None = None
    file_bytes: int | None = None
    core_pattern: str = "core"
    locks_without_limit: bool = False
    has_infiniband: bool = False


class SharedMemory(Value, frozen=True, kw_only=True):
    """Where processes share memory; None: it is not there."""

    total_bytes: int | None
    free_bytes: int | None = None


class Memory(Value, frozen=True, kw_only=True):
    """RAM and swap of the machine, and what the control group leaves of it."""

    total_bytes: int | None
    available_bytes: int | None
    swap_bytes: int
    group_bytes: int | None
    group_available_bytes: int | None


def read_limits(place: Place) -> Limits:
    """From /proc/self/limits, where a limit is `NAME  SOFT  HARD  UNIT`."""
    text = read_text(place.root / "proc/self/limits")

    def soft(name: str) -> int | None:
        return _limit(text, name)[0]

    files, files_hard = _limit(text, "Max open files")
    return Limits(
        open_files=files,
        open_files_hard=files_hard,
        processes=soft("Max processes"),
        processes_of_group=_pids_max(place.root),
        locked_bytes=soft("Max locked memory"),
        core_bytes=soft("Max core file size"),
        address_bytes=soft("Max address space"),
        file_bytes=soft("Max file size"),
        core_pattern=read_text(place.root / "proc/sys/kernel/core_pattern").strip(),
        locks_without_limit=locks_without_limit(read_text(place.root / "proc/self/status")),
        has_infiniband=any(place.root.glob("sys/class/infiniband/*")),
    )


def _limit(text: str, name: str) -> tuple[int | None, int | None]:
    found = re.search(rf"^{re.escape(name)}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
    if found is None:
        return None, None
    soft, hard = (int(value) if value.isdigit() else None for value in found.groups())
    return soft, hard


def _pids_max(root: Path) -> int | None:
    texts = (read_text(root / path).strip() for path in ("sys/fs/cgroup/pids.max", "sys/fs/cgroup/pids/pids.max"))
    return next((int(text) for text in texts if text.isdigit()), None)


def read_shared_memory(place: Place) -> SharedMemory:
    try:
        space = os.statvfs(place.root / "dev/shm")
    except OSError:
        return SharedMemory(total_bytes=None)
    return SharedMemory(total_bytes=space.f_frsize * space.f_blocks, free_bytes=space.f_frsize * space.f_bavail)


def read_memory(place: Place) -> Memory:
    memory = parse_meminfo(read_text(place.root / "proc/meminfo"))
    group = read_cgroup_limits(place.root)
    return Memory(
        total_bytes=memory.get("MemTotal"),
        available_bytes=memory.get("MemAvailable"),
        swap_bytes=memory.get("SwapTotal", 0),
        group_bytes=group.memory_bytes,
        group_available_bytes=group.available_bytes,
    )


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    """Where processes share memory is there, and large enough for NCCL."""
    yield from judge_shared_memory(read_shared_memory(machine.place), num_gpus=machine.num_gpus)


def judge_shared_memory(shared: SharedMemory, *, num_gpus: int) -> Iterator[Finding]:
    total, free = shared.total_bytes, shared.free_bytes
    larger = "docker run --shm-size=16g (or --ipc=host); elsewhere: sudo mount -o remount,size=50% /dev/shm"
    if total is None:
        yield fault(f"{SHM} is not there", f"sudo mount -t tmpfs tmpfs {SHM}")
    elif total < SMALL_SHM_BYTES:
        make = fault if num_gpus > 1 else warning
        yield make(f"{SHM} has {format_bytes(total)}; NCCL shares memory there", larger)
    elif free is not None and free < FULL_SHM_BYTES:
        yield warning(
            f"{SHM} has {format_bytes(free)} free of {format_bytes(total)}",
            f"ls -l {SHM} shows what ended processes left; remove that",
        )
    else:
        yield fine(f"{SHM} has {format_bytes(total)}")


def check_open_files(machine: Machine) -> Iterator[Finding]:
    """Files and sockets that a process may have open."""
    limits = read_limits(machine.place)
    number = limits.open_files
    enough = FILES_OF_MANY_GPUS if machine.num_gpus >= 4 else USUAL_FILES
    if number is None or number >= enough:
        yield fine(f"open files: {'no limit' if number is None else number}")
        return
    wanted = max(enough, min(limits.open_files_hard or 65536, 65536))
    make = fault if number < LEAST_FILES else warning
    yield make(
        f"a process may have {number} files open; {enough} are usual for {machine.num_gpus or 'no'} GPUs",
        f"ulimit -n {wanted}; for good: nofile in /etc/security/limits.conf, --ulimit nofile={wanted} for a container",
    )


def check_processes(machine: Machine) -> Iterator[Finding]:
    """Processes and threads that this user, or this container, may have."""
    limits = read_limits(machine.place)
    known = [number for number in (limits.processes, limits.processes_of_group) if number is not None]
    least = min(known, default=None)
    if least is None or least >= USUAL_PROCESSES:
        yield fine(f"processes: {'no limit' if least is None else least}")
        return
    is_group = least == limits.processes_of_group
    make = fault if least < LEAST_PROCESSES else warning
    yield make(
        f"{least} processes and threads are allowed {'in this control group' if is_group else 'for this user'}",
        "docker run --pids-limit=-1" if is_group else "ulimit -u 65536, or nproc in /etc/security/limits.conf",
    )


def check_locked_memory(machine: Machine) -> Iterator[Finding]:
    """The limit of locked memory, for InfiniBand and for state that is offloaded to NVMe."""
    limits = read_limits(machine.place)
    if limits.locked_bytes is None or limits.locks_without_limit:
        yield fine("locked memory: no limit")
        return
    allowed = format_bytes(limits.locked_bytes)
    raise_it = "ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 for a container"
    if limits.has_infiniband:
        yield warning(f"{allowed} may be locked in RAM, and there is InfiniBand, which locks its buffers", raise_it)
    else:
        yield fine(f"locked memory: {allowed}; only offload_nvme needs more")


def check_other_limits(machine: Machine) -> Iterator[Finding]:
    """Address space, file size, core files."""
    limits = read_limits(machine.place)
    if limits.address_bytes is not None:
        make = fault if machine.has_gpus else warning
        yield make(
            f"a process may have {format_bytes(limits.address_bytes)} of addresses (ulimit -v); CUDA reserves more "
            "than all RAM and GPU memory",
            "ulimit -v unlimited",
        )
    if limits.file_bytes is not None:
        yield warning(
            f"a file may have {format_bytes(limits.file_bytes)} (ulimit -f); a checkpoint is larger",
            "ulimit -f unlimited",
        )
    if limits.core_bytes is None and limits.core_pattern and not limits.core_pattern.startswith("|"):
        yield warning(
            "core files are not limited (ulimit -c): a rank that crashes writes all of its memory to the disk",
            "ulimit -c 0",
        )


def check_memory(machine: Machine) -> Iterator[Finding]:
    """RAM, and what a container or a Slurm job may have of it."""
    yield from judge_memory(read_memory(machine.place))


def judge_memory(memory: Memory) -> Iterator[Finding]:
    total, group = memory.total_bytes, memory.group_bytes
    if total is None:
        yield warning("/proc/meminfo does not say how much RAM there is", "mount /proc: plans need it")
        return
    if group is not None and group < SMALL_GROUP_SHARE * total:
        yield warning(
            f"this control group may use {format_bytes(group)} of {format_bytes(total)} of RAM; what goes over is "
            "killed",
            "docker run --memory, --mem of sbatch or MemoryMax= of systemd give it more",
        )
    known = [each for each in (memory.available_bytes, memory.group_available_bytes) if each is not None]
    available = min(known, default=total)
    if available < LEAST_AVAILABLE_BYTES:
        yield warning(
            f"{format_bytes(available)} of RAM are available; loading torch and a small model takes 2 GiB",
            "end what holds it: ps aux --sort=-rss | head",
        )
        return
    swap = f"{format_bytes(memory.swap_bytes)} of swap" if memory.swap_bytes else "no swap"
    yield fine(f"{format_bytes(available)} of {format_bytes(min(total, group or total))} of RAM are available; {swap}")


MEASURED_BYTES, BUDGET_S = 128 * MIB, 1.0
SLOW_BYTES_PER_S = 100 * 10**6
CHECKPOINT_BYTES = 16 * GIB  # of a model of one billion parameters, with AdamW's state in fp32, rounded
LEAST_ROOM_BYTES, LITTLE_ROOM_BYTES = 500 * MIB, 10 * GIB
LEAST_INODES = 1000
HOME_BYTES, LEAST_HOME_BYTES = 1 * GIB, 10 * MIB
_SHARED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "afs", "orangefs"})
_SLOW = frozenset({"cifs", "smb3", "9p", "fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "davfs", "drvfs"})


def folders_of(place: Place) -> dict[str, Path]:
    """Folders that shardwise writes to, by purpose."""
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
        elif room.free_files is not None and room.free_files < LEAST_INODES:
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


# The Windows Subsystem for Linux: the driver moves GPU memory to RAM instead of failing, at most half of the RAM can be
# pinned, WSL gets half of the RAM unless .wslconfig says otherwise, and /mnt/c is reached through a file server.
SMALL_RAM_BYTES = 16 * GIB
_WINDOWS_FILESYSTEMS = frozenset({"9p", "drvfs", "virtiofs"})
_MEMORY = re.compile(r"^\s*memory\s*=\s*(\S+)", re.MULTILINE | re.IGNORECASE)


class Wsl(Value, frozen=True, kw_only=True):
    """Facts about WSL that can be read inside it."""

    ram_bytes: int | None
    stated_memory: str | None  # of .wslconfig
    config: str | None  # its path
    on_windows: tuple[str, ...]  # folders of ours that lie on a disk of Windows


def read_wsl(place: Place) -> Wsl | None:
    """None elsewhere."""
    if not is_wsl(read_text(place.root / "proc/version")):
        return None
    configs = sorted(place.root.glob("mnt/[a-z]/Users/*/.wslconfig"))
    stated = _MEMORY.search(read_text(configs[0])) if configs else None
    return Wsl(
        ram_bytes=parse_meminfo(read_text(place.root / "proc/meminfo")).get("MemTotal"),
        stated_memory=stated[1] if stated else None,
        config=str(configs[0]) if configs else None,
        on_windows=tuple(_on_windows(place)),
    )


def _on_windows(place: Place) -> Iterator[str]:
    mounts = parse_mountinfo(read_text(place.root / "proc/self/mountinfo"))
    for folder in dict.fromkeys((place.working, place.output, place.cache, place.hub)):
        mount = mount_of(Path(folder), mounts)
        if mount is not None and mount.filesystem in _WINDOWS_FILESYSTEMS and mount.mount_point.startswith("/mnt/"):
            yield str(folder)


def check_wsl(machine: Machine) -> Iterator[Finding]:
    """Nothing where this is no WSL."""
    found = read_wsl(machine.place)
    if found is not None:
        yield from judge_wsl(found, has_gpus=machine.has_gpus)


def judge_wsl(found: Wsl, *, has_gpus: bool) -> Iterator[Finding]:
    if has_gpus:
        yield warning(
            "under WSL the driver moves GPU memory to RAM instead of failing: a run that does not fit crawls",
            "NVIDIA Control Panel > Manage 3D settings > CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback; or "
            "cap it with --vram",
        )
    if found.ram_bytes is not None:
        half = format_bytes(found.ram_bytes // 2)
        if found.ram_bytes < SMALL_RAM_BYTES:
            said = f"memory={found.stated_memory} in {found.config}" if found.stated_memory else "half of Windows' RAM"
            yield warning(
                f"WSL has {format_bytes(found.ram_bytes)} of RAM ({said}), and can pin {half} of it for offload",
                "[wsl2] memory=SIZE in %UserProfile%\\.wslconfig, then wsl --shutdown",
            )
        else:
            yield fine(f"WSL has {format_bytes(found.ram_bytes)} of RAM, and can pin {half} of it for offload")
    for folder in found.on_windows:
        yield warning(
            f"{folder} lies on a disk of Windows, which WSL reaches through a file server: ten times slower and more",
            "move it below the home of WSL (~), or name other folders (output, folders.cache and folders.huggingface)",
        )
