"""The rows of the catalogue: published figures, plausible ones, laptop GPUs at their power, MIG slices."""

from typing import Any

import pytest
from estimate_factory import UNKNOWN_HOST
from msgspec.structs import asdict
from planning_factory import note_of, plan_of

from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.speed.step import speed_notes
from shardwise.trainer.planning.tables.gpu_specs import GPU_SPECS, GpuSpec, gpu_spec
from shardwise.trainer.spec.hardware import Gpu, Hardware, MeasuredRates
from shardwise.trainer.spec.strategy import Precision
from shardwise.trainer.spec.units import GIB

ROWS = pytest.mark.parametrize("spec", GPU_SPECS.values(), ids=GPU_SPECS.keys())
# TFLOP/s of datasheets and whitepapers, dense, sums in fp32: fp32, tf32, fp16, fp8; GB/s of memory.
# fmt: off
PUBLISHED = [
    ("V100-16GB", 15.7, None, 125, None, 900), ("V100-32GB", 15.7, None, 125, None, 900),
    ("V100-PCIe-16GB", 14, None, 112, None, 900), ("V100-PCIe-32GB", 14, None, 112, None, 900),
    ("T4", 8.1, None, 65, None, 320), ("RTX-2080Ti", 13.4, None, 53.8, None, 616),
    ("RTX-3060-12GB", 12.7, 12.7, 25.5, None, 360), ("RTX-3070-8GB", 20.3, 20.3, 40.6, None, 448),
    ("RTX-3080-10GB", 29.8, 29.8, 59.5, None, 760), ("RTX-3090", 35.6, 35.6, 71, None, 936),
    ("RTX-4060-8GB", 15.1, 15.1, 30, 60, 272), ("RTX-4060Ti-16GB", 22.1, 22.1, 44, 88, 288),
    ("RTX-4070-12GB", 29.1, 29.1, 58.3, 116.6, 504), ("RTX-4080", 48.7, 48.7, 97.5, 194.9, 717),
    ("RTX-4090", 82.6, 82.6, 165.2, 330.3, 1008), ("RTX-5070Ti", 43.9, 43.9, 87.9, 175.8, 896),
    ("RTX-5080", 56.3, 56.3, 112.6, 225.1, 960), ("RTX-5090", 104.8, 104.8, 209.5, 419, 1792),
    ("A10G", 31.5, 35, 70, None, 600), ("A10", 31.2, 62.5, 125, None, 600), ("A30", 10.3, 82, 165, None, 933),
    ("A40", 37.4, 74.8, 149.7, None, 696), ("L4", 30.3, 60, 121, 242, 300), ("L40", 90.5, 90.5, 181, 362, 864),
    ("L40S", 91.6, 183, 362, 733, 864), ("RTX-A5000", 27.8, 55.6, 111, None, 768),
    ("RTX-A6000", 38.7, 77.4, 154.8, None, 768), ("RTX-6000-Ada", 91.1, 182.1, 364.2, 728.5, 960),
    ("A100-SXM4-40GB", 19.5, 156, 312, None, 1555), ("A100-SXM4-80GB", 19.5, 156, 312, None, 2039),
    ("A100-PCIe-40GB", 19.5, 156, 312, None, 1555), ("A100-PCIe-80GB", 19.5, 156, 312, None, 1935),
    ("A800-SXM4-80GB", 19.5, 156, 312, None, 2039), ("H100-SXM5-80GB", 67, 494.5, 989.5, 1979, 3350),
    ("H100-PCIe-80GB", 51, 378, 756, 1513, 2000), ("H100-NVL-94GB", 60, 417.5, 835.5, 1671, 3938),
    ("H100-96GB-HBM2e", 67, 494.5, 989.5, 1979, 2400), ("H200", 67, 494.5, 989.5, 1979, 4800),
    ("GH200", 67, 494.5, 989.5, 1979, 4000), ("B200", 75, 1125, 2250, 4500, 8000), ("B300", 75, 1125, 2250, 4500, 8000),
    ("GB200", 80, 1250, 2500, 5000, 8000),
    ("RTX-2060-6GB", 6.45, None, 25.8, None, 336), ("RTX-2070", 7.5, None, 29.9, None, 448),
    ("RTX-2080", 10.1, None, 40.3, None, 448), ("RTX-2080Super", 11.2, None, 44.6, None, 496),
    ("TITAN-RTX", 16.3, None, 130.5, None, 672), ("Quadro-RTX-8000", 16.3, None, 130.5, None, 672),
    ("GTX-1660Ti", 5.4, None, 5.4, None, 288), ("V100S-PCIe-32GB", 16.4, None, 130, None, 1134),
    ("RTX-3060Ti", 16.2, 16.2, 32.4, None, 448), ("RTX-3070Ti", 21.7, 21.7, 43.5, None, 608),
    ("RTX-3080-12GB", 30.6, 30.6, 61.3, None, 912), ("RTX-3080Ti", 34.1, 34.1, 68.2, None, 912),
    ("RTX-3090Ti", 40, 40, 80, None, 1008), ("RTX-A2000-12GB", 8, 16, 31.9, None, 288),
    ("RTX-A4000", 19.2, 38.3, 76.7, None, 448), ("RTX-A4500", 23.7, 47.3, 94.6, None, 640),
    ("RTX-A5500", 34.1, 68.2, 136.4, None, 768), ("A2", 4.5, 9, 18, None, 200), ("A16", 4.5, 9, 18, None, 200),
    ("RTX-4060Ti-8GB", 22.1, 22.1, 44.1, 88.2, 288), ("RTX-4070Super", 35.5, 35.5, 71, 142, 504),
    ("RTX-4070Ti", 40.1, 40.1, 80.2, 160.4, 504), ("RTX-4070TiSuper", 44.1, 44.1, 88.2, 176.4, 672),
    ("RTX-4080Super", 52.2, 52.2, 104.4, 208.9, 736), ("RTX-4090D", 73.5, 73.5, 147.1, 294.2, 1008),
    ("RTX-2000-Ada", 12, 24, 48, 96, 224), ("RTX-4000-SFF-Ada", 19.2, 38.4, 76.7, 153.4, 280),
    ("RTX-4000-Ada", 26.7, 53.5, 106.9, 213.8, 360), ("RTX-4500-Ada", 39.6, 79.3, 158.5, 317, 432),
    ("RTX-5000-Ada", 65.3, 130.6, 261.1, 522.2, 576), ("L20", 59.8, 59.8, 119.5, 239, 864),
    ("H800-SXM5-80GB", 67, 494.5, 989.5, 1979, 3350), ("H20-96GB", 44, 74, 148, 296, 4000),
    ("H200-NVL", 60, 417.5, 835.5, 1671, 4800), ("RTX-5060Ti-16GB", 23.7, 23.7, 47.4, 94.8, 448),
    ("RTX-5070", 30.9, 30.9, 61.7, 123.5, 672), ("RTX-PRO-6000", 126, 251.9, 503.8, 1007.6, 1792),
    ("RTX-PRO-6000-MaxQ", 110, 220, 440, 880, 1792), ("GB10", 31, 62, 125, 250, 273),
    ("RTX-4090-Laptop", 39.7, 39.7, 79.4, 158.8, 576), ("RTX-3080Ti-Laptop", 23.6, 23.6, 47.2, None, 512),
]
# fmt: on


@pytest.mark.parametrize(("name", "fp32", "tf32", "fp16", "fp8", "gb_per_s"), PUBLISHED)
def test_peaks_that_follow_from_the_chip_are_those_of_the_datasheet(name, fp32, tf32, fp16, fp8, gb_per_s):
    """Up to rounding: a datasheet gives two or three digits."""
    spec = GPU_SPECS[name]
    found = (spec.fp32_flops_per_s, spec.tf32_flops_per_s, spec.fp16_flops_per_s, spec.fp8_flops_per_s)
    for peak, published in zip(found, (fp32, tf32, fp16, fp8), strict=True):
        assert (peak is None) is (published is None)
        if peak is not None and published is not None:
            assert peak / 1e12 == pytest.approx(published, rel=0.01)
    assert spec.bf16_flops_per_s == (spec.fp16_flops_per_s if spec.compute_capability >= (8, 0) else None)
    assert spec.memory_bytes_per_s == gb_per_s * 10**9


@ROWS
def test_figures_of_a_row_are_consistent(spec: GpuSpec) -> None:
    assert 0.94 * spec.memory_bytes < spec.usable_bytes < spec.memory_bytes
    assert spec.context_bytes < GIB
    has_tensor_cores = not spec.name.startswith("GTX")
    assert spec.fp32_flops_per_s < spec.fp16_flops_per_s or not has_tensor_cores
    assert 4 <= spec.pcie_bytes_per_s / 1e9 <= 450
    assert spec.source
    has_bf16, has_fp8 = spec.compute_capability >= (8, 0), spec.compute_capability >= (8, 9)
    assert (spec.bf16_flops_per_s is not None) is has_bf16
    assert (spec.tf32_flops_per_s is not None) is has_bf16
    assert (spec.fp8_flops_per_s is not None) is has_fp8
    if has_fp8:
        assert spec.fp8_flops_per_s == pytest.approx(2 * spec.fp16_flops_per_s, rel=0.03)
    # Two capacities in one name would be a slip of the table.
    tolerance = 0.05 if spec.generation != "ga10x" else 0.07
    for stated in (part for part in spec.name.split("-") if part.endswith("GB")):
        assert int(stated[:-2]) == pytest.approx(spec.memory_bytes / GIB, rel=tolerance)


@pytest.mark.parametrize("spec", [row for row in GPU_SPECS.values() if row.lowest_watts], ids=lambda row: row.name)
def test_a_laptop_gpu_is_slower_at_less_power_and_never_faster_than_its_row(spec: GpuSpec) -> None:
    assert spec.lowest_watts is not None and "Laptop" in spec.name
    watts = [1, spec.lowest_watts, (spec.lowest_watts + spec.board_watts) / 2, spec.board_watts, 1000]
    peaks = [spec.at_power(limit).fp16_flops_per_s for limit in watts]
    assert peaks[0] == peaks[1] < peaks[2] < peaks[3] == peaks[4] == spec.fp16_flops_per_s
    assert peaks[1] / peaks[3] == pytest.approx(spec.lowest_clock_share, rel=1e-6)
    assert 0.5 < spec.lowest_clock_share < 0.85


def test_only_cards_for_games_lack_peer_access_over_pcie_and_an_older_card_peaks_of_types_it_lacks() -> None:
    without = {spec.name for spec in GPU_SPECS.values() if not spec.has_peer_access_over_pcie}
    assert {"RTX-3090", "RTX-4090", "RTX-5090"} <= without
    assert without.isdisjoint({"RTX-A6000", "RTX-6000-Ada", "L40S", "A100-PCIe-80GB", "H100-PCIe-80GB"})
    v100 = GPU_SPECS["V100-32GB"]
    assert v100.peak_flops_per_s(Precision.BF16_MIXED) is None
    assert v100.peak_flops_per_s(Precision.FP16_MIXED) == v100.fp16_flops_per_s


def test_the_boost_clock_of_a_power_class_is_the_published_one() -> None:
    lowest = GPU_SPECS["RTX-4090-Laptop"].at_power(80)
    assert lowest.fp32_flops_per_s / 1e12 == pytest.approx(28.3, rel=0.01)  # 76 SMs at 1455 MHz
    assert GPU_SPECS["RTX-4090"].at_power(200) is GPU_SPECS["RTX-4090"]


# SMs, memory slices of eight and GiB of `nvidia-smi mig -lgip`
SLICES = [
    ("A100-SXM4-40GB-MIG-1g.5gb", 14, 1, 4.75), ("A100-SXM4-80GB-MIG-1g.10gb", 14, 1, 9.5),
    ("A100-PCIe-80GB-MIG-3g.40gb", 42, 4, 39.25), ("A30-MIG-2g.12gb", 28, 4, 11.69),
    ("H100-SXM5-80GB-MIG-1g.20gb", 16, 2, 19.5), ("H100-SXM5-80GB-MIG-3g.40gb", 60, 4, 39.25),
    ("H200-MIG-1g.18gb", 16, 1, 16), ("H200-MIG-7g.141gb", 132, 8, 139.5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "num_sms", "eighths", "gib"), SLICES)
def test_a_mig_slice_has_its_part_of_the_card(name: str, num_sms: int, eighths: int, gib: float) -> None:
    found, card = gpu_spec(name), GPU_SPECS[name.partition("-MIG-")[0]]
    assert found is not None and found.name == name
    assert found.usable_bytes == pytest.approx(gib * GIB, rel=0.001)
    assert found.memory_bytes_per_s * 8 == card.memory_bytes_per_s * eighths
    assert found.bf16_flops_per_s == pytest.approx((card.bf16_flops_per_s or 0) * num_sms / card.num_sms, rel=1e-9)
    assert found.nvlink_bytes_per_s is None


@ROWS
def test_slices_of_a_card_are_parts_of_it(spec: GpuSpec) -> None:
    for profile in spec.mig_profiles:
        part = gpu_spec(f"{spec.name}-MIG-{profile.name}")
        assert part.usable_bytes <= spec.usable_bytes and part.num_sms <= spec.num_sms
        assert part.usable_bytes == pytest.approx(spec.memory_bytes * profile.memory_eighths / 8, rel=0.12)
        figures = asdict(part)
        assert {key for key, value in asdict(spec).items() if value is None and figures[key] is not None} == set()


def with_card(gpu: Gpu, **facts: Any) -> Hardware:
    return Hardware(gpus=(gpu,), host=UNKNOWN_HOST, **facts)


STRANGER = Gpu(index=0, name="NVIDIA Future 1", spec_name=None, memory_bytes=16 * GIB)


def test_the_speed_of_a_card_without_a_row_is_not_known() -> None:
    stranger = plan_of("1b", with_card(STRANGER))
    assert stranger.chosen.speed.mfu is None
    expectation = note_of(stranger, "no run on this device")
    assert "tokens/s" not in expectation and "memory" in expectation
    assert any("not known" in note and "probe --measure" in note for note in stranger.notes)


def test_a_measured_card_needs_no_row() -> None:
    rates = MeasuredRates(matmul_flops_per_s=10**14, matmul_precision="bf16", memory_bytes_per_s=10**12)
    device = device_of(with_card(STRANGER, rates=rates))
    assert device.has_known_speed and speed_notes(device) == ()
