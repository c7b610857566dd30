"""Space that a user may still write below a folder: the free space of the file system, less what quotas deny.

A quota is read with the command of its file system:

    lustre            lfs quota -q -u UID | -g GID | -p PROJECT MOUNT
    gpfs              mmlsquota -Y                               (IBM Storage Scale)
    ext4, xfs, nfs    quota -w -p --show-mntpoint --hide-device -f MOUNT

If the command is missing, fails or exceeds TIMEOUT_S, no quota is known. All three count space in KiB. A soft limit
counts if there is no hard one: it may be exceeded for a week, and a run may take longer.
"""

import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.launch.probe.host import LOCAL_FILESYSTEMS, Mount, parse_mountinfo, read_text
from shardwise.launch.probe.program import run_program
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.units import KIB, format_bytes
from shardwise.trainer.spec.value import Value

TIMEOUT_S = 5.0
_SCALE_FOLDER = "/usr/lpp/mmfs/bin"  # of mmlsquota, which is seldom on PATH
_READ_BY_QUOTA = frozenset({"ext2", "ext3", "ext4", "xfs", "f2fs", "jfs", "reiserfs", "nfs", "nfs4", "ocfs2", "gfs2"})
_KEEPS_CHANGE_TIMES = LOCAL_FILESYSTEMS | {
    "beegfs", "ceph", "gfs2", "gpfs", "lustre", "nfs", "nfs4", "ocfs2", "tmpfs", "virtiofs",
}  # fmt: skip
_USED = re.compile(r"\d+\*?")  # the star marks what is over its soft limit


class DiskRoom(NamedTuple):
    """Free bytes and files, each with the limit that applies."""

    free_bytes: int
    free_files: int | None  # None: the file system counts none
    bytes_limit: str  # `are free`, `are left of your user's quota`
    files_limit: str


class DiskQuota(Value, frozen=True, kw_only=True):
    """Free space of one quota; None if it sets no limit."""

    whose: str  # `your user's quota`
    free_bytes: int | None
    free_files: int | None


def read_room(folder: Path, environment: Mapping[str, str] = os.environ, *, root: Path = Path("/")) -> DiskRoom:
    """The room below a folder, which need not exist yet."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    system = os.statvfs(there)
    num_bytes = [(system.f_bavail * system.f_frsize, "are free")]
    files = [(system.f_favail, "are free")] if system.f_files > 0 else []
    for quota in read_quotas(there, environment, root=root):
        limit = f"are left of {quota.whose}"
        num_bytes += [(quota.free_bytes, limit)] if quota.free_bytes is not None else []
        files += [(quota.free_files, limit)] if quota.free_files is not None else []
    least_bytes, least_files = min(num_bytes), min(files, default=(None, "are free"))
    return DiskRoom(least_bytes[0], least_files[0], least_bytes[1], least_files[1])


def check_room(
    folder: Path,
    *,
    num_bytes: int,
    num_files: int = 0,
    what: str,
    remedy: str,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> None:
    """Raises EnvironmentFaultError with both numbers if `what` needs more bytes or inodes than there are."""
    room = read_room(folder, environment, root=root)
    if room.free_bytes < num_bytes:
        raise EnvironmentFaultError(
            f"{folder}: {what} {format_bytes(num_bytes)}, {format_bytes(room.free_bytes)} {room.bytes_limit}; {remedy}"
        )
    if room.free_files is not None and room.free_files < num_files:
        raise EnvironmentFaultError(
            f"{folder}: {what} {num_files} inodes, {room.free_files} {room.files_limit}; {remedy}"
        )


def read_quotas(
    folder: Path, environment: Mapping[str, str] = os.environ, *, root: Path = Path("/"), timeout_s: float = TIMEOUT_S
) -> tuple[DiskQuota, ...]:
    """The quotas on what this user writes below a folder that exists."""
    mount = mount_of(folder, parse_mountinfo(read_text(root / "proc/self/mountinfo")))
    if mount is None:
        return ()
    if mount.filesystem == "lustre":
        return tuple(_read_lustre(folder, mount, environment, timeout_s))
    if mount.filesystem == "gpfs":
        folders = f"{environment.get('PATH', '')}:{_SCALE_FOLDER}"
        text = run_program(
            ["mmlsquota", "-Y"], environment={**environment, "PATH": folders}, timeout_s=timeout_s
        ).output
        return parse_scale(text, Path(mount.source).name, group=_group_of(folder))
    if mount.filesystem in _READ_BY_QUOTA:
        return tuple(_read_linux(folder, mount, environment, timeout_s))
    return ()


def mount_of(folder: Path, mounts: Sequence[Mount]) -> Mount | None:
    """The mount that a folder lies in: of those above it the lowest, and of several there the last."""
    path = folder.resolve()
    above = [mount for mount in mounts if path.is_relative_to(mount.mount_point)]
    return max(enumerate(above), key=lambda pair: (len(pair[1].mount_point), pair[0]), default=(0, None))[1]


def keeps_change_times(folders: Collection[Path], *, root: Path = Path("/")) -> bool:
    """True if the file systems of all folders store the time of each change (ctime) as the kernel saw it.

    FAT stores none, and a FUSE file system may repeat the time of writing, which programs can set.
    """
    mounts = parse_mountinfo(read_text(root / "proc/self/mountinfo"))
    found = [mount_of(folder, mounts) for folder in folders]
    return all(mount is not None and mount.filesystem in _KEEPS_CHANGE_TIMES for mount in found)


def parse_table(text: str, whose: str) -> DiskQuota | None:
    """A row of `lfs quota` or of `quota`: used, soft, hard, grace of space, then of files; None without such a row.

    The name of a file system may be on a line of its own before it. Lustre puts unknown values in brackets.
    """
    cells = text.split()
    for at in range(len(cells) - 7):
        used, soft, hard, _, used_files, soft_files, hard_files, _ = cells[at : at + 8]
        limits = (soft, hard, soft_files, hard_files)
        if _USED.fullmatch(used) and _USED.fullmatch(used_files) and all(limit.isdigit() for limit in limits):
            left = _left(used, soft, hard)
            return DiskQuota(
                whose=whose,
                free_bytes=None if left is None else left * KIB,
                free_files=_left(used_files, soft_files, hard_files),
            )
    return None


def parse_scale(text: str, filesystem: str, *, group: int) -> tuple[DiskQuota, ...]:
    """`mmlsquota -Y`: columns by the names of its header, for a user and a group."""
    names: list[str] = []
    found = []
    for line in text.splitlines():
        fields = line.split(":")
        if len(fields) > 2 and fields[2] == "HEADER":
            names = fields
            continue
        row = dict(zip(names, fields, strict=False))
        kind = {"USR": "user", "GRP": "group"}.get(row.get("quotaType", ""))
        if kind is None or row.get("filesystemName") != filesystem or (kind == "group" and row.get("id") != str(group)):
            continue
        columns = [f"{what}{limit}" for what in ("block", "files") for limit in ("Usage", "Quota", "Limit")]
        values = [row.get(column, "") for column in columns]
        if all(value.isdigit() for value in values):
            table = " ".join([*values[:3], "-", *values[3:], "-"])
            quota = parse_table(table, f"your {kind}'s quota")
            found += [quota] if quota is not None else []
    return tuple(found)


def _read_lustre(folder: Path, mount: Mount, environment: Mapping[str, str], timeout_s: float) -> Iterator[DiskQuota]:
    quotas = [("-u", os.getuid(), "your user's quota"), ("-g", _group_of(folder), "your group's quota")]
    project = run_program(
        ["lfs", "project", "-d", str(folder)], environment=environment, timeout_s=timeout_s
    ).output.split()
    if project and project[0].isdigit() and project[0] != "0":
        quotas.append(("-p", int(project[0]), f"the quota of project {project[0]}"))
    for option, number, whose in quotas:
        argv = ["lfs", "quota", "-q", option, str(number), mount.mount_point]
        text = run_program(argv, environment=environment, timeout_s=timeout_s).output
        quota = parse_table(text, whose)
        if quota is not None:
            yield quota


def _read_linux(folder: Path, mount: Mount, environment: Mapping[str, str], timeout_s: float) -> Iterator[DiskQuota]:
    mount_options = ["-w", "-p", "--show-mntpoint", "--hide-device", "-f", mount.mount_point]
    for option, whose in (("-u", "your user's quota"), ("-g", "your group's quota")):
        text = run_program(["quota", option, *mount_options], environment=environment, timeout_s=timeout_s).output
        sections = text.split("Disk quotas for ")[1:]
        if option == "-g":
            sections = [section for section in sections if f"(gid {_group_of(folder)})" in section.partition("\n")[0]]
        for section in sections:
            quota = parse_table(section.partition("\n")[2], whose)
            if quota is not None:
                yield quota


def _group_of(folder: Path) -> int:
    """The group of new files in a folder: the folder's own if its set-group-ID bit is set."""
    found = folder.stat()
    return found.st_gid if found.st_mode & stat.S_ISGID else os.getegid()


def _left(used: str, soft: str, hard: str) -> int | None:
    limit = int(hard) or int(soft)
    return max(0, limit - int(used.rstrip("*"))) if limit else None
