"""Parsers of `nvidia-smi`: cards, processes on them, MIG slices, links between cards, failures.

Every function maps text to values; `gpus` runs the program. A figure that the driver does not report
(`[N/A]`, `[Not Supported]`, `[Insufficient Permissions]`, `ERR!`) is None, never zero. Compute processes come from
`--query-compute-apps`; graphics processes (a display, a browser) are only in the table that `nvidia-smi` prints without
arguments, which is also the only source of the memory of a MIG slice.

`topo -m` gives the kind of path between two cards, `nvlink -s` the rate of one NVLink in each direction, `topo -p2p r`
whether one card may read the other's memory at all (GeForce drivers refuse it over PCIe: copies then pass through host
memory). Over PCIe the rate is that of the narrower of the two slots, after line coding, before packet headers.
Not covered: NVSwitch state, clocks, temperatures.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath

from msgspec.structs import replace

from shardwise.trainer.planning.tables.gpu_names import match_gpu_name
from shardwise.trainer.spec.hardware import Gpu, GpuProcess, Link, LinkKind
from shardwise.trainer.spec.units import MIB
from shardwise.trainer.spec.value import Value

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
_UNIFIED_MEMORY_NAMES = r"\b(GB10|Orin|Thor|Xavier)\b"
_KINDS = {
    "PIX": LinkKind.PCIE_SWITCH,
    "PXB": LinkKind.PCIE_SWITCH,
    "PHB": LinkKind.PCIE_HOST,
    "NODE": LinkKind.NUMA_NODE,
    "SYS": LinkKind.SOCKET,
    "SOC": LinkKind.SOCKET,  # the older name of SYS
}
# Bytes per second of one lane in one direction: 2.5 and 5 GT/s with 8b/10b coding, then 8 to 64 GT/s with 128b/130b.
_PCIE_LANE_BYTES_PER_S = {
    1: 250_000_000,
    2: 500_000_000,
    3: 984_615_384,
    4: 1_969_230_769,
    5: 3_938_461_538,
    6: 7_563_000_000,  # FLIT mode, without line coding but with its own overhead
}
_MIG_LINE = r"\s+MIG (\S+)\s+Device\s+(\d+): \(UUID: (MIG-[^)]+)\)"
_ANSI = r"\x1b\[[0-9;]*m"  # the header is underlined, also when piped


class Topology(Value, frozen=True, kw_only=True):
    """The matrix of `topo -m`: cells by (row, column) of GPU numbers, and each GPU's NUMA node if there is one."""

    cells: dict[tuple[int, int], str]
    numa_nodes: dict[int, int]


class Failure(Value, frozen=True, kw_only=True):
    """A failure of nvidia-smi and its remedy; `proves_gpu`: it happens only on a machine with a card."""

    sentence: str
    proves_gpu: bool


class GpuRow(Value, frozen=True, kw_only=True):
    """One line of `--query-gpu`: the card, and the facts that decide if it can be used at all."""

    gpu: Gpu
    bus_id: str | None
    shares_host_memory: bool
    is_prohibited: bool  # compute mode Prohibited: no process may compute on it
    pcie_max_width: int | None


class MigSlice(Value, frozen=True, kw_only=True):
    """One MIG device."""

    gpu_index: int
    device: int  # within its card
    profile: str
    uuid: str


def known(text: str) -> str | None:
    """The text of a field, None if the driver did not report it."""
    bare = text.strip()
    return None if not bare or bare.startswith("[") or bare in ("N/A", "ERR!", "Not Supported") else bare


def parse_gpu_rows(text: str, fields: Sequence[str] = GPU_FIELDS) -> tuple[tuple[GpuRow, ...], tuple[str, ...]]:
    """The cards that `--query-gpu=FIELDS --format=csv,noheader,nounits` lists; any other line becomes a sentence."""
    rows, problems = [], []
    for line in filter(None, map(str.strip, text.splitlines())):
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(fields):
            problems.append(f"nvidia-smi: {line}")
            continue
        rows.append(_gpu_row(dict(zip(fields, cells, strict=True))))
    return tuple(rows), tuple(problems)


def unknown_field(output: str) -> str | None:
    """The field that this driver's nvidia-smi does not know, from its message."""
    match = re.search(r'Field "([^"]+)" is not a valid field to query', output)
    return match[1] if match else None


def parse_compute_apps(text: str) -> dict[str, tuple[GpuProcess, ...]]:
    """Compute processes by the UUID of their card, from `--query-compute-apps` with COMPUTE_APP_FIELDS."""
    processes: dict[str, tuple[GpuProcess, ...]] = {}
    for line in text.splitlines():
        cells = line.split(",")
        if len(cells) < len(COMPUTE_APP_FIELDS) or not cells[1].strip().isdigit():
            continue
        name = known(",".join(cells[2:-1]))  # a path may hold commas
        process = GpuProcess(pid=int(cells[1]), name=name and _program(name), memory_bytes=_mebibytes(cells[-1]))
        uuid = cells[0].strip()
        processes[uuid] = (*processes.get(uuid, ()), process)
    return processes


def parse_table_processes(text: str) -> list[tuple[int, GpuProcess]]:
    """GPU index and process of each line at the end of the table that `nvidia-smi` prints; long names are cut there."""
    ids = r"(\d+)\s+(?:N/A|\d+)\s+(?:N/A|\d+)\s+(\d+)"
    pattern = rf"^\|\s+{ids}\s+(?:C\+G|M\+C|G|C)\s+(.*?)\s+(?:(\d+)MiB|N/A)\s*\|$"
    return [
        (int(index), GpuProcess(pid=int(pid), name=_program(name), memory_bytes=int(memory) * MIB if memory else None))
        for index, pid, name, memory in re.findall(pattern, text, re.MULTILINE)
    ]


def parse_mig_slices(text: str) -> tuple[MigSlice, ...]:
    """The MIG devices that `nvidia-smi -L` lists under their cards."""
    slices, gpu_index = [], None
    for line in text.splitlines():
        if card := re.match(r"GPU (\d+): ", line):
            gpu_index = int(card[1])
        elif gpu_index is not None and (found := re.match(_MIG_LINE, line)):
            slices.append(MigSlice(gpu_index=gpu_index, device=int(found[2]), profile=found[1], uuid=found[3]))
    return tuple(slices)


def parse_mig_memory(text: str) -> dict[tuple[int, int], tuple[int, int]]:
    """Used and total bytes of each MIG device, by (card, device), from the table that `nvidia-smi` prints."""
    pattern = r"^\|\s+(\d+)\s+(?:\d+|N/A)\s+(?:\d+|N/A)\s+(\d+)\s+\|\s+(\d+)MiB\s*/\s*(\d+)MiB\s*\|"
    rows = (map(int, row) for row in re.findall(pattern, text, re.MULTILINE))
    return {(index, device): (used * MIB, total * MIB) for index, device, used, total in rows}


def mig_gpus(
    parent: Gpu, slices: Sequence[MigSlice], memory: dict[tuple[int, int], tuple[int, int]], *, first_index: int
) -> tuple[Gpu, ...]:
    """The slices of one card as devices numbered from `first_index`; a slice of unknown memory is left out.

    The row of a slice is that of its card and its profile; None if the tables lack either.
    """
    own = [one for one in slices if one.gpu_index == parent.index and (one.gpu_index, one.device) in memory]
    devices = []
    for index, one in enumerate(own, start=first_index):
        used, total = memory[(one.gpu_index, one.device)]
        name = f"{parent.name} MIG {one.profile}"
        own_fields = {"index": index, "name": name, "spec_name": match_gpu_name(name, total), "uuid": one.uuid}
        sizes = {"memory_bytes": total, "usable_bytes": total, "free_bytes": total - used}
        # The power limit and the processes are those of the whole card.
        devices.append(replace(parent, **own_fields, **sizes, is_mig_on=True, power_limit_w=None, processes=()))
    return tuple(devices)


def _gpu_row(cells: dict[str, str]) -> GpuRow:
    def value(field: str) -> str | None:
        return known(cells.get(field, ""))

    name = value("name") or "unknown GPU"
    total = _mebibytes(cells.get("memory.total", ""))
    reserved = _mebibytes(cells.get("memory.reserved", ""))
    capability = re.fullmatch(r"(\d+)\.(\d+)", value("compute_cap") or "")
    is_unified = total is None and bool(re.search(_UNIFIED_MEMORY_NAMES, name))
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


def parse_topology(text: str) -> Topology:
    """The GPU part of the matrix that `nvidia-smi topo -m` prints; rows and columns of network cards are dropped."""
    columns, rows = _matrix(text)
    has_numa = "NUMA Affinity" in text
    at = len(columns) + 1  # after the columns: CPU Affinity, NUMA Affinity, GPU NUMA ID
    placed = {a: row[at] for a, row in rows.items() if has_numa and len(row) > at and row[at].isdigit()}
    return Topology(cells=_cells(columns, rows), numa_nodes={a: int(node) for a, node in placed.items()})


def parse_peer_access(text: str) -> dict[tuple[int, int], bool]:
    """Peer access (read) between GPUs, from `nvidia-smi topo -p2p r`; U (unknown) is left out."""
    return {pair: cell == "OK" for pair, cell in _cells(*_matrix(text)).items() if cell != "U"}


def parse_nvlink_rates(text: str) -> dict[int, tuple[int, ...]]:
    """Bytes per second and direction of each active NVLink of each GPU, from `nvidia-smi nvlink -s`."""
    rates: dict[int, tuple[int, ...]] = {}
    gpu_index = None
    for line in text.splitlines():
        if card := re.match(r"GPU (\d+):", line):
            gpu_index = int(card[1])
        elif gpu_index is not None and (link := re.match(r"\s+Link \d+: ([\d.]+) GB/s", line)):
            rates[gpu_index] = (*rates.get(gpu_index, ()), round(float(link[1]) * 10**9))
    return {index: found for index, found in rates.items() if any(found)}


def pcie_bytes_per_s(gpu: Gpu) -> int | None:
    """Rate of a GPU's PCIe slot in one direction."""
    lane = _PCIE_LANE_BYTES_PER_S.get(gpu.pcie_generation or 0)
    return lane * gpu.pcie_width if lane and gpu.pcie_width else None


def build_links(
    gpus: Sequence[Gpu],
    topology: Topology,
    peer_access: Mapping[tuple[int, int], bool],
    nvlink_rates: Mapping[int, Sequence[int]],
) -> tuple[Link, ...]:
    """One Link for each pair of `gpus` whose path is known."""
    pairs = [(a, b) for number, a in enumerate(gpus) for b in gpus[number + 1 :]]
    links = []
    for a, b in pairs:
        path = topology.cells.get((a.index, b.index))
        bonded = re.fullmatch(r"NV(\d+)", path or "")
        if bonded is None and path not in _KINDS:
            continue
        num_nvlinks = int(bonded[1]) if bonded else 0
        links.append(
            Link(
                a=a.index,
                b=b.index,
                kind=LinkKind.NVLINK if bonded else _KINDS[path or ""],
                num_nvlinks=num_nvlinks,
                bytes_per_s=_nvlink_bytes_per_s(num_nvlinks, a, b, nvlink_rates) if bonded else _slower_slot(a, b),
                has_peer_access=_both_ways(peer_access, a.index, b.index),
            )
        )
    return tuple(links)


def _matrix(text: str) -> tuple[list[str], dict[int, list[str]]]:
    """Column names and, for each GPU row, its cells; the cells after the last column are the affinities."""
    lines = [re.sub(_ANSI, "", line) for line in text.splitlines()]
    header = next((line for line in lines if re.match(r"\s+GPU\d+\b", line)), "")
    columns = re.findall(r"\b(?:GPU\d+|NIC\d+|mlx\w+)\b", header)
    found = (re.match(r"\s*GPU(\d+)\s+(\S.*)", line) for line in lines if line != header)
    return columns, {int(row[1]): row[2].split() for row in found if row}


def _cells(columns: Sequence[str], rows: Mapping[int, Sequence[str]]) -> dict[tuple[int, int], str]:
    """Cells of pairs of different GPUs."""
    return {
        (a, int(name[3:])): cell
        for a, row in rows.items()
        for name, cell in zip(columns, row, strict=False)
        if name.startswith("GPU") and cell != "X"
    }


def _nvlink_bytes_per_s(num_nvlinks: int, a: Gpu, b: Gpu, rates: Mapping[int, Sequence[int]]) -> int | None:
    from statistics import median

    known = [median(rates[gpu.index]) for gpu in (a, b) if rates.get(gpu.index)]
    return round(num_nvlinks * min(known)) if known else None


def _slower_slot(a: Gpu, b: Gpu) -> int | None:
    rates = [pcie_bytes_per_s(gpu) for gpu in (a, b)]
    known = [rate for rate in rates if rate is not None]
    return min(known) if len(known) == len(rates) else None


def _both_ways(peer_access: Mapping[tuple[int, int], bool], a: int, b: int) -> bool | None:
    directions = [peer_access.get((a, b)), peer_access.get((b, a))]
    return None if None in directions else all(directions)


_LOST_GPU = "a GPU no longer responds\nrestart the machine; `sudo dmesg | grep -i xid` names the fault of the card"
_FAILURES = (
    (
        "Driver/library version mismatch",
        "the NVIDIA kernel module and the driver's libraries have different versions, as after a driver update\n"
        "restart the machine, or unload and load the kernel module: sudo rmmod nvidia_uvm nvidia_drm nvidia_modeset"
        " nvidia && sudo modprobe nvidia",
        True,
    ),
    (
        "couldn't communicate with the NVIDIA driver",
        "the NVIDIA kernel module is not loaded\n"
        "load it with: sudo modprobe nvidia; after a kernel update install the driver again (its module was built for"
        " the old kernel), and with Secure Boot on enrol its key",
        False,
    ),
    (
        "GPU access blocked by the operating system",
        "Windows does not let WSL use the GPU\n"
        "install the current NVIDIA driver in Windows, run `wsl --update` and `wsl --shutdown` there, and start again",
        True,
    ),
    (
        "Insufficient Permissions",
        "this user may not open the NVIDIA devices\n"
        "see `ls -l /dev/nvidia*`, and join the group that owns them: sudo usermod -aG video $USER, then log in again",
        True,
    ),
    (
        "Failed to initialize NVML: Unknown Error",
        "the container has lost its access to the GPU\nrestart the container",
        True,
    ),
    (
        "libnvidia-ml.so",
        "the driver's libraries are missing\n"
        "in a container, start it with access to the GPU (docker run --gpus all, apptainer exec --nv);"
        " elsewhere install the NVIDIA driver again",
        False,
    ),
    ("Unable to determine the device handle", _LOST_GPU, True),
    ("GPU is lost", _LOST_GPU, True),
    (
        "No devices were found",
        "the NVIDIA driver is there but gives this session no GPU\n"
        "under Slurm request one (--gpus 1); in a container give it one (--gpus all);"
        " elsewhere see `sudo dmesg | grep NVRM`",
        False,
    ),
)  # fmt: skip


def explain_failure(output: str, exit_code: int | None) -> Failure:
    """Meaning of a failed run; `exit_code` is None if it did not end in time. Exit codes differ between versions."""
    if exit_code is None:
        return Failure(
            sentence="nvidia-smi does not respond\n"
            "the driver hangs: `sudo dmesg | grep -i xid` names the cause; restart the machine",
            proves_gpu=False,
        )
    for fragment, meaning, proves_gpu in _FAILURES:
        if fragment in output:
            return Failure(sentence=f"nvidia-smi fails: {meaning}", proves_gpu=proves_gpu)
    first = next(filter(None, map(str.strip, output.splitlines())), "it printed nothing")
    return Failure(
        sentence=f"nvidia-smi fails with exit code {exit_code}: {first}\nrun `nvidia-smi` and repair the driver",
        proves_gpu=False,
    )
