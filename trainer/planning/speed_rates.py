"""Rates a device reaches, as opposed to those on its datasheet.

The shares are fitted on 177 published throughputs (A100, H100, H200; full, LoRA, QLoRA; FSDP and one GPU): median
error 2.6 % on them, 7 to 11 % on a software stack that was left out of the fit, about 28 % on consumer cards over PCIe.
A rate measured on the machine replaces its datasheet figure and the share with it. Where nothing is known a rate is so
low that nothing is promised, and `speed_notes` says so.
"""

from trainer.planning.device import Device
from trainer.planning.gpu_specs import Generation
from trainer.planning.setting import Setting
from trainer.spec.hardware import DeviceKind, LinkKind
from trainer.spec.strategy import Precision
from trainer.spec.value import Value

# Fitted.
MATMUL_SHARE = 0.813  # of the dense peak, where power does not limit
WATT_TFLOPS = 1.129  # 16-bit TFLOP/s that a Hopper board sustains per watt
FP8_GAIN = 1.92  # fp8 against 16-bit products
ATTENTION_SHARE = 0.618  # flash attention, of the dense peak
ATTENTION_SHARE_HOPPER = 0.346  # the same kernels on Hopper and later
MEMORY_SHARE = 0.749
LINK_SHARE = 0.479
# Not fitted: sustained 16-bit products per watt relative to Hopper; only Hopper and Ampere are pinned by data.
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
NO_PEER_SHARE = 0.5  # copies between cards bounce through host memory
EMULATED_SHARE = 0.25  # of the fp32 peak: 16-bit types without a unit are converted operation by operation
# For a GPU that is neither in the catalogue nor measured: below any data-centre card of the last ten years.
UNKNOWN_FLOPS_PER_S = 5e12
UNKNOWN_MEMORY_BYTES_PER_S = 200e9
UNKNOWN_LINK_BYTES_PER_S = 4e9
UNKNOWN_NETWORK_BYTES_PER_S = 1e9
CPU_ATTENTION_SHARE = 0.3  # of the rate of its matrix products


class Rates(Value, frozen=True, kw_only=True):
    """What one device reaches, per second."""

    matmul: float  # FLOP, in the computing type
    linear: float  # the same in linear layers: fp8 where it is on
    attention: float
    memory: float  # bytes
    link: float  # bytes each way through one device of a ring over all of them
    inner_link: float  # the same inside a node
    pcie: float


def rates_of(setting: Setting, device: Device) -> Rates:
    """The rates that the formulas of `speed` divide by."""
    precision = setting.strategy.precision
    matmul = _matmul_rate(device, precision)
    has_fp8 = precision is Precision.FP8 and Precision.FP8 in device.peak_flops_per_s
    inner = _inner_link(device)
    spans_nodes = setting.num_ranks > setting.ranks_per_node
    return Rates(
        matmul=matmul,
        linear=FP8_GAIN * matmul if has_fp8 else matmul,
        attention=_attention_rate(device, matmul),
        memory=_memory_rate(device),
        link=min(inner, LINK_SHARE * _network(device)) if spans_nodes else inner,
        inner_link=inner,
        pcie=_pcie_rate(device),
    )


def speed_notes(device: Device) -> tuple[str, ...]:
    """What to know before believing a predicted speed; empty where every rate is measured or from a datasheet."""
    notes = []
    if device.kind is DeviceKind.CPU:
        if device.is_matmul_assumed:
            assumed = device.matmul_flops_per_s or 0
            notes.append(
                f"the speed of this CPU is assumed ({assumed / 1e9:.0f} GFLOP/s a rank); "
                "`shardwise probe --measure` measures it"
            )
    elif not device.peak_flops_per_s and device.matmul_flops_per_s is None:
        notes.append(
            f"{device.name} is not in the GPU catalogue and was not measured: speeds assume "
            f"{UNKNOWN_FLOPS_PER_S / 1e12:.0f} TFLOP/s and only rank; `shardwise probe --measure` mends it"
        )
    elif device.matmul_flops_per_s is None:
        notes.append("speeds are from datasheet rates; `shardwise probe --measure` replaces them by measured ones")
    return tuple(notes)


def _matmul_rate(device: Device, precision: Precision) -> float:
    if device.matmul_flops_per_s is not None:
        return float(device.matmul_flops_per_s)
    # fp8 runs as 16-bit products with a gain, which the fit needs.
    wanted = Precision.BF16_MIXED if precision is Precision.FP8 else precision
    peak = device.peak_flops_per_s.get(wanted)
    if peak is None:
        fp32 = device.peak_flops_per_s.get(Precision.FP32)
        return UNKNOWN_FLOPS_PER_S if fp32 is None else EMULATED_SHARE * fp32
    rate = MATMUL_SHARE * peak
    if precision is not Precision.FP32 and device.generation and device.board_watts:
        rate = min(rate, WATT_TFLOPS * 1e12 * WATT_BY_GENERATION[device.generation] * device.board_watts)
    return rate


def _attention_rate(device: Device, matmul: float) -> float:
    if device.kind is DeviceKind.CPU:
        return CPU_ATTENTION_SHARE * matmul
    share = ATTENTION_SHARE_HOPPER if (device.compute_capability or (0, 0)) >= (9, 0) else ATTENTION_SHARE
    if device.generation is Generation.GB20X:
        share = ATTENTION_SHARE
    return min(matmul, share / MATMUL_SHARE * matmul)


def _memory_rate(device: Device) -> float:
    if device.measured_memory_bytes_per_s is not None:
        return float(device.measured_memory_bytes_per_s)
    if device.memory_bytes_per_s is None:
        return UNKNOWN_MEMORY_BYTES_PER_S
    return device.memory_bytes_per_s * (1.0 if device.kind is DeviceKind.CPU else MEMORY_SHARE)


def _inner_link(device: Device) -> float:
    rate = device.link_bytes_per_s or UNKNOWN_LINK_BYTES_PER_S
    bounces = device.has_peer_access is False and device.link_kind is not LinkKind.NVLINK
    return LINK_SHARE * rate * (NO_PEER_SHARE if bounces else 1.0)


def _network(device: Device) -> float:
    return float(device.network_bytes_per_s or UNKNOWN_NETWORK_BYTES_PER_S)


def _pcie_rate(device: Device) -> float:
    if device.measured_pcie_bytes_per_s is not None:
        return float(device.measured_pcie_bytes_per_s)
    return LINK_SHARE * (device.pcie_bytes_per_s or UNKNOWN_LINK_BYTES_PER_S)
