"""Names of cards as people, nvidia-smi and SPECs write them, and the row that each means."""

import pytest
from estimate_factory import CPU_HOST

from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.speed.step import speed_notes
from shardwise.trainer.planning.tables import gpu_names
from shardwise.trainer.planning.tables.gpu_specs import GPU_SPECS, GpuSpec
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind, Hardware
from shardwise.trainer.spec.units import GIB, MIB


def machine(spec: str) -> Hardware:
    return gpu_names.hardware_from_spec(spec, local_host=lambda: CPU_HOST)


def usual(spec: str) -> Hardware:
    return gpu_names.as_usual(machine(spec))


ROWS = pytest.mark.parametrize("spec", GPU_SPECS.values(), ids=GPU_SPECS.keys())
# Written from vendors' and Wikipedia's names, as people type them; a row is all that they mean.
# fmt: off
TYPED = [
    ("4070Ti", "RTX-4070Ti"), ("RTX 3060 12GB", "RTX-3060-12GB"), ("rtx_4090", "RTX-4090"), ("RTX 4090", "RTX-4090"),
    ("rtx4090", "RTX-4090"), ("4090", "RTX-4090"), ("NVIDIA GeForce RTX 4060 Laptop GPU", "RTX-4060-Laptop"),
    ("geforce rtx 3090 ti", "RTX-3090Ti"), ("3080 12GB", "RTX-3080-12GB"), ("RTX 3080 10G", "RTX-3080-10GB"),
    ("RTX 4060 Ti 16GB", "RTX-4060Ti-16GB"), ("4060 Ti 8 GB", "RTX-4060Ti-8GB"), ("RTX 3070", "RTX-3070-8GB"),
    ("3060 Ti", "RTX-3060Ti"), ("3070ti", "RTX-3070Ti"), ("RTX 3080 Ti", "RTX-3080Ti"), ("RTX 4070", "RTX-4070-12GB"),
    ("4070 SUPER", "RTX-4070Super"), ("4070 Ti Super", "RTX-4070TiSuper"), ("4080S", "RTX-4080Super"),
    ("RTX 4090 D", "RTX-4090D"), ("5060", "RTX-5060"), ("RTX 5060 Ti 16G", "RTX-5060Ti-16GB"), ("RTX5070", "RTX-5070"),
    ("5070 Ti", "RTX-5070Ti"), ("5080", "RTX-5080"), ("GeForce RTX 5090", "RTX-5090"),
    ("RTX 5090 Laptop GPU", "RTX-5090-Laptop"), ("4070 mobile", "RTX-4070-Laptop"),
    ("RTX 3050 Ti Laptop", "RTX-3050Ti-Laptop"), ("rtx 2070 max-q", "RTX-2070-MaxQ"),
    ("RTX 2060 12GB", "RTX-2060-12GB"), ("2060 Super", "RTX-2060Super"), ("RTX 2070S", "RTX-2070Super"),
    ("2080", "RTX-2080"), ("2080ti", "RTX-2080Ti"), ("GTX 1650", "GTX-1650"), ("1660 Super", "GTX-1660Super"),
    ("GTX 1660 Ti", "GTX-1660Ti"), ("Titan RTX", "TITAN-RTX"), ("Titan V", "TITAN-V"),
    ("Quadro RTX 8000", "Quadro-RTX-8000"), ("RTX 8000", "Quadro-RTX-8000"), ("RTX A2000 12GB", "RTX-A2000-12GB"),
    ("A4000", "RTX-A4000"), ("NVIDIA RTX A5000", "RTX-A5000"), ("a6000", "RTX-A6000"),
    ("RTX 4000 SFF Ada", "RTX-4000-SFF-Ada"), ("RTX 5000 Ada Generation", "RTX-5000-Ada"),
    ("6000 Ada", "RTX-6000-Ada"), ("RTX A6000 Ada", "RTX-6000-Ada"), ("RTX 5000 Ada Laptop", "RTX-5000-Ada-Laptop"),
    ("RTX PRO 6000", "RTX-PRO-6000"), ("RTX Pro 6000 Blackwell Max-Q", "RTX-PRO-6000-MaxQ"),
    ("Pro 6000 server", "RTX-PRO-6000-Server"), ("RTX PRO 4500 Blackwell", "RTX-PRO-4500"), ("NVIDIA A10G", "A10G"),
    ("a16", "A16"), ("A30 24GB", "A30"), ("A40 48GB", "A40"), ("Tesla T4", "T4"), ("T4 16GB", "T4"),
    ("V100-SXM2-32GB", "V100-32GB"), ("Tesla V100-PCIE-16GB", "V100-PCIe-16GB"), ("V100S", "V100S-PCIe-32GB"),
    ("A100 SXM4 80GB", "A100-SXM4-80GB"), ("A100-PCIE-40GB", "A100-PCIe-40GB"), ("A800 80GB PCIe", "A800-PCIe-80GB"),
    ("H100 SXM", "H100-SXM5-80GB"), ("H100 80GB HBM3", "H100-SXM5-80GB"), ("h100-pcie", "H100-PCIe-80GB"),
    ("H100 NVL", "H100-NVL-94GB"), ("H800", "H800-SXM5-80GB"), ("H20", "H20-96GB"), ("H20-3e SXM", "H20-141GB"),
    ("H200 141GB", "H200"), ("H200 NVL", "H200-NVL"), ("GH200 144GB", "GH200-144GB"), ("NVIDIA B300 SXM6 AC", "B300"),
    ("DGX Spark", "GB10"), ("Jetson AGX Orin 64GB", "Orin-AGX-64GB"), ("Jetson AGX Thor", "Thor-AGX-128GB"),
    ("A100-SXM4-80GB-MIG-1g.10gb", "A100-SXM4-80GB-MIG-1g.10gb"), ("H200 MIG 1g.18gb", "H200-MIG-1g.18gb"),
    ("A30 1g.6gb+me", "A30-MIG-1g.6gb"), ("h100 pcie 3g.40gb", "H100-PCIe-80GB-MIG-3g.40gb"),
]
# fmt: on


@pytest.mark.parametrize(("name", "expected"), TYPED)
def test_names_that_people_type(name: str, expected: str) -> None:
    assert gpu_names.match_card(name).spec.name == expected
    assert [gpu.spec_name for gpu in machine(f"1x{name}").gpus] == [expected]


@ROWS
def test_a_row_is_found_by_each_of_its_names(spec: GpuSpec) -> None:
    slices = [f"{spec.name}-MIG-{profile.name}" for profile in spec.mig_profiles]
    for name in (spec.name, spec.name.lower(), spec.name.replace("-", " "), *slices):
        found = gpu_names.match_card(name)
        assert (found.spec.name.lower(), found.others) == (name.lower().replace(" ", "-"), ())


AMBIGUOUS = [
    # name, cards in a node, the row that is assumed, one of the others
    ("3080", 1, "RTX-3080-10GB", "RTX-3080-12GB"), ("RTX 4060 Ti", 2, "RTX-4060Ti-8GB", "RTX-4060Ti-16GB"),
    ("3060", 1, "RTX-3060-8GB", "RTX-3060-12GB"), ("A100", 8, "A100-SXM4-40GB", "A100-SXM4-80GB"),
    ("A100", 2, "A100-PCIe-40GB", "A100-SXM4-80GB"), ("A100 80GB", 8, "A100-SXM4-80GB", "A100-PCIe-80GB"),
    ("H100", 8, "H100-SXM5-80GB", "H100-PCIe-80GB"), ("RTX 6000", 1, "Quadro-RTX-6000", "RTX-6000-Ada"),
    ("H100 1g.10gb", 1, "H100-PCIe-80GB-MIG-1g.10gb", "H100-SXM5-80GB"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "count", "expected", "other"), AMBIGUOUS)
def test_a_name_of_several_rows_says_which_was_taken(name: str, count: int, expected: str, other: str) -> None:
    hardware = machine(f"{count}x{name}")
    assert {gpu.spec_name for gpu in hardware.gpus} == {expected}
    (note,) = hardware.notes
    assert expected in note and other in note


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("RTX-4900", "RTX-4090"), ("RTX 4090 48GB", "RTX-4090"), ("H300", "H200"), ("GTX 1080 Ti", "RTX-2080Ti"),
        ("A100 MIG 9g.90gb", "1g.5gb"), ("L4 1g.5gb", "L4"), ("quantum", "V100-16GB"), ("B9000", "known"),
        ("Radeon 7900", "known"), ("V100 32GB PCIe or so", "V100"),
    ],
)  # fmt: skip
def test_an_unknown_name_is_answered_with_what_there_is(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"(?s)unknown GPU '{name}'.*{hint}"):
        gpu_names.match_card(name)


def test_a_stated_power_class_replaces_the_assumed_one() -> None:
    assumed, stated = (device_of(machine(spec)) for spec in ("1xRTX-4070-Laptop", "1xRTX 4070 Laptop 80W"))
    assert any("115 W" in note for note in speed_notes(assumed))
    assert not any("115 W" in note for note in speed_notes(stated))
    assert (assumed.board_watts, stated.board_watts) == (115, 80)
    ratio = max(dict(stated.peaks).values()) / max(dict(assumed.peaks).values())
    assert ratio == pytest.approx((1230 + (2175 - 1230) * 45 / 80) / 2175, rel=1e-6)


@ROWS
def test_a_row_is_found_by_its_own_nvidia_smi_name(spec: GpuSpec) -> None:
    for name in spec.smi_names:
        assert gpu_names.match_gpu_name(f"NVIDIA {name}", spec.memory_bytes) == spec.name
        for profile in spec.mig_profiles:
            found = gpu_names.match_gpu_name(f"NVIDIA {name} MIG {profile.name}", round(profile.usable_gib * 2**30))
            assert found == f"{spec.name}-MIG-{profile.name}"


SMI_NAMES = [
    ("NVIDIA GeForce RTX 4090", 49140, "RTX-4090"),  # chips of twice the size were soldered on
    ("NVIDIA GeForce RTX 3060", 12288, "RTX-3060-12GB"), ("NVIDIA GeForce RTX 3060", 8192, "RTX-3060-8GB"),
    ("NVIDIA H100 80GB HBM2e", 81559, "H100-PCIe-80GB"),  # of two that it may be, the slower
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb+me", 9728, "A100-SXM4-80GB-MIG-1g.10gb"),
    ("NVIDIA A100-SXM4-40GB MIG 1c.2g.10gb", 9856, None),  # a part of a slice, which is not reported
    ("Tesla V100-SXM2-16GB", 16160, "V100-16GB"), ("Tesla T4", 15109, "T4"),
    ("NVIDIA RTX 6000 Ada Generation", 46068, "RTX-6000-Ada"),  # ECC on takes a sixteenth
    ("NVIDIA GB10", None, "GB10"),  # on the host's memory
    ("NVIDIA A40-24Q", 24576, None), ("GRID T4-16Q", 16384, None),  # vGPU
    ("NVIDIA A100-SXM-64GB", 65536, None), ("NVIDIA GeForce GTX 1080 Ti", 11264, None), ("", 0, None),
    ("AMD Instinct MI300X", 196592, None), ("NVIDIA Graphics Device", 16384, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "memory_mib", "expected"), SMI_NAMES)
def test_names_of_nvidia_smi(name: str, memory_mib: int | None, expected: str | None) -> None:
    assert gpu_names.match_gpu_name(name, None if memory_mib is None else memory_mib * MIB) == expected


def test_a_spec_makes_a_machine_of_nodes_and_cpu_ranks_have_machines_like_this_one() -> None:
    hardware = machine("4x8xH200")
    assert (hardware.num_nodes, len(hardware.gpus), hardware.num_devices) == (4, 8, 32)
    assert hardware.source == "catalogue 4x8xH200"
    assert hardware.host.ram_bytes is None and hardware.host.num_cores is None
    hardware = machine("3x2xCPU")
    assert (hardware.num_nodes, hardware.num_devices_per_node, hardware.num_devices) == (3, 2, 6)
    assert (hardware.device_kind, hardware.host) == (DeviceKind.CPU, CPU_HOST)


@pytest.mark.parametrize("text", ["", "8x", "0xH200", "1x0xH200", "8xH300", "-1xH200", "0x2xCPU", "1x2x3xH200"])
def test_a_wrong_spec_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(InputError, match=r"8xH100-SXM5-80GB|2xCPU"):
        machine(text)


def test_mig_slices_do_not_work_together() -> None:
    assert machine("A30-MIG-1g.6gb").gpus[0].is_mig_on
    with pytest.raises(InputError, match=r"1xA30-MIG-1g\.6gb"):
        machine("2xA30-MIG-1g.6gb")


def test_what_a_spec_does_not_state_is_assumed_as_usual_and_noted() -> None:
    desktop, server, pcie = usual("2xRTX-3090"), usual("8xH100-SXM5-80GB"), GPU_SPECS["RTX-3090"].pcie_bytes_per_s
    assert desktop.host.is_ram_assumed and server.host.is_ram_assumed
    assert desktop.host.ram_bytes == 96 * GIB  # twice the memory of both cards
    assert server.host.ram_bytes > 1250 * GIB and desktop.host.is_desktop and not server.host.is_desktop
    assert any("32 GiB of RAM (28 GiB for a run)" in note for note in usual("1xRTX-4060").notes)
    assert (usual("1xRTX-4060").host.ram_bytes, usual("1xGB10").host.ram_bytes) == (32 * GIB, None)  # the card's memory
    free_bytes = [gpu.free_bytes for gpu in desktop.gpus]
    assert free_bytes == [GPU_SPECS["RTX-3090"].usable_bytes - gpu_names.DISPLAY_BYTES, None]
    assert [gpu.pcie_width for gpu in desktop.gpus] == [8, 8]
    assert device_of(desktop).pcie_bytes_per_s == device_of(desktop).link_bytes_per_s == pcie // 2
    assert (usual("4xRTX-4060").gpus[0].pcie_width, usual("1xRTX-3090").gpus[0].pcie_width) == (4, None)
    assert server.gpus[0].free_bytes is server.gpus[0].pcie_width is None
    for hardware in (desktop, server):
        assert "bitsandbytes" in hardware.libraries and "transformer-engine" not in hardware.libraries
        assert any("assumed of this machine" in note for note in hardware.notes)


def test_a_spec_states_what_is_otherwise_assumed() -> None:
    stated = usual("2xRTX-3090,ram=128GiB,lanes=16,display=no,cores=32")
    assert (stated.host.ram_bytes, stated.host.is_ram_assumed, stated.host.num_cores) == (128 * GIB, False, 32)
    assert {gpu.pcie_width for gpu in stated.gpus} == {16}
    assert device_of(stated).usable_bytes == GPU_SPECS["RTX-3090"].usable_bytes
    assert device_of(stated).pcie_bytes_per_s == GPU_SPECS["RTX-3090"].pcie_bytes_per_s


NO_FACTS = ("ram", "ram=much", "lanes=0", "cores=x", "display=maybe", "disk=1TB", "")
NO_RATES = ("12GB", "0Gb", "fast", "", "-1Gb", "1e9Gb", "100")


@pytest.mark.parametrize(
    ("spec", "fact"),
    [
        *((f"1xRTX-3090,{option}", "1xRTX-3090") for option in NO_FACTS),
        *((f"2x8xH100-SXM5-80GB,network={rate}", "network=400Gb$") for rate in NO_RATES),
    ],
)
def test_a_fact_that_is_none_of_a_machine_is_an_error_with_the_form(spec: str, fact: str) -> None:
    with pytest.raises(InputError, match=fact):
        usual(spec)


@pytest.mark.parametrize(
    ("rate", "bytes_per_s"), [("400Gb", 50e9), ("100 Gbit/s", 12.5e9), ("3.2Tb", 400e9), ("2.5Gbps", 0.3125e9)]
)
def test_the_network_between_nodes_is_stated_in_bits_per_second(rate: str, bytes_per_s: float) -> None:
    stated, assumed = usual(f"2x8xA100-SXM4-80GB,network={rate}"), usual("2x8xA100-SXM4-80GB")
    assert stated.network_bytes_per_s == device_of(stated).network_bytes_per_s == bytes_per_s
    assert (assumed.network_bytes_per_s, device_of(assumed).network_bytes_per_s) == (None, 200e9)
    assert "a network of 1,600 Gbit/s a node" in " ".join(assumed.notes) and "a network of" not in " ".join(
        stated.notes
    )
