"""The catalogue of GPUs: every promised name, plausible figures, names as people and nvidia-smi write them."""

import pytest
from estimate_factory import CPU_HOST

from trainer.planning.gpu_specs import GPU_SPECS, GpuSpec, find_gpu_spec, hardware_from_spec, match_gpu_name
from trainer.spec.errors import InputError
from trainer.spec.hardware import DeviceKind
from trainer.spec.strategy import Precision
from trainer.spec.units import GIB, MIB

PROMISED = [
    "V100-16GB", "V100-32GB", "T4", "RTX-2080Ti", "RTX-3060-12GB", "RTX-3070-8GB", "RTX-3090", "RTX-4060-8GB",
    "RTX-4060Ti-16GB", "RTX-4070-12GB", "RTX-4080", "RTX-4090", "RTX-5070Ti", "RTX-5090", "A10G", "A10", "A30", "L4",
    "L40S", "RTX-A5000", "RTX-A6000", "RTX-6000-Ada", "A100-SXM4-40GB", "A100-SXM4-80GB", "A100-PCIe-80GB",
    "A800-SXM4-80GB", "H100-SXM5-80GB", "H100-PCIe-80GB", "H100-96GB-HBM2e", "H200", "GH200", "B200", "B300", "GB200",
]  # fmt: skip
ROWS = pytest.mark.parametrize("spec", GPU_SPECS.values(), ids=GPU_SPECS.keys())


def test_every_promised_name_is_there() -> None:
    assert set(PROMISED) <= set(GPU_SPECS)


@ROWS
def test_figures_of_a_row_are_consistent(spec: GpuSpec) -> None:
    assert 0.94 * spec.memory_bytes < spec.usable_bytes < spec.memory_bytes
    assert spec.context_bytes < GIB
    assert spec.fp32_flops_per_s < spec.fp16_flops_per_s
    assert 4 <= spec.pcie_bytes_per_s / 1e9 <= 450
    assert spec.source
    has_bf16, has_fp8 = spec.compute_capability >= (8, 0), spec.compute_capability >= (8, 9)
    assert (spec.bf16_flops_per_s is not None) is has_bf16
    assert (spec.tf32_flops_per_s is not None) is has_bf16
    assert (spec.fp8_flops_per_s is not None) is has_fp8
    if has_fp8:
        assert spec.fp8_flops_per_s == pytest.approx(2 * spec.fp16_flops_per_s, rel=0.03)
    # Two capacities in one name would be a slip of the table.
    if "GB" in spec.name and "-" in spec.name:
        stated = next(part for part in spec.name.split("-") if part.endswith("GB"))
        assert int(stated[:-2]) == pytest.approx(spec.memory_bytes / GIB, rel=0.05)


@ROWS
def test_a_row_is_found_by_its_own_nvidia_smi_name(spec: GpuSpec) -> None:
    for name in spec.smi_names:
        assert match_gpu_name(f"NVIDIA {name}", spec.memory_bytes) == spec.name


@ROWS
def test_a_row_makes_a_machine(spec: GpuSpec) -> None:
    hardware = hardware_from_spec(f"4x8x{spec.name}", local_host=lambda: CPU_HOST)
    assert (hardware.num_nodes, len(hardware.gpus), hardware.num_devices) == (4, 8, 32)
    assert hardware.source == f"catalogue 4x8x{spec.name}"
    assert {gpu.spec_name for gpu in hardware.gpus} == {spec.name}
    assert hardware.host.ram_bytes is None and hardware.host.num_cores is None


def test_only_cards_for_games_lack_peer_access_over_pcie() -> None:
    without = {spec.name for spec in GPU_SPECS.values() if not spec.has_peer_access_over_pcie}
    assert {"RTX-3090", "RTX-4090", "RTX-5090"} <= without
    assert without.isdisjoint({"RTX-A6000", "RTX-6000-Ada", "L40S", "A100-PCIe-80GB", "H100-PCIe-80GB"})


SMI_NAMES = [
    ("NVIDIA GeForce RTX 4090", 24564, "RTX-4090"),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, None),
    ("NVIDIA GeForce RTX 4090 D", 24564, None),
    ("NVIDIA GeForce RTX 3060", 12288, "RTX-3060-12GB"),
    ("NVIDIA GeForce RTX 3060", 8192, None),  # the same name, another card
    ("NVIDIA GeForce RTX 3090 Ti", 24564, None),
    ("NVIDIA H100 80GB HBM3", 81559, "H100-SXM5-80GB"),
    ("NVIDIA H100 PCIe", 81559, "H100-PCIe-80GB"),
    ("Tesla V100-SXM2-32GB", 32768, "V100-32GB"),
    ("Tesla V100-SXM2-16GB", 16160, "V100-16GB"),
    ("Tesla T4", 15109, "T4"),
    ("NVIDIA A100-PCIE-40GB", 40960, "A100-PCIe-40GB"),
    ("NVIDIA A100-SXM4-80GB", 81251, "A100-SXM4-80GB"),
    ("NVIDIA A100 80GB PCIe", 81920, "A100-PCIe-80GB"),
    ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 40192, None),
    ("NVIDIA A10G", 22731, "A10G"),
    ("NVIDIA RTX 6000 Ada Generation", 46068, None),  # ECC on takes a sixteenth: no longer this row
    ("NVIDIA RTX 6000 Ada Generation", 49140, "RTX-6000-Ada"),
    ("NVIDIA GH200 480GB", 97871, "GH200"),
    ("AMD Instinct MI300X", 196592, None),
    ("", 0, None),
]


@pytest.mark.parametrize(("name", "memory_mib", "expected"), SMI_NAMES)
def test_names_of_nvidia_smi(name: str, memory_mib: int, expected: str | None) -> None:
    assert match_gpu_name(name, memory_mib * MIB) == expected


@pytest.mark.parametrize("name", ["RTX-4090", "rtx_4090", "RTX 4090", "rtx4090"])
def test_case_and_separators_do_not_matter(name: str) -> None:
    assert find_gpu_spec(name).name == "RTX-4090"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("H100", "did you mean H100-SXM5-80GB, H100-PCIe-80GB"),
        ("RTX-4900", "did you mean RTX-4090"),
        ("A100", "did you mean A100-SXM4-40GB"),
        ("quantum", "known: V100-16GB"),
    ],
)
def test_an_unknown_name_answers_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(InputError, match=f"unknown GPU '{name}'") as caught:
        find_gpu_spec(name)
    assert hint in str(caught.value)


def test_a_cpu_spec_shares_this_machine() -> None:
    hardware = hardware_from_spec("2xCPU", local_host=lambda: CPU_HOST)
    assert hardware.device_kind is DeviceKind.CPU
    assert (hardware.num_devices, hardware.host) == (2, CPU_HOST)


def test_cpu_ranks_of_several_machines_have_machines_like_this_one() -> None:
    hardware = hardware_from_spec("3x2xCPU", local_host=lambda: CPU_HOST)
    assert (hardware.num_nodes, hardware.num_devices_per_node, hardware.num_devices) == (3, 2, 6)
    assert (hardware.device_kind, hardware.host) == (DeviceKind.CPU, CPU_HOST)


def test_a_bare_name_is_one_card() -> None:
    assert hardware_from_spec("H200", local_host=lambda: CPU_HOST).num_devices == 1
    assert hardware_from_spec("RTX-4090", local_host=lambda: CPU_HOST).num_devices == 1


@pytest.mark.parametrize("text", ["", "8x", "0xH200", "1x0xH200", "8xH300", "-1xH200", "0x2xCPU", "1x2x3xH200"])
def test_a_wrong_spec_says_what_one_looks_like(text: str) -> None:
    with pytest.raises(InputError) as caught:
        hardware_from_spec(text, local_host=lambda: CPU_HOST)
    message = str(caught.value)
    assert "8xH100-SXM5-80GB" in message or "2xCPU" in message
    assert len(message.splitlines()) <= 3


def test_an_older_card_has_no_peak_in_the_types_it_lacks() -> None:
    v100 = GPU_SPECS["V100-32GB"]
    assert v100.peak_flops_per_s(Precision.BF16_MIXED) is None
    assert v100.peak_flops_per_s(Precision.FP16_MIXED) == 125 * 10**12
    assert GPU_SPECS["H200"].peak_flops_per_s(Precision.FP8) == 1979 * 10**12
