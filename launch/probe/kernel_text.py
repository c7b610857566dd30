"""What the kernel's text files say of the machine around the GPUs, as values. Pure: text in, values out.

Sources: /proc/meminfo, /proc/cpuinfo, /proc/self/mountinfo, /proc/version, sysfs, and Slurm's environment variables.
`cgroup` reads the limits, `probe_host` the files. A figure that is not there is None.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.spec.hardware import SlurmEnvironment
from trainer.spec.units import KIB, MIB
from trainer.spec.value import Value

# The flags that decide a precision on a CPU, in the order they came.
PRECISION_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
LOCAL_FILESYSTEMS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "overlay"})
_CAP_IPC_LOCK = 14  # its bit among the capabilities
# Bridges and their ends inside a machine: no traffic of ours leaves through them.
_INTERNAL_INTERFACE = re.compile(
    r"lo|docker\d*|br-.*|veth.*|virbr\d*.*|cni\d*|flannel.*|cali.*|lxc.*|lxdbr\d*|tunl\d*|kube-.*"
)


class Mount(Value, frozen=True, kw_only=True):
    """A line of mountinfo."""

    device: str  # MAJOR:MINOR
    root: str  # the part of the file system that is mounted
    mount_point: str
    options: tuple[str, ...]
    filesystem: str
    source: str
    super_options: tuple[str, ...]


class Processor(Value, frozen=True, kw_only=True):
    """The CPU's name and those of its flags that decide a precision."""

    name: str | None
    flags: tuple[str, ...]


def read_text(path: Path) -> str:
    """The file's text; empty where it is missing or may not be read, as much under /proc and /sys is."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def locks_without_limit(status: str) -> bool:
    """Whether a process may lock any amount of memory, from its `/proc/self/status`: CAP_IPC_LOCK, capabilities(7)."""
    effective = next((line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")), "0")
    return bool(int(effective, 16) >> _CAP_IPC_LOCK & 1)


def parse_meminfo(text: str) -> dict[str, int]:
    """Bytes by name from /proc/meminfo; entries without a unit (huge page counts) are left out."""
    return {name: int(kib) * KIB for name, kib in re.findall(r"^(\S+):\s+(\d+) kB$", text, re.MULTILINE)}


def parse_cpuinfo(text: str) -> Processor:
    """Name and precision flags from /proc/cpuinfo; ARM writes no name."""
    name = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return Processor(
        name=" ".join(name[1].split()) if name else None,
        flags=tuple(flag for flag in PRECISION_FLAGS if flag in present),
    )


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
    """Whether a mount is a writable local file system; network, memory and boot ones are not."""
    is_boot = mount.mount_point == "/boot" or mount.mount_point.startswith(("/boot/", "/snap/"))
    return mount.filesystem in LOCAL_FILESYSTEMS and "ro" not in mount.options and not is_boot


def once_each(mounts: Sequence[Mount]) -> tuple[Mount, ...]:
    """Each file system once, at its shortest mount point: a volume may be bound to many."""
    by_source: dict[str, Mount] = {}
    for mount in sorted(mounts, key=lambda mount: (len(mount.mount_point), mount.mount_point)):
        by_source.setdefault(mount.source if mount.source.startswith("/dev/") else mount.device, mount)
    return tuple(sorted(by_source.values(), key=lambda mount: mount.mount_point))


def is_wsl(kernel_version: str) -> bool:
    """Whether /proc/version (or osrelease) is that of the Windows Subsystem for Linux."""
    return "microsoft" in kernel_version.lower()


def is_internal_interface(name: str) -> bool:
    """Whether a network interface only joins parts of this machine."""
    return _INTERNAL_INTERFACE.fullmatch(name) is not None


def parse_ethernet_speed(text: str) -> int | None:
    """Bytes per second from sysfs' `speed` in Mb/s; -1 (unknown) and 65535 from older drivers are None."""
    bare = text.strip()
    return int(bare) * 10**6 // 8 if bare.isdigit() and int(bare) not in (0, 65535) else None


def parse_infiniband_rate(text: str) -> int | None:
    """Bytes per second from sysfs' `rate`, such as `400 Gb/sec (4X NDR)`."""
    match = re.match(r"([\d.]+) Gb/sec", text.strip())
    return round(float(match[1]) * 10**9 / 8) if match else None


def slurm_environment(environment: Mapping[str, str], *, has_sbatch: bool) -> SlurmEnvironment | None:
    """Where Slurm says we are; None on a machine without it."""
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
    """The memory a Slurm job was given on this node; None outside a job and where it has the whole node (0)."""
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
    """The processors a Slurm job was given on this node; None outside a job."""
    cores = environment.get("SLURM_CPUS_ON_NODE", "")
    return int(cores) if "SLURM_JOB_ID" in environment and cores.isdigit() and int(cores) else None


def _unescape(text: str) -> str:
    r"""A path of mountinfo: blanks and backslashes are written as octal, `\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
