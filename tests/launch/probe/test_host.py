"""Parsers of the kernel's files, cgroup limits of real layouts, and the host as a whole."""

import os

import pytest
from captured_machine import MACHINES, Machine, captured, lay_out

from shardwise.launch.probe.host import (
    CgroupLimits,
    count_cores,
    interface_address,
    is_internal_interface,
    is_local_disk,
    is_wsl,
    locks_without_limit,
    once_each,
    parse_cpu_list,
    parse_cpu_max,
    parse_cpuinfo,
    parse_ethernet_speed,
    parse_file_cache,
    parse_infiniband_rate,
    parse_limit,
    parse_meminfo,
    parse_mountinfo,
    parse_quota,
    read_cgroup_limits,
    read_host,
    read_oom_kills,
    read_text,
    slurm_environment,
    slurm_memory_bytes,
    slurm_num_cores,
)
from shardwise.trainer.spec.hardware import SlurmEnvironment
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


def v2_machine(folder, path, groups):
    machine = Machine(folder)
    machine.write("proc/self/cgroup", f"0::{path}\n")
    machine.write("proc/self/mountinfo", V2_MOUNT)
    for group, files in groups.items():
        for name, text in files.items():
            machine.write(f"sys/fs/cgroup{group}/{name}", text)
    return read_cgroup_limits(machine.root)


def v1_machine(folder, path, groups, mounts=V1_MOUNTS):
    machine = Machine(folder)
    machine.write(
        "proc/self/cgroup", f"5:memory:{path}\n4:cpu,cpuacct:{path}\n3:cpuset:{path}\n1:name=systemd:{path}\n"
    )
    machine.write("proc/self/mountinfo", mounts)
    for file, text in groups.items():
        machine.write(f"sys/fs/cgroup/{file}", text)
    return read_cgroup_limits(machine.root)


@pytest.mark.parametrize(
    ("effective", "is_free"),
    [("0000000000000000", False), ("0000000000004000", True), ("00000000a80425fb", False), ("000001ffffffffff", True)],
)
def test_a_process_that_may_lock_memory_has_no_limit(tmp_path, monkeypatch, effective, is_free):
    """None, the bit alone, what Docker leaves a container, and root's."""
    status = f"Name:\tpython\nCapPrm:\t000001ffffffffff\nCapEff:\t{effective}\nCapBnd:\t000001ffffffffff\n"
    assert locks_without_limit(status) is is_free
    machine = Machine(tmp_path)
    machine.write("proc/self/status", status)
    monkeypatch.setattr("resource.getrlimit", lambda _: (8 * MIB, 8 * MIB))
    assert read_host(root=machine.root, environment={}).memlock_limit_bytes == (None if is_free else 8 * MIB)


def test_meminfo_is_in_bytes():
    memory = parse_meminfo(captured("rtx4090_desktop", "meminfo"))
    assert (memory["MemTotal"], memory["MemAvailable"]) == (65707180 * KIB, 52361044 * KIB)
    assert "HugePages_Total" not in memory


@pytest.mark.parametrize(
    ("machine", "name", "flags"),
    [
        ("no_gpu_laptop", "Intel(R) Core(TM) i5-8250U CPU @ 1.60GHz", ("avx2",)),
        ("rtx4090_desktop", "AMD Ryzen 9 7950X 16-Core Processor", ("avx2", "avx512f", "avx512_bf16")),
        (
            "nvlink_8x_h100",
            "Intel(R) Xeon(R) Platinum 8480C",
            ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16"),
        ),
        ("unified_gb10", None, ()),
    ],
)
def test_cpuinfo_gives_the_name_and_the_flags_that_decide_a_precision(machine, name, flags):
    processor = parse_cpuinfo(captured(machine, "cpuinfo"))
    assert (processor.name, processor.flags) == (name, flags)


@pytest.mark.parametrize(
    ("parse", "value_by_text"),
    [
        (parse_cpu_list, {"0-3,8\n": {0, 1, 2, 3, 8}, "5": {5}, "": set(), "0-1,4-5": {0, 1, 4, 5}}),
        (parse_ethernet_speed, {"10000\n": 1_250_000_000, "-1\n": None, "": None, "65535": None}),  # bytes
        (parse_infiniband_rate, {"400 Gb/sec (4X NDR)\n": 50 * 10**9, "2.5 Gb/sec (1X SDR)": 312_500_000, "": None}),
        (parse_limit, {"max\n": None, "": None, NO_LIMIT_V1: None, "9223372036854775807": None, "1024\n": 1024}),
        (parse_cpu_max, {"max 100000\n": None, "150000 100000\n": 1.5, "": None, "1 0": None}),  # cores
        (lambda quota: parse_quota(quota, "100000\n"), {"-1\n": None, "400000\n": 4}),  # of the older files
        (parse_file_cache, {"anon 100\ninactive_file 30\nactive_file 12\n": 42, FILE_CACHE_V1: 42, "": 0}),
        (parse_mountinfo, {"": (), "garbage\n": (), "1 2 3 - ext4\n": ()}),
    ],
    ids=["cpu list", "ethernet", "infiniband", "limit", "cpu.max", "quota", "file cache", "no mount"],
)
def test_files_of_the_kernel_are_read_as_figures(parse, value_by_text):
    assert {text: parse(text) for text in value_by_text} == value_by_text


def local_disks(text):
    return once_each([mount for mount in parse_mountinfo(text) if is_local_disk(mount)])


def test_disks_are_local_writable_and_each_once():
    disks = local_disks(captured("rtx4090_desktop", "mountinfo"))
    found = [(disk.mount_point, disk.filesystem, disk.device) for disk in disks]
    assert found == [("/", "ext4", "259:2"), ("/mnt/big disk", "xfs", "259:5")]


def test_a_disk_is_known_by_its_device_and_else_by_its_number():
    disks = local_disks(
        "1 0 0:50 / /a rw - overlay overlay rw\n"
        "2 0 0:51 / /b rw - overlay overlay rw\n"
        "3 0 0:60 /x /c rw - btrfs /dev/sdb rw\n"
        "4 0 0:61 /y /d/e rw - btrfs /dev/sdb rw\n"
        "5 0 8:1 / /data\\040two rw - ext4 /dev/sdc rw\n"
        "6 0 8:2 / /cdrom ro,relatime - ext4 /dev/sdd ro\n"
    )
    assert [disk.mount_point for disk in disks] == ["/a", "/b", "/c", "/data two"]


def test_windows_drives_and_driver_folders_of_wsl_are_no_local_disks():
    disks = local_disks(captured("wsl_rtx3080", "mountinfo"))
    assert [disk.mount_point for disk in disks] == ["/", "/usr/lib/modules/6.6.87.2-microsoft-standard-WSL2"]


@pytest.mark.parametrize(
    ("names", "is_internal"),
    [
        (("lo", "docker0", "br-12ab", "veth1234", "virbr0", "cni0"), True),
        (("eth0", "bond0", "ib0", "enp5s0", "br0", "wlan0"), False),
    ],
)
def test_bridges_inside_the_machine_are_internal(names, is_internal):
    assert {is_internal_interface(name) for name in names} == {is_internal}


@pytest.mark.parametrize("machine", [name for name in MACHINES if captured(name, "version")])
def test_wsl_is_known_by_its_kernel(machine):
    assert is_wsl(captured(machine, "version")) is machine.startswith("wsl")


def test_slurm_is_a_login_node_a_job_or_nothing():
    assert slurm_environment({}, has_sbatch=False) is None
    assert slurm_environment({"SLURM_NNODES": "3"}, has_sbatch=True) == SlurmEnvironment(has_sbatch=True)
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    assert slurm_environment(job, has_sbatch=True) == SlurmEnvironment(
        has_sbatch=True, job_id="17", num_nodes=2, node_list="node[1-2]"
    )
    assert slurm_environment({"SLURM_JOB_ID": "17", "SLURM_NNODES": "1"}, has_sbatch=False) == SlurmEnvironment(
        has_sbatch=False, job_id="17", num_nodes=1
    )


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
def test_slurm_says_what_a_job_was_given(environment, memory, cores):
    assert slurm_memory_bytes(environment) == memory
    assert slurm_num_cores(environment) == cores


def test_a_container_with_its_own_namespace_sees_its_limits_at_the_top(tmp_path):
    limits = v2_machine(
        tmp_path,
        "/",
        {
            "": {
                "memory.max": f"{8 * GIB}\n",
                "memory.current": f"{3 * GIB}\n",
                "memory.stat": f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB}\n",
                "cpu.max": "250000 100000\n",
                "cpuset.cpus.effective": "0-3\n",
            }
        },
    )
    assert limits == CgroupLimits(
        memory_bytes=8 * GIB, available_bytes=7 * GIB, num_cores=2.5, cores=frozenset({0, 1, 2, 3})
    )


def test_the_tightest_of_nested_groups_binds(tmp_path):
    pod, container = "/kubepods.slice/pod7.slice", "/kubepods.slice/pod7.slice/cri-1.scope"
    limits = v2_machine(
        tmp_path,
        container,
        {
            container: {"memory.max": "max\n", "cpu.max": "400000 100000\n", "cpuset.cpus.effective": "4-7\n"},
            pod: {"memory.max": f"{16 * GIB}\n", "memory.current": f"{GIB}\n", "cpu.max": "200000 100000\n"},
            "/kubepods.slice": {"memory.max": f"{60 * GIB}\n", "memory.current": f"{50 * GIB}\n"},
        },
    )
    assert limits.memory_bytes == 16 * GIB
    assert limits.available_bytes == 10 * GIB  # the neighbours have filled the group above
    assert limits.num_cores == 2
    assert limits.cores == frozenset({4, 5, 6, 7})


@pytest.mark.parametrize(
    ("path", "group", "files", "expected"),
    [
        ("/job", "/job", {"max": 8 * GIB, "high": 6 * GIB, "current": 0}, (6 * GIB, 6 * GIB)),
        ("/job", "/job", {"high": GIB, "current": 2 * GIB}, (GIB, 0)),
        ("/job", "/job", {"max": GIB}, (GIB, None)),
        ("/../../elsewhere", "", {"max": 4 * GIB, "current": 0}, (4 * GIB, 4 * GIB)),
        ("/gone", "", {"max": 4 * GIB, "current": 0}, (4 * GIB, 4 * GIB)),
    ],
    ids=["throttled", "over its limit", "use unknown", "outside the visible tree", "gone"],
)
def test_the_memory_of_a_group_is_bounded_by_each_of_its_limits(tmp_path, path, group, files, expected):
    limits = v2_machine(tmp_path, path, {group: {f"memory.{name}": f"{value}\n" for name, value in files.items()}})
    assert (limits.memory_bytes, limits.available_bytes) == expected


def test_slurm_on_version_1_limits_the_step(tmp_path):
    job = "slurm/uid_1000/job_42"
    limits = v1_machine(
        tmp_path,
        f"/{job}/step_0",
        {
            f"memory/{job}/step_0/memory.limit_in_bytes": f"{32 * GIB}\n",
            f"memory/{job}/step_0/memory.usage_in_bytes": f"{4 * GIB}\n",
            f"memory/{job}/step_0/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file 0\n",
            f"memory/{job}/memory.limit_in_bytes": f"{33 * GIB}\n",
            f"memory/{job}/memory.usage_in_bytes": f"{4 * GIB}\n",
            "memory/memory.limit_in_bytes": NO_LIMIT_V1,
            f"cpu,cpuacct/{job}/step_0/cpu.cfs_quota_us": "-1\n",
            f"cpu,cpuacct/{job}/step_0/cpu.cfs_period_us": "100000\n",
            f"cpuset/{job}/step_0/cpuset.cpus": "2-5\n",
        },
    )
    assert limits == CgroupLimits(
        memory_bytes=32 * GIB, available_bytes=29 * GIB, num_cores=None, cores=frozenset({2, 3, 4, 5})
    )


def test_a_container_on_version_1_sees_its_group_as_the_top_of_the_mount(tmp_path):
    """The path in /proc/self/cgroup is the host's; the mount shows the container's part of the tree."""
    path = "/docker/6f1e"
    mounts = "32 31 0:32 /docker/6f1e /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory\n"
    limits = v1_machine(
        tmp_path,
        path,
        {"memory/memory.limit_in_bytes": f"{2 * GIB}\n", "memory/memory.usage_in_bytes": f"{GIB}\n"},
        mounts,
    )
    assert (limits.memory_bytes, limits.available_bytes) == (2 * GIB, GIB)


def test_a_group_below_the_root_of_the_mount_is_found(tmp_path):
    limits = v1_machine(
        tmp_path,
        "/docker/6f1e/inner",
        {"memory/inner/memory.limit_in_bytes": f"{GIB}\n", "memory/memory.limit_in_bytes": f"{2 * GIB}\n"},
        "32 31 0:32 /docker/6f1e /sys/fs/cgroup/memory ro,relatime - cgroup cgroup rw,memory\n",
    )
    assert limits.memory_bytes == GIB


def test_both_versions_side_by_side_bind_together(tmp_path):
    machine = Machine(tmp_path)
    machine.write("proc/self/cgroup", "4:memory:/a\n0::/b\n")
    machine.write("proc/self/mountinfo", BOTH_MOUNTS)
    machine.write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", f"{5 * GIB}\n")
    machine.write("sys/fs/cgroup/unified/b/cpu.max", "100000 100000\n")
    limits = read_cgroup_limits(machine.root)
    assert (limits.memory_bytes, limits.num_cores) == (5 * GIB, 1)


@pytest.mark.parametrize(
    ("affinity", "limits", "slurm", "cores"),
    [
        (range(16), CgroupLimits(), None, 16),
        (range(16), CgroupLimits(num_cores=2.5), None, 2),
        (range(16), CgroupLimits(num_cores=0.5), None, 1),
        (range(16), CgroupLimits(cores=frozenset({0, 1, 99})), None, 2),
        (range(4), CgroupLimits(cores=frozenset({98, 99})), None, 4),  # another namespace's numbers
        (range(16), CgroupLimits(num_cores=8), 4, 4),
        ([3], CgroupLimits(num_cores=8), None, 1),
    ],
)
def test_cores_are_the_least_of_affinity_cpuset_quota_and_slurm(affinity, limits, slurm, cores):
    assert count_cores(set(affinity), limits, slurm) == cores


def test_the_memory_of_the_host_is_the_cgroups(tmp_path):
    machine = lay_out(tmp_path, "rtx4090_desktop")
    machine.write("proc/self/cgroup", "0::/job\n")
    machine.write("sys/fs/cgroup/job/memory.max", f"{16 * GIB}\n")
    machine.write("sys/fs/cgroup/job/memory.current", f"{2 * GIB}\n")
    host = read_host(root=machine.root, environment=machine.environment)
    assert (host.ram_bytes, host.ram_available_bytes) == (16 * GIB, 14 * GIB)
    assert host.pinned_limit_bytes == 16 * GIB
    in_job = read_host(root=machine.root, environment={"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": "8192"})
    assert (in_job.ram_bytes, in_job.ram_available_bytes) == (8 * GIB, 8 * GIB)


def test_the_memory_of_a_free_host_is_what_the_kernel_says(tmp_path):
    host = read_host(root=lay_out(tmp_path, "no_gpu_laptop").root, environment={})
    assert (host.ram_bytes, host.ram_available_bytes) == (7973604 * KIB, 3310188 * KIB)
    assert host.slurm is None
    assert not host.is_wsl


def test_wsl_pins_half_of_its_memory(tmp_path):
    host = read_host(root=lay_out(tmp_path, "wsl_rtx3080").root, environment={})
    assert host.is_wsl
    assert host.pinned_limit_bytes == 16298788 * KIB // 2


def test_a_machine_that_says_nothing_has_unknown_figures(tmp_path):
    host = read_host(root=Machine(tmp_path).root, environment={})
    assert (host.cpu_name, host.ram_bytes, host.ram_available_bytes, host.pinned_limit_bytes) == (None,) * 4
    assert (host.shm_bytes, host.disks, host.interfaces, host.cpu_flags) == (None, (), (), ())
    assert host.num_cores is not None


def test_disks_have_their_space_and_kind(tmp_path):
    machine = lay_out(tmp_path, "rtx4090_desktop")
    (machine.root / "mnt/big disk").mkdir(parents=True)
    machine.write("sys/dev/block/259:2/queue/rotational", "0\n")
    machine.write("sys/dev/block/259:5/unused", "")
    root, big = read_host(root=machine.root, environment={}).disks
    assert (root.path, root.filesystem, root.is_rotational) == ("/", "ext4", False)
    assert (big.path, big.is_rotational) == ("/mnt/big disk", None)
    assert 0 < root.free_bytes <= root.total_bytes


def test_a_partition_turns_as_its_disk_does(tmp_path):
    machine = lay_out(tmp_path, "rtx4090_desktop")
    machine.write("sys/devices/sda/queue/rotational", "1\n")
    (machine.root / "sys/devices/sda/sda2").mkdir()
    (machine.root / "sys/dev/block").mkdir(parents=True)
    (machine.root / "sys/dev/block/259:2").symlink_to(machine.root / "sys/devices/sda/sda2")
    assert read_host(root=machine.root, environment={}).disks[0].is_rotational


def test_a_btrfs_volume_is_found_by_the_name_of_its_device(tmp_path):
    machine = lay_out(tmp_path, "no_gpu_laptop")
    machine.write("sys/class/block/luks-3f2a/queue/rotational", "0\n")
    assert read_host(root=machine.root, environment={}).disks[0].is_rotational is False


def test_a_file_bound_into_a_container_is_no_disk(tmp_path):
    machine = Machine(tmp_path)
    machine.write("etc/hosts", "")
    (machine.root / "data/scratch").mkdir(parents=True)
    machine.write(
        "proc/self/mountinfo",
        "50 40 8:1 /var/x/hosts /etc/hosts rw - ext4 /dev/sda1 rw\n"
        "51 40 8:1 /scratch /data/scratch rw - ext4 /dev/sda1 rw\n",
    )
    assert [disk.path for disk in read_host(root=machine.root, environment={}).disks] == ["/data/scratch"]


def test_interfaces_that_are_up_are_listed_with_infiniband_ports(tmp_path):
    machine = Machine(tmp_path)
    for name, state, speed, kind in (
        ("eno7", "up", "25000", "1"),
        ("eno8", "down", "25000", "1"),
        ("docker0", "up", "10000", "1"),
        ("ib7", "up", "400000", "32"),
    ):
        machine.write(f"sys/class/net/{name}/operstate", f"{state}\n")
        machine.write(f"sys/class/net/{name}/speed", f"{speed}\n")
        machine.write(f"sys/class/net/{name}/type", f"{kind}\n")
    for port, state, layer in (
        ("1", "4: ACTIVE", "InfiniBand"),
        ("2", "1: DOWN", "InfiniBand"),
        ("3", "4: ACTIVE", "Ethernet"),
    ):
        machine.write(f"sys/class/infiniband/mlx5_0/ports/{port}/state", f"{state}\n")
        machine.write(f"sys/class/infiniband/mlx5_0/ports/{port}/link_layer", f"{layer}\n")
        machine.write(f"sys/class/infiniband/mlx5_0/ports/{port}/rate", "400 Gb/sec (4X NDR)\n")
    interfaces = read_host(root=machine.root, environment={}).interfaces
    assert [(one.name, one.speed_bytes_per_s) for one in interfaces] == [
        ("eno7", 3_125_000_000),
        ("ib7", None),
        ("mlx5_0:1", 50_000_000_000),
    ]


def test_the_loopback_has_its_address_and_a_stranger_none():
    assert interface_address("lo") == "127.0.0.1"
    assert interface_address("nosuch0") is None


@pytest.mark.parametrize(
    ("configuration", "variable", "expected"),
    [
        (None, None, None),  # Debian's package is installed, and nobody set a cluster up
        ("root/etc/slurm/slurm.conf", None, SlurmEnvironment(has_sbatch=True)),
        ("root/etc/slurm-llnl/slurm.conf", None, SlurmEnvironment(has_sbatch=True)),
        ("root/run/slurm/conf/slurm.conf", None, SlurmEnvironment(has_sbatch=True)),
        ("etc/slurm.conf", None, SlurmEnvironment(has_sbatch=True)),  # beside the bin folder of sbatch
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
    assert read_host(root=machine.root, environment=environment).slurm == expected


def test_this_machine_is_read():
    host = read_host()
    assert host.ram_bytes is not None
    assert host.ram_available_bytes is not None
    assert 0 < host.ram_available_bytes <= host.ram_bytes
    assert host.num_cores is not None
    assert 1 <= host.num_cores <= len(os.sched_getaffinity(0))


def test_a_file_that_is_not_there_reads_as_empty(tmp_path):
    assert read_text(tmp_path / "none") == ""
    assert read_text(tmp_path) == ""


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
    assert read_oom_kills(machine.root) == kills
    assert read_oom_kills(tmp_path / "nowhere") is None
