"""What `nvidia-smi` prints, as values: cards, who holds their memory, MIG slices.

Every function takes text and returns values; `probe_gpus` runs the program. A figure that the driver does not give
(`[N/A]`, `[Not Supported]`, `[Insufficient Permissions]`, `ERR!`) is None, never zero. Compute processes come from
`--query-compute-apps`; graphics processes (a display, a browser) stand only in the table that `nvidia-smi` prints
without arguments, which is also the only place that gives the memory of a MIG slice.
Not covered: NVSwitch state, clocks, temperatures.
"""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from trainer.planning.tables.gpu_names import match_gpu_name
from trainer.spec.hardware import Gpu, Holder
from trainer.spec.units import MIB
from trainer.spec.value import Value

GPU_FIELDS = (
    "index",
    "uuid",
    "pci.bus_id",
    "name",
    "memory.total",
    "memory.reserved",
    "memory.free",
    "compute_cap",
    "driver_version",
    "compute_mode",
    "ecc.mode.current",
    "mig.mode.current",
    "power.limit",
    "pcie.link.gen.max",
    "pcie.link.width.max",
    "pcie.link.width.current",
)
COMPUTE_APP_FIELDS = ("gpu_uuid", "pid", "process_name", "used_gpu_memory")
# Chips that share the host's memory: the driver reports none of their own.
_UNIFIED_MEMORY_NAMES = re.compile(r"\b(GB10|Orin|Thor|Xavier)\b")


class GpuRow(Value, frozen=True, kw_only=True):
    """One line of `--query-gpu`: the card, and what decides whether it can be used at all."""

    gpu: Gpu
    bus_id: str | None
    shares_host_memory: bool
    is_prohibited: bool  # compute mode Prohibited: no process may compute on it
    pcie_max_width: int | None


class MigSlice(Value, frozen=True, kw_only=True):
    """One MIG device; `device` counts within its card."""

    gpu_index: int
    device: int
    profile: str
    uuid: str


class TableProcess(Value, frozen=True, kw_only=True):
    """A line of the table's process list; `kind` is G, C or C+G."""

    gpu_index: int
    kind: str
    holder: Holder


def known(text: str) -> str | None:
    """The text of a field, None where the driver did not answer."""
    bare = text.strip()
    return None if not bare or bare.startswith("[") or bare in ("N/A", "ERR!", "Not Supported") else bare


def parse_gpu_rows(text: str, fields: Sequence[str] = GPU_FIELDS) -> tuple[tuple[GpuRow, ...], tuple[str, ...]]:
    """The cards that `--query-gpu=FIELDS --format=csv,noheader,nounits` lists; any other line becomes a sentence."""
    rows, problems = [], []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(fields) or not cells[0].isdigit():
            problems.append(f"nvidia-smi: {line}")
            continue
        rows.append(_gpu_row(dict(zip(fields, cells, strict=True))))
    return tuple(rows), tuple(problems)


def unknown_field(output: str) -> str | None:
    """The field that this driver's nvidia-smi does not know, from its message."""
    match = re.search(r'Field "([^"]+)" is not a valid field to query', output)
    return match[1] if match else None


def parse_compute_apps(text: str) -> dict[str, tuple[Holder, ...]]:
    """Who computes on which card, by the card's UUID, from `--query-compute-apps` with COMPUTE_APP_FIELDS."""
    holders: dict[str, tuple[Holder, ...]] = {}
    for line in text.splitlines():
        cells = line.split(",")
        if len(cells) < len(COMPUTE_APP_FIELDS) or not cells[1].strip().isdigit():
            continue
        name = known(",".join(cells[2:-1]))  # a path may hold commas
        holder = Holder(pid=int(cells[1]), name=name and _program(name), memory_bytes=_mebibytes(cells[-1]))
        uuid = cells[0].strip()
        holders[uuid] = (*holders.get(uuid, ()), holder)
    return holders


def parse_table_processes(text: str) -> tuple[TableProcess, ...]:
    """The process list at the end of the table that `nvidia-smi` prints; long names arrive cut."""
    pattern = re.compile(
        r"^\|\s+(\d+)\s+(?:N/A|\d+)\s+(?:N/A|\d+)\s+(\d+)\s+(C\+G|M\+C|G|C)\s+(.*?)\s+(?:(\d+)MiB|N/A)\s*\|$",
        re.MULTILINE,
    )
    return tuple(
        TableProcess(
            gpu_index=int(index),
            kind=kind,
            holder=Holder(pid=int(pid), name=_program(name), memory_bytes=int(memory) * MIB if memory else None),
        )
        for index, pid, kind, name, memory in pattern.findall(text)
    )


def parse_mig_slices(text: str) -> tuple[MigSlice, ...]:
    """The MIG devices that `nvidia-smi -L` lists under their cards."""
    slices, gpu_index = [], None
    for line in text.splitlines():
        if card := re.match(r"GPU (\d+): ", line):
            gpu_index = int(card[1])
        elif gpu_index is not None and (
            found := re.match(r"\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)]+)\)", line)
        ):
            slices.append(MigSlice(gpu_index=gpu_index, device=int(found[2]), profile=found[1], uuid=found[3]))
    return tuple(slices)


def parse_mig_memory(text: str) -> dict[tuple[int, int], tuple[int, int]]:
    """Used and total bytes of each MIG device, by (card, device), from the table that `nvidia-smi` prints."""
    pattern = re.compile(
        r"^\|\s+(\d+)\s+(?:\d+|N/A)\s+(?:\d+|N/A)\s+(\d+)\s+\|\s+(\d+)MiB\s*/\s*(\d+)MiB\s*\|", re.MULTILINE
    )
    return {
        (int(index), int(device)): (int(used) * MIB, int(total) * MIB)
        for index, device, used, total in pattern.findall(text)
    }


def mig_gpus(
    parent: Gpu, slices: Sequence[MigSlice], memory: dict[tuple[int, int], tuple[int, int]], *, first_index: int
) -> tuple[Gpu, ...]:
    """The slices of one card as devices numbered from `first_index`; a slice of unknown memory is left out.

    The row of a slice is that of its card and its profile; None where the catalogue lacks either.
    """
    own = [one for one in slices if one.gpu_index == parent.index and (one.gpu_index, one.device) in memory]
    devices = []
    for offset, one in enumerate(own):
        used, total = memory[(one.gpu_index, one.device)]
        name = f"{parent.name} MIG {one.profile}"
        devices.append(
            Gpu(
                index=first_index + offset,
                name=name,
                spec_name=match_gpu_name(name, total),
                memory_bytes=total,
                usable_bytes=total,
                free_bytes=total - used,
                uuid=one.uuid,
                compute_capability=parent.compute_capability,
                driver=parent.driver,
                is_ecc_on=parent.is_ecc_on,
                is_mig_on=True,
                pcie_generation=parent.pcie_generation,
                pcie_width=parent.pcie_width,
                numa_node=parent.numa_node,
            )
        )
    return tuple(devices)


def _gpu_row(cells: dict[str, str]) -> GpuRow:
    def value(field: str) -> str | None:
        return known(cells.get(field, ""))

    name = value("name") or "unknown GPU"
    total = _mebibytes(cells.get("memory.total", ""))
    reserved = _mebibytes(cells.get("memory.reserved", ""))
    capability = re.fullmatch(r"(\d+)\.(\d+)", value("compute_cap") or "")
    is_unified = total is None and bool(_UNIFIED_MEMORY_NAMES.search(name))
    max_width, width = _whole(value("pcie.link.width.max")), _whole(value("pcie.link.width.current"))
    gpu = Gpu(
        index=int(cells["index"]),
        name=name,
        spec_name=match_gpu_name(name, total),
        memory_bytes=total or 0,
        usable_bytes=total - reserved if total and reserved is not None else None,
        free_bytes=_mebibytes(cells.get("memory.free", "")),
        uuid=value("uuid"),
        compute_capability=(int(capability[1]), int(capability[2])) if capability else None,
        driver=value("driver_version"),
        is_ecc_on=_is_enabled(value("ecc.mode.current")),
        is_mig_on=_is_enabled(value("mig.mode.current")),
        power_limit_w=_decimal(value("power.limit")),
        # A chip on the host's memory has no slot, though the driver reports one of the slowest kind.
        pcie_generation=None if is_unified else _whole(value("pcie.link.gen.max")),
        pcie_width=None if is_unified else width or max_width,
    )
    return GpuRow(
        gpu=gpu,
        bus_id=value("pci.bus_id"),
        shares_host_memory=is_unified,
        is_prohibited=value("compute_mode") == "Prohibited",
        pcie_max_width=max_width,
    )


def _program(command: str) -> str:
    """The program's name, without its folders; Windows paths too."""
    return PurePosixPath(command.strip().replace("\\", "/")).name or command.strip()


def _mebibytes(text: str) -> int | None:
    bare = known(text)
    return int(float(bare) * MIB) if bare and re.fullmatch(r"\d+(\.\d+)?", bare) else None


def _whole(text: str | None) -> int | None:
    return int(text) if text and text.isdigit() else None


def _decimal(text: str | None) -> float | None:
    return float(text) if text and re.fullmatch(r"\d+(\.\d+)?", text) else None


def _is_enabled(text: str | None) -> bool | None:
    return {"Enabled": True, "Disabled": False}.get(text) if text else None
