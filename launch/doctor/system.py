"""`doctor`: limits of the kernel for a process (memory, open files, processes), and the folders that runs write to.

Limits come from the kernel's files below `root` (proc(5), cgroups(7)). A call on a folder may hang if its file server
is down; `doctor` gives each check a time limit.
"""

import os
import re
import shlex
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from shardwise.launch.doctor.finding import Finding, Machine, Place, fault, fine, warning
from shardwise.launch.job import state_home
from shardwise.launch.probe.disks import mount_of, read_room
from shardwise.launch.probe.host import (
    is_wsl,
    locks_without_limit,
    parse_meminfo,
    parse_mountinfo,
    read_cgroup_limits,
    read_host,
    read_text,
)
from shardwise.launch.probe.measure import measure_folder
from shardwise.trainer.spec.host_ram import pinnable_ram, usable_ram
from shardwise.trainer.spec.units import GIB, MIB, format_bytes, format_seconds

LEAST_FILES, USUAL_FILES, FILES_OF_MANY_GPUS = 256, 1024, 4096
LEAST_PROCESSES, USUAL_PROCESSES = 256, 2048
SMALL_SHM_BYTES = 256 * MIB  # Docker gives 64 MiB
FULL_SHM_BYTES = 64 * MIB
SMALL_GROUP_SHARE = 0.5  # of the machine's RAM
LEAST_AVAILABLE_BYTES = 2 * GIB
SHM = "/dev/shm"  # noqa: S108  # looked at, nothing is written
MEASURED_BYTES, BUDGET_S = 128 * MIB, 1.0
SLOW_BYTES_PER_S = 100 * 10**6
CHECKPOINT_BYTES = 16 * GIB  # of a model of one billion parameters, with AdamW's state in fp32, rounded
LEAST_ROOM_BYTES, LITTLE_ROOM_BYTES = 500 * MIB, 10 * GIB
LEAST_INODES = 1000
HOME_BYTES, LEAST_HOME_BYTES = 1 * GIB, 10 * MIB
SMALL_WSL_RAM_BYTES = 16 * GIB
_SHARED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "panfs", "afs", "orangefs"})
_SLOW = frozenset({"cifs", "smb3", "9p", "fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "davfs", "drvfs"})
_WINDOWS_FILESYSTEMS = frozenset({"9p", "drvfs", "virtiofs"})
_WSL_MEMORY = re.compile(r"^\s*memory\s*=\s*(\S+)", re.MULTILINE | re.IGNORECASE)
_REMEDIES = {
    "the output": "name another folder with output or --run-dir, or change its owner: sudo chown $USER FOLDER",
    "the cache": "export SHARDWISE_CACHE=/a/folder, or folders: {cache: /a/folder} in config.yaml",
    "the state": "export XDG_STATE_HOME=/a/folder",
    "the hub's cache": "export HF_HOME=/a/folder, or folders: {huggingface: /a/folder} in config.yaml",
    "temporary files": "export TMPDIR=/a/folder",
}


def check_memory(machine: Machine) -> Iterator[Finding]:
    """RAM, and the part of it that a container or a Slurm job may use."""
    memory = parse_meminfo(read_text(machine.place.root / "proc/meminfo"))
    group = read_cgroup_limits(machine.place.root)
    total = memory.get("MemTotal")
    if total is None:
        yield warning("/proc/meminfo does not contain the size of the RAM", "mount /proc: plans need it")
        return
    if group.memory_bytes is not None and group.memory_bytes < SMALL_GROUP_SHARE * total:
        yield warning(
            f"this control group may use {format_bytes(group.memory_bytes)} of {format_bytes(total)} of RAM; a process "
            "that exceeds it is killed",
            "docker run --memory, --mem of sbatch or MemoryMax= of systemd give it more",
        )
    known = [each for each in (memory.get("MemAvailable"), group.available_bytes) if each is not None]
    available = min(known, default=total)
    if available < LEAST_AVAILABLE_BYTES:
        yield warning(
            f"{format_bytes(available)} of RAM are available; loading torch and a small model takes 2 GiB",
            "end the processes that use it: ps aux --sort=-rss | head",
        )
        return
    swap_bytes = swap_of(machine.place)
    swap = f"{format_bytes(swap_bytes)} of swap" if swap_bytes else "no swap"
    host = read_host(root=machine.place.root, environment=machine.place.environment)
    usable, for_runs = format_bytes(min(total, group.memory_bytes or total)), format_bytes(usable_ram(host) or 0)
    yield fine(
        f"{format_bytes(available)} of {usable} of RAM are available, {for_runs} of it for a run, of which "
        f"{format_bytes(pinnable_ram(host) or 0)} may be pinned; {swap}"
    )


def swap_of(place: Place) -> int:
    """Bytes of swap."""
    return parse_meminfo(read_text(place.root / "proc/meminfo")).get("SwapTotal", 0)


def check_shared_memory(machine: Machine) -> Iterator[Finding]:
    """Shared memory exists and is large enough for NCCL."""
    try:
        space = os.statvfs(machine.place.root / "dev/shm")
    except OSError:
        yield fault(f"{SHM} is not there", f"sudo mount -t tmpfs tmpfs {SHM}")
        return
    total, free = space.f_frsize * space.f_blocks, space.f_frsize * space.f_bavail
    yield judge_shared_memory(total, free, num_gpus=machine.num_gpus)


def judge_shared_memory(total_bytes: int, free_bytes: int, *, num_gpus: int) -> Finding:
    if total_bytes < SMALL_SHM_BYTES:
        return (fault if num_gpus > 1 else warning)(
            f"{SHM} has {format_bytes(total_bytes)}; NCCL shares memory there",
            "docker run --shm-size=16g (or --ipc=host); elsewhere: sudo mount -o remount,size=50% /dev/shm",
        )
    if free_bytes < FULL_SHM_BYTES:
        return warning(
            f"{SHM} has {format_bytes(free_bytes)} free of {format_bytes(total_bytes)}",
            f"ls -l {SHM} shows the files of processes that have ended; remove them",
        )
    return fine(f"{SHM} has {format_bytes(total_bytes)}")


def check_open_files(machine: Machine) -> Iterator[Finding]:
    """The limit of open files and sockets of a process."""
    number, hard = _limit(machine, "Max open files")
    enough = FILES_OF_MANY_GPUS if machine.num_gpus >= 4 else USUAL_FILES
    if number is None or number >= enough:
        yield fine(f"open files: {'no limit' if number is None else number}")
        return
    wanted = max(enough, min(hard or 65536, 65536))
    yield (fault if number < LEAST_FILES else warning)(
        f"a process may have {number} files open; {enough} are usual for {machine.num_gpus or 'no'} GPUs",
        f"ulimit -n {wanted}; for good: nofile in /etc/security/limits.conf, --ulimit nofile={wanted} for a container",
    )


def check_processes(machine: Machine) -> Iterator[Finding]:
    """The limit of processes and threads of this user or container."""
    files = ("sys/fs/cgroup/pids.max", "sys/fs/cgroup/pids/pids.max")
    texts = (read_text(machine.place.root / path).strip() for path in files)
    of_group = next((int(text) for text in texts if text.isdigit()), None)
    known = [number for number in (_limit(machine, "Max processes")[0], of_group) if number is not None]
    least = min(known, default=None)
    if least is None or least >= USUAL_PROCESSES:
        yield fine(f"processes: {'no limit' if least is None else least}")
        return
    where, remedy = "for this user", "ulimit -u 65536, or nproc in /etc/security/limits.conf"
    if least == of_group:
        where, remedy = "in this control group", "docker run --pids-limit=-1"
    yield (fault if least < LEAST_PROCESSES else warning)(f"{least} processes and threads are allowed {where}", remedy)


def check_locked_memory(machine: Machine) -> Iterator[Finding]:
    """The limit of locked memory, for InfiniBand and for state that is offloaded to NVMe."""
    root, (limit, _) = machine.place.root, _limit(machine, "Max locked memory")
    if limit is None or locks_without_limit(read_text(root / "proc/self/status")):
        yield fine("locked memory: no limit")
    elif any(root.glob("sys/class/infiniband/*")):
        yield warning(
            f"{format_bytes(limit)} may be locked in RAM, and there is InfiniBand, which locks its buffers",
            "ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 for a container",
        )
    else:
        yield fine(f"locked memory: {format_bytes(limit)}; only offload_nvme needs more")


def check_other_limits(machine: Machine) -> Iterator[Finding]:
    """Address space, file size, core files."""
    (addresses, _), (file_bytes, _) = _limit(machine, "Max address space"), _limit(machine, "Max file size")
    if addresses is not None:
        yield (fault if machine.has_gpus else warning)(
            f"a process may have {format_bytes(addresses)} of addresses (ulimit -v); CUDA reserves more than all RAM "
            "and GPU memory",
            "ulimit -v unlimited",
        )
    if file_bytes is not None:
        yield warning(
            f"a file may have {format_bytes(file_bytes)} (ulimit -f); a checkpoint is larger", "ulimit -f unlimited"
        )
    pattern = read_text(machine.place.root / "proc/sys/kernel/core_pattern").strip()
    if _limit(machine, "Max core file size")[0] is None and pattern and not pattern.startswith("|"):
        yield warning(
            "core files are not limited (ulimit -c): a rank that crashes writes all of its memory to the disk",
            "ulimit -c 0",
        )


def _limit(machine: Machine, name: str) -> tuple[int | None, int | None]:
    """The soft and the hard limit from /proc/self/limits; None if unlimited or unknown."""
    text = read_text(machine.place.root / "proc/self/limits")
    found = re.search(rf"^{re.escape(name)}\s+(\S+)\s+(\S+)", text, re.MULTILINE)
    soft, hard = (int(value) if value.isdigit() else None for value in (found.groups() if found else ("", "")))
    return soft, hard


def check_wsl(machine: Machine) -> Iterator[Finding]:
    """The Windows Subsystem for Linux; empty elsewhere.

    Its driver moves GPU memory to RAM instead of failing, at most half of the RAM can be pinned, WSL gets half of the
    RAM unless .wslconfig sets another size, and /mnt/c is reached through a file server.
    """
    place = machine.place
    if not is_wsl(read_text(place.root / "proc/version")):
        return
    if machine.has_gpus:
        yield warning(
            "under WSL the driver moves GPU memory to RAM instead of failing: a run that does not fit crawls",
            "NVIDIA Control Panel > Manage 3D settings > CUDA - Sysmem Fallback Policy: Prefer No Sysmem Fallback; or "
            "cap it with --vram",
        )
    ram_bytes = parse_meminfo(read_text(place.root / "proc/meminfo")).get("MemTotal")
    if ram_bytes is not None:
        ram, half = format_bytes(ram_bytes), format_bytes(ram_bytes // 2)
        config = next(iter(sorted(place.root.glob("mnt/[a-z]/Users/*/.wslconfig"))), None)
        stated = _WSL_MEMORY.search(read_text(config)) if config is not None else None
        source = f"memory={stated[1]} in {config}" if stated else "half of Windows' RAM"
        if ram_bytes < SMALL_WSL_RAM_BYTES:
            yield warning(
                f"WSL has {ram} of RAM ({source}), and can pin {half} of it for offload",
                "[wsl2] memory=SIZE in %UserProfile%\\.wslconfig, then wsl --shutdown",
            )
        else:
            yield fine(f"WSL has {ram} of RAM, and can pin {half} of it for offload")
    mounts = parse_mountinfo(read_text(place.root / "proc/self/mountinfo"))
    for folder in dict.fromkeys((place.working, place.output, place.cache, place.hub)):
        mount = mount_of(Path(folder), mounts)
        if mount is not None and mount.filesystem in _WINDOWS_FILESYSTEMS and mount.mount_point.startswith("/mnt/"):
            yield warning(
                f"{folder} lies on a disk of Windows, which WSL reaches through a file server: ten times slower and "
                "more",
                "move it below the home of WSL (~), or name other folders (output, folders.cache and "
                "folders.huggingface)",
            )


def folders_of(place: Place) -> dict[str, Path]:
    """Folders that shardwise writes to, by purpose."""
    return {
        "the output": place.output,
        "the cache": place.cache,
        "the state": state_home(place.environment),
        "the hub's cache": place.hub,
        "temporary files": Path(place.environment.get("TMPDIR") or place.root / "tmp"),
    }


def check_folders(machine: Machine) -> Iterator[Finding]:
    """Each folder can be written."""
    obstacles = {what: obstacle_in(folder) for what, folder in folders_of(machine.place).items()}
    for what, problem in obstacles.items():
        if problem is not None:
            yield fault(f"{what} cannot be written: {problem}", _REMEDIES[what])
    if not any(obstacles.values()):
        yield fine("output, cache, state, the hub's cache and temporary files can be written")


def obstacle_in(folder: Path) -> str | None:
    """The reason why a folder, which need not exist yet, cannot be written; None if it can."""
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


def check_home(machine: Machine) -> Iterator[Finding]:
    """The home directory can be written: many libraries use it even if other folders are configured."""
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
    stated = f"{home}: {format_bytes(room.free_bytes)} {room.bytes_limit}"
    if room.free_bytes < HOME_BYTES:
        yield (fault if room.free_bytes < LEAST_HOME_BYTES else warning)(
            f"the home directory is full: {stated}", f"du -xh {shlex.quote(str(home))} | sort -h | tail shows its files"
        )
    else:
        yield fine(f"the home directory {stated}")


def check_room(machine: Machine) -> Iterator[Finding]:
    """Bytes and inodes below the output and the cache, quotas counted."""
    place, remedy = machine.place, "make room (shardwise cache --prune, hf cache prune), or name another folder"
    for what in ("the output", "the cache", "the hub's cache"):
        folder = folders_of(place)[what]
        room = read_room(folder, place.environment, root=place.root)
        stated = f"{folder}: {format_bytes(room.free_bytes)} {room.bytes_limit}"
        if room.free_bytes < LEAST_ROOM_BYTES:
            yield fault(f"{stated}; {what} needs more than that", remedy)
        elif room.free_files is not None and room.free_files < LEAST_INODES:
            yield fault(f"{folder}: {room.free_files} inodes {room.files_limit}", remedy)
        elif room.free_bytes < LITTLE_ROOM_BYTES:
            yield warning(f"{stated}; a model of a billion parameters writes checkpoints of 12 GB", remedy)
        else:
            yield fine(stated)


def check_mounts(machine: Machine) -> Iterator[Finding]:
    """File systems that are slow or read-only for what is written there."""
    mounts = parse_mountinfo(read_text(machine.place.root / "proc/self/mountinfo"))
    for what, folder in folders_of(machine.place).items():
        mount = mount_of(folder.absolute(), mounts)
        if mount is None:
            continue
        where = f"{what} ({folder}) lies on {mount.filesystem} of {mount.source}"
        if "ro" in mount.options:
            yield fault(f"{what} ({folder}) lies on {mount.mount_point}, which is mounted read-only", _REMEDIES[what])
        elif mount.filesystem in _SLOW and not (mount.mount_point.startswith("/mnt/") and mount.filesystem == "9p"):
            yield warning(f"{where}, which is slow for many small files", _REMEDIES[what])
        elif mount.filesystem in _SHARED and what == "temporary files":
            yield warning(
                f"{where}: sockets and locks of the ranks go there", "export TMPDIR=/tmp, or another local disk"
            )
        elif mount.filesystem in _SHARED:
            yield fine(f"{where}, which other machines see too")


def check_speed(machine: Machine) -> Iterator[Finding]:
    """Writing and reading of a short file, past the page cache."""
    devices: set[int] = set()
    for what in ("the output", "the cache"):
        named = folders_of(machine.place)[what].absolute()
        folder = next(path for path in (named, *named.parents) if path.is_dir())
        if folder.stat().st_dev in devices:
            continue
        devices.add(folder.stat().st_dev)
        speed = measure_folder(folder, file_bytes=MEASURED_BYTES, budget_s=BUDGET_S)
        if speed is None:
            continue  # no room, or not writable: another check reports it
        write, read = speed.write_bytes_per_s, speed.read_bytes_per_s
        stated = f"{folder}: writes {write / 1e6:.0f} MB/s, reads {read / 1e6:.0f} MB/s"
        if min(write, read) < SLOW_BYTES_PER_S:
            duration = format_seconds(CHECKPOINT_BYTES / write)
            yield warning(
                f"{stated}; a checkpoint of {format_bytes(CHECKPOINT_BYTES)} takes {duration}",
                f"name a folder on a faster disk for {what}: {_REMEDIES[what]}",
            )
        else:
            yield fine(stated)


def check_hub_cache(machine: Machine) -> Iterator[Finding]:
    """Models in the hub's cache whose files are missing."""
    links = machine.place.hub.glob("*--*/snapshots/*/*")
    broken = Counter(link.parents[2].name for link in links if link.is_symlink() and not link.exists())
    for repository, number in sorted(broken.items()):
        kind, _, name = repository.partition("--")
        shown = f"{kind.removesuffix('s')}/{name.replace('--', '/', 1)}"
        yield fault(
            f"{shown} in {machine.place.hub} is broken: {number} file{'s' if number > 1 else ''} of it "
            f"{'are links' if number > 1 else 'is a link'} to nothing",
            f"hf cache rm {shown}, and fetch it again",
        )
