"""`doctor`: what the kernel grants a process: memory, shared memory, open files, locked memory, processes.

Read from the files of the kernel below `root` (proc(5), cgroups(7)); the sizes of /dev/shm from the kernel itself.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from launch.doctor.finding import Finding, fault, fine, warning
from launch.doctor.machine import Machine, Place
from launch.probe.host import locks_without_limit, parse_meminfo, read_cgroup_limits, read_text
from trainer.spec.units import GIB, MIB, format_bytes
from trainer.spec.value import Value

LEAST_FILES, USUAL_FILES, FILES_OF_MANY_GPUS = 256, 1024, 4096
LEAST_PROCESSES, USUAL_PROCESSES = 256, 2048
SMALL_SHM_BYTES = 256 * MIB  # Docker gives 64 MiB
FULL_SHM_BYTES = 64 * MIB
SMALL_GROUP_SHARE = 0.5  # of the machine's RAM
LEAST_AVAILABLE_BYTES = 2 * GIB
SHM = "/dev/shm"  # noqa: S108  # looked at, nothing is written


class Limits(Value, frozen=True, kw_only=True):
    """What this process may use; None: without limit, or not known."""

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
    """What may be locked in RAM: for InfiniBand, and for state that is offloaded to NVMe."""
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
