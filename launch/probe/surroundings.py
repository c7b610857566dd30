"""Reads the machine around the GPUs: cores, memory, disks, network, Slurm. Starts no program and opens no connection.

Every figure is what this process may use: cores under affinity, cpuset and quota (rounded down, since a thread above
the quota is stopped rather than slowed), memory under the cgroup and Slurm. Pinned memory is bounded by the same
limit; WSL pins at most about half of it. Files are read below `root`; affinity, free space, addresses and resource
limits are asked of the kernel.
"""

import contextlib
import fcntl
import os
import resource
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

from launch.probe.cgroup import CgroupLimits, read_cgroup_limits
from launch.probe.kernel_text import (
    Mount,
    is_internal_interface,
    is_local_disk,
    is_wsl,
    locks_without_limit,
    once_each,
    parse_cpuinfo,
    parse_ethernet_speed,
    parse_infiniband_rate,
    parse_meminfo,
    parse_mountinfo,
    read_text,
    slurm_environment,
    slurm_memory_bytes,
    slurm_num_cores,
)
from trainer.spec.hardware import Disk, Host, NetworkInterface

_GET_INTERFACE_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h
_SLURM_CONFIGURATIONS = ("etc/slurm/slurm.conf", "etc/slurm-llnl/slurm.conf", "run/slurm/conf/slurm.conf")
_INFINIBAND_TYPE = "32"  # ARPHRD_INFINIBAND of linux/if_arp.h


def read_host(*, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Host:
    """The host as this process may use it."""
    memory = parse_meminfo(read_text(root / "proc/meminfo"))
    cgroup = read_cgroup_limits(root)
    processor = parse_cpuinfo(read_text(root / "proc/cpuinfo"))
    ram_bytes = _least(memory.get("MemTotal"), cgroup.memory_bytes, slurm_memory_bytes(environment))
    available_bytes = _least(memory.get("MemAvailable"), cgroup.available_bytes, ram_bytes)
    wsl = is_wsl(read_text(root / "proc/version"))
    return Host(
        cpu_name=processor.name,
        num_cores=count_cores(os.sched_getaffinity(0), cgroup, slurm_num_cores(environment)),
        ram_bytes=ram_bytes,
        ram_available_bytes=available_bytes,
        pinned_limit_bytes=ram_bytes // 2 if wsl and ram_bytes else ram_bytes,
        memlock_limit_bytes=_memlock_limit(read_text(root / "proc/self/status")),
        shm_bytes=_total_bytes(root / "dev/shm"),
        cpu_flags=processor.flags,
        is_wsl=wsl,
        disks=_read_disks(root),
        interfaces=_read_interfaces(root),
        slurm=slurm_environment(environment, has_sbatch=_can_submit(root, environment)),
    )


def _can_submit(root: Path, environment: Mapping[str, str]) -> bool:
    """Whether sbatch is here and has a cluster to talk to: the package alone makes no login node of a machine.

    Its configuration stands where SLURM_CONF says, where distributions and nodes without one of their own keep it
    (`/run/slurm/conf`), or below the prefix that Slurm was built with, as on clusters that clouds set up.
    """
    program = shutil.which("sbatch", path=environment.get("PATH", os.defpath))
    if program is None:
        return False
    if named := environment.get("SLURM_CONF"):
        return Path(named).is_file()
    beside = Path(program).resolve().parents[1] / "etc/slurm.conf"
    return beside.is_file() or any((root / place).is_file() for place in _SLURM_CONFIGURATIONS)


def count_cores(affinity: set[int] | frozenset[int], cgroup: CgroupLimits, slurm: int | None) -> int:
    """Cores that threads of this process can keep busy, at least one."""
    allowed = affinity & cgroup.cores if cgroup.cores is not None else affinity
    counts = [len(allowed) or len(affinity)]
    counts += [int(cgroup.num_cores)] if cgroup.num_cores is not None else []
    counts += [slurm] if slurm is not None else []
    return max(1, min(counts))


def _least(*amounts: int | None) -> int | None:
    return min((amount for amount in amounts if amount is not None), default=None)


def _memlock_limit(status: str) -> int | None:
    """What one process may lock (mlock, InfiniBand); None: as much as it likes. CUDA's pinned memory is not counted."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY or locks_without_limit(status) else soft


def _total_bytes(path: Path) -> int | None:
    try:
        space = os.statvfs(path)
    except OSError:
        return None
    return space.f_frsize * space.f_blocks


def _read_disks(root: Path) -> tuple[Disk, ...]:
    mounts = filter(is_local_disk, parse_mountinfo(read_text(root / "proc/self/mountinfo")))
    # A container binds single files (/etc/hosts) from the disk below it.
    folders = [mount for mount in mounts if (root / mount.mount_point.lstrip("/")).is_dir()]
    disks = []
    for mount in once_each(folders):
        with contextlib.suppress(OSError):  # mounted in another namespace, or gone
            space = os.statvfs(root / mount.mount_point.lstrip("/"))
            disks.append(
                Disk(
                    path=mount.mount_point,
                    filesystem=mount.filesystem,
                    total_bytes=space.f_frsize * space.f_blocks,
                    free_bytes=space.f_frsize * space.f_bavail,
                    is_rotational=_is_rotational(mount, root),
                )
            )
    return tuple(disks)


def _is_rotational(mount: Mount, root: Path) -> bool | None:
    """What the kernel believes of the block device below a mount; a virtual disk may say either."""
    device = root / "sys/dev/block" / mount.device
    if not device.exists():  # btrfs numbers its volumes itself
        device = root / "sys/class/block" / Path(mount.source).name
    for queue in (device / "queue", device.resolve().parent / "queue"):  # a partition's queue is its disk's
        answer = read_text(queue / "rotational").strip()
        if answer:
            return answer == "1"
    return None


def _read_interfaces(root: Path) -> tuple[NetworkInterface, ...]:
    interfaces = []
    for folder in sorted(root.glob("sys/class/net/*")):
        state = read_text(folder / "operstate").strip()
        if is_internal_interface(folder.name) or state not in ("up", "unknown"):
            continue
        is_infiniband = read_text(folder / "type").strip() == _INFINIBAND_TYPE  # its port below has the speed
        speed = None if is_infiniband else parse_ethernet_speed(read_text(folder / "speed"))
        interfaces.append(
            NetworkInterface(name=folder.name, address=interface_address(folder.name), speed_bytes_per_s=speed)
        )
    return (*interfaces, *_read_infiniband(root))


def _read_infiniband(root: Path) -> list[NetworkInterface]:
    """Active InfiniBand ports, named as NCCL_IB_HCA names them; Ethernet ports stand among the interfaces already."""
    ports = []
    for folder in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        is_active = read_text(folder / "state").strip().endswith("ACTIVE")
        if is_active and read_text(folder / "link_layer").strip() == "InfiniBand":
            rate = parse_infiniband_rate(read_text(folder / "rate"))
            name = f"{folder.parent.parent.name}:{folder.name}"
            ports.append(NetworkInterface(name=name, address=None, speed_bytes_per_s=rate))
    return ports


def interface_address(name: str) -> str | None:
    """The IPv4 address of an interface."""
    import socket  # two milliseconds of every start, also where no host is looked at

    request = struct.pack("256s", name.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _GET_INTERFACE_ADDRESS, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """The name of the interface that has this IPv4 address; None where none has."""
    names = sorted(folder.name for folder in Path("/sys/class/net").glob("*"))
    return next((name for name in names if interface_address(name) == address), None)
