"""The hardware of this machine (devices, links, host) as a plan may use it, and its table for `shardwise probe`.

    read_gpus + read_host -> visible (CUDA_VISIBLE_DEVICES) -> selected (--gpus, busy, uniform) -> Hardware

An unknown figure is None, a device that is left out is named in `Hardware.excluded`, and other facts for the user are
in `Hardware.notes`. A GPU whose driver fails stops the probe with the remedy, because a plan for the CPU would be a
silent loss of speed; `CUDA_VISIBLE_DEVICES=` (empty) requests that plan.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from shardwise.launch.probe.gpus import (
    TIMEOUT_S,
    GpuFindings,
    amd_notes,
    free_memory_note,
    name_processes,
    read_gpus,
    select_gpus,
    visible_gpus,
)
from shardwise.launch.probe.host import read_host
from shardwise.launch.probe.installed import installed_version, unfit_version
from shardwise.trainer.planning.tables.gpu_names import spec_of
from shardwise.trainer.planning.tables.gpu_specs import GpuSpec, gpu_spec
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.hardware import Disk, Gpu, Hardware, Host, Link, NetworkInterface, PeerCopy
from shardwise.trainer.spec.host_ram import pinnable_ram, usable_ram
from shardwise.trainer.spec.packages import KERNEL_PACKAGES
from shardwise.trainer.spec.strategy import Precision
from shardwise.trainer.spec.units import format_bytes

_HIDES_ALL = ("", "-1", "NoDevFiles")
LIBRARIES = (
    "torch", "accelerate", "transformers", "deepspeed", "peft", "bitsandbytes", "galore-torch", "lion-pytorch",
    "tokenizers", "safetensors", "triton", "flash-attn", "kernels", "transformer-engine", "liger-kernel", "torchao",
    *("wandb", *KERNEL_PACKAGES),
)  # fmt: skip
_LIBRARIES_PER_LINE = 5


def read_hardware(
    *,
    gpus: tuple[int, ...] | None = None,
    measure: bool = False,
    vram_cap_bytes: int | None = None,
    root: Path = Path("/"),
    environment: Mapping[str, str] = os.environ,
    smi_timeout_s: float = TIMEOUT_S,
) -> Hardware:
    """This machine as a plan may use it.

    Raises InputError for an index in `gpus` that does not exist, EnvironmentFaultError if a GPU's driver does not
    respond. `measure` adds the speed of disks, of the device and of the links between devices: half a minute, a few
    minutes at most if something hangs.
    """
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    findings = read_gpus(root=root, environment=environment, timeout_s=smi_timeout_s)
    failure_notes = _failure_notes(findings, hides_all=setting is not None and setting.strip() in _HIDES_ALL)
    visible, hidden = visible_gpus(findings.gpus, setting)
    chosen, excluded = select_gpus(visible, wanted=gpus, torch_version=installed_version("torch"))
    uneven, unfit = free_memory_note(chosen), unfit_version("kernels", user="transformers")
    host = replace(
        read_host(root=root, environment=environment),
        is_desktop=any("GeForce" in gpu.name if (spec := spec_of(gpu)) is None else spec.is_consumer for gpu in chosen),
    )
    hardware = Hardware(
        gpus=chosen,
        host=host,
        links=tuple(link for link in findings.links if {link.a, link.b} <= {gpu.index for gpu in chosen}),
        excluded=(*findings.excluded, *hidden, *excluded),
        notes=(
            *findings.notes,
            *failure_notes,
            *(() if findings.gpus else amd_notes(root)),
            *([uneven] if uneven else []),
            *_mixed_order_note(findings.gpus, setting),
        ),
        libraries=read_libraries(),
        unfit_libraries={} if unfit is None else {"kernels": unfit.sentence},
        vram_cap_bytes=vram_cap_bytes,
        can_expand_segments=not host.is_wsl,
    )
    return _with_measurements(hardware) if measure else hardware


def read_libraries() -> dict[str, str]:
    """Versions of the installed libraries that decide what a plan can use, from their metadata; none is imported."""
    return {name: version for name in LIBRARIES if (version := installed_version(name)) is not None}


def _failure_notes(findings: GpuFindings, *, hides_all: bool) -> tuple[str, ...]:
    failure = findings.failure
    if failure is None:
        return ()
    if not hides_all and (failure.proves_gpu or findings.is_gpu_on_bus):
        raise EnvironmentFaultError(
            f"{failure.sentence}\nto train on the CPU all the same, set CUDA_VISIBLE_DEVICES= (empty)"
        )
    return (failure.sentence.replace("\n", "; "),)


def _mixed_order_note(gpus: tuple[Gpu, ...], setting: str | None) -> tuple[str, ...]:
    """CUDA counts the fastest card first by default; on mixed machines numbers may mean other cards."""
    has_numbers = setting is not None and any(entry.strip().isdigit() for entry in setting.split(","))
    if not has_numbers or len({gpu.name for gpu in gpus}) < 2:
        return ()
    return (
        f"CUDA_VISIBLE_DEVICES={setting} is read with the numbers of nvidia-smi; "
        "on a machine of several models CUDA itself may count otherwise",
    )


def _with_measurements(hardware: Hardware) -> Hardware:
    import tempfile  # imported here: an ordinary probe starts faster without them

    from shardwise.launch.probe.measure import judged_links, measure_disks, measure_rates

    folders = [Path(tempfile.gettempdir()), Path.cwd(), Path.home()]
    disks, disk_notes = measure_disks(hardware.host.disks, folders)
    found = measure_rates(hardware)
    return replace(
        hardware,
        host=replace(hardware.host, disks=disks),
        links=judged_links(hardware.links, found.rates),
        rates=found.rates,
        notes=(*hardware.notes, *disk_notes, *found.notes),
    )


def describe_hardware(hardware: Hardware) -> str:
    """Plain text, several lines, without a final newline."""
    sections = (
        _section("devices", _device_lines(hardware)),
        _section("links", _link_lines(hardware.links)),
        _section("host", _host_lines(hardware.host)),
        _section("disks", [_disk_line(disk) for disk in hardware.host.disks]),
        _section("network", [_interface_line(interface) for interface in hardware.host.interfaces]),
        _section("measured", _rate_lines(hardware)),
        _section("libraries", _library_lines(hardware.libraries)),
        _section("left out", hardware.excluded),
        _section("notes", hardware.notes),
    )
    return "\n".join(line for section in sections for line in section)


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"{title if number == 0 else '':<10} {line}" for number, line in enumerate(lines)]


def _joined(*parts: str | None) -> str:
    return ", ".join(filter(None, parts))


def _size(template: str, num_bytes: int | None) -> str:
    """The template with a size; empty if that is not known."""
    return "" if num_bytes is None else template.format(format_bytes(num_bytes))


def _device_lines(hardware: Hardware) -> list[str]:
    capped = _size("capped at {}", hardware.vram_cap_bytes)
    if hardware.gpus:
        nodes = f"{hardware.num_nodes} nodes, each with" if hardware.num_nodes > 1 else ""
        lines = [line for gpu in hardware.gpus for line in _gpu_lines(gpu)]
        return list(filter(None, (nodes, *lines, capped)))
    host = hardware.host
    ranks = f"{hardware.num_cpu_devices} ranks" if hardware.num_cpu_devices > 1 else None
    return [_joined(f"CPU {host.cpu_name or ''}".strip(), _size("{} of memory", host.ram_bytes), ranks, capped)]


def _gpu_lines(gpu: Gpu) -> list[str]:
    capability = gpu.compute_capability
    line = _joined(
        f"{gpu.index}: {gpu.name}",
        f"{format_bytes(gpu.memory_bytes)}{_size(' ({} free)', gpu.free_bytes)}",
        f"compute capability {capability[0]}.{capability[1]}" if capability else None,
        f"PCIe {gpu.pcie_generation} x{gpu.pcie_width}" if gpu.pcie_generation and gpu.pcie_width else None,
        f"NUMA node {gpu.numa_node}" if gpu.numa_node is not None else None,
        f"{gpu.power_limit_w:g} W" if gpu.power_limit_w is not None else None,
        {True: "ECC on", False: "ECC off", None: None}[gpu.is_ecc_on],
        f"driver {gpu.driver}" if gpu.driver else None,
        None if gpu.spec_name or gpu.is_mig_on else "not in the catalogue: its speed is not known",
    )
    return [line] + ([f"   memory is also used by {name_processes(gpu.processes)}"] if gpu.processes else [])


def _link_lines(links: Sequence[Link]) -> list[str]:
    """Pairs joined alike share a line."""
    pairs: dict[str, list[str]] = {}
    for link in links:
        pairs.setdefault(_link_text(link), []).append(f"{link.a}-{link.b}")
    return [f"{text}: {_shortened(names)}" for text, names in pairs.items()]


def _link_text(link: Link) -> str:
    rate = _size("{}/s each way", link.bytes_per_s)
    peer = {True: "peer access", False: "no peer access", None: None}[link.has_peer_access]
    kind = f"{link.num_nvlinks} NVLinks" if link.num_nvlinks else link.kind.value.replace("_", " ")
    return _joined(kind, rate, peer)


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 6 else f"{names[0]}, {names[1]}, ... {names[-1]} ({len(names)} pairs)"


def _host_lines(host: Host) -> list[str]:
    memory = _joined(
        _size("{} of RAM" + _size(" ({} available)", host.ram_available_bytes), host.ram_bytes),
        _size("{} for runs", usable_ram(host)),
        _size("{} can be pinned", pinnable_ram(host)),
        _size("{} can be locked", host.memlock_limit_bytes),
        _size("{} of shared memory", host.shm_bytes),
    )
    cores = f"{host.num_cores} cores" if host.num_cores is not None else None
    cpu = _joined(host.cpu_name, cores, " ".join(host.cpu_flags) or None)
    place = _joined("Windows Subsystem for Linux" if host.is_wsl else None, _slurm_text(host))
    return [line for line in (cpu, memory, place) if line]


def _slurm_text(host: Host) -> str | None:
    slurm = host.slurm
    if slurm is None:
        return None
    if slurm.job_id is None:
        return "Slurm, outside a job: this may be a login node"
    nodes = f" on {slurm.node_list}" if slurm.node_list else ""
    return f"Slurm job {slurm.job_id}{nodes}"


def _disk_line(disk: Disk) -> str:
    return _joined(
        f"{disk.path} ({disk.filesystem})",
        f"{format_bytes(disk.free_bytes)} free of {format_bytes(disk.total_bytes)}",
        "rotating" if disk.is_rotational else None,
        _size("writes {}/s", disk.write_bytes_per_s),
        _size("reads {}/s", disk.read_bytes_per_s),
    )


def _interface_line(interface: NetworkInterface) -> str:
    speed = interface.speed_bytes_per_s
    return _joined(interface.name, interface.address, f"{speed * 8 / 10**9:g} Gb/s" if speed is not None else None)


def _rate_lines(hardware: Hardware) -> list[str]:
    """Measured rates, each with the datasheet's figure if there is one."""
    rates = hardware.rates
    spec = gpu_spec(hardware.gpus[0].spec_name) if hardware.gpus else None
    native = {"bf16": Precision.BF16, "fp16": Precision.FP16_MIXED}.get(rates.matmul_precision or "", Precision.FP32)
    products = _joined(
        _flops(rates.matmul_precision or "products", rates.matmul_flops_per_s, spec, native),
        _flops("fp32", rates.fp32_flops_per_s, spec, Precision.FP32),
        _flops("fp8", rates.fp8_flops_per_s, spec, Precision.FP8),
    )
    # An all-gather is bounded by the slowest link of its ring.
    slowest_link = min((link.bytes_per_s for link in hardware.links if link.bytes_per_s is not None), default=None)
    lines = (
        f"matrix products in {products}" if products else "",
        _flops("attention", rates.attention_flops_per_s, None, native),
        _joined(
            _rate("memory", rates.memory_bytes_per_s, spec.memory_bytes_per_s if spec else None),
            _rate("host to device", rates.host_to_device_bytes_per_s, spec.pcie_bytes_per_s if spec else None),
            _rate("device to host", rates.device_to_host_bytes_per_s, spec.pcie_bytes_per_s if spec else None),
            _rate("AdamW on the host", rates.host_adam_bytes_per_s, None),
        ),
        _joined(
            _rate("all-gather", rates.all_gather_bytes_per_s, slowest_link),
            "only without peer access" if rates.gathers_only_without_peers else None,
        ),
        _rate("between nodes", rates.between_nodes_bytes_per_s, hardware.network_bytes_per_s),
        *_peer_lines(rates.peer_copies),
    )
    return list(filter(None, lines))


def _flops(name: str, measured: int | None, spec: GpuSpec | None, precision: Precision) -> str | None:
    if measured is None:
        return None
    nominal = spec.peak_flops_per_s(precision) if spec else None
    datasheet = f" (datasheet {nominal / 10**12:.3g})" if nominal else ""
    return f"{name} {measured / 10**12:.3g} TFLOP/s{datasheet}"


def _rate(name: str, measured: int | None, nominal: int | None) -> str:
    return _size(f"{name} {{}}/s{_size(' (datasheet {}/s)', nominal or None)}", measured)


def _peer_lines(copies: Sequence[PeerCopy]) -> list[str]:
    """The range of the copies that work; those that do not are named in the notes."""
    good = [copy.bytes_per_s for copy in copies if copy.is_correct and copy.bytes_per_s is not None]
    if not good:
        return []
    slowest, fastest = format_bytes(min(good)), format_bytes(max(good))
    spread = f"{slowest}/s" if slowest == fastest else f"{slowest}/s to {fastest}/s"
    return [f"copies between GPUs {spread}, {len(good)} of {len(copies)} pairs right"]


def _library_lines(libraries: dict[str, str]) -> list[str]:
    named = [f"{name} {version}" for name, version in libraries.items()]
    return [", ".join(named[at : at + _LIBRARIES_PER_LINE]) for at in range(0, len(named), _LIBRARIES_PER_LINE)]
