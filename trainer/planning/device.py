"""One device as the estimates see it: what it can hold and how fast it is, with what is unknown left None.

A machine of unequal GPUs is planned for the weakest of them, since every rank waits for the slowest and none may run
out. Measured rates replace datasheet figures. A GPU without a row in the catalogue keeps the memory that was probed;
its rates stay unknown until they are measured (`speed_notes` states the effect on the ranking). A CPU is a device whose
memory is its share of the RAM that the cgroup grants.
"""

from collections.abc import Sequence

from shardwise.trainer.planning.tables.gpu_chips import Generation
from shardwise.trainer.planning.tables.gpu_names import spec_of
from shardwise.trainer.planning.tables.gpu_specs import GpuSpec, gpu_spec, usual_cards_per_uplink
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind, Disk, Gpu, Hardware, Host, LinkKind
from shardwise.trainer.spec.host_ram import machine_bytes, pinnable_ram, usable_ram
from shardwise.trainer.spec.strategy import Fp8Recipe, Precision
from shardwise.trainer.spec.units import MIB, format_bytes
from shardwise.trainer.spec.value import Value

# What a core is assumed to sustain in fp32 training of a small model, by the widest vectors it has: with AVX-512, 90
# GFLOP/s were measured over whole steps on each of two cores of a Zen 4; vectors half as wide do half as much.
# Still an assumption: `shardwise probe --measure` replaces it, and until then a plan notes it.
CPU_FLOPS_PER_CORE: tuple[tuple[str, int], ...] = (("avx512f", 80_000_000_000), ("avx2", 40_000_000_000))
UNKNOWN_CPU_FLOPS_PER_CORE = 20_000_000_000  # 128-bit vectors, or unknown
ASSUMED_CPU_MEMORY_BYTES_PER_S = 15_000_000_000  # of the whole socket, far below any server CPU's datasheet
ASSUMED_CPU_LINK_BYTES_PER_S = 1_000_000_000  # gloo between two processes of one machine
# Interpreter, torch, transformers and accelerate, anonymous memory after import and a first step on CPU.
CPU_PROCESS_BYTES = 450 * MIB
_UNKNOWN_CONTEXT_BYTES = 600 * MIB  # of a GPU without a row: above every row of the consumer and data-centre cards


class Device(Value, frozen=True, kw_only=True, cache_hash=True):
    """The weakest device of a machine and what joins it to the others; rates per second, each direction."""

    kind: DeviceKind
    name: str
    memory_bytes: int
    usable_bytes: int  # what one process may take, context included
    context_bytes: int
    num_nodes: int = 1
    devices_per_node: int = 1
    host_ram_bytes: int | None = None  # of a node, for a run
    pinnable_ram_bytes: int | None = None  # the same
    num_cores: int | None = None  # of a node
    cpu_name: str | None = None
    is_consumer: bool = False  # a card of desktops and laptops
    shares_host_memory: bool = False  # its memory is the RAM of the machine, one pool for both
    compute_capability: tuple[int, int] | None = None
    generation: Generation | None = None
    board_watts: float | None = None  # the limit that is set
    rated_watts: float | None = None  # of the card as it is sold
    lowest_watts: int | None = None  # of a laptop GPU whose power class is not known: `rated_watts` is assumed
    peaks: tuple[tuple[Precision, int], ...] = ()  # FLOP/s, dense datasheet figures; absent: unknown, or no such unit
    tf32_flops_per_s: int | None = None  # the same, of fp32 products whose inputs are rounded
    matmul_flops_per_s: int | None = None  # measured, or assumed for a CPU
    is_matmul_assumed: bool = False
    measured_fp32_flops_per_s: int | None = None
    measured_fp8_flops_per_s: int | None = None
    # Seconds that a FLOP of a model's converted layers saves against bf16, casts included, by FP8 recipe.
    measured_fp8_savings: tuple[tuple[Fp8Recipe, float], ...] = ()
    measured_attention_flops_per_s: int | None = None
    halves_fp32_sums: bool = False  # products that sum in fp32 run at half the rate of those that sum in fp16
    sums_bf16_apart: bool = False  # a product in bf16 sums in an fp32 array as large as its result
    memory_bytes_per_s: int | None = None  # datasheet
    measured_memory_bytes_per_s: int | None = None
    link_bytes_per_s: int | None = None  # to the other devices of the node
    measured_link_bytes_per_s: int | None = None  # an all-gather over all of them, each way through one
    link_kind: LinkKind | None = None
    has_peer_access: bool | None = None
    network_bytes_per_s: int | None = None  # of a node, all adapters together
    measured_network_bytes_per_s: int | None = None  # an all-gather over all devices of several nodes, into one of them
    pcie_bytes_per_s: int | None = None  # of one card
    cards_per_uplink: int = 1  # that share a way to the host
    measured_pcie_bytes_per_s: int | None = None
    measured_host_adam_bytes_per_s: int | None = None
    nvme_bytes_per_s: int | None = None  # the fastest disk that was measured, in its slower direction

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def peak_flops_per_s(self, precision: Precision) -> int | None:
        """The one of `peaks`; None: unknown, or no such unit."""
        return dict(self.peaks).get(precision)

    @property
    def has_known_speed(self) -> bool:
        """True if the rate of products was measured, is from a datasheet or follows from one."""
        return self.matmul_flops_per_s is not None or bool(self.peaks)


def device_of(hardware: Hardware) -> Device:
    """The device that every rank of `hardware` can count on; InputError where its memory is unknown."""
    return _gpu_device(hardware) if hardware.gpus else _cpu_device(hardware)


def machine_text(hardware: Hardware) -> str:
    """`4 nodes of 8 x H100-SXM5-80GB`, `1 x RTX-4090`, `2 ranks on Intel Xeon` or `2 nodes of 2 ranks on it`."""
    device = device_of(hardware)
    nodes = f"{hardware.num_nodes} nodes of " if hardware.num_nodes > 1 else ""
    if hardware.gpus:
        return f"{nodes}{hardware.num_devices_per_node} x {device.name}"
    ranks = hardware.num_devices_per_node
    return (
        f"{nodes}{ranks} rank{'s' if ranks > 1 else ''} on {device.name}, {format_bytes(device.memory_bytes)} RAM each"
    )


def _gpu_device(hardware: Hardware) -> Device:
    gpus = hardware.gpus
    smallest = min(gpus, key=_grantable_bytes)
    known = [spec for spec in map(spec_of, gpus) if spec is not None]
    rates = hardware.rates
    # Rates of the slowest card, and only when those of every card are known.
    slowest = min(known, key=lambda spec: spec.fp16_flops_per_s) if len(known) == len(gpus) else None
    capabilities = [gpu.compute_capability for gpu in gpus if gpu.compute_capability is not None]
    usable, shares = _grantable_bytes(smallest), any(spec.is_integrated for spec in known)
    if shares:  # the system lives in the same pool
        granted = usable_ram(hardware.host)
        left = machine_bytes(smallest.memory_bytes, smallest.free_bytes)
        usable = min(usable, left if granted is None else min(left, granted))
    slots = [spec.pcie_bytes_per_s_at(gpu.pcie_width) for gpu in gpus if (spec := spec_of(gpu)) is not None]
    pcie = min(slots) if slowest else None
    fabric = _fabric(hardware, slowest, pcie)
    watts = [gpu.power_limit_w for gpu in gpus if gpu.power_limit_w is not None]
    return Device(
        kind=DeviceKind.CUDA,
        name=smallest.spec_name or smallest.name,
        memory_bytes=smallest.memory_bytes,
        usable_bytes=usable if hardware.vram_cap_bytes is None else min(usable, hardware.vram_cap_bytes),
        context_bytes=max((spec.context_bytes for spec in known), default=_UNKNOWN_CONTEXT_BYTES),
        num_nodes=hardware.num_nodes,
        devices_per_node=len(gpus),
        host_ram_bytes=usable_ram(hardware.host),
        pinnable_ram_bytes=pinnable_ram(hardware.host),
        num_cores=hardware.host.num_cores,
        cpu_name=hardware.host.cpu_name,
        is_consumer=any(spec.is_consumer for spec in known),
        shares_host_memory=shares,
        compute_capability=min(capabilities) if len(capabilities) == len(gpus) else None,
        generation=slowest.generation if slowest else None,
        board_watts=min(watts) if watts else (slowest.board_watts or None if slowest else None),
        rated_watts=(slowest.board_watts or None) if slowest else None,
        lowest_watts=slowest.lowest_watts if slowest and not watts else None,
        peaks=_peaks(slowest),
        tf32_flops_per_s=slowest.tf32_flops_per_s if slowest else None,
        matmul_flops_per_s=rates.matmul_flops_per_s,
        measured_fp32_flops_per_s=rates.fp32_flops_per_s,
        measured_fp8_flops_per_s=rates.fp8_flops_per_s,
        measured_attention_flops_per_s=rates.attention_flops_per_s,
        halves_fp32_sums=bool(slowest and slowest.halves_fp32_sums),
        memory_bytes_per_s=min(spec.memory_bytes_per_s for spec in known) if slowest else None,
        measured_memory_bytes_per_s=rates.memory_bytes_per_s,
        pcie_bytes_per_s=pcie,
        cards_per_uplink=_cards_per_uplink(hardware, slowest),
        measured_pcie_bytes_per_s=rates.host_to_device_bytes_per_s,
        measured_host_adam_bytes_per_s=rates.host_adam_bytes_per_s,
        nvme_bytes_per_s=_fastest_disk(hardware.host.disks),
        network_bytes_per_s=hardware.network_bytes_per_s
        or (min(spec.network_bytes_per_s for spec in known) if slowest else None),
        link_bytes_per_s=fabric.bytes_per_s,
        measured_link_bytes_per_s=rates.all_gather_bytes_per_s,
        measured_network_bytes_per_s=rates.between_nodes_bytes_per_s,
        link_kind=fabric.kind,
        has_peer_access=fabric.has_peer_access,
    )


def _grantable_bytes(gpu: Gpu) -> int:
    """Bytes a process can allocate on a GPU: its usable memory minus what other processes hold now."""
    spec = gpu_spec(gpu.spec_name)
    usable = gpu.usable_bytes or min(gpu.memory_bytes, spec.usable_bytes if spec else gpu.memory_bytes)
    return usable if gpu.free_bytes is None else min(usable, gpu.free_bytes)


def _peaks(spec: GpuSpec | None) -> tuple[tuple[Precision, int], ...]:
    if spec is None:
        return ()
    peaks = ((precision, spec.peak_flops_per_s(precision)) for precision in Precision)
    return tuple((precision, peak) for precision, peak in peaks if peak is not None)


def _cards_per_uplink(hardware: Hardware, spec: GpuSpec | None) -> int:
    """Cards that copy to and from the host through one uplink: by the topology, else as is usual."""
    joined = [{link.a, link.b} for link in hardware.links if link.kind is LinkKind.PCIE_SWITCH]
    groups = [set[int]().union(*(pair for pair in joined if gpu.index in pair)) for gpu in hardware.gpus]
    if joined:
        return max(map(len, groups))
    return 1 if spec is None or hardware.links else usual_cards_per_uplink(spec, len(hardware.gpus))


class _Fabric(Value, frozen=True, kw_only=True):
    bytes_per_s: int | None
    kind: LinkKind | None
    has_peer_access: bool | None


def _fabric(hardware: Hardware, spec: GpuSpec | None, pcie: int | None) -> _Fabric:
    """Link between the GPUs of a node: the slowest of the probed links, or that of the catalogue."""
    links = hardware.links
    is_nvlink = all(link.kind is LinkKind.NVLINK for link in links) if links else bool(spec and spec.nvlink_bytes_per_s)
    rates = [link.bytes_per_s for link in links if link.bytes_per_s is not None]
    if rates:
        rate: int | None = min(rates)
    else:
        rate = spec.nvlink_bytes_per_s if spec and is_nvlink else pcie
    if links:
        kind: LinkKind | None = max((link.kind for link in links), key=list(LinkKind).index)
    else:
        kind = (LinkKind.NVLINK if is_nvlink else LinkKind.PCIE_HOST) if spec else None
    reported = [link.has_peer_access for link in links if link.has_peer_access is not None]
    if reported:
        peers: bool | None = all(reported)
    else:
        peers = (is_nvlink or spec.has_peer_access_over_pcie) if spec else None
    return _Fabric(bytes_per_s=rate, kind=kind, has_peer_access=peers)


def _fastest_disk(disks: Sequence[Disk]) -> int | None:
    rates = [
        min(disk.read_bytes_per_s, disk.write_bytes_per_s)
        for disk in disks
        if disk.read_bytes_per_s is not None and disk.write_bytes_per_s is not None
    ]
    return max(rates, default=None)


def _cpu_device(hardware: Hardware) -> Device:
    host, num_ranks = hardware.host, hardware.num_cpu_devices
    cap = hardware.vram_cap_bytes
    if host.ram_bytes is None and cap is None:
        raise InputError("the RAM of this machine is not known; limits.vram (or --vram) sets what a rank may use")
    memory = (host.ram_bytes if host.ram_bytes is not None else num_ranks * (cap or 0)) // num_ranks
    usable = usable_ram(host)
    free = memory if usable is None else min(memory, usable // num_ranks)
    measured, attention = hardware.rates.matmul_flops_per_s, hardware.rates.attention_flops_per_s
    cores = max(1, (host.num_cores or 1) // num_ranks)
    return Device(
        kind=DeviceKind.CPU,
        name=host.cpu_name or "CPU",
        memory_bytes=memory,
        usable_bytes=free if cap is None else min(free, cap),
        context_bytes=CPU_PROCESS_BYTES,
        num_nodes=hardware.num_nodes,
        devices_per_node=num_ranks,
        host_ram_bytes=usable,
        num_cores=host.num_cores,
        cpu_name=host.cpu_name,
        sums_bf16_apart=_sums_bf16_apart(host),
        matmul_flops_per_s=(measured // num_ranks) if measured else cores * _assumed_flops_per_core(host),
        is_matmul_assumed=not measured,
        measured_attention_flops_per_s=attention // num_ranks if attention else None,
        measured_memory_bytes_per_s=hardware.rates.memory_bytes_per_s,
        memory_bytes_per_s=ASSUMED_CPU_MEMORY_BYTES_PER_S // num_ranks,
        link_bytes_per_s=ASSUMED_CPU_LINK_BYTES_PER_S if num_ranks > 1 else None,
        measured_link_bytes_per_s=hardware.rates.all_gather_bytes_per_s if num_ranks > 1 else None,
        measured_network_bytes_per_s=hardware.rates.between_nodes_bytes_per_s,
        measured_host_adam_bytes_per_s=hardware.rates.host_adam_bytes_per_s,
        nvme_bytes_per_s=_fastest_disk(host.disks),
    )


def _sums_bf16_apart(host: Host) -> bool:
    """True if oneDNN computes bf16 products by fp32 kernels; with AVX2 alone PyTorch does not use oneDNN.

    Found with torch's profiler and oneDNN's instruction sets limited to those of each kind of CPU.
    """
    return "avx512f" in host.cpu_flags and not {"avx512_bf16", "amx_bf16"} & set(host.cpu_flags)


def _assumed_flops_per_core(host: Host) -> int:
    """Fp32 FLOP/s of one core of a CPU without measurements."""
    return next((rate for flag, rate in CPU_FLOPS_PER_CORE if flag in host.cpu_flags), UNKNOWN_CPU_FLOPS_PER_CORE)
