"""The machine around the GPUs: cores, memory, disks, network, Slurm. Starts no program and opens no connection.

Every figure is what this process may use: cores under affinity, cpuset and quota (rounded down, since a thread above
the quota is stopped rather than slowed), memory under the cgroup and Slurm, and less what the system needs
(`spec.host_ram`). Text files of the kernel (/proc/meminfo, /proc/cpuinfo, /proc/self/mountinfo, sysfs) are read below
`root`; the `parse_` functions take their text. A missing figure is None.

A control group's limit binds everything below it, so each limit is the least on the way from our own group up to the
highest visible one, in version 1, version 2 or both at once. Page cache counts as used but the kernel returns it on
demand: the free memory of a group is its limit less its use without the file cache. In a container the path of
/proc/self/cgroup may be the host's while the mount shows only a part of the tree; the mount's root names the part
(cgroups(7), cgroup_namespaces(7)).
"""

import contextlib
import os
import re
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TypeVar

from shardwise.trainer.spec.hardware import Disk, Host, NetworkInterface, SlurmEnvironment
from shardwise.trainer.spec.host_ram import PINNED_SHARE, WSL_PINNED_SHARE, machine_bytes
from shardwise.trainer.spec.network import interface_address
from shardwise.trainer.spec.units import KIB, MIB
from shardwise.trainer.spec.value import Value

_SLURM_CONFIGURATIONS = ("etc/slurm/slurm.conf", "etc/slurm-llnl/slurm.conf", "run/slurm/conf/slurm.conf")
_INFINIBAND_TYPE = "32"  # ARPHRD_INFINIBAND of linux/if_arp.h
# CPU flags that decide a precision, oldest first.
PRECISION_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
LOCAL_FILESYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "overlay"})
# Version 1 writes "no limit" as the largest page-aligned number, far above any real limit.
_NO_LIMIT_BYTES = 2**60
_OOM_KILL = r"(?m)^oom_kill (\d+)$"
_CAP_IPC_LOCK = 14  # its bit among the capabilities
# Bridges and their ends inside a machine: they carry no traffic to other machines.
_INTERNAL_INTERFACE = r"lo|docker\d*|br-.*|veth.*|virbr\d*.*|cni\d*|flannel.*|cali.*|lxc.*|lxdbr\d*|tunl\d*|kube-.*"


N = TypeVar("N", int, float)


class Mount(Value, frozen=True, kw_only=True):
    """A line of mountinfo."""

    device: str  # MAJOR:MINOR
    root: str  # the part of the file system that is mounted
    mount_point: str
    options: tuple[str, ...]
    filesystem: str
    source: str
    super_options: tuple[str, ...]


class CgroupLimits(Value, frozen=True, kw_only=True):
    """Memory and cores granted by control groups; None: no limit is set."""

    memory_bytes: int | None = None
    available_bytes: int | None = None
    num_cores: float | None = None  # CPU time a second, from the quota
    cores: frozenset[int] | None = None  # from the cpuset


def read_host(*, root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> Host:
    """The host as this process may use it."""
    memory = parse_meminfo(read_text(root / "proc/meminfo"))
    cgroup = read_cgroup_limits(root)
    cpu_name, cpu_flags = parse_cpuinfo(read_text(root / "proc/cpuinfo"))
    total, in_job = memory.get("MemTotal"), slurm_memory_bytes(environment)
    ram_bytes = _least(total, cgroup.memory_bytes, in_job)
    available_bytes = _least(memory.get("MemAvailable"), cgroup.available_bytes, ram_bytes)
    of_machine = None if total is None else machine_bytes(total, memory.get("MemAvailable"))
    wsl = is_wsl(read_text(root / "proc/version"))
    return Host(
        cpu_name=cpu_name,
        num_cores=count_cores(os.sched_getaffinity(0), cgroup, slurm_num_cores(environment)),
        ram_bytes=ram_bytes,
        ram_available_bytes=available_bytes,
        usable_ram_bytes=_least(of_machine, cgroup.available_bytes, in_job),
        pinned_limit_bytes=_pinned_limit(ram_bytes, total, is_wsl=wsl),
        memlock_limit_bytes=memlock_limit(read_text(root / "proc/self/status")),
        shm_bytes=_total_bytes(root / "dev/shm"),
        cpu_flags=cpu_flags,
        is_wsl=wsl,
        disks=_read_disks(root),
        interfaces=_read_interfaces(root),
        slurm=slurm_environment(environment, has_sbatch=_can_submit(root, environment)),
    )


def _pinned_limit(ram_bytes: int | None, total_bytes: int | None, *, is_wsl: bool) -> int | None:
    """Bytes that may be pinned under WSL or in a grant; None on a machine without."""
    if ram_bytes is not None and is_wsl:
        return int(WSL_PINNED_SHARE * ram_bytes)
    if ram_bytes is None or total_bytes is None or ram_bytes == total_bytes:
        return None
    return min(ram_bytes, int(PINNED_SHARE * total_bytes))


def _can_submit(root: Path, environment: Mapping[str, str]) -> bool:
    """True if sbatch is here and has a cluster: the package alone does not make a machine a login node.

    Its configuration is the file of SLURM_CONF, in the folders of distributions and of nodes without one of their own
    (`/run/slurm/conf`), or below the prefix that Slurm was built with, as on clusters that clouds set up.
    """
    from shutil import which  # loads three libraries of compression

    program = which("sbatch", path=environment.get("PATH", os.defpath))
    if program is None:
        return False
    if named := environment.get("SLURM_CONF"):
        return Path(named).is_file()
    own = Path(program).resolve().parents[1] / "etc/slurm.conf"
    return own.is_file() or any((root / place).is_file() for place in _SLURM_CONFIGURATIONS)


def count_cores(affinity: set[int] | frozenset[int], cgroup: CgroupLimits, slurm: int | None) -> int:
    """Cores that threads of this process can keep busy, at least one."""
    allowed = affinity & cgroup.cores if cgroup.cores is not None else affinity
    counts = [len(allowed) or len(affinity)]
    counts += [int(cgroup.num_cores)] if cgroup.num_cores is not None else []
    counts += [slurm] if slurm is not None else []
    return max(1, min(counts))


def _least(*amounts: N | None) -> N | None:
    return min((amount for amount in amounts if amount is not None), default=None)


def memlock_limit(status: str) -> int | None:
    """Bytes that one process may lock (mlock, InfiniBand); None: no limit. CUDA's pinned memory does not count."""
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
        with contextlib.suppress(OSError):  # mounted in another namespace, or removed
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
    """The kernel's flag of the block device below a mount; that of a virtual disk means little."""
    device = root / "sys/dev/block" / mount.device
    if not device.exists():  # btrfs numbers its volumes itself
        device = root / "sys/class/block" / Path(mount.source).name
    for queue in (device / "queue", device.resolve().parent / "queue"):  # a partition's queue is its disk's
        flag = read_text(queue / "rotational").strip()
        if flag:
            return flag == "1"
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
    """Active InfiniBand ports, named as NCCL_IB_HCA names them; Ethernet ports are among the interfaces already."""
    ports = []
    for folder in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        is_active = read_text(folder / "state").strip().endswith("ACTIVE")
        if is_active and read_text(folder / "link_layer").strip() == "InfiniBand":
            rate = parse_infiniband_rate(read_text(folder / "rate"))
            name = f"{folder.parent.parent.name}:{folder.name}"
            ports.append(NetworkInterface(name=name, address=None, speed_bytes_per_s=rate))
    return ports


def interface_of(address: str) -> str | None:
    """The name of the interface that has this IPv4 address, or None."""
    names = sorted(folder.name for folder in Path("/sys/class/net").glob("*"))
    return next((name for name in names if interface_address(name) == address), None)


def parse_cgroup_paths(text: str) -> dict[str, str]:
    """Our group by controller, from /proc/self/cgroup; version 2 has the empty name."""
    paths = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            paths[controller] = path
    return paths


def parse_limit(text: str) -> int | None:
    """Bytes of a limit file; `max` and version 1's largest number are None."""
    bare = text.strip()
    return int(bare) if bare.isdigit() and int(bare) < _NO_LIMIT_BYTES else None


def parse_cpu_max(text: str) -> float | None:
    """Cores of version 2's `cpu.max`, `QUOTA PERIOD` in microseconds; version 1 has a file for each."""
    match = re.fullmatch(r"(\d+) (\d+)", text.strip())
    return int(match[1]) / int(match[2]) if match and int(match[2]) else None


def parse_file_cache(memory_stat: str) -> int:
    """Bytes of `memory.stat` that the kernel returns on demand; in version 1 `total_` counts the groups below."""
    fields = dict(re.findall(r"^(\S+) (\d+)$", memory_stat, re.MULTILINE))
    prefix = "total_" if "total_inactive_file" in fields else ""
    return sum(int(fields.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """The limits that bind this process."""
    paths = parse_cgroup_paths(read_text(root / "proc/self/cgroup"))
    mounts = parse_mountinfo(read_text(root / "proc/self/mountinfo"))
    unified = _groups(root, mounts, paths, "")
    memory = [_memory(group, ("memory.max", "memory.high"), "memory.current") for group in unified]
    memory += [
        _memory(group, ("memory.limit_in_bytes",), "memory.usage_in_bytes")
        for group in _groups(root, mounts, paths, "memory")
    ]
    quotas = [parse_cpu_max(read_text(group / "cpu.max")) for group in unified]
    files = [(group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us") for group in _groups(root, mounts, paths, "cpu")]
    quotas += [parse_cpu_max(" ".join(read_text(file).strip() for file in both)) for both in files]
    cpusets = [read_text(group / "cpuset.cpus.effective") for group in unified[:1]]
    cpusets += [
        read_text(group / "cpuset.effective_cpus") or read_text(group / "cpuset.cpus")
        for group in _groups(root, mounts, paths, "cpuset")[:1]
    ]
    cores = [parse_cpu_list(text) for text in cpusets if text.strip()]
    return CgroupLimits(
        memory_bytes=_least(*(limit for limit, _ in memory)),
        available_bytes=_least(*(free for _, free in memory)),
        num_cores=_least(*quotas),
        cores=frozenset.intersection(*cores) if cores else None,
    )


def read_oom_kills(root: Path = Path("/")) -> int | None:
    """Processes of our group that the kernel's OOM killer ended; None if no file counts them.

    Version 2 counts in `memory.events`, version 1 in `memory.oom_control`, which not every kernel has for each group.
    Without either it is the whole machine's count, of /proc/vmstat, which other processes raise too.
    """
    paths = parse_cgroup_paths(read_text(root / "proc/self/cgroup"))
    mounts = parse_mountinfo(read_text(root / "proc/self/mountinfo"))
    files = [group / "memory.events" for group in _groups(root, mounts, paths, "")[:1]]
    files += [group / "memory.oom_control" for group in _groups(root, mounts, paths, "memory")[:1]]
    counts = (re.search(_OOM_KILL, read_text(path)) for path in (*files, root / "proc/vmstat"))
    return next((int(found[1]) for found in counts if found), None)


def _groups(root: Path, mounts: Sequence[Mount], paths: dict[str, str], controller: str) -> tuple[Path, ...]:
    """Our group of `controller` and those above it, the innermost first; empty if it is not mounted."""
    path = paths.get(controller)
    for mount in mounts:
        is_ours = controller in mount.super_options if controller else mount.filesystem == "cgroup2"
        if path is None or not is_ours or not mount.filesystem.startswith("cgroup"):
            continue
        top = root / mount.mount_point.lstrip("/")
        own = PurePosixPath(path)
        inner = own.relative_to(mount.root) if ".." not in own.parts and own.is_relative_to(mount.root) else None
        group = top / inner if inner is not None and (top / inner).is_dir() else top
        return (group, *(parent for parent in group.parents if parent.is_relative_to(top)))
    return ()


def _memory(group: Path, limit_names: Sequence[str], usage_name: str) -> tuple[int | None, int | None]:
    """The least of a group's limits and the free memory below it."""
    limit = _least(*(parse_limit(read_text(group / name)) for name in limit_names))
    usage = parse_limit(read_text(group / usage_name))
    if limit is None or usage is None:
        return limit, None
    used = max(0, usage - parse_file_cache(read_text(group / "memory.stat")))
    return limit, max(0, limit - used)


def read_text(path: Path) -> str:
    """The file's text; empty if it is missing or unreadable, as many under /proc and /sys are."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def locks_without_limit(status: str) -> bool:
    """True if a process may lock any amount of memory, by its `/proc/self/status`: CAP_IPC_LOCK, capabilities(7)."""
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name from /proc/meminfo; entries without a unit (huge page counts) are left out."""
    return {name: int(kib) * KIB for name, kib in re.findall(r"^(\S+):\s+(\d+) kB$", text, re.MULTILINE)}


def parse_cpuinfo(text: str) -> tuple[str | None, tuple[str, ...]]:
    """Name and precision flags from /proc/cpuinfo; ARM writes no name."""
    name = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return " ".join(name[1].split()) if name else None, tuple(flag for flag in PRECISION_FLAGS if flag in present)


def parse_cpu_list(text: str) -> frozenset[int]:
    """Processor numbers from a list such as `0-3,8`."""
    numbers: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def parse_mountinfo(text: str) -> tuple[Mount, ...]:
    """The mounts of /proc/self/mountinfo, in the order they were made."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        left, right = before.split(), after.split(" ")
        if not separator or len(left) < 6 or len(right) < 2:
            continue
        mounts.append(
            Mount(
                device=left[2],
                root=_unescape(left[3]),
                mount_point=_unescape(left[4]),
                options=tuple(left[5].split(",")),
                filesystem=right[0],
                source=_unescape(right[1]),
                super_options=tuple(right[2].split(",")) if len(right) > 2 else (),
            )
        )
    return tuple(mounts)


def is_local_disk(mount: Mount) -> bool:
    """True if a mount is a writable local file system; network, memory and boot ones are not."""
    is_boot = mount.mount_point == "/boot" or mount.mount_point.startswith(("/boot/", "/snap/"))
    return mount.filesystem in LOCAL_FILESYSTEMS and "ro" not in mount.options and not is_boot


def once_each(mounts: Sequence[Mount]) -> tuple[Mount, ...]:
    """Each file system once, at its shortest mount point: a volume may be bound to many."""
    by_source: dict[str, Mount] = {}
    for mount in sorted(mounts, key=lambda mount: (len(mount.mount_point), mount.mount_point)):
        by_source.setdefault(mount.source if mount.source.startswith("/dev/") else mount.device, mount)
    return tuple(sorted(by_source.values(), key=lambda mount: mount.mount_point))


def is_wsl(kernel_version: str) -> bool:
    """True if /proc/version (or osrelease) is that of the Windows Subsystem for Linux."""
    return "microsoft" in kernel_version.lower()


def is_internal_interface(name: str) -> bool:
    """True if a network interface only joins parts of this machine."""
    return re.fullmatch(_INTERNAL_INTERFACE, name) is not None


def parse_ethernet_speed(text: str) -> int | None:
    """Bytes per second from sysfs' `speed` in Mb/s; -1 (unknown) and 65535 from older drivers are None."""
    bare = text.strip()
    return int(bare) * 10**6 // 8 if bare.isdigit() and int(bare) not in (0, 65535) else None


def parse_infiniband_rate(text: str) -> int | None:
    """Bytes per second from sysfs' `rate`, such as `400 Gb/sec (4X NDR)`."""
    match = re.match(r"([\d.]+) Gb/sec", text.strip())
    return round(float(match[1]) * 10**9 / 8) if match else None


def slurm_environment(environment: Mapping[str, str], *, has_sbatch: bool) -> SlurmEnvironment | None:
    """The Slurm job of the environment; None on a machine without Slurm."""
    job_id = environment.get("SLURM_JOB_ID")
    if not has_sbatch and job_id is None:
        return None
    nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES") or ""
    return SlurmEnvironment(
        has_sbatch=has_sbatch,
        job_id=job_id,
        num_nodes=int(nodes) if job_id and nodes.isdigit() else None,
        node_list=environment.get("SLURM_JOB_NODELIST") if job_id else None,
    )


def slurm_memory_bytes(environment: Mapping[str, str]) -> int | None:
    """Memory of a Slurm job on this node; None outside a job and if it has the whole node (0)."""
    if "SLURM_JOB_ID" not in environment:
        return None
    per_node = environment.get("SLURM_MEM_PER_NODE", "")
    per_core = environment.get("SLURM_MEM_PER_CPU", "")
    cores = environment.get("SLURM_CPUS_ON_NODE", "")
    if per_node.isdigit():
        return int(per_node) * MIB or None
    if per_core.isdigit() and cores.isdigit():
        return int(per_core) * int(cores) * MIB or None
    return None


def slurm_num_cores(environment: Mapping[str, str]) -> int | None:
    """Processors of a Slurm job on this node; None outside a job."""
    cores = environment.get("SLURM_CPUS_ON_NODE", "")
    return int(cores) if "SLURM_JOB_ID" in environment and cores.isdigit() and int(cores) else None


def _unescape(text: str) -> str:
    r"""A path of mountinfo: blanks and backslashes are written as octal, `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
