"""Parsers of the kernel's files, cgroup limits of real layouts, and the host as a whole."""

import os

import pytest
from captured_machine import Machine, captured, lay_out

from shardwise.launch.probe import host as probe
from shardwise.trainer.spec import host_ram
from shardwise.trainer.spec.hardware import SlurmEnvironment
from shardwise.trainer.spec.network import interface_address
from shardwise.trainer.spec.units import GIB, KIB, MIB

V2_MOUNT = "29 22 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = "".join(
    f"{number} 31 0:{number} / /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}\n"
    for number, name in enumerate(("memory", "cpu,cpuacct", "cpuset"), 32)
)
NO_LIMIT_V1 = "9223372036854771712\n"
FILE_CACHE_V1 = "cache 9\ninactive_file 1\nactive_file 1\ntotal_inactive_file 30\ntotal_active_file 12\n"
BOTH_MOUNTS = (
    "32 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "38 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)


def limits_of(folder, groups, mounts, files):
    """Of a process in these groups; `files` below /sys/fs/cgroup by the beginning and the end of their names."""
    machine = Machine(folder)
    machine.write("proc/self/cgroup", groups)
    machine.write("proc/self/mountinfo", mounts)
    for begin, contents in files.items():
        for end, content in contents.items():
            machine.write(f"sys/fs/cgroup/{begin}.{end}", f"{content}\n")
    return probe.read_cgroup_limits(machine.root)


def test_a_process_that_may_lock_memory_has_no_limit(tmp_path, monkeypatch):
    """Capabilities: none, the bit alone, what Docker gives a container, and root's."""
    machine = Machine(tmp_path)
    monkeypatch.setattr("resource.getrlimit", lambda _: (8 * MIB, 8 * MIB))
    free = {"0000000000000000": False, "0000000000004000": True, "00000000a80425fb": False, "000001ffffffffff": True}
    for effective, is_free in free.items():
        machine.write("proc/self/status", f"Name:\tpython\nCapPrm:\t000001ffffffffff\nCapEff:\t{effective}\n")
        host = probe.read_host(root=machine.root, environment={})
        assert host.memlock_limit_bytes == (None if is_free else 8 * MIB)


def test_cpuinfo_gives_the_name_and_the_flags_that_decide_a_precision():
    for machine, name, flags in (
        ("no_gpu_laptop", "Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz", "avx2"),
        ("nvlink_8x_h100", "Intel(R) Xeon(R) Platinum 8480C", "avx2 avx512f avx512_bf16 avx512_fp16 amx_bf16"),
        ("unified_gb10", None, ""),
    ):
        assert probe.parse_cpuinfo(captured(machine, "cpuinfo")) == (name, tuple(flags.split()))


@pytest.mark.parametrize(
    ("parse", "value_by_text"),
    [
        (probe.parse_cpu_list, {"0-3,8\n": {0, 1, 2, 3, 8}, "5": {5}, "": set(), "0-1,4-5": {0, 1, 4, 5}}),
        (probe.parse_ethernet_speed, {"10000\n": 1_250_000_000, "-1\n": None, "": None, "65535": None}),  # bytes
        (probe.parse_infiniband_rate, {"400 Gb/sec (4X NDR)\n": 50 * 10**9, "2.5 Gb/sec (1X)": 312_500_000, "": None}),
        (probe.parse_limit, {"max\n": None, "": None, NO_LIMIT_V1: None, "9223372036854775807": None, "1024\n": 1024}),
        (probe.parse_cpu_max, {"max 100000\n": None, "150000 100000\n": 1.5, "": None, "1 0": None, "-1 100000": None}),
        (probe.parse_file_cache, {"anon 100\ninactive_file 30\nactive_file 12\n": 42, FILE_CACHE_V1: 42, "": 0}),
        (probe.parse_mountinfo, {"": (), "garbage\n": (), "1 2 3 - ext4\n": ()}),
    ],
    ids=["cpu list", "ethernet", "infiniband", "limit", "cpu.max", "file cache", "no mount"],
)
def test_files_of_the_kernel_are_read_as_figures(parse, value_by_text):
    assert {text: parse(text) for text in value_by_text} == value_by_text


SAME_NUMBER = """\
1 0 0:50 / /a rw - overlay overlay rw
2 0 0:51 / /b rw - overlay overlay rw
3 0 0:60 /x /c rw - btrfs /dev/sdb rw
4 0 0:61 /y /d/e rw - btrfs /dev/sdb rw
5 0 8:1 / /data\\040two rw - ext4 /dev/sdc rw
6 0 8:2 / /cdrom ro,relatime - ext4 /dev/sdd ro
"""


@pytest.mark.parametrize(
    ("text", "points"),
    [
        (captured("rtx4090_desktop", "mountinfo"), ["/", "/mnt/big disk"]),
        (captured("wsl_rtx3080", "mountinfo"), ["/", "/usr/lib/modules/6.6.87.2-microsoft-standard-WSL2"]),
        (SAME_NUMBER, ["/a", "/b", "/c", "/data two"]),  # by its device, else by its number
    ],
)
def test_disks_are_local_writable_and_each_once(text, points):
    disks = probe.once_each([mount for mount in probe.parse_mountinfo(text) if probe.is_local_disk(mount)])
    assert [disk.mount_point for disk in disks] == points


@pytest.mark.parametrize(
    ("environment", "memory", "cores"),
    [
        ({"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": "65536", "SLURM_CPUS_ON_NODE": "8"}, 64 * GIB, 8),
        ({"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": "0"}, None, None),  # the whole node
        ({"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "4000", "SLURM_CPUS_ON_NODE": "8"}, 32000 * MIB, 8),
        ({"SLURM_JOB_ID": "1", "SLURM_MEM_PER_CPU": "4000"}, None, None),
        ({"SLURM_MEM_PER_NODE": "65536", "SLURM_CPUS_ON_NODE": "8"}, None, None),  # left over, no job
    ],
)
def test_slurm_reports_the_memory_and_cores_of_a_job(environment, memory, cores):
    assert probe.slurm_memory_bytes(environment) == memory
    assert probe.slurm_num_cores(environment) == cores


@pytest.mark.parametrize(
    ("path", "group", "files", "expected"),
    [
        ("/job", "job/", {"max": 8 * GIB, "high": 6 * GIB, "current": 0}, (6 * GIB, 6 * GIB)),
        ("/job", "job/", {"high": GIB, "current": 2 * GIB}, (GIB, 0)),
        ("/job", "job/", {"max": GIB}, (GIB, None)),
        ("/../../elsewhere", "", {"max": 4 * GIB, "current": 0}, (4 * GIB, 4 * GIB)),
        ("/missing", "", {"max": 4 * GIB, "current": 0}, (4 * GIB, 4 * GIB)),
    ],
    ids=["throttled", "over its limit", "use unknown", "outside the visible tree", "missing"],
)
def test_the_memory_of_a_group_is_bounded_by_each_of_its_limits(tmp_path, path, group, files, expected):
    limits = limits_of(tmp_path, f"0::{path}\n", V2_MOUNT, {f"{group}memory": files})
    assert (limits.memory_bytes, limits.available_bytes) == expected


POD, STEP = "kubepods.slice/pod7.slice", "slurm/uid_1000/job_42/step_0"
CGROUPS = {
    "a container with its own namespace sees its limits at the top": (
        "0::/\n", V2_MOUNT,
        {
            "memory": {
                "max": 8 * GIB, "current": 3 * GIB, "stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB}",
            },
            "cpu": {"max": "250000 100000"}, "cpuset.cpus": {"effective": "0-3"},
        },
        (8 * GIB, 7 * GIB, 2.5, range(4)),
    ),
    "the tightest of nested groups binds": (
        f"0::/{POD}/cri-1.scope\n", V2_MOUNT,
        {
            f"{POD}/cri-1.scope/memory": {"max": "max"}, f"{POD}/cri-1.scope/cpu": {"max": "400000 100000"},
            f"{POD}/cri-1.scope/cpuset.cpus": {"effective": "4-7"}, f"{POD}/cpu": {"max": "200000 100000"},
            f"{POD}/memory": {"max": 16 * GIB, "current": GIB},
            "kubepods.slice/memory": {"max": 60 * GIB, "current": 50 * GIB},  # the neighbours have filled it
        },
        (16 * GIB, 10 * GIB, 2, range(4, 8)),
    ),
    "Slurm on version 1 limits the step": (
        f"5:memory:/{STEP}\n4:cpu,cpuacct:/{STEP}\n3:cpuset:/{STEP}\n1:name=systemd:/slurm\n", V1_MOUNTS,
        {
            f"memory/{STEP}/memory": {
                "limit_in_bytes": 32 * GIB, "usage_in_bytes": 4 * GIB, "stat": f"total_inactive_file {GIB}",
            },
            f"memory/{STEP[:-7]}/memory": {"limit_in_bytes": 33 * GIB, "usage_in_bytes": 4 * GIB},
            "memory/memory": {"limit_in_bytes": NO_LIMIT_V1.strip()},
            f"cpu,cpuacct/{STEP}/cpu": {"cfs_quota_us": 250000, "cfs_period_us": 100000},
            f"cpuset/{STEP}/cpuset": {"cpus": "2-5"},
        },
        (32 * GIB, 29 * GIB, 2.5, range(2, 6)),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("groups", "mounts", "files", "expected"), CGROUPS.values(), ids=CGROUPS)
def test_limits_are_those_of_the_groups_of_a_process(tmp_path, groups, mounts, files, expected):
    found = limits_of(tmp_path, groups, mounts, files)
    assert (found.memory_bytes, found.available_bytes, found.num_cores, found.cores) == (*expected[:3], {*expected[3]})


@pytest.mark.parametrize(
    ("path", "files", "limits"),
    [
        ("/docker/6f1e", {"": (2 * GIB, GIB)}, (2 * GIB, GIB)),
        ("/docker/6f1e/inner", {"inner/": (GIB, 0), "": (2 * GIB, 0)}, (GIB, GIB)),
    ],
)
def test_a_container_on_version_1_sees_its_group_as_the_top_of_the_mount(tmp_path, path, files, limits):
    """The path in /proc/self/cgroup is the host's; the mount shows the container's part of the tree."""
    mounts = "32 31 0:32 /docker/6f1e /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory\n"
    groups = {
        f"memory/{group}memory": {"limit_in_bytes": limit, "usage_in_bytes": usage}
        for group, (limit, usage) in files.items()
    }
    found = limits_of(tmp_path, f"5:memory:{path}\n", mounts, groups)
    assert (found.memory_bytes, found.available_bytes) == limits


@pytest.mark.parametrize(
    ("affinity", "limits", "slurm", "cores"),
    [
        (range(16), probe.CgroupLimits(), None, 16),
        (range(16), probe.CgroupLimits(num_cores=2.5), None, 2),
        (range(16), probe.CgroupLimits(num_cores=0.5), None, 1),
        (range(16), probe.CgroupLimits(cores=frozenset({0, 1, 99})), None, 2),
        (range(4), probe.CgroupLimits(cores=frozenset({98, 99})), None, 4),  # another namespace's numbers
        (range(16), probe.CgroupLimits(num_cores=8), 4, 4),
        ([3], probe.CgroupLimits(num_cores=8), None, 1),
    ],
)
def test_cores_are_the_least_of_affinity_cpuset_quota_and_slurm(affinity, limits, slurm, cores):
    assert probe.count_cores(set(affinity), limits, slurm) == cores


def test_the_memory_of_the_host_is_the_cgroups_or_the_grant_of_slurm_within_the_machine(tmp_path):
    machine = lay_out(tmp_path, "rtx4090_desktop")
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("sys/fs/cgroup/job/memory.max", f"{16 * GIB}\n")
    machine.write("sys/fs/cgroup/job/memory.current", f"{2 * GIB}\n")
    host = probe.read_host(root=machine.root, environment=machine.environment)
    assert (host.ram_bytes, host.ram_available_bytes) == (16 * GIB, 14 * GIB)
    assert host.pinned_limit_bytes == 16 * GIB
    free = probe.read_host(root=lay_out(tmp_path / "free", "no_gpu_laptop").root, environment={})
    assert (free.ram_bytes, free.ram_available_bytes) == (7973604 * KIB, 3310188 * KIB)
    assert free.slurm is None and not free.is_wsl
    wsl = probe.read_host(root=lay_out(tmp_path / "wsl", "wsl_rtx3080").root, environment={})
    assert wsl.is_wsl and wsl.pinned_limit_bytes == 16298788 * KIB // 2
    in_job = probe.read_host(root=machine.root, environment={"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": "8192"})
    assert (in_job.ram_bytes, in_job.ram_available_bytes) == (8 * GIB, 8 * GIB)
    assert host_ram.usable_ram(host) == 14 * GIB, "a grant is what it is"
    assert host_ram.usable_ram(in_job) == host_ram.pinnable_ram(in_job) == 8 * GIB
    assert host_ram.usable_ram(free) == 3310188 * KIB * 15 // 16, "of what is measured, what the system spares"
    machine = lay_out(tmp_path / "whole", "rtx4090_desktop")
    alone = probe.read_host(root=machine.root, environment={})
    job = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": f"{alone.ram_bytes // MIB - 1}"}
    granted = probe.read_host(root=machine.root, environment=job)
    assert host_ram.usable_ram(granted) == host_ram.usable_ram(alone) < alone.ram_available_bytes, "more than is left"
    assert host_ram.pinnable_ram(granted) == int(0.9 * alone.ram_bytes)


@pytest.mark.parametrize(
    ("configuration", "variable", "expected"),
    [
        (None, None, None),  # Debian's package is installed, without a cluster
        ("root/etc/slurm/slurm.conf", None, SlurmEnvironment(has_sbatch=True)),
        ("root/etc/slurm-llnl/slurm.conf", None, SlurmEnvironment(has_sbatch=True)),
        ("root/run/slurm/conf/slurm.conf", None, SlurmEnvironment(has_sbatch=True)),
        ("etc/slurm.conf", None, SlurmEnvironment(has_sbatch=True)),  # next to the bin folder of sbatch
        ("elsewhere.conf", "elsewhere.conf", SlurmEnvironment(has_sbatch=True)),
        ("root/etc/slurm/slurm.conf", "missing.conf", None),  # Slurm reads this one alone
    ],
)
def test_a_login_node_is_known_by_sbatch_and_a_cluster(tmp_path, configuration, variable, expected):
    machine = Machine(tmp_path)
    (machine.programs / "sbatch").write_text("#!/bin/sh\n")
    (machine.programs / "sbatch").chmod(0o755)
    if configuration is not None:
        machine.write(f"../{configuration}", "ClusterName=test\n")
    environment = machine.environment
    if variable is not None:
        environment["SLURM_CONF"] = str(tmp_path / variable)
    assert probe.read_host(root=machine.root, environment=environment).slurm == expected


@pytest.mark.parametrize(
    ("files", "kills"),
    [
        ({"sys/fs/cgroup/memory/a/memory.oom_control": "under_oom 0\noom_kill 3\n"}, 3),
        ({"sys/fs/cgroup/unified/b/memory.events": "oom 5\noom_kill 2\noom_group_kill 0\n"}, 2),
        ({"sys/fs/cgroup/memory/memory.oom_control": "oom_kill 9\n"}, 7),  # of the group above: not ours
        ({}, 7),
    ],
)
def test_kills_are_those_of_our_group_else_of_the_machine(tmp_path, files, kills):
    machine = Machine(tmp_path)
    machine.write("proc/self/cgroup", "4:memory:/a\n0::/b\n")
    machine.write("proc/self/mountinfo", BOTH_MOUNTS)
    machine.write("proc/vmstat", "pgfault 1\noom_kill 7\n")
    for group in ("memory/a", "unified/b"):
        (machine.root / "sys/fs/cgroup" / group).mkdir(parents=True)
    for path, text in files.items():
        machine.write(path, text)
    assert probe.read_oom_kills(machine.root) == kills
    assert probe.read_oom_kills(tmp_path / "nowhere") is None


def test_a_machine_without_kernel_files_has_unknown_figures_and_this_one_is_read(tmp_path):
    host = probe.read_host(root=Machine(tmp_path).root, environment={})
    assert (host.cpu_name, host.ram_bytes, host.ram_available_bytes, host.pinned_limit_bytes) == (None,) * 4
    assert (host.shm_bytes, host.disks, host.interfaces, host.cpu_flags) == (None, (), (), ())
    here = probe.read_host()
    assert here.ram_bytes is not None and here.ram_available_bytes is not None and here.num_cores is not None
    assert 0 < here.ram_available_bytes <= here.ram_bytes and 1 <= here.num_cores <= len(os.sched_getaffinity(0))
    assert interface_address("lo") == "127.0.0.1" and probe.interface_of("127.0.0.1") == "lo"
    assert interface_address("nosuch0") is probe.interface_of("192.0.2.1") is None


def test_disks_have_their_space_and_kind(tmp_path):
    """A partition is of its disk's kind, a btrfs volume is found by its device, a file bound from a disk is none."""
    machine = lay_out(tmp_path, "rtx4090_desktop")
    (machine.root / "mnt/big disk").mkdir(parents=True)
    machine.write("sys/devices/sda/queue/rotational", "1\n")
    (machine.root / "sys/devices/sda/sda2").mkdir()
    machine.write("sys/dev/block/259:5/unused", "")
    (machine.root / "sys/dev/block/259:2").symlink_to(machine.root / "sys/devices/sda/sda2")
    root, big = probe.read_host(root=machine.root, environment={}).disks
    assert (root.path, root.filesystem, root.is_rotational) == ("/", "ext4", True)
    assert (big.path, big.is_rotational) == ("/mnt/big disk", None)
    assert 0 < root.free_bytes <= root.total_bytes
    laptop = lay_out(tmp_path / "laptop", "no_gpu_laptop")
    laptop.write("sys/class/block/luks-3f2a/queue/rotational", "0\n")
    assert probe.read_host(root=laptop.root, environment={}).disks[0].is_rotational is False
    container = Machine(tmp_path / "container")
    container.write("etc/hosts", "")
    (container.root / "data/scratch").mkdir(parents=True)
    bound = "50 40 8:1 /var/x/hosts /etc/hosts rw - ext4 /dev/sda1 rw\n"
    container.write("proc/self/mountinfo", f"{bound}51 40 8:1 /scratch /data/scratch rw - ext4 /dev/sda1 rw\n")
    assert [disk.path for disk in probe.read_host(root=container.root, environment={}).disks] == ["/data/scratch"]


def test_interfaces_that_are_up_are_listed_with_infiniband_ports(tmp_path):
    machine = Machine(tmp_path)
    internal = ("lo", "docker0", "br-12ab", "veth1234", "virbr0", "cni0")
    others = (("br0", "down", "25000", "1"), ("eno7", "up", "25000", "1"), ("ib7", "up", "400000", "32"))
    for name, state, speed, kind in (*((name, "up", "10000", "1") for name in internal), *others):
        for file, text in (("operstate", state), ("speed", speed), ("type", kind)):
            machine.write(f"sys/class/net/{name}/{file}", f"{text}\n")
    ports = (("1", "4: ACTIVE", "InfiniBand"), ("2", "1: DOWN", "InfiniBand"), ("3", "4: ACTIVE", "Ethernet"))
    for port, state, layer in ports:
        for file, text in (("state", state), ("link_layer", layer), ("rate", "400 Gb/sec (4X NDR)")):
            machine.write(f"sys/class/infiniband/mlx5_0/ports/{port}/{file}", f"{text}\n")
    interfaces = probe.read_host(root=machine.root, environment={}).interfaces
    expected = [("eno7", 3_125_000_000), ("ib7", None), ("mlx5_0:1", 50_000_000_000)]
    assert [(one.name, one.speed_bytes_per_s) for one in interfaces] == expected
    assert not any(map(probe.is_internal_interface, ("eth0", "bond0", "ib0", "enp5s0", "br0", "wlan0")))
