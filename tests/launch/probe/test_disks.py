"""Free space under quotas, as the commands of each file system print it, and errors for want of it."""

import os
from pathlib import Path

import pytest

from shardwise.launch.probe import disks
from shardwise.launch.probe.host import parse_mountinfo
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.units import KIB, MIB

MOUNTS = """\
22 1 8:1 / / rw - ext4 /dev/sda1 rw
30 22 0:40 / /scratch rw - lustre 10.0.0.1@o2ib:/scratch rw
31 22 0:41 / /scratch/fast rw - gpfs fast rw
32 22 0:42 / /home rw - nfs4 nas:/export/home rw
33 22 0:43 / /home rw - nfs4 nas2:/export/home rw
34 22 0:44 / /tmp rw - tmpfs tmpfs rw
"""
SCALE = """\
mmlsquota::HEADER:version:reserved:reserved:filesystemName:quotaType:id:name:blockUsage:blockQuota:blockLimit:\
blockInDoubt:blockGrace:filesUsage:filesQuota:filesLimit:filesInDoubt:filesGrace:remarks:
mmlsquota::0:1:::fast:USR:1000:alice:1048576:4194304:5242880:0:none:400:1000:2000:0:none::
mmlsquota::0:1:::other:USR:1000:alice:1048576:1048577:1048577:0:none:400:401:401:0:none::
mmlsquota::0:1:::fast:GRP:77:theory:1048576:0:0:0:none:400:500:0:0:none::
mmlsquota::0:1:::fast:GRP:78:vision:1048576:1048577:1048577:0:none:400:401:401:0:none::
mmlsquota::0:1:::fast:FILESET:0:root:1:2:3:0:none:1:2:3:0:none::
"""


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("     /lustre  1044488  0 10485760 -  2002  0  100000  -\n", ((10485760 - 1044488) * KIB, 97998)),
        ("/a/very/long/name/of/a/file/system\n   100  0 300 -  5  0  0  -\n", (200 * KIB, None)),
        ("  /home  1500* 1000 2000 1700000000  5 10 0 0", (500 * KIB, 5)),  # over the soft limit; files have only that
        ("  /home  2500* 1000 2000 1700000000  5 0 0 0", (0, None)),
        ("  /home  1 0 0 0 1 0 0 0", (None, None)),
        ("none", None),
        ("/lustre [100] 0 300 - [5] 0 0 -", None),
        ("Unexpected quotactl error: Operation not supported by this file system", None),
    ],
)
def test_a_row_of_a_quota_is_read_as_what_is_free(text, limits):
    found = disks.parse_table(text, "your")
    assert (found and (found.free_bytes, found.free_files)) == limits


def test_a_folder_lies_in_the_lowest_mount_above_it_whose_kind_decides_if_times_of_change_are_relied_on(place):
    mounts = parse_mountinfo(MOUNTS)
    sources = {"/scratch/fast/me": "fast", "/scratch/me": "10.0.0.1@o2ib:/scratch", "/scratchy": "/dev/sda1"}
    for path, source in (sources | {"/home/me": "nas2:/export/home"}).items():
        assert disks.mount_of(Path(path), mounts).source == source
    assert disks.mount_of(Path("/x"), ()) is None
    folder, _, root = place
    for filesystem in ("ext4", "nfs4", "tmpfs", "vfat", "fuse.sshfs"):
        mounted(root, filesystem)
        assert disks.keeps_change_times([folder], root=root) is (filesystem not in ("vfat", "fuse.sshfs"))
    assert not disks.keeps_change_times([folder, root], root=root)  # of the other nothing is known


@pytest.fixture
def place(tmp_path: Path) -> tuple[Path, dict[str, str], Path]:
    """A folder, an environment whose PATH holds nothing yet, and a root whose mountinfo a test writes."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    return tmp_path / "work", {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}, tmp_path


def test_blocks_and_files_that_are_kept_for_root_are_not_free(place, monkeypatch):
    folder, environment, root = place
    found = os.statvfs_result((4096, 4096, 1000, 300, 200, 50, 40, 30, 0, 255))  # free blocks and files: of all, of us
    monkeypatch.setattr(os, "statvfs", lambda _: found)
    room = disks.read_room(folder, environment, root=root)
    assert (room.free_bytes, room.free_files) == (200 * 4096, 30)


def mounted(root: Path, filesystem: str, source: str = "/dev/x") -> str:
    """Makes the test's folder a mount of this kind; where it is."""
    point = os.path.realpath(root / "work")
    (root / "proc/self/mountinfo").write_text(f"30 1 0:40 / {point} rw - {filesystem} {source} rw\n")
    return point


def program(root: Path, name: str, script: str) -> None:
    (root / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
    (root / "bin" / name).chmod(0o755)


def test_lustre_has_quotas_of_user_group_and_project(place):
    folder, environment, root = place
    point = mounted(root, "lustre")
    answers = f"""case "$*" in
    "project -d {folder}") echo "  4711 P {folder}" ;;
    "quota -q -u {os.getuid()} {point}") echo "  {point} 100 0 300 - 5 0 50 -" ;;
    "quota -q -g {os.getegid()} {point}") echo "  {point} 100 0 0 - 5 0 0 -" ;;
    "quota -q -p 4711 {point}") echo "  {point} 100 0 200 - 5 0 0 -" ;;
    *) echo "$*" >&2; exit 9 ;;
esac"""
    program(root, "lfs", answers)
    user, group, project = disks.read_quotas(folder, environment, root=root)
    assert (user.free_bytes, user.free_files) == (200 * KIB, 45)
    assert (group.free_bytes, group.free_files) == (None, None)
    assert (project.whose, project.free_bytes) == ("the quota of project 4711", 100 * KIB)


def test_quota_covers_the_user_and_the_group_of_new_files(place):
    folder, environment, root = place
    point = mounted(root, "nfs4")
    header = "     Filesystem  blocks   quota   limit   grace   files   quota   limit   grace"
    answers = f"""case "$*" in
    "-u -w -p --show-mntpoint --hide-device -f {point}")
        printf '%s\\n' "Disk quotas for user me (uid 1):" "{header}" "{point} 1500* 1000 2000 1700000000 5 0 0 0"
        exit 1 ;;
    "-g -w -p --show-mntpoint --hide-device -f {point}")
        printf '%s\\n' "Disk quotas for group a (gid 99999):" "{header}" "{point} 1 2 3 0 5 0 0 0"
        printf '%s\\n' "Disk quotas for group b (gid {os.getegid()}):" "{header}" "{point} 1 0 0 0 5 0 9 0" ;;
    *) exit 9 ;;
esac"""
    program(root, "quota", answers)
    user, group = disks.read_quotas(folder, environment, root=root)
    assert (user.free_bytes, user.free_files, user.whose) == (500 * KIB, None, "your user's quota")
    assert (group.free_bytes, group.free_files, group.whose) == (None, 4, "your group's quota")


def test_storage_scale_is_found_by_the_name_of_its_device(place):
    folder, environment, root = place
    mounted(root, "gpfs", source="/dev/fast")
    program(root, "mmlsquota", f'[ "$*" = -Y ] && cat {root}/scale.txt')
    (root / "scale.txt").write_text(SCALE)
    assert disks.read_quotas(folder, environment, root=root)[0].free_bytes == 4096 * MIB
    user, group = disks.parse_scale(SCALE, "fast", group=77)
    assert user == disks.DiskQuota(whose="your user's quota", free_bytes=4096 * MIB, free_files=1600)
    assert group == disks.DiskQuota(whose="your group's quota", free_bytes=None, free_files=100)
    assert disks.parse_scale("", "fast", group=77) == disks.parse_scale(SCALE, "slow", group=77) == ()


@pytest.mark.parametrize(
    ("script", "timeout_s"),
    [
        (None, 60),
        ("echo 'quota: Mountpoint (or device) /x not found or has no quota enabled.' >&2; exit 1", 60),
        ("echo 'Disk quotas for user root (uid 0): none'", 60),
        ("echo garbage; printf '\\377'", 60),
        ("exec sleep 600", 0.2),
    ],
)
def test_without_output_of_the_command_no_quota_is_known(place, script, timeout_s):
    folder, environment, root = place
    mounted(root, "ext4")
    if script is not None:
        program(root, "quota", script)
    assert disks.read_quotas(folder, environment | {"PATH": f"{root}/bin"}, root=root, timeout_s=timeout_s) == ()
    mounted(root, "tmpfs")
    assert disks.read_quotas(folder, environment, root=root) == ()


def test_a_quota_bounds_the_room_and_is_named(place):
    folder, environment, root = place
    mounted(root, "ext4")
    program(root, "quota", "printf '%s\\n' 'Disk quotas for user me (uid 1):' '/here 100 0 1124 0 5 0 9 0'")
    room = disks.read_room(folder / "not" / "yet", environment, root=root)
    assert room.free_bytes == MIB and "your user's quota" in room.bytes_limit
    needed = {"what": "the data needs", "remedy": "make room", "environment": environment, "root": root}
    disks.check_room(folder, num_bytes=MIB, num_files=4, **needed)
    with pytest.raises(EnvironmentFaultError, match=r"the data needs 2 MiB.*1 MiB.*your user's quota.*make room"):
        disks.check_room(folder, num_bytes=2 * MIB, **needed)
    with pytest.raises(EnvironmentFaultError, match=r"5 inodes.*4 .*your user's quota"):
        disks.check_room(folder, num_bytes=1, num_files=5, **needed)
