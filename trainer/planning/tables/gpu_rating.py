"""The figures of a GPU in this machine: its row of the catalogue, else what follows from what its driver reports.

Of a card without a row, NVML reports the number of CUDA cores, the bus of the memory and the highest clocks, from which

    peak      = SMs x clock x FLOP of an SM in a clock   (`gpu_chips`; the compute capability tells the chip)
    bandwidth = 2 x memory clock x bus / 8               (two transfers a clock)

follow as for any row. Three things the driver does not report, hence the wide range in `certainty`: what clock the card
sustains, whether it sums in fp32 at half rate, and what limits it. Cards with GDDR memory are sold with a boost clock
of 0.74 to 0.86 of their highest one (RTX 2080 Ti, A4000, 3090, 4090, 5090, A6000: the catalogue beside
`clocks.max.sm`), cards with HBM with the highest itself. Half rate is what GeForce cards have.
"""

import re

from shardwise.trainer.planning.tables.gpu_chips import CHIPS, MHZ, TU10X, TU11X, Chip, Generation, peaks_of
from shardwise.trainer.planning.tables.gpu_specs import GpuSpec, gpu_spec
from shardwise.trainer.spec.hardware import Gpu
from shardwise.trainer.spec.units import MIB

GDDR_GENERATIONS = (Generation.TURING, Generation.GA10X, Generation.ADA, Generation.GB20X)
_GDDR_BOOST_SHARE = 0.8  # of the highest clock of a card with GDDR memory
_LANE_BYTES_PER_S = 10**9  # of PCIe 3.0, each direction; twice it with each later generation
_SLOWEST_SLOT = (3, 4)  # generation and lanes of a slot that is not reported
_UNKNOWN_NETWORK_BYTES_PER_S = 10**9


def spec_of(gpu: Gpu) -> GpuSpec | None:
    """The figures of a card; None where the catalogue has no row and its driver reports too little."""
    row = gpu_spec(gpu.spec_name)
    return rated_spec(gpu) if row is None else row.at_power(gpu.power_limit_w)


def rated_spec(gpu: Gpu) -> GpuSpec | None:
    """Specification from the cores, clocks and bus that the driver reports; None if one of them is unknown."""
    chip = _chip_of(gpu)
    cores, clock, bus, memory_clock = (
        gpu.num_cuda_cores,
        gpu.max_clock_mhz,
        gpu.memory_bus_bits,
        gpu.max_memory_clock_mhz,
    )
    if chip is None or not (cores and clock and bus and memory_clock):
        return None
    num_sms = round(cores / chip.cuda_cores)
    halves = chip.tensor_flop is not None and "geforce" in gpu.name.lower()
    boost_share = _GDDR_BOOST_SHARE if chip.generation in GDDR_GENERATIONS else 1.0
    peaks = peaks_of(chip, num_sms, clock_mhz=boost_share * clock, tensor_mhz=None, halves_fp32_sums=halves)
    generation, lanes = gpu.pcie_generation or _SLOWEST_SLOT[0], gpu.pcie_width or _SLOWEST_SLOT[1]
    return GpuSpec(
        name=gpu.name,
        smi_names=(),
        generation=chip.generation,
        compute_capability=chip.compute_capability,
        num_sms=num_sms,
        memory_bytes=gpu.memory_bytes,
        usable_bytes=gpu.usable_bytes or gpu.memory_bytes,
        memory_bytes_per_s=round(2 * memory_clock * MHZ * bus / 8),
        fp32_flops_per_s=peaks.fp32,
        tf32_flops_per_s=peaks.tf32,
        fp16_flops_per_s=peaks.fp16,
        bf16_flops_per_s=peaks.bf16,
        fp8_flops_per_s=peaks.fp8,
        nvlink_bytes_per_s=None,  # the probe has the links
        pcie_bytes_per_s=round(_LANE_BYTES_PER_S * 2.0 ** (generation - 3) * lanes),
        network_bytes_per_s=_UNKNOWN_NETWORK_BYTES_PER_S,
        has_peer_access_over_pcie=False,
        halves_fp32_sums=halves,
        board_watts=round(gpu.power_limit_w or 0),
        context_bytes=chip.context_mib * MIB,
        source="its driver",
    )


def _chip_of(gpu: Gpu) -> Chip | None:
    chip = CHIPS.get(gpu.compute_capability or (0, 0))
    return TU11X if chip is TU10X and re.search(r"\bGTX\b", gpu.name) else chip
