"""Rates a device reaches, as opposed to those on its datasheet.

A rate that was measured on the machine replaces its datasheet figure and the share of it that is reached. A measured
copy or collective ran alone; in a step it shares memory with products, hence the two factors `_DURING_PRODUCTS`. If
nothing is known the assumed rate is very low, and `speed_notes` reports that the speed is not known.

The CPUs of a host update no more state than its cores and its memory move. The channels of the memory follow from the
name of the CPU; if that is not known the host of a consumer card is a desktop with two, any other a server.
"""

import math
import re
from functools import lru_cache

from shardwise.trainer.planning.configuration import Configuration, once
from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.policy.reference_trainers import reference_of
from shardwise.trainer.planning.speed import constants as constants
from shardwise.trainer.planning.tables.gpu_chips import CHIPS, GDDR_GENERATIONS, HOPPER_TENSOR_FLOP, Generation
from shardwise.trainer.spec.hardware import DeviceKind, LinkKind
from shardwise.trainer.spec.strategy import Fp8Recipe, Precision
from shardwise.trainer.spec.value import Value

# Sustained 16-bit products per watt relative to Hopper. Ampere's is above what limits an A100, so no row depends on
# it; the others are ratios of dense peak to board power, rounded down, and matter where a board is capped.
WATT_BY_GENERATION = {
    Generation.VOLTA: 0.5,
    Generation.TURING: 0.4,
    Generation.AMPERE: 0.75,
    Generation.GA10X: 0.45,
    Generation.ADA: 0.8,
    Generation.HOPPER: 1.0,
    Generation.BLACKWELL: 1.5,
    Generation.GB20X: 0.8,
}
# Watts of the board that a chip was made for; smaller boards of the same chip are capped. Others: their own.
REFERENCE_WATTS = {Generation.AMPERE: 400.0, Generation.HOPPER: 700.0, Generation.BLACKWELL: 1000.0}
_FP8_PEAKS = 2  # of 16-bit units: datasheets from Ada on
EMULATED_SHARE = 0.25  # of the fp32 peak: 16-bit types without a unit are converted operation by operation
COPY_DURING_PRODUCTS = 0.9  # a copy on H200 reaches 4.0 of 4.8 TB/s, elementwise kernels of a step 0.749 of it
LINK_DURING_PRODUCTS = 0.62  # nccl-tests reach 231 of 300 GB/s on A100, collectives of a step 0.479 of it
# What strategies are ranked by on a GPU of unknown speed: below any data-centre card of the last ten years. No figure
# that follows from these is a prediction, and a plan notes that the speed is not known.
UNKNOWN_FLOPS_PER_S = 5e12
UNKNOWN_MEMORY_BYTES_PER_S = 200e9
UNKNOWN_LINK_BYTES_PER_S = 4e9
UNKNOWN_NETWORK_BYTES_PER_S = 1e9
# Kinds of CPU by their names, in the order in which they are compared.
_SERVER_CPU = r"(?i)Xeon|EPYC|Threadripper|Neoverse|Graviton|Grace"
_DDR5_CPU = r"(?i)Ryzen.* [789]\d{3}|Ryzen AI|Core.* i\d-1[2-4]\d{2,3}|Core.* Ultra"
_DESKTOP_CPU = r"(?i)Ryzen|Core|Pentium|Celeron|Athlon"


class Rates(Value, frozen=True, kw_only=True):
    """Rates of one device, per second."""

    matmul: float  # FLOP, in the computing type
    fp8: float  # the same in the linear layers that run in fp8
    attention: float
    fp32: float  # products in fp32, outside tensor units
    memory: float  # bytes
    link: float  # bytes each way through one device of a ring over all of them
    inner_link: float  # the same inside a node
    network: float  # bytes each way through all adapters of a node
    pcie: float
    host_adam: float  # bytes of fp32 state, weight and gradient that the CPUs of a node update
    host_cores: float  # the same by its cores alone, which update as many elements of 16 bit
    nvme: float


def rates_of(configuration: Configuration, device: Device) -> Rates:
    """The rates that the formulas of `speed` divide by."""
    return _rates(
        device,
        configuration.strategy.precision,
        is_tf32=configuration.tf32,
        fp8_recipe=configuration.fp8_recipe,
        flash_generation=configuration.policy.flash_generation
        or reference_of(configuration.reference).flash_generation,
        spans_nodes=configuration.num_ranks > configuration.ranks_per_node,
    )


@once
def _rates(
    device: Device,
    precision: Precision,
    *,
    is_tf32: bool,
    fp8_recipe: Fp8Recipe | None,
    flash_generation: int,
    spans_nodes: bool,
) -> Rates:
    exact = _matmul_rate(device, precision)
    matmul = max(exact, _tf32_rate(device)) if is_tf32 else exact
    inner, network = _inner_link(device), _network_rate(device)
    return Rates(
        matmul=matmul,
        fp8=_fp8_rate(device, matmul, fp8_recipe) if precision is Precision.FP8 else matmul,
        attention=_attention_rate(device, precision, exact, flash_generation),
        fp32=device.peak_flops_per_s(Precision.FP32) or matmul,
        memory=_memory_rate(device),
        # The slower of a node's fabric and its network, whose adapters serve one ring together.
        link=min(inner, network) if spans_nodes else inner,
        inner_link=inner,
        network=network,
        pcie=_pcie_rate(device),
        host_adam=_host_adam_rate(device),
        host_cores=_host_core_rate(device),
        nvme=_nvme_rate(device),
    )


def has_desktop_host(device: Device) -> bool:
    """True if the host has two memory channels and a consumer's NVMe disk."""
    name = device.cpu_name or ""
    if _is_a(_SERVER_CPU, name):
        return False
    return device.is_consumer or _is_a(_DESKTOP_CPU, name)


@lru_cache(maxsize=64)
def _is_a(kind: str, cpu_name: str) -> bool:
    return re.search(kind, cpu_name) is not None


def _host_adam_rate(device: Device) -> float:
    by_cores = _host_core_rate(device)
    if device.measured_host_adam_bytes_per_s is not None:
        return by_cores
    if not has_desktop_host(device):
        return min(by_cores, constants.HOST_ADAM_BYTES_PER_S)
    has_ddr5 = _is_a(_DDR5_CPU, device.cpu_name or "")
    return min(by_cores, constants.DDR5_ADAM_BYTES_PER_S if has_ddr5 else constants.DDR4_ADAM_BYTES_PER_S)


def _host_core_rate(device: Device) -> float:
    """A measurement does not separate cores from memory; it was made in fp32, and counts for 16 bit too."""
    if device.measured_host_adam_bytes_per_s is not None:
        return float(device.measured_host_adam_bytes_per_s)
    return math.inf if device.num_cores is None else device.num_cores * constants.CORE_ADAM_BYTES_PER_S


def _nvme_rate(device: Device) -> float:
    assumed = constants.DESKTOP_NVME_BYTES_PER_S if has_desktop_host(device) else constants.NVME_BYTES_PER_S
    return float(device.nvme_bytes_per_s or assumed)


def speed_notes(device: Device) -> tuple[str, ...]:
    """Cautions about a predicted speed; empty if every rate is measured or from a datasheet."""
    notes = []
    if device.kind is DeviceKind.CPU:
        if device.is_matmul_assumed:
            assumed = device.matmul_flops_per_s or 0
            notes.append(
                f"the speed of this CPU is assumed ({assumed / 1e9:.0f} GFLOP/s a rank); "
                "`shardwise probe --measure` measures it"
            )
    elif not device.has_known_speed:
        notes.append(
            f"the speed of {device.name} is not known: the GPU catalogue does not have it, and it was not measured; "
            "times and tokens/s only rank strategies; `shardwise probe --measure` measures it"
        )
    elif device.matmul_flops_per_s is None:
        notes.append("speeds are from datasheet rates; `shardwise probe --measure` replaces them by measured ones")
    if device.lowest_watts is not None and device.matmul_flops_per_s is None:
        notes.append(
            f"{device.name} is sold with {device.lowest_watts} to {device.rated_watts:g} W: {device.rated_watts:g} W "
            f"is assumed; --hardware 1x{device.name}-{device.lowest_watts}W states another"
        )
    return tuple(notes)


def _matmul_rate(device: Device, precision: Precision) -> float:
    if precision is Precision.FP32 and device.measured_fp32_flops_per_s is not None:
        return float(device.measured_fp32_flops_per_s)
    if device.matmul_flops_per_s is not None:
        return float(device.matmul_flops_per_s)
    # fp8 runs as 16-bit products with a gain, which the fit needs.
    wanted = Precision.BF16_MIXED if precision is Precision.FP8 else precision
    peak = device.peak_flops_per_s(wanted)
    if peak is None:
        fp32 = device.peak_flops_per_s(Precision.FP32)
        return UNKNOWN_FLOPS_PER_S if fp32 is None else EMULATED_SHARE * fp32
    if precision is Precision.FP32:
        return constants.MATMUL_SHARE * peak
    rate = peak * (constants.HALVED_MATMUL_SHARE if device.halves_fp32_sums else constants.MATMUL_SHARE)
    if device.generation and device.board_watts:
        rate = min(rate, _power_limited_rate(device.generation, device.board_watts, device.rated_watts))
    return rate


def _tf32_rate(device: Device) -> float:
    """Tensor units reach the same share of either peak."""
    half = device.peak_flops_per_s(Precision.BF16_MIXED)
    if half is None or device.tf32_flops_per_s is None:
        return 0.0
    return _matmul_rate(device, Precision.BF16_MIXED) * device.tf32_flops_per_s / half


def _power_limited_rate(generation: Generation, watts: float, rated_watts: float | None) -> float:
    """FLOP/s that a board sustains under its power limit; the loss is less than proportional."""
    reference = REFERENCE_WATTS.get(generation) or rated_watts or watts
    uncapped = constants.WATT_FLOPS * WATT_BY_GENERATION[generation] * reference
    return float(uncapped * (watts / reference) ** constants.WATT_EXPONENT)


def saved_by_fp8(device: Device, recipe: Fp8Recipe | None) -> float | None:
    """Seconds a FLOP of converted layers, by a timing of this model's blocks on this device; None if it has none."""
    return next((saved for timed, saved in device.measured_fp8_savings if timed is recipe), None)


def _fp8_rate(device: Device, matmul: float, recipe: Fp8Recipe | None) -> float:
    saved, peak = saved_by_fp8(device, recipe), device.peak_flops_per_s(Precision.FP8)
    if saved is not None:
        return 1 / max(1 / matmul - saved, 1 / (peak or _FP8_PEAKS * matmul))
    if device.measured_fp8_flops_per_s is not None:
        return float(device.measured_fp8_flops_per_s)
    return constants.FP8_GAIN * matmul if peak is not None else matmul


def _attention_rate(device: Device, precision: Precision, matmul: float, flash_generation: int) -> float:
    newest = _newest_attention_rate(device, precision, matmul)
    if flash_generation == 1:
        return constants.FLASH_1_SHARE * newest
    # Its kernels are written for Hopper's products of a group of warps.
    return min(matmul, constants.FLASH_3_GAIN * newest) if _runs_flash_3(device, flash_generation) else newest


def _runs_flash_3(device: Device, flash_generation: int) -> bool:
    return flash_generation == 3 and device.generation is Generation.HOPPER


def _newest_attention_rate(device: Device, precision: Precision, matmul: float) -> float:
    """Both shares are of the dense peak, and of no more than products reach.

    A halved peak does not slow down the rest of the kernel, the softmax: a unit of work needs 1 / share, of which
    1 / MATMUL_SHARE are products, and only those need twice as long.
    """
    is_as_measured = device.kind is DeviceKind.CPU or precision is not Precision.FP32
    if device.measured_attention_flops_per_s is not None and is_as_measured:
        return float(device.measured_attention_flops_per_s)
    if device.kind is DeviceKind.CPU:
        return constants.CPU_ATTENTION_SHARE * matmul
    if device.halves_fp32_sums:
        softmax = 1 / constants.ATTENTION_SHARE - 1 / constants.MATMUL_SHARE
        return matmul / (1 + constants.HALVED_MATMUL_SHARE * softmax / 2)
    return min(matmul, _flash_share(device.compute_capability) / constants.MATMUL_SHARE * matmul)


def _flash_share(capability: tuple[int, int] | None) -> float:
    """Share of the dense peak that FlashAttention-2 reaches, whose products are those of one warp (mma.sync).

    An SM of Hopper and of the server chips of Blackwell multiplies faster for groups of warps alone (wgmma, tcgen05);
    products of a warp are as fast in both. GB20x has no others.
    """
    chip = CHIPS.get(capability or (0, 0))
    if chip is None:
        return constants.ATTENTION_SHARE if (capability or (0, 0)) < (9, 0) else constants.ATTENTION_SHARE_HOPPER
    wide = (chip.tensor_flop or 0) / HOPPER_TENSOR_FLOP
    return constants.ATTENTION_SHARE if wide < 1 else constants.ATTENTION_SHARE_HOPPER / wide


def _memory_rate(device: Device) -> float:
    is_cpu = device.kind is DeviceKind.CPU
    if device.measured_memory_bytes_per_s is not None:
        return device.measured_memory_bytes_per_s * (1.0 if is_cpu else COPY_DURING_PRODUCTS)
    if device.memory_bytes_per_s is None:
        return UNKNOWN_MEMORY_BYTES_PER_S
    if is_cpu:
        return float(device.memory_bytes_per_s)
    gain = constants.GDDR_GAIN if device.generation in GDDR_GENERATIONS else 1.0
    return device.memory_bytes_per_s * constants.MEMORY_SHARE * gain


def _inner_link(device: Device) -> float:
    if device.measured_link_bytes_per_s is not None:
        return LINK_DURING_PRODUCTS * device.measured_link_bytes_per_s
    rate = device.link_bytes_per_s or UNKNOWN_LINK_BYTES_PER_S
    bounces = device.has_peer_access is False and device.link_kind is not LinkKind.NVLINK
    return constants.LINK_SHARE * rate * (constants.NO_PEER_SHARE if bounces else 1.0)


def _network_rate(device: Device) -> float:
    if device.measured_network_bytes_per_s is not None:
        return LINK_DURING_PRODUCTS * device.measured_network_bytes_per_s
    return constants.LINK_SHARE * (device.network_bytes_per_s or UNKNOWN_NETWORK_BYTES_PER_S)


def _pcie_rate(device: Device) -> float:
    """Of each card while all copy, as ranks do; one card was measured alone."""
    if device.measured_pcie_bytes_per_s is not None:
        return device.measured_pcie_bytes_per_s / device.cards_per_uplink
    rate = device.pcie_bytes_per_s or UNKNOWN_LINK_BYTES_PER_S
    return constants.PCIE_SHARE * rate / device.cards_per_uplink
