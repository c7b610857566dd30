"""The catalogue: datasheet facts of GPUs, for plans without the machine.

A row has a card's datasheet figures (SMs, boost clock, memory, slot, board power); its peaks follow from its chip
(`gpu_chips`), and a row states a peak only if the datasheet of that card has another. Memory is the total that
`nvidia-smi` reports (without ECC), usable memory what a process can allocate of it (CUDA context included), rates are
per second and per direction. Peaks are dense (no sparsity) and accumulate in fp32. `network_bytes_per_s` is not of the
card: it is the usual rate of a node with this card, all adapters together, until a measurement replaces it: for cards
on a baseboard that of NVIDIA's own machines (DGX-1 with four adapters of 100 Gb/s, DGX A100 eight of 200, DGX H100 and
B200 eight of 400). Clouds may have a quarter of it; a case can set it.

A laptop GPU is sold with a range of board powers. Its row is the highest of them, and also has the lowest with its
boost clock; between the two the clock is interpolated (`at_power`). The figures are those of NVIDIA's comparison of
GeForce laptop GPUs, without Dynamic Boost. Rows of RTX A laptop GPUs and of Max-Q designs have one class of power only.

Sources: each family or row names NVIDIA's datasheet or architecture whitepaper; usable memory is `total_memory` of
`torch.cuda.get_device_properties` as people report it for the card, within about 1 %; a row without it has 128 MiB and
1.5 % less than its memory.
Not covered: AMD, Intel, chips before compute capability 7.0, and PCIe bridges of NVLink (a machine that has them is
probed instead).
"""

from collections.abc import Mapping
from functools import lru_cache

from msgspec.structs import replace

from shardwise.trainer.planning.tables.gpu_chips import (
    AD10X,
    GA10B,
    GA10X,
    GA100,
    GB10B,
    GB20B,
    GB20X,
    GB100,
    GB110,
    GH100,
    GV100,
    TU10X,
    TU11X,
    Chip,
    Generation,
    peaks_of,
)
from shardwise.trainer.spec.strategy import Precision
from shardwise.trainer.spec.units import MIB
from shardwise.trainer.spec.value import Value

GB_PER_S = 10**9
TFLOPS = 10**12
MIG_MARK = "-MIG-"  # between the name of a card and a profile, in the name of a slice
_PCIE_GB_PER_S = {3: 1, 4: 2, 5: 4}  # of a lane, each direction, by generation
_UNSTATED_RESERVE_MIB, _UNSTATED_RESERVE_SHARE = 128, 0.015  # reserved by the driver, by default


class MigProfile(Value, frozen=True, kw_only=True):
    """One profile of MIG, as `nvidia-smi mig -lgip` lists it."""

    name: str  # 1g.10gb
    num_sms: int
    memory_eighths: int  # memory slices, each an eighth of the memory and of its bandwidth
    usable_gib: float


class GpuSpec(Value, frozen=True, kw_only=True):
    """One row of the catalogue of GPUs."""

    name: str
    smi_names: tuple[str, ...]  # as nvidia-smi writes them, without "NVIDIA" or "Tesla"
    generation: Generation
    compute_capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    usable_bytes: int
    memory_bytes_per_s: int
    fp32_flops_per_s: int
    tf32_flops_per_s: int | None
    fp16_flops_per_s: int
    bf16_flops_per_s: int | None
    fp8_flops_per_s: int | None
    nvlink_bytes_per_s: int | None  # to the other GPUs of the node, all links together, each direction
    pcie_bytes_per_s: int  # to the host, each direction
    pcie_lanes: int | None = None  # None: another link, or unknown
    network_bytes_per_s: int  # of a typical node
    has_peer_access_over_pcie: bool
    halves_fp32_sums: bool  # products that sum in fp32 run at half the rate of those that sum in fp16
    is_consumer: bool = False  # GeForce and TITAN: the usual machine is a desktop or a laptop
    board_watts: int
    lowest_watts: int | None = None  # of a laptop GPU: the lowest board power it is sold with
    lowest_clock_share: float = 1.0  # its boost clock there, as a share of the one at `board_watts`
    mig_profiles: tuple[MigProfile, ...] = ()
    context_bytes: int  # CUDA context and kernels of one process
    source: str

    def peak_flops_per_s(self, precision: Precision) -> int | None:
        """Dense peak of the matrix products of `precision`; None where the chip has no unit for it."""
        if precision is Precision.FP32:
            return self.fp32_flops_per_s
        if precision is Precision.FP16_MIXED:
            return self.fp16_flops_per_s
        if precision is Precision.FP8:
            return self.fp8_flops_per_s
        return self.bf16_flops_per_s

    @property
    def is_integrated(self) -> bool:
        """True if the device memory is the RAM of the machine."""
        return self.pcie_lanes is None and self.nvlink_bytes_per_s is None

    def pcie_bytes_per_s_at(self, lanes: int | None) -> int:
        """Rate to the host in a slot with `lanes`, or with all that the card has."""
        if lanes is None or self.pcie_lanes is None:
            return self.pcie_bytes_per_s
        return self.pcie_bytes_per_s * min(lanes, self.pcie_lanes) // self.pcie_lanes

    def at_power(self, watts: float | None) -> "GpuSpec":
        """The row of a laptop GPU whose board power is limited to `watts`; any other row as it is."""
        if watts is None or self.lowest_watts is None or watts >= self.board_watts:
            return self
        limit = max(watts, self.lowest_watts)
        above_lowest = (limit - self.lowest_watts) / (self.board_watts - self.lowest_watts)
        share = self.lowest_clock_share + (1 - self.lowest_clock_share) * above_lowest
        return replace(_with_scaled_peaks(self, share), board_watts=round(limit), lowest_watts=None)


SHARED_UPLINKS_FROM = 8  # cards


def usual_cards_per_uplink(spec: GpuSpec, num_cards: int) -> int:
    """Cards of a server that share a way to the host, where its topology is not known.

    Eight in slots are behind PCIe switches, two for each uplink; fewer have lanes of their own. Boards of NVLink have
    such switches too, but the one measured run of their offload (70B on eight A100, torchtune) is faster than without.
    """
    is_in_slot = spec.pcie_lanes is not None and spec.nvlink_bytes_per_s is None
    return 2 if num_cards >= SHARED_UPLINKS_FROM and is_in_slot and not spec.is_consumer else 1


@lru_cache(maxsize=256)
def gpu_spec(name: str | None) -> GpuSpec | None:
    """The row of exactly this name, of a card or of a MIG slice (`A100-SXM4-80GB-MIG-1g.10gb`); None: there is none."""
    card, mark, wanted = (name or "").partition(MIG_MARK)
    row = GPU_SPECS.get(card)
    if row is None or not mark:
        return row
    return next((_slice_of(row, profile) for profile in row.mig_profiles if profile.name == wanted), None)


def _slice_of(row: GpuSpec, profile: MigProfile) -> GpuSpec:
    """A slice has its own SMs and memory; it shares the clock, the power and the way to the host."""
    num_sms = min(profile.num_sms, row.num_sms)  # a PCIe card has fewer SMs than its profiles list
    part = _with_scaled_peaks(row, num_sms / row.num_sms)
    return replace(
        part,
        name=f"{row.name}{MIG_MARK}{profile.name}",
        smi_names=tuple(f"{name} MIG {profile.name}" for name in row.smi_names),
        num_sms=num_sms,
        memory_bytes=round(profile.usable_gib * 1024) * MIB,
        usable_bytes=round(profile.usable_gib * 1024) * MIB,
        memory_bytes_per_s=row.memory_bytes_per_s * profile.memory_eighths // 8,
        nvlink_bytes_per_s=None,
        mig_profiles=(),
    )


def _with_scaled_peaks(row: GpuSpec, share: float) -> GpuSpec:
    def scaled(peak: int | None) -> int | None:
        return None if peak is None else round(share * peak)

    return replace(
        row,
        fp32_flops_per_s=round(share * row.fp32_flops_per_s),
        tf32_flops_per_s=scaled(row.tf32_flops_per_s),
        fp16_flops_per_s=round(share * row.fp16_flops_per_s),
        bf16_flops_per_s=scaled(row.bf16_flops_per_s),
        fp8_flops_per_s=scaled(row.fp8_flops_per_s),
    )


class _Family(Value, frozen=True, kw_only=True):
    """Facts that the cards of one product line share."""

    chip: Chip
    source: str
    halves_fp32_sums: bool = False
    has_peer_access_over_pcie: bool = True
    is_consumer: bool = False
    network: int  # GB/s of a typical node


def _geforce(chip: Chip, source: str) -> _Family:
    """GeForce drivers bounce copies between cards through host memory."""
    halves = chip.tensor_flop is not None
    return _Family(
        chip=chip,
        source=source,
        halves_fp32_sums=halves,
        has_peer_access_over_pcie=False,
        is_consumer=True,
        network=3,
    )


_TURING_PAPER = "NVIDIA Turing GPU Architecture whitepaper"
_GA102_PAPER = "NVIDIA Ampere GA102 GPU Architecture whitepaper, v2.1"
_AD102_PAPER = "NVIDIA Ada GPU Architecture whitepaper, v2.1"
_GB202_PAPER = "NVIDIA RTX Blackwell GPU Architecture whitepaper, v1.1"
_LAPTOPS = "NVIDIA's comparison of GeForce laptop GPUs, nvidia.com/geforce/laptops/compare; "
_DATA_CENTER = "nvidia.com/en-us/data-center/"

_V100 = _Family(chip=GV100, source=f"NVIDIA V100 Tensor Core GPU datasheet, {_DATA_CENTER}v100", network=12)
_TITAN_V = _geforce(GV100, "NVIDIA TITAN V user guide; NVIDIA Tesla V100 GPU Architecture whitepaper")
_GTX16 = _geforce(TU11X, "NVIDIA GeForce GTX 16 series, nvidia.com/geforce/graphics-cards/16-series")
_RTX20 = _geforce(TU10X, _TURING_PAPER)
_QUADRO = _Family(chip=TU10X, source="NVIDIA Quadro RTX datasheets; " + _TURING_PAPER, network=12)
_T4 = _Family(chip=TU10X, source=f"NVIDIA T4 datasheet, {_DATA_CENTER}tesla-t4", network=6)
_RTX30 = _geforce(GA10X, _GA102_PAPER)
_RTX30_L = _geforce(GA10X, _LAPTOPS + _GA102_PAPER)
_RTX_A = _Family(chip=GA10X, source="NVIDIA RTX A-series datasheets; " + _GA102_PAPER, network=12)
_RTX40 = _geforce(AD10X, _AD102_PAPER)
_RTX40_L = _geforce(AD10X, _LAPTOPS + _AD102_PAPER)
_RTX_ADA = _Family(chip=AD10X, source="NVIDIA RTX Ada Generation datasheets; " + _AD102_PAPER, network=12)
_RTX50 = _geforce(GB20X, _GB202_PAPER)
_RTX50_L = _geforce(GB20X, _LAPTOPS + _GB202_PAPER)
_RTX_PRO = _Family(chip=GB20X, source="NVIDIA RTX PRO Blackwell datasheets; " + _GB202_PAPER, network=12)
_A100 = _Family(chip=GA100, source=f"NVIDIA A100 Tensor Core GPU datasheet, {_DATA_CENTER}a100", network=50)
_H100 = _Family(chip=GH100, source=f"NVIDIA H100 Tensor Core GPU datasheet, {_DATA_CENTER}h100", network=100)
_B200 = _Family(chip=GB100, source=f"NVIDIA HGX B200 datasheet, {_DATA_CENTER}hgx (with sparsity, halved)", network=400)
_B300 = _Family(chip=GB110, source=f"NVIDIA HGX B300 datasheet, {_DATA_CENTER}hgx (with sparsity, halved)", network=800)
_ORIN = _Family(chip=GA10B, source="NVIDIA Jetson AGX Orin Series technical brief, v1.2", network=1)
_THOR = _Family(chip=GB10B, source="NVIDIA Jetson Thor datasheet (fp4 with sparsity, by 8)", network=1)
_GB10 = _Family(chip=GB20B, source="NVIDIA DGX Spark datasheet (fp4 with sparsity, by 8)", network=25)

# Profiles with and without media engines (+me, +me.all) are alike here. Names, SMs and sizes are those of
# `nvidia-smi mig -lgip` and of the MIG user guide.
_MIG_SMS = {GA100: (14, 14, 28, 42, 56, 98), GH100: (16, 16, 32, 60, 64, 132)}


def _mig(chip: Chip, *profiles: tuple[str, float]) -> tuple[MigProfile, ...]:
    """The six profiles of a card with seven compute and eight memory slices: 1g, 1g double, 2g, 3g, 4g, 7g."""
    return tuple(
        MigProfile(name=name, num_sms=sms, memory_eighths=eighths, usable_gib=gib)
        for (name, gib), sms, eighths in zip(profiles, _MIG_SMS[chip], (1, 2, 2, 4, 4, 8), strict=True)
    )


_MIG_A100_40 = _mig(
    GA100, ("1g.5gb", 4.75), ("1g.10gb", 9.62), ("2g.10gb", 9.62), ("3g.20gb", 19.5), ("4g.20gb", 19.5),
    ("7g.40gb", 39.25),
)  # fmt: skip
_MIG_A100_80 = _mig(
    GA100, ("1g.10gb", 9.5), ("1g.20gb", 19.5), ("2g.20gb", 19.5), ("3g.40gb", 39.25), ("4g.40gb", 39.25),
    ("7g.80gb", 78.75),
)  # fmt: skip
_MIG_H100_80 = _mig(
    GH100, ("1g.10gb", 9.5), ("1g.20gb", 19.5), ("2g.20gb", 19.5), ("3g.40gb", 39.25), ("4g.40gb", 39.25),
    ("7g.80gb", 79.0),
)  # fmt: skip
_MIG_H100_94 = _mig(
    GH100, ("1g.12gb", 10.75), ("1g.24gb", 22), ("2g.24gb", 22), ("3g.47gb", 46), ("4g.47gb", 46), ("7g.94gb", 92.5),
)  # fmt: skip
_MIG_H100_96 = _mig(
    GH100, ("1g.12gb", 10.75), ("1g.24gb", 22), ("2g.24gb", 22), ("3g.48gb", 46), ("4g.48gb", 46), ("7g.96gb", 94),
)  # fmt: skip
_MIG_H200 = _mig(
    GH100, ("1g.18gb", 16), ("1g.35gb", 32.5), ("2g.35gb", 32.5), ("3g.71gb", 69.5), ("4g.71gb", 69.5),
    ("7g.141gb", 139.5),
)  # fmt: skip
_MIG_A30 = tuple(
    MigProfile(name=name, num_sms=sms, memory_eighths=eighths, usable_gib=gib)
    for name, sms, eighths, gib in (("1g.6gb", 14, 2, 5.81), ("2g.12gb", 28, 4, 11.69), ("4g.24gb", 56, 8, 23.44))
)


def _row(
    names: str,
    family: _Family,
    chip: tuple[int, float],
    memory: tuple[int, int],
    slot: str,
    watts: int,
    *,
    usable: float | None = None,
    lowest: tuple[int, float] | None = None,
    tensor_mhz: float | None = None,
    stated: Mapping[str, float] | None = None,
    halves: bool | None = None,
    nvlink: int | None = None,
    network: int | None = None,
    mig: tuple[MigProfile, ...] = (),
    source: str | None = None,
) -> GpuSpec:
    """One row: `chip` is (SMs, boost MHz), `memory` (MiB in nvidia-smi, GB/s), `slot` `4x16` or GB/s to the host.

    `usable` GiB of memory, `lowest` (W, boost MHz) of a laptop GPU, `stated` TFLOP/s of a datasheet that differs from
    the formula, `nvlink` and `network` in GB/s.
    """
    name, *smi_names = names.split(" = ")
    (num_sms, boost_mhz), (mib, gb_per_s) = chip, memory
    halves_fp32_sums = family.halves_fp32_sums if halves is None else halves
    peaks = peaks_of(
        family.chip, num_sms, clock_mhz=boost_mhz, tensor_mhz=tensor_mhz, halves_fp32_sums=halves_fp32_sums
    )
    if stated is not None:
        peaks = replace(peaks, **{kind: round(peak * TFLOPS) for kind, peak in stated.items()})
    usable_mib = mib - _UNSTATED_RESERVE_MIB - _UNSTATED_RESERVE_SHARE * mib if usable is None else usable * 1024
    return GpuSpec(
        name=name,
        smi_names=tuple(smi_names),
        generation=family.chip.generation,
        compute_capability=family.chip.compute_capability,
        num_sms=num_sms,
        memory_bytes=mib * MIB,
        usable_bytes=round(usable_mib) * MIB,
        memory_bytes_per_s=gb_per_s * GB_PER_S,
        fp32_flops_per_s=peaks.fp32,
        tf32_flops_per_s=peaks.tf32,
        fp16_flops_per_s=peaks.fp16,
        bf16_flops_per_s=peaks.bf16,
        fp8_flops_per_s=peaks.fp8,
        nvlink_bytes_per_s=None if nvlink is None else nvlink * GB_PER_S,
        pcie_bytes_per_s=_slot_gb_per_s(slot) * GB_PER_S,
        pcie_lanes=int(slot.partition("x")[2]) if "x" in slot else None,
        network_bytes_per_s=(network or family.network) * GB_PER_S,
        has_peer_access_over_pcie=family.has_peer_access_over_pcie,
        halves_fp32_sums=halves_fp32_sums,
        is_consumer=family.is_consumer,
        board_watts=watts,
        lowest_watts=lowest[0] if lowest else None,
        lowest_clock_share=lowest[1] / boost_mhz if lowest else 1.0,
        mig_profiles=mig,
        context_bytes=family.chip.context_mib * MIB,
        source=source or family.source,
    )


def _slot_gb_per_s(slot: str) -> int:
    """`4x16` is PCIe 4.0 with 16 lanes; a bare number is the rate of another link to the host."""
    generation, cross, lanes = slot.partition("x")
    return _PCIE_GB_PER_S[int(generation)] * int(lanes) if cross else int(slot)


# Of cards with the same name, the first is used if nothing else distinguishes them.
# fmt: off
_ROWS = (
    # name = names in nvidia-smi, family, (SMs, boost MHz), (MiB, GB/s), slot, W
    _row("V100-16GB = V100-SXM2-16GB", _V100, (80, 1530), (16384, 900), "3x16", 300, usable=15.77, nvlink=150,
         network=50),
    _row("V100-32GB = V100-SXM2-32GB = V100-SXM3-32GB = V100-DGXS-32GB", _V100, (80, 1530), (32768, 900), "3x16", 300,
         usable=31.74, nvlink=150, network=50),
    _row("V100-PCIe-16GB = V100-PCIE-16GB", _V100, (80, 1370), (16384, 900), "3x16", 250, usable=15.77),
    _row("V100-PCIe-32GB = V100-PCIE-32GB", _V100, (80, 1370), (32768, 900), "3x16", 250, usable=31.74),
    _row("V100S-PCIe-32GB = V100S-PCIE-32GB", _V100, (80, 1597), (32768, 1134), "3x16", 250, usable=31.74),
    _row("TITAN-V = TITAN V", _TITAN_V, (80, 1455), (12288, 653), "3x16", 250, halves=False),

    # Turing
    _row("GTX-1630 = GeForce GTX 1630", _GTX16, (8, 1785), (4096, 96), "3x16", 75),
    _row("GTX-1650 = GeForce GTX 1650 = GeForce GTX 1650 with Max-Q Design", _GTX16, (14, 1665), (4096, 128),
         "3x16", 75),
    _row("GTX-1650Ti-Laptop = GeForce GTX 1650 Ti = GeForce GTX 1650 Ti with Max-Q Design", _GTX16, (16, 1485),
         (4096, 192), "3x16", 50),
    _row("GTX-1650Super = GeForce GTX 1650 SUPER", _GTX16, (20, 1725), (4096, 192), "3x16", 100),
    _row("GTX-1660 = GeForce GTX 1660", _GTX16, (22, 1785), (6144, 192), "3x16", 120),
    _row("GTX-1660Super = GeForce GTX 1660 SUPER", _GTX16, (22, 1785), (6144, 336), "3x16", 125),
    _row("GTX-1660Ti = GeForce GTX 1660 Ti", _GTX16, (24, 1770), (6144, 288), "3x16", 120),
    _row("GTX-1660Ti-MaxQ = GeForce GTX 1660 Ti with Max-Q Design", _GTX16, (24, 1335), (6144, 288), "3x16", 60),
    _row("RTX-2060-6GB = GeForce RTX 2060", _RTX20, (30, 1680), (6144, 336), "3x16", 160),
    _row("RTX-2060-12GB = GeForce RTX 2060", _RTX20, (34, 1650), (12288, 336), "3x16", 184),
    _row("RTX-2060-MaxQ = GeForce RTX 2060 with Max-Q Design", _RTX20, (30, 1185), (6144, 264), "3x16", 65),
    _row("RTX-2060Super = GeForce RTX 2060 SUPER", _RTX20, (34, 1650), (8192, 448), "3x16", 175),
    _row("RTX-2070 = GeForce RTX 2070", _RTX20, (36, 1620), (8192, 448), "3x16", 175),
    _row("RTX-2070-MaxQ = GeForce RTX 2070 with Max-Q Design", _RTX20, (36, 1185), (8192, 384), "3x16", 80),
    _row("RTX-2070Super = GeForce RTX 2070 SUPER", _RTX20, (40, 1770), (8192, 448), "3x16", 215),
    _row("RTX-2070Super-MaxQ = GeForce RTX 2070 Super with Max-Q Design", _RTX20, (40, 1155), (8192, 352), "3x16", 80),
    _row("RTX-2080 = GeForce RTX 2080", _RTX20, (46, 1710), (8192, 448), "3x16", 215),
    _row("RTX-2080-MaxQ = GeForce RTX 2080 with Max-Q Design", _RTX20, (46, 1095), (8192, 384), "3x16", 80),
    _row("RTX-2080Super = GeForce RTX 2080 SUPER", _RTX20, (48, 1815), (8192, 496), "3x16", 250),
    _row("RTX-2080Super-MaxQ = GeForce RTX 2080 Super with Max-Q Design", _RTX20, (48, 1080), (8192, 352), "3x16", 80),
    _row("RTX-2080Ti = GeForce RTX 2080 Ti", _RTX20, (68, 1545), (11264, 616), "3x16", 250, usable=10.75),
    _row("TITAN-RTX = TITAN RTX", _RTX20, (72, 1770), (24576, 672), "3x16", 280, halves=False),
    _row("Quadro-RTX-4000 = Quadro RTX 4000", _QUADRO, (36, 1545), (8192, 416), "3x16", 160),
    _row("Quadro-RTX-5000 = Quadro RTX 5000", _QUADRO, (48, 1815), (16384, 448), "3x16", 230),
    _row("Quadro-RTX-6000 = Quadro RTX 6000", _QUADRO, (72, 1770), (24576, 672), "3x16", 260),
    _row("Quadro-RTX-8000 = Quadro RTX 8000", _QUADRO, (72, 1770), (49152, 672), "3x16", 260),
    _row("T4 = T4", _T4, (40, 1590), (15360, 320), "3x16", 70, usable=14.56),

    # GA10x: GeForce 30, RTX A, A2 to A40
    _row("RTX-2050-Laptop = GeForce RTX 2050", _RTX30_L, (16, 1477), (4096, 112), "3x8", 45, lowest=(30, 1155)),
    _row("RTX-3050-6GB = GeForce RTX 3050", _RTX30, (18, 1470), (6144, 168), "4x8", 70),
    _row("RTX-3050-8GB = GeForce RTX 3050", _RTX30, (20, 1777), (8192, 224), "4x8", 130),
    _row("RTX-3060-8GB = GeForce RTX 3060", _RTX30, (28, 1777), (8192, 240), "4x16", 170),
    _row("RTX-3060-12GB = GeForce RTX 3060", _RTX30, (28, 1777), (12288, 360), "4x16", 170, usable=11.75),
    _row("RTX-3060Ti = GeForce RTX 3060 Ti", _RTX30, (38, 1665), (8192, 448), "4x16", 200),
    _row("RTX-3070-8GB = GeForce RTX 3070", _RTX30, (46, 1725), (8192, 448), "4x16", 220, usable=7.78),
    _row("RTX-3070Ti = GeForce RTX 3070 Ti", _RTX30, (48, 1770), (8192, 608), "4x16", 290),
    _row("RTX-3080-10GB = GeForce RTX 3080", _RTX30, (68, 1710), (10240, 760), "4x16", 320, usable=9.77),
    _row("RTX-3080-12GB = GeForce RTX 3080", _RTX30, (70, 1710), (12288, 912), "4x16", 350),
    _row("RTX-3080Ti = GeForce RTX 3080 Ti", _RTX30, (80, 1665), (12288, 912), "4x16", 350),
    _row("RTX-3090 = GeForce RTX 3090", _RTX30, (82, 1695), (24576, 936), "4x16", 350, usable=23.68),
    _row("RTX-3090Ti = GeForce RTX 3090 Ti", _RTX30, (84, 1860), (24576, 1008), "4x16", 450),
    _row("RTX-3050-Laptop-4GB = GeForce RTX 3050 Laptop GPU", _RTX30_L, (16, 1740), (4096, 192), "4x8", 80,
         lowest=(35, 1057)),
    _row("RTX-3050-Laptop-6GB = GeForce RTX 3050 6GB Laptop GPU", _RTX30_L, (20, 1492), (6144, 168), "4x8", 80,
         lowest=(35, 1237)),
    _row("RTX-3050Ti-Laptop = GeForce RTX 3050 Ti Laptop GPU", _RTX30_L, (20, 1695), (4096, 192), "4x8", 80,
         lowest=(35, 1035)),
    _row("RTX-3060-Laptop = GeForce RTX 3060 Laptop GPU", _RTX30_L, (30, 1703), (6144, 336), "4x16", 115,
         lowest=(60, 1283)),
    _row("RTX-3070-Laptop = GeForce RTX 3070 Laptop GPU", _RTX30_L, (40, 1620), (8192, 448), "4x16", 125,
         lowest=(80, 1290)),
    _row("RTX-3070Ti-Laptop = GeForce RTX 3070 Ti Laptop GPU", _RTX30_L, (46, 1485), (8192, 448), "4x16", 125,
         lowest=(80, 1035)),
    _row("RTX-3080-Laptop-8GB = GeForce RTX 3080 Laptop GPU", _RTX30_L, (48, 1710), (8192, 448), "4x16", 150,
         lowest=(80, 1245)),
    _row("RTX-3080-Laptop-16GB = GeForce RTX 3080 Laptop GPU", _RTX30_L, (48, 1710), (16384, 448), "4x16", 150,
         lowest=(80, 1245)),
    _row("RTX-3080Ti-Laptop = GeForce RTX 3080 Ti Laptop GPU", _RTX30_L, (58, 1590), (16384, 512), "4x16", 150,
         lowest=(80, 1125)),
    _row("RTX-A400 = RTX A400", _RTX_A, (6, 1762), (4094, 96), "4x8", 50),
    _row("RTX-A1000 = RTX A1000", _RTX_A, (18, 1462), (8188, 192), "4x8", 50),
    _row("RTX-A2000-6GB = RTX A2000", _RTX_A, (26, 1200), (6138, 288), "4x16", 70),
    _row("RTX-A2000-12GB = RTX A2000 12GB", _RTX_A, (26, 1200), (12282, 288), "4x16", 70),
    _row("RTX-A4000 = RTX A4000", _RTX_A, (48, 1560), (16376, 448), "4x16", 140),
    _row("RTX-A4500 = RTX A4500", _RTX_A, (56, 1650), (20470, 640), "4x16", 200),
    _row("RTX-A5000 = RTX A5000", _RTX_A, (64, 1695), (24564, 768), "4x16", 230, usable=23.68,
         source="NVIDIA RTX A5000 datasheet; " + _GA102_PAPER),
    _row("RTX-A5500 = RTX A5500", _RTX_A, (80, 1665), (24564, 768), "4x16", 230),
    _row("RTX-A6000 = RTX A6000", _RTX_A, (84, 1800), (49140, 768), "4x16", 300, usable=47.53,
         source="NVIDIA RTX A6000 datasheet; " + _GA102_PAPER),
    _row("RTX-A1000-Laptop = RTX A1000 Laptop GPU", _RTX_A, (16, 1537), (4096, 176), "4x8", 95),
    _row("RTX-A2000-Laptop-4GB = RTX A2000 Laptop GPU", _RTX_A, (20, 1687), (4096, 176), "4x16", 95),
    _row("RTX-A2000-Laptop-8GB = RTX A2000 8GB Laptop GPU", _RTX_A, (20, 1687), (8192, 224), "4x16", 95),
    _row("RTX-A3000-Laptop = RTX A3000 Laptop GPU", _RTX_A, (32, 1560), (6144, 264), "4x16", 130),
    _row("RTX-A4000-Laptop = RTX A4000 Laptop GPU", _RTX_A, (40, 1680), (8192, 384), "4x16", 140),
    _row("RTX-A5000-Laptop = RTX A5000 Laptop GPU", _RTX_A, (48, 1575), (16384, 448), "4x16", 150),
    _row("RTX-A5500-Laptop = RTX A5500 Laptop GPU", _RTX_A, (58, 1500), (16384, 512), "4x16", 165),
    _row("A2 = A2", _RTX_A, (10, 1770), (15356, 200), "4x8", 60,
         source=f"NVIDIA A2 datasheet, {_DATA_CENTER}products/a2"),
    _row("A10G = A10G", _RTX_A, (80, 1710), (23028, 600), "4x16", 150, usable=22.05, halves=True, stated={"fp32": 31.5},
         source="NVIDIA A10G datasheet of the AWS G5 instances (d1.awsstatic.com, 17 February 2022)"),
    _row("A10 = A10", _RTX_A, (72, 1695), (23028, 600), "4x16", 150, usable=22.05,
         source=f"NVIDIA A10 Tensor Core GPU datasheet, {_DATA_CENTER}products/a10-gpu"),
    _row("A16 = A16", _RTX_A, (10, 1755), (15356, 200), "4x16", 62,
         source=f"NVIDIA A16 datasheet, {_DATA_CENTER}products/a16-gpu (one of the four GPUs of a board)"),
    _row("A40 = A40", _RTX_A, (84, 1740), (46068, 696), "4x16", 300, usable=44.35,
         source=f"NVIDIA A40 datasheet, {_DATA_CENTER}a40"),
    _row("Orin-AGX-64GB = Orin (nvgpu)", _ORIN, (16, 1300), (62840, 204), "102", 60),

    # Ada: GeForce 40, RTX Ada, L4 to L40S
    _row("RTX-4060-8GB = GeForce RTX 4060", _RTX40, (24, 2460), (8188, 272), "4x8", 115, usable=7.75),
    _row("RTX-4060Ti-8GB = GeForce RTX 4060 Ti", _RTX40, (34, 2535), (8188, 288), "4x8", 160),
    _row("RTX-4060Ti-16GB = GeForce RTX 4060 Ti", _RTX40, (34, 2535), (16380, 288), "4x8", 165, usable=15.6),
    _row("RTX-4070-12GB = GeForce RTX 4070", _RTX40, (46, 2475), (12282, 504), "4x16", 200, usable=11.6),
    _row("RTX-4070Super = GeForce RTX 4070 SUPER", _RTX40, (56, 2475), (12282, 504), "4x16", 220),
    _row("RTX-4070Ti = GeForce RTX 4070 Ti", _RTX40, (60, 2610), (12282, 504), "4x16", 285),
    _row("RTX-4070TiSuper = GeForce RTX 4070 Ti SUPER", _RTX40, (66, 2610), (16376, 672), "4x16", 285),
    _row("RTX-4080 = GeForce RTX 4080", _RTX40, (76, 2505), (16376, 717), "4x16", 320, usable=15.69),
    _row("RTX-4080Super = GeForce RTX 4080 SUPER", _RTX40, (80, 2550), (16376, 736), "4x16", 320),
    _row("RTX-4090 = GeForce RTX 4090", _RTX40, (128, 2520), (24564, 1008), "4x16", 450, usable=23.64),
    _row("RTX-4090D = GeForce RTX 4090 D", _RTX40, (114, 2520), (24564, 1008), "4x16", 425),
    _row("RTX-4050-Laptop = GeForce RTX 4050 Laptop GPU", _RTX40_L, (20, 2370), (6141, 192), "4x8", 115,
         lowest=(35, 1605)),
    _row("RTX-4060-Laptop = GeForce RTX 4060 Laptop GPU", _RTX40_L, (24, 2370), (8188, 256), "4x8", 115,
         lowest=(35, 1470)),
    _row("RTX-4070-Laptop = GeForce RTX 4070 Laptop GPU", _RTX40_L, (36, 2175), (8188, 256), "4x8", 115,
         lowest=(35, 1230)),
    _row("RTX-4080-Laptop = GeForce RTX 4080 Laptop GPU", _RTX40_L, (58, 2280), (12282, 432), "4x16", 150,
         lowest=(60, 1350)),
    _row("RTX-4090-Laptop = GeForce RTX 4090 Laptop GPU", _RTX40_L, (76, 2040), (16376, 576), "4x16", 150,
         lowest=(80, 1455)),
    _row("RTX-2000-Ada = RTX 2000 Ada Generation", _RTX_ADA, (22, 2130), (16380, 224), "4x8", 70),
    _row("RTX-4000-SFF-Ada = RTX 4000 SFF Ada Generation", _RTX_ADA, (48, 1565), (20475, 280), "4x16", 70),
    _row("RTX-4000-Ada = RTX 4000 Ada Generation", _RTX_ADA, (48, 2175), (20475, 360), "4x16", 130),
    _row("RTX-4500-Ada = RTX 4500 Ada Generation", _RTX_ADA, (60, 2580), (24570, 432), "4x16", 210),
    _row("RTX-5000-Ada = RTX 5000 Ada Generation", _RTX_ADA, (100, 2550), (32760, 576), "4x16", 250),
    _row("RTX-5880-Ada = RTX 5880 Ada Generation", _RTX_ADA, (110, 2460), (49140, 960), "4x16", 285),
    _row("RTX-6000-Ada = RTX 6000 Ada Generation", _RTX_ADA, (142, 2505), (49140, 960), "4x16", 300, usable=47.4,
         source="NVIDIA RTX 6000 Ada Generation datasheet; " + _AD102_PAPER),
    _row("RTX-2000-Ada-Laptop = RTX 2000 Ada Generation Laptop GPU", _RTX_ADA, (24, 2115), (8188, 256), "4x8",
         140, lowest=(35, 1635)),
    _row("RTX-3000-Ada-Laptop = RTX 3000 Ada Generation Laptop GPU", _RTX_ADA, (36, 2115), (8188, 256), "4x8",
         140, lowest=(35, 1395)),
    _row("RTX-3500-Ada-Laptop = RTX 3500 Ada Generation Laptop GPU", _RTX_ADA, (40, 2250), (12282, 432), "4x16",
         140, lowest=(60, 1545)),
    _row("RTX-4000-Ada-Laptop = RTX 4000 Ada Generation Laptop GPU", _RTX_ADA, (58, 2175), (12282, 432), "4x16",
         175, lowest=(60, 1500)),
    _row("RTX-5000-Ada-Laptop = RTX 5000 Ada Generation Laptop GPU", _RTX_ADA, (76, 2190), (16376, 576), "4x16",
         175, lowest=(80, 1680)),
    _row("L4 = L4", _RTX_ADA, (58, 2040), (23034, 300), "4x16", 72, usable=22.03,
         source=f"NVIDIA L4 Tensor Core GPU datasheet, {_DATA_CENTER}l4 (its figures with sparsity, halved)"),
    _row("L20 = L20", _RTX_ADA, (92, 2520), (46068, 864), "4x16", 275, halves=True,
         source="NVIDIA L20 datasheet (dense bf16 119.5 TFLOP/s)"),
    _row("L40 = L40", _RTX_ADA, (142, 2490), (46068, 864), "4x16", 300, usable=44.39, halves=True, network=25,
         source=f"NVIDIA L40 datasheet, {_DATA_CENTER}l40"),
    _row("L40S = L40S", _RTX_ADA, (142, 2520), (46068, 864), "4x16", 350, usable=44.39, network=50,
         stated={"fp16": 362, "bf16": 362}, source=f"NVIDIA L40S datasheet, {_DATA_CENTER}l40s"),

    # GA100
    _row("A30 = A30", _A100, (56, 1440), (24576, 933), "4x16", 165, usable=23.5, network=12, mig=_MIG_A30,
         source=f"NVIDIA A30 Tensor Core GPU datasheet, {_DATA_CENTER}products/a30-gpu"),
    _row("A100-SXM4-40GB = A100-SXM4-40GB", _A100, (108, 1410), (40960, 1555), "4x16", 400, usable=39.39,
         nvlink=300, network=200,
         mig=_MIG_A100_40),
    _row("A100-SXM4-80GB = A100-SXM4-80GB = A100-SXM-80GB", _A100, (108, 1410), (81920, 2039), "4x16", 400,
         usable=79.15,
         nvlink=300, network=200, mig=_MIG_A100_80),
    _row("A100-PCIe-40GB = A100-PCIE-40GB = A100-PCIe-40GB", _A100, (108, 1410), (40960, 1555), "4x16", 250,
         usable=39.39,
         mig=_MIG_A100_40),
    _row("A100-PCIe-80GB = A100 80GB PCIe = A100-PCIE-80GB", _A100, (108, 1410), (81920, 1935), "4x16", 300,
         usable=79.15,
         mig=_MIG_A100_80),
    _row("A800-SXM4-80GB = A800-SXM4-80GB", _A100, (108, 1410), (81920, 2039), "4x16", 400, usable=79.15, nvlink=200,
         network=200, mig=_MIG_A100_80, source="NVIDIA A800 80GB datasheet (A100 with 400 GB/s NVLink)"),
    _row("A800-PCIe-80GB = A800 80GB PCIe", _A100, (108, 1410), (81920, 1935), "4x16", 300, usable=79.15,
         mig=_MIG_A100_80,
         source="NVIDIA A800 80GB datasheet"),
    _row("A800-PCIe-40GB = A800 40GB Active", _A100, (108, 1410), (40960, 1555), "4x16", 240, usable=39.39, network=12,
         mig=_MIG_A100_40, source="NVIDIA A800 40GB Active datasheet"),

    # Hopper
    _row("H100-SXM5-80GB = H100 80GB HBM3", _H100, (132, 1980), (81559, 3350), "5x16", 700, usable=79.11,
         tensor_mhz=1830,
         nvlink=450, network=400, mig=_MIG_H100_80),
    _row("H100-PCIe-80GB = H100 PCIe", _H100, (114, 1755), (81559, 2000), "5x16", 350, usable=79.11, tensor_mhz=1620,
         mig=_MIG_H100_80),
    _row("H100-NVL-94GB = H100 NVL", _H100, (132, 1785), (95830, 3938), "5x16", 400, usable=93.1,
         tensor_mhz=1545, nvlink=300,
         mig=_MIG_H100_94),
    _row("H100-96GB-HBM2e = H100 96GB HBM2e", _H100, (132, 1980), (97871, 2400), "5x16", 500, usable=94.9,
         tensor_mhz=1830,
         nvlink=450, network=400, mig=_MIG_H100_96,
         source="torchtitan docs/performance.md (a 96 GB, 2.4 TB/s, 500 W variant); peaks as H100 SXM"),
    _row("H800-SXM5-80GB = H800", _H100, (132, 1980), (81559, 3350), "5x16", 700, usable=79.11, tensor_mhz=1830,
         nvlink=200,
         network=400, mig=_MIG_H100_80, source="NVIDIA H800 datasheet (H100 with 400 GB/s NVLink)"),
    _row("H800-PCIe-80GB = H800 PCIe", _H100, (114, 1755), (81559, 2000), "5x16", 350, usable=79.11, tensor_mhz=1620,
         mig=_MIG_H100_80, source="NVIDIA H800 datasheet"),
    _row("H20-96GB = H20", _H100, (78, 1980), (97871, 4000), "5x16", 400, usable=94.9, nvlink=450, network=400,
         stated={"fp32": 44, "tf32": 74, "fp16": 148, "bf16": 148, "fp8": 296}, source="NVIDIA H20 datasheet"),
    _row("H20-141GB = H20-3e", _H100, (78, 1980), (143771, 4800), "5x16", 500, usable=139.8, nvlink=450, network=400,
         stated={"fp32": 44, "tf32": 74, "fp16": 148, "bf16": 148, "fp8": 296}, source="NVIDIA H20 datasheet, HBM3e"),
    _row("H200 = H200", _H100, (132, 1980), (143771, 4800), "5x16", 700, usable=139.8, tensor_mhz=1830,
         nvlink=450, network=400,
         mig=_MIG_H200, source=f"NVIDIA H200 Tensor Core GPU datasheet, {_DATA_CENTER}h200"),
    _row("H200-NVL = H200 NVL", _H100, (132, 1785), (143771, 4800), "5x16", 600, usable=139.8, tensor_mhz=1545,
         nvlink=450,
         mig=_MIG_H200, source=f"NVIDIA H200 Tensor Core GPU datasheet, {_DATA_CENTER}h200"),
    _row("GH200 = GH200 480GB", _H100, (132, 1980), (97871, 4000), "450", 700, usable=94.5, tensor_mhz=1830, nvlink=450,
         mig=_MIG_H100_96, source="NVIDIA GH200 Grace Hopper Superchip datasheet (96 GB HBM3; NVLink-C2C to the host)"),
    _row("GH200-144GB = GH200 144G HBM3e", _H100, (132, 1980), (146831, 4900), "450", 700, tensor_mhz=1830, nvlink=450,
         source="NVIDIA GH200 Grace Hopper Superchip datasheet (144 GB HBM3e; NVLink-C2C to the host)"),

    # Blackwell
    _row("B200 = B200", _B200, (148, 1965), (183359, 8000), "5x16", 1000, usable=178.3, tensor_mhz=1856, nvlink=900),
    _row("B300 = B300 SXM6 AC = B300", _B300, (148, 1965), (275040, 8000),
         "5x16", 1100,
         usable=267.7, tensor_mhz=1856, nvlink=900),
    _row("GB200 = GB200", _B200, (152, 2062), (189471, 8000), "450", 1200, usable=184.3, tensor_mhz=2008, nvlink=900,
         source=f"NVIDIA GB200 NVL72 datasheet, {_DATA_CENTER}gb200-nvl72 (with sparsity, halved)"),
    _row("GB300 = GB300", _B300, (152, 2062), (284208, 8000), "450", 1400,
         tensor_mhz=2008,
         nvlink=900, source=f"NVIDIA GB300 NVL72 datasheet, {_DATA_CENTER}gb300-nvl72 (with sparsity, halved)"),
    _row("Thor-AGX-128GB = Thor", _THOR, (20, 1575), (125772, 273), "136", 130),
    _row("GB10 = GB10", _GB10, (48, 2525), (124609, 273), "136", 140),
    _row("RTX-5050 = GeForce RTX 5050", _RTX50, (20, 2572), (8151, 320), "5x8", 130),
    _row("RTX-5060 = GeForce RTX 5060", _RTX50, (30, 2497), (8151, 448), "5x8", 145),
    _row("RTX-5060Ti-8GB = GeForce RTX 5060 Ti", _RTX50, (36, 2572), (8151, 448), "5x8", 180),
    _row("RTX-5060Ti-16GB = GeForce RTX 5060 Ti", _RTX50, (36, 2572), (16311, 448), "5x8", 180),
    _row("RTX-5070 = GeForce RTX 5070", _RTX50, (48, 2512), (12227, 672), "5x16", 250),
    _row("RTX-5070Ti = GeForce RTX 5070 Ti", _RTX50, (70, 2452), (16303, 896), "5x16", 300, usable=15.46),
    _row("RTX-5080 = GeForce RTX 5080", _RTX50, (84, 2617), (16303, 960), "5x16", 360, usable=15.46),
    _row("RTX-5090 = GeForce RTX 5090", _RTX50, (170, 2407), (32607, 1792), "5x16", 575, usable=31.36),
    _row("RTX-5090D = GeForce RTX 5090 D", _RTX50, (170, 2407), (32607, 1792), "5x16", 575),
    _row("RTX-5090D-v2 = GeForce RTX 5090 D v2", _RTX50, (170, 2407), (24463, 1344), "5x16", 575),
    _row("RTX-5050-Laptop = GeForce RTX 5050 Laptop GPU", _RTX50_L, (20, 2662), (8151, 384), "5x8", 100,
         lowest=(35, 1500)),
    _row("RTX-5060-Laptop = GeForce RTX 5060 Laptop GPU", _RTX50_L, (26, 2497), (8151, 384), "5x8", 100,
         lowest=(45, 1455)),
    _row("RTX-5070-Laptop = GeForce RTX 5070 Laptop GPU", _RTX50_L, (36, 2347), (8151, 384), "5x8", 100,
         lowest=(50, 1425)),
    _row("RTX-5070Ti-Laptop = GeForce RTX 5070 Ti Laptop GPU", _RTX50_L, (46, 2220), (12227, 672), "5x16", 115,
         lowest=(60, 1447)),
    _row("RTX-5080-Laptop = GeForce RTX 5080 Laptop GPU", _RTX50_L, (60, 2287), (16303, 896), "5x16", 150,
         lowest=(80, 1500)),
    _row("RTX-5090-Laptop = GeForce RTX 5090 Laptop GPU", _RTX50_L, (82, 2160), (24463, 896), "5x16", 150,
         lowest=(95, 1597)),
    _row("RTX-PRO-2000 = RTX PRO 2000 Blackwell", _RTX_PRO, (34, 1957), (16311, 288), "5x8", 70),
    _row("RTX-PRO-4000 = RTX PRO 4000 Blackwell", _RTX_PRO, (70, 2617), (24467, 672), "5x16", 145),
    _row("RTX-PRO-4500 = RTX PRO 4500 Blackwell", _RTX_PRO, (82, 2617), (32623, 896), "5x16", 200),
    _row("RTX-PRO-5000-48GB = RTX PRO 5000 Blackwell", _RTX_PRO, (110, 2377), (48935, 1344), "5x16", 300),
    _row("RTX-PRO-5000-72GB = RTX PRO 5000 72GB Blackwell", _RTX_PRO, (110, 2377), (73415, 1344), "5x16", 300),
    _row("RTX-PRO-6000 = RTX PRO 6000 Blackwell Workstation Edition", _RTX_PRO, (188, 2617), (97887, 1792),
         "5x16", 600),
    _row("RTX-PRO-6000-MaxQ = RTX PRO 6000 Blackwell Max-Q Workstation Edition", _RTX_PRO, (188, 2288),
         (97887, 1792), "5x16", 300),
    _row("RTX-PRO-6000-Server = RTX PRO 6000 Blackwell Server Edition", _RTX_PRO, (188, 2490), (97887, 1597),
         "5x16", 600, network=50),
)
# fmt: on

GPU_SPECS: dict[str, GpuSpec] = {row.name: row for row in _ROWS}
