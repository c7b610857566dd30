"""Parsers of nvidia-smi against captured text, and what each of its failures is called."""

import pytest
from captured_machine import captured
from msgspec.structs import replace

from shardwise.launch.probe import nvidia_smi
from shardwise.trainer.spec.hardware import Gpu, GpuProcess, LinkKind
from shardwise.trainer.spec.units import MIB

GPU = Gpu(index=0, name="NVIDIA Test", spec_name=None, memory_bytes=24 * 1024 * MIB)


def rows_of(machine):
    rows, problems = nvidia_smi.parse_gpu_rows(captured(machine, "query-gpu.csv"))
    assert problems == ()
    return rows


def links_of(machine):
    links = nvidia_smi.build_links(
        [row.gpu for row in rows_of(machine)],
        nvidia_smi.parse_topology(captured(machine, "topo.txt")),
        nvidia_smi.parse_peer_access(captured(machine, "p2p.txt")),
        nvidia_smi.parse_nvlink_rates(captured(machine, "nvlink.txt")),
    )
    return {(link.a, link.b): link for link in links}


def facts_of(link):
    return link.kind, link.num_nvlinks, link.has_peer_access, link.bytes_per_s


def test_every_column_of_a_consumer_card_is_read():
    (row,) = rows_of("rtx4090_desktop")
    memory = {"memory_bytes": 24564 * MIB, "usable_bytes": (24564 - 365) * MIB, "free_bytes": 22757 * MIB}
    slot = {"power_limit_w": 450.0, "pcie_generation": 4, "pcie_width": 16}
    absent = {"is_ecc_on": None, "is_mig_on": None}  # [N/A]: not off, but not there
    card = replace(GPU, name="NVIDIA GeForce RTX 4090", spec_name="RTX-4090", **memory, **slot, **absent)
    uuid = "GPU-3d1c7b52-90ae-4f0b-8f61-5b2c0a9e4417"
    assert row.gpu == replace(card, uuid=uuid, compute_capability=(8, 9), driver="580.95.05")
    assert row.bus_id == "00000000:01:00.0" and not row.is_prohibited


def test_ecc_mig_compute_mode_and_narrow_slots_are_read():
    h100 = rows_of("nvlink_8x_h100")[0].gpu
    assert (h100.is_ecc_on, h100.is_mig_on) == (True, False)
    names = [row.gpu.spec_name for row in rows_of("mixed_models")]
    assert names == [None, "RTX-3090", "RTX-3090", "RTX-A4000"]
    text = captured("rtx4090_desktop", "query-gpu.csv").replace("RTX 4090", "RTX 4060 Ti").replace("24564", "16380")
    ((row,), _) = nvidia_smi.parse_gpu_rows(text)
    assert row.gpu.spec_name == "RTX-4060Ti-16GB", "its memory distinguishes it"
    assert [row.gpu.is_mig_on for row in rows_of("mig_a100")] == [True, False]
    assert [row.is_prohibited for row in rows_of("mixed_models")] == [False, False, False, True]
    older = "GPU 3: A100-SXM4-40GB (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: MIG-GPU-1/7/0)\n"
    assert [(one.gpu_index, one.uuid) for one in nvidia_smi.parse_mig_slices(older)] == [(3, "MIG-GPU-1/7/0")]
    narrow = rows_of("pcie_2x_rtx3090")[1]
    assert (narrow.gpu.pcie_width, narrow.pcie_max_width) == (8, 16)


def test_what_the_driver_does_not_report_is_unknown_rather_than_zero():
    (row,) = rows_of("unified_gb10")
    assert row.shares_host_memory
    assert (row.gpu.free_bytes, row.gpu.usable_bytes, row.gpu.power_limit_w) == (None, None, None)
    assert (row.gpu.pcie_generation, row.gpu.pcie_width) == (None, None)
    for text in ("[N/A]", "[Not Supported]", "[Insufficient Permissions]", "[GPU is lost]", "N/A", "ERR!", " "):
        line = ", ".join("7" if field == "index" else text for field in nvidia_smi.GPU_FIELDS)
        ((row,), problems) = nvidia_smi.parse_gpu_rows(line)
        assert row.gpu == Gpu(index=7, name="unknown GPU", spec_name=None, memory_bytes=0) and problems == ()
        assert not row.shares_host_memory


def test_compute_processes_are_grouped_by_card():
    processes = nvidia_smi.parse_compute_apps(captured("shared_4x_a100", "compute-apps.csv"))
    assert sorted(len(found) for found in processes.values()) == [1, 2]
    ((comma,),) = nvidia_smi.parse_compute_apps(captured("pcie_2x_rtx3090", "compute-apps.csv")).values()
    assert comma == GpuProcess(pid=98211, name="python", memory_bytes=1230 * MIB), "a comma in a program's path"
    ((display, hidden),) = nvidia_smi.parse_compute_apps(captured("wsl_rtx3080", "compute-apps.csv")).values()
    assert display == GpuProcess(pid=33, name="Xwayland", memory_bytes=None)
    assert hidden == GpuProcess(pid=9452, name=None, memory_bytes=None)
    none = "No running processes found\ngpu_uuid, pid, process_name, used_gpu_memory [MiB]\n"
    assert nvidia_smi.parse_compute_apps(none) == {}
    assert processes["GPU-b4d6f8a0-b2c4-4e68-9a0c-2e4f6a8b0c1d"] == (
        GpuProcess(pid=1403377, name="python3.11", memory_bytes=68210 * MIB),
        GpuProcess(pid=1403378, name=None, memory_bytes=1024 * MIB),
    )


def test_links_have_their_kind_their_number_and_the_rate_of_the_narrower_slot():
    links = links_of("nvlink_8x_h100").values()
    assert len(links) == 28
    assert {facts_of(link) for link in links} == {(LinkKind.NVLINK, 18, True, 18 * 26_562_000_000)}
    topology = nvidia_smi.parse_topology(captured("nvlink_8x_h100", "topo.txt"))  # with columns of network cards
    assert set(topology.cells) == {(a, b) for a in range(8) for b in range(8) if a != b}
    assert topology.numa_nodes == dict(enumerate([0] * 4 + [1] * 4))
    for (machine, *pair), expected in {
        ("nvlink_4x_v100", 0, 3): (LinkKind.NVLINK, 2, True, 2 * 25_781_000_000),
        ("nvlink_4x_v100", 0, 1): (LinkKind.NVLINK, 1, True, 25_781_000_000),
        ("nvlink_4x_v100", 1, 3): (LinkKind.SOCKET, 0, False, 16 * 984_615_384),
        ("pcie_2x_rtx3090", 0, 1): (LinkKind.NUMA_NODE, 0, False, 8 * 1_969_230_769),
        ("mixed_models", 0, 1): (LinkKind.PCIE_HOST, 0, False, 16 * 984_615_384),
        ("mixed_models", 0, 2): (LinkKind.SOCKET, 0, False, 16 * 984_615_384),
        ("mixed_models", 2, 3): (LinkKind.PCIE_SWITCH, 0, False, 16 * 1_969_230_769),
    }.items():
        assert facts_of(links_of(machine)[*pair]) == expected, (machine, pair)
    rates = nvidia_smi.parse_nvlink_rates(captured("nvlink_4x_v100", "nvlink.txt")).values()
    assert {len(each) for each in rates} == {4}
    assert nvidia_smi.parse_nvlink_rates(captured("pcie_2x_rtx3090", "nvlink.txt")) == {}, "inactive links have no rate"
    for generation, width, gigabytes in ((3, 16, 15.75), (4, 8, 15.75), (5, 16, 63.0), (1, 1, 0.25)):
        rate = nvidia_smi.pcie_bytes_per_s(replace(GPU, pcie_generation=generation, pcie_width=width))
        assert rate == pytest.approx(gigabytes * 10**9, rel=0.001)
    for generation in (None, 9):
        assert nvidia_smi.pcie_bytes_per_s(replace(GPU, pcie_generation=generation, pcie_width=16)) is None


def test_unknown_paths_and_rates_stay_unknown():
    gpus = [GPU, replace(GPU, index=1)]
    assert nvidia_smi.build_links(gpus, nvidia_smi.parse_topology(""), {}, {}) == ()
    topology = nvidia_smi.parse_topology("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t\nGPU1\tSYS\t X \t\n")
    (link,) = nvidia_smi.build_links(gpus, topology, {(0, 1): True}, {})
    assert (link.bytes_per_s, link.has_peer_access) == (None, None)
    bonded = nvidia_smi.parse_topology("\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n")
    (link,) = nvidia_smi.build_links(gpus, bonded, {}, {})
    assert (link.num_nvlinks, link.bytes_per_s) == (4, None)
    text = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t0-15\t0-1\t\tN/A\n"
    assert nvidia_smi.parse_topology(text).numa_nodes == {}, "a range of nodes"
    assert nvidia_smi.parse_topology(text.replace("0-1\t", "1\t")).numa_nodes == {0: 1}
    assert nvidia_smi.parse_peer_access(" \tGPU0\tGPU1\t\n GPU0\tX\tU\t\n GPU1\tOK\tX\t\n") == {(1, 0): True}


NVML = "Failed to initialize NVML: "
FAILURES = [
    (f"{NVML}Driver/library version mismatch\nNVML library version: 580.95\n", 18, "restart the machine", True),
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", 9, "modprobe nvidia", False),
    (f"{NVML}GPU access blocked by the operating system\n", 17, "wsl --update", True),
    (f"{NVML}Insufficient Permissions\n", 4, "usermod -aG video", True),
    (f"{NVML}Unknown Error\n", 255, "restart the container", True),
    ("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.\n", 12, "docker run --gpus all", False),
    ("Unable to determine the device handle for GPU 0000:04:00.0: Unknown Error\n", 255, "dmesg | grep -i xid", True),
    ("Unable to determine the device handle for GPU0: GPU is lost.  Reboot the system\n", 15, "restart", True),
    ("No devices were found\n", 6, "--gpus", False),
    ("", None, "restart", False),
    ("", -11, "code -11", False),
    ("\nsomething else\nmore", 3, "code 3: something else", False),
]


@pytest.mark.parametrize(("output", "exit_code", "remedy", "proves_gpu"), FAILURES)
def test_every_failure_has_a_remedy(output, exit_code, remedy, proves_gpu):
    failure = nvidia_smi.explain_failure(output, exit_code)
    assert remedy in failure.sentence and failure.proves_gpu is proves_gpu
    assert 2 <= len(failure.sentence.splitlines()) <= 3
