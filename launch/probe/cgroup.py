"""The memory and the cores that control groups grant to this process, version 1, version 2 or both at once.

A group's limit binds everything below it, so each limit is the least on the way from our own group up to the highest
that is visible. Page cache counts as used but the kernel gives it back on demand: what is free of a group is its limit
less its use without the file cache. In a container the path of /proc/self/cgroup may be the host's while the mount
shows only a part of the tree; the mount's root says which (cgroups(7), cgroup_namespaces(7)).
"""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from launch.probe.kernel_text import Mount, parse_cpu_list, parse_mountinfo, read_text
from trainer.spec.value import Value

# Version 1 writes "no limit" as the largest page-aligned number; nothing real comes near it.
_NO_LIMIT_BYTES = 2**60


class CgroupLimits(Value, frozen=True, kw_only=True):
    """What is granted; None: no limit is set."""

    memory_bytes: int | None = None
    available_bytes: int | None = None
    num_cores: float | None = None  # CPU time a second, from the quota
    cores: frozenset[int] | None = None  # from the cpuset


def parse_cgroup_paths(text: str) -> dict[str, str]:
    """Our group by controller, from /proc/self/cgroup; version 2 stands under the empty name."""
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
    """Cores of version 2's `cpu.max`, `QUOTA PERIOD` in microseconds."""
    match = re.fullmatch(r"(\d+) (\d+)", text.strip())
    return int(match[1]) / int(match[2]) if match and int(match[2]) else None


def parse_quota(quota: str, period: str) -> float | None:
    """Cores of version 1's `cpu.cfs_quota_us` (-1: none) and `cpu.cfs_period_us`."""
    return parse_cpu_max(f"{quota.strip()} {period.strip()}")


def parse_file_cache(memory_stat: str) -> int:
    """Bytes of `memory.stat` that the kernel gives back on demand; in version 1 `total_` counts the groups below."""
    fields = dict(re.findall(r"^(\S+) (\d+)$", memory_stat, re.MULTILINE))
    prefix = "total_" if "total_inactive_file" in fields else ""
    return sum(int(fields.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """The limits that bind this process."""
    paths = parse_cgroup_paths(read_text(root / "proc/self/cgroup"))
    mounts = parse_mountinfo(read_text(root / "proc/self/mountinfo"))
    unified = _groups(root, mounts, paths, "")
    memory = [_memory_v2(group) for group in unified] + [_memory_v1(g) for g in _groups(root, mounts, paths, "memory")]
    quotas = [parse_cpu_max(read_text(group / "cpu.max")) for group in unified]
    quotas += [
        parse_quota(read_text(group / "cpu.cfs_quota_us"), read_text(group / "cpu.cfs_period_us"))
        for group in _groups(root, mounts, paths, "cpu")
    ]
    cpusets = [read_text(group / "cpuset.cpus.effective") for group in unified[:1]]
    cpusets += [_cpuset_v1(group) for group in _groups(root, mounts, paths, "cpuset")[:1]]
    cores = [parse_cpu_list(text) for text in cpusets if text.strip()]
    return CgroupLimits(
        memory_bytes=min((limit for limit, _ in memory if limit is not None), default=None),
        available_bytes=min((free for _, free in memory if free is not None), default=None),
        num_cores=min((quota for quota in quotas if quota is not None), default=None),
        cores=frozenset.intersection(*cores) if cores else None,
    )


def read_oom_kills(root: Path = Path("/")) -> int | None:
    """Processes of our group that the kernel ended for want of memory; None where nothing counts them.

    Version 2 counts in `memory.events`, version 1 in `memory.oom_control`, which not every kernel has for each group.
    Without either it is the whole machine's count, of /proc/vmstat, which a neighbour may raise too.
    """
    paths = parse_cgroup_paths(read_text(root / "proc/self/cgroup"))
    mounts = parse_mountinfo(read_text(root / "proc/self/mountinfo"))
    files = [group / "memory.events" for group in _groups(root, mounts, paths, "")[:1]]
    files += [group / "memory.oom_control" for group in _groups(root, mounts, paths, "memory")[:1]]
    counts = (_OOM_KILL.search(read_text(path)) for path in (*files, root / "proc/vmstat"))
    return next((int(found[1]) for found in counts if found), None)


_OOM_KILL = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def _groups(root: Path, mounts: Sequence[Mount], paths: dict[str, str], controller: str) -> tuple[Path, ...]:
    """Our group of `controller` and those above it, the innermost first; empty where it is not mounted."""
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


def _memory_v2(group: Path) -> tuple[int | None, int | None]:
    limits = [parse_limit(read_text(group / name)) for name in ("memory.max", "memory.high")]
    return _with_headroom([limit for limit in limits if limit is not None], group, "memory.current")


def _memory_v1(group: Path) -> tuple[int | None, int | None]:
    limit = parse_limit(read_text(group / "memory.limit_in_bytes"))
    return _with_headroom([] if limit is None else [limit], group, "memory.usage_in_bytes")


def _with_headroom(limits: Sequence[int], group: Path, usage_name: str) -> tuple[int | None, int | None]:
    """The least of a group's limits and what is free below it."""
    if not limits:
        return None, None
    limit = min(limits)
    usage = parse_limit(read_text(group / usage_name))
    if usage is None:
        return limit, None
    held = max(0, usage - parse_file_cache(read_text(group / "memory.stat")))
    return limit, max(0, limit - held)


def _cpuset_v1(group: Path) -> str:
    return read_text(group / "cpuset.effective_cpus") or read_text(group / "cpuset.cpus")
