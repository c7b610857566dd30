"""GPUs and links of this machine, from the output of `nvidia-smi`, and the GPUs that a plan may use.

The absence of `nvidia-smi` and its failures become sentences. It runs as rarely as possible: two at once for any
machine (cards, compute processes); then, only if needed, the table (a display uses memory, or MIG), the list (MIG) and
the links (more than one card), again at once. A run of more than 10 s is killed. Everything is read below `root`, so a
test can lay out a machine of its own.

NVML adds cores, clocks and memory bus of cards that have no row in the tables. No other module of launch/ imports its
binding, and this one only for such a card; without it, or if the driver does not report them, these figures stay None.

A plan may use GPUs that are visible, requested, not busy and all of one kind: a rank waits for the slowest of its peers
and none may run out of memory, so a plan needs equal cards. Each card that is left out gets a sentence with the process
that uses it or the other model. Numbers are those of `nvidia-smi`; CUDA may count cards of different models in another
order, so processes get cards by UUID. The trial of `launch.probe.torch_fit` and the ranks get the same variables.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from shardwise.launch.probe.host import parse_meminfo, read_text
from shardwise.launch.probe.nvidia_smi import (
    COMPUTE_APP_FIELDS,
    GPU_FIELDS,
    Failure,
    GpuRow,
    build_links,
    explain_failure,
    mig_gpus,
    parse_compute_apps,
    parse_gpu_rows,
    parse_mig_memory,
    parse_mig_slices,
    parse_nvlink_rates,
    parse_peer_access,
    parse_table_processes,
    parse_topology,
    unknown_field,
)
from shardwise.launch.probe.program import BackgroundCall, ProgramResult, run_program
from shardwise.trainer.planning.tables.gpu_names import spec_of
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind, Gpu, GpuProcess, Hardware, Link
from shardwise.trainer.spec.packages import lacks_code
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import MIB, format_bytes
from shardwise.trainer.spec.value import Value

TIMEOUT_S = 10.0
_CSV = "--format=csv,noheader,nounits"
_UNEXPLAINED_BYTES = 200 * MIB  # used by none of the compute processes: the table, which lists displays, is needed
# Above a desktop's share of a large card, below the memory of any training process.
BUSY_SHARE = 0.25
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"  # segments that expand instead of fragmenting


class GpuFindings(Value, frozen=True, kw_only=True):
    """The machine's GPUs; `failure` if a card is or may be there and the driver fails."""

    gpus: tuple[Gpu, ...] = ()
    links: tuple[Link, ...] = ()
    excluded: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    failure: Failure | None = None
    is_gpu_on_bus: bool = False


def read_gpus(
    *, root: Path = Path("/"), environment: Mapping[str, str] = os.environ, timeout_s: float = TIMEOUT_S
) -> GpuFindings:
    """Every NVIDIA GPU of this machine, whether or not this process may use it."""
    program = find_nvidia_smi(root, environment)
    if program is None:
        return _without_program(root)
    cards, fields, apps = _query(program, timeout_s)
    rows, problems = parse_gpu_rows(cards.printed, fields)
    if not rows:
        failure = explain_failure(cards.obstacle or cards.printed, 127 if cards.obstacle else cards.exit_code)
        return GpuFindings(failure=failure, is_gpu_on_bus=bool(nvidia_bus_ids(root)))
    return _assemble(program, rows, problems, apps, root, timeout_s)


def find_nvidia_smi(root: Path, environment: Mapping[str, str]) -> str | None:
    """The program's path; that of WSL is often not on PATH."""
    from shutil import which  # loads three libraries of compression

    found = which("nvidia-smi", path=environment.get("PATH", os.defpath))
    wsl = root / "usr/lib/wsl/lib/nvidia-smi"
    return found or (str(wsl) if os.access(wsl, os.X_OK) else None)


def nvidia_bus_ids(root: Path) -> tuple[str, ...]:
    """PCI addresses of NVIDIA display and 3D controllers, driver or not."""
    return _bus_ids(root, vendor="0x10de")


def amd_notes(root: Path) -> tuple[str, ...]:
    """A sentence if the machine has GPUs of AMD."""
    bus_ids = _bus_ids(root, vendor="0x1002")
    if not bus_ids:
        return ()
    return (f"{_named_on_bus('AMD', bus_ids)}: found and not supported (ROCm), training runs on the CPU",)


def _bus_ids(root: Path, *, vendor: str) -> tuple[str, ...]:
    """PCI addresses of a maker's display controllers (class 03) and processing accelerators (12, as an Instinct is)."""
    return tuple(
        file.parent.name
        for file in sorted(root.glob("sys/bus/pci/devices/*/vendor"))
        if read_text(file).strip() == vendor and read_text(file.with_name("class")).startswith(("0x03", "0x12"))
    )


def _named_on_bus(maker: str, bus_ids: Sequence[str]) -> str:
    return f"{len(bus_ids)} {maker} GPU{'s' if len(bus_ids) > 1 else ''} on PCI ({', '.join(bus_ids[:4])})"


def _run_all(program: str, argument_lists: Iterable[Sequence[str]], timeout_s: float) -> list[ProgramResult]:
    """Runs the program with each list of arguments, all at the same time."""
    from shardwise.launch.worker import REAPING_S  # no program runs without a card

    running = [
        BackgroundCall(partial(run_program, [program, *arguments], environment=os.environ, timeout_s=timeout_s))
        for arguments in argument_lists
    ]
    ends = time.monotonic() + timeout_s + REAPING_S + 1
    return [run.wait(ends) or ProgramResult() for run in running]


def _query(program: str, timeout_s: float) -> tuple[ProgramResult, tuple[str, ...], ProgramResult]:
    """Cards, their fields (without those that an older driver does not know), and compute processes."""
    fields: tuple[str, ...] = GPU_FIELDS
    apps_query = [f"--query-compute-apps={','.join(COMPUTE_APP_FIELDS)}", _CSV]
    cards, apps = _run_all(program, [[f"--query-gpu={','.join(fields)}", _CSV], apps_query], timeout_s)
    while (unknown := unknown_field(cards.printed)) in fields:
        fields = tuple(field for field in fields if field != unknown)
        (cards,) = _run_all(program, [[f"--query-gpu={','.join(fields)}", _CSV]], timeout_s)
    return cards, fields, apps


def _assemble(
    program: str, rows: Sequence[GpuRow], problems: Sequence[str], apps: ProgramResult, root: Path, timeout_s: float
) -> GpuFindings:
    usable, excluded = _usable_cards(rows, apps, root)
    wanted = _further_queries(usable)
    results = _run_all(program, wanted.values(), timeout_s)
    texts = {topic: result.printed for topic, result in zip(wanted, results, strict=True) if result.exit_code == 0}
    silent = [
        f"`{' '.join(('nvidia-smi', *query))}` did not respond within {timeout_s:g} s: left out"
        for query, result in zip(wanted.values(), results, strict=True)
        if result.exit_code is None
    ]
    gpus, without_slice = _split_by_mig(_with_table_processes(usable, texts.get("table", "")), rows, texts)
    topology = parse_topology(texts.get("topology", ""))
    known = {gpu.index: gpu.numa_node for gpu in gpus if gpu.numa_node is not None or gpu.is_mig_on}
    nodes: dict[int, int | None] = {**topology.numa_nodes, **known}
    gpus = tuple(replace(gpu, numa_node=nodes.get(gpu.index)) for gpu in gpus)
    whole = [gpu for gpu in gpus if not gpu.is_mig_on]
    peers, rates = parse_peer_access(texts.get("peer_access", "")), parse_nvlink_rates(texts.get("nvlinks", ""))
    return GpuFindings(
        gpus=gpus,
        links=build_links(whole, topology, peers, rates),
        excluded=(*excluded, *without_slice),
        notes=(*problems, *_slot_notes(rows), *silent),
        is_gpu_on_bus=True,
    )


def _usable_cards(rows: Sequence[GpuRow], apps: ProgramResult, root: Path) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    processes = parse_compute_apps(apps.printed if apps.exit_code == 0 else "")
    gpus, excluded = [], []
    for row in rows:
        gpu, named = row.gpu, f"GPU {row.gpu.index} ({row.gpu.name})"
        if row.is_prohibited:
            excluded.append(f"{named}: its compute mode is Prohibited; `sudo nvidia-smi -c 0` lifts it")
            continue
        memory_bytes, free_bytes = gpu.memory_bytes, gpu.free_bytes
        if row.shares_host_memory:
            host = parse_meminfo(read_text(root / "proc/meminfo"))
            memory_bytes, free_bytes = host.get("MemTotal", 0), host.get("MemAvailable")
        if not memory_bytes:
            excluded.append(f"{named}: the driver does not report its memory")
            continue
        gpus.append(
            replace(
                gpu,
                memory_bytes=memory_bytes,
                free_bytes=free_bytes,
                numa_node=_numa_node(row.bus_id, root),
                processes=processes.get(gpu.uuid or "", ()),
            )
        )
    return tuple(gpus), tuple(excluded)


def _further_queries(gpus: Sequence[Gpu]) -> dict[str, tuple[str, ...]]:
    """Further runs that this machine needs, by topic."""
    has_mig = any(gpu.is_mig_on for gpu in gpus)
    queries: dict[str, tuple[str, ...]] = {"list": ("-L",)} if has_mig else {}
    if has_mig or any(_unexplained_bytes(gpu) > _UNEXPLAINED_BYTES for gpu in gpus):
        queries["table"] = ()
    if sum(not gpu.is_mig_on for gpu in gpus) > 1:
        queries |= {"topology": ("topo", "-m"), "peer_access": ("topo", "-p2p", "r"), "nvlinks": ("nvlink", "-s")}
    return queries


def _unexplained_bytes(gpu: Gpu) -> int:
    known = sum(process.memory_bytes or 0 for process in gpu.processes)
    return 0 if gpu.free_bytes is None else held_bytes(gpu) - known


def _with_table_processes(gpus: Sequence[Gpu], table: str) -> tuple[Gpu, ...]:
    """The cards with the processes of the table that `--query-compute-apps` does not list."""
    listed, found = parse_table_processes(table), []
    for gpu in gpus:
        known = {process.pid for process in gpu.processes}
        more = [process for index, process in listed if index == gpu.index and process.pid not in known]
        found.append(replace(gpu, processes=(*gpu.processes, *more)))
    return tuple(found)


def _split_by_mig(
    gpus: Sequence[Gpu], rows: Sequence[GpuRow], texts: Mapping[str, str]
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Cards as they are, cards in MIG mode replaced by their slices, numbered after the last card of the machine."""
    slices, memory = parse_mig_slices(texts.get("list", "")), parse_mig_memory(texts.get("table", ""))
    parts: list[Gpu] = []
    excluded = []
    first_index = max(row.gpu.index for row in rows) + 1
    for parent in (gpu for gpu in gpus if gpu.is_mig_on):
        own = mig_gpus(parent, slices, memory, first_index=first_index + len(parts))
        parts += own
        if not own:
            excluded.append(
                f"GPU {parent.index} ({parent.name}): MIG is on but no slice can be seen; `sudo nvidia-smi mig -cgi"
                " PROFILE -C` makes one, `sudo nvidia-smi -mig 0` switches MIG off"
            )
    return (*(gpu for gpu in gpus if not gpu.is_mig_on), *parts), tuple(excluded)


def _slot_notes(rows: Sequence[GpuRow]) -> list[str]:
    return [
        f"GPU {row.gpu.index} ({row.gpu.name}) runs on {row.gpu.pcie_width} of its {row.pcie_max_width} PCIe lanes"
        for row in rows
        if row.pcie_max_width and row.gpu.pcie_width and row.gpu.pcie_width < row.pcie_max_width
    ]


def _numa_node(bus_id: str | None, root: Path) -> int | None:
    """The NUMA node of a PCI device; the kernel writes -1 if there is only one."""
    match = re.fullmatch(r"0*([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])", bus_id or "")
    text = read_text(root / "sys/bus/pci/devices" / match[1].lower() / "numa_node").strip() if match else ""
    return int(text) if text.isdigit() else None


def _without_program(root: Path) -> GpuFindings:
    """Findings without nvidia-smi: a note if a card is on the bus."""
    bus_ids = nvidia_bus_ids(root)
    if not bus_ids:
        return GpuFindings()
    named = _named_on_bus("NVIDIA", bus_ids)
    if (root / "proc/driver/nvidia/version").exists():
        remedy = (
            "the driver is loaded but nvidia-smi is missing: in a container, start it with access to the GPU "
            "(docker run --gpus all, apptainer exec --nv); elsewhere install the driver's utilities"
        )
    else:
        remedy = (
            "no NVIDIA driver is installed: install it (Ubuntu: sudo ubuntu-drivers install; Debian: sudo apt install "
            "nvidia-driver) and restart"
        )
    return GpuFindings(notes=(f"{named}, but {remedy}",), is_gpu_on_bus=True)


def select_gpus(
    gpus: Sequence[Gpu], *, wanted: tuple[int, ...] | None, torch_version: str | None = None
) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """The GPUs to plan for and a sentence for each that is left out; InputError names the indices that exist.

    A busy card, and one that the installed torch has no code for, is skipped unless it is requested; if all are busy,
    the number with the most free memory in total is selected.
    """
    requested, excluded = _requested(gpus, wanted)
    fitting, old = (requested, ()) if wanted is not None else _with_code(requested, torch_version)
    free, busy = (fitting, ()) if wanted is not None else _not_busy(fitting)
    uniform, others = _best_uniform(free)
    chosen, slices = _one_mig_slice(uniform)
    return chosen, (*excluded, *old, *busy, *others, *slices)


def visible_gpus(gpus: Sequence[Gpu], setting: str | None) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """GPUs visible under CUDA_VISIBLE_DEVICES (None: not set), and a sentence if it hides some.

    As in CUDA, an entry is a number or the beginning of a UUID, and the list ends at the first that names no card.
    """
    if setting is None:
        return tuple(gpus), ()
    seen: list[Gpu] = []
    for entry in setting.split(","):
        found = _named(gpus, entry.strip())
        if not found:
            break
        seen += [gpu for gpu in found if gpu not in seen]
    hidden = [gpu.index for gpu in gpus if gpu not in seen]
    sentence = (f"CUDA_VISIBLE_DEVICES={setting} hides {name_gpus(hidden)}",) if hidden else ()
    return tuple(gpu for gpu in gpus if gpu in seen), sentence


def visible_devices(gpus: Sequence[Gpu]) -> str:
    """The value of CUDA_VISIBLE_DEVICES that gives a process exactly these GPUs, in this order."""
    return ",".join(gpu.uuid or str(gpu.index) for gpu in gpus)


def free_memory_note(gpus: Sequence[Gpu]) -> str | None:
    """A sentence if equal cards differ clearly in free memory: the plan is made for the least."""
    free = {gpu.index: gpu.free_bytes for gpu in gpus if gpu.free_bytes is not None}
    if len(free) < 2 or max(free.values()) - min(free.values()) < 0.01 * max(free.values()):
        return None
    least = min(free, key=lambda index: free[index])
    return (
        f"free memory differs from GPU to GPU ({format_bytes(min(free.values()))} to "
        f"{format_bytes(max(free.values()))}): planning for the least, GPU {least}"
    )


def name_gpus(indices: Sequence[int]) -> str:
    """`GPU 3`, `GPUs 0 and 2`, `GPUs 2 to 7`."""
    ordered = sorted(indices)
    if len(ordered) == 1:
        return f"GPU {ordered[0]}"
    if len(ordered) > 2 and ordered[-1] - ordered[0] == len(ordered) - 1:
        return f"GPUs {ordered[0]} to {ordered[-1]}"
    return f"GPUs {', '.join(map(str, ordered[:-1]))} and {ordered[-1]}"


def held_bytes(gpu: Gpu) -> int:
    """Memory of a GPU that other processes use now."""
    if gpu.free_bytes is None:
        return sum(process.memory_bytes or 0 for process in gpu.processes)
    return max(0, (gpu.usable_bytes or gpu.memory_bytes) - gpu.free_bytes)


def name_processes(processes: Sequence[GpuProcess]) -> str:
    """`python (pid 4242)`, the largest first, at most three."""
    ordered = sorted(processes, key=lambda process: process.memory_bytes or 0, reverse=True)
    named = [f"{process.name or 'a process'} (pid {process.pid})" for process in ordered[:3]]
    more = [f"{len(ordered) - 3} more"] if len(ordered) > 3 else []
    return ", ".join(named + more) or "a process that is not visible from here"


def _requested(gpus: Sequence[Gpu], wanted: tuple[int, ...] | None) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    if wanted is None:
        return tuple(gpus), ()
    existing = [gpu.index for gpu in gpus]
    unknown = [index for index in wanted if index not in existing]
    if unknown:
        there = f"this machine offers {name_gpus(existing)}" if existing else "this machine offers no GPU"
        raise InputError(f"--gpus {','.join(map(str, wanted))}: there is no {name_gpus(unknown)}; {there}")
    left = [index for index in existing if index not in wanted]
    sentence = (f"{name_gpus(left)}: not in --gpus {','.join(map(str, wanted))}",) if left else ()
    return tuple(gpu for gpu in gpus if gpu.index in wanted), sentence


def _with_code(gpus: Sequence[Gpu], torch_version: str | None) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """The cards that this torch has code for, or all if it has code for none: a run then stops with the remedy."""
    known = [gpu for gpu in gpus if torch_version and gpu.compute_capability]
    old = [gpu for gpu in known if lacks_code(torch_version or "", gpu.compute_capability or (0, 0))]
    if len(old) == len(gpus):
        return tuple(gpus), ()
    return tuple(gpu for gpu in gpus if gpu not in old), tuple(
        f"GPU {gpu.index} ({gpu.name}): torch {torch_version} has no code for so old a card" for gpu in old
    )


def _not_busy(gpus: Sequence[Gpu]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    idle = [gpu for gpu in gpus if held_bytes(gpu) <= BUSY_SHARE * (gpu.usable_bytes or gpu.memory_bytes)]
    if not idle and gpus:
        idle = _most_free_memory(gpus)
    skipped = [gpu for gpu in gpus if gpu not in idle]
    return tuple(idle), tuple(
        f"GPU {gpu.index} is busy: {name_processes(gpu.processes)} uses {format_bytes(held_bytes(gpu))} of "
        f"{format_bytes(gpu.memory_bytes)}; --gpus {gpu.index} uses it all the same"
        for gpu in skipped
    )


def _most_free_memory(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The cards with the most free memory: as many as make number x (free memory of the fullest of them) largest."""
    ordered = sorted(gpus, key=lambda gpu: gpu.free_bytes or 0, reverse=True)
    best = max(range(1, len(ordered) + 1), key=lambda count: count * (ordered[count - 1].free_bytes or 0))
    retained = {gpu.index for gpu in ordered[:best]}
    return [gpu for gpu in gpus if gpu.index in retained]


def _best_uniform(gpus: Sequence[Gpu]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    groups: dict[tuple[str, int], list[Gpu]] = {}
    for gpu in gpus:
        groups.setdefault((gpu.name, gpu.memory_bytes), []).append(gpu)
    if len(groups) < 2:
        return tuple(gpus), ()
    knows_peaks = all(spec_of(gpu) is not None for gpu in gpus)
    best = max(groups.values(), key=lambda group: _worth(group, knows_peaks=knows_peaks))
    rest = [group for group in groups.values() if group is not best]
    return tuple(best), tuple(
        f"{name_gpus([gpu.index for gpu in group])} ({group[0].name}, {format_bytes(group[0].memory_bytes)}): "
        f"another model than the {len(best)} x {best[0].name} planned for"
        for group in rest
    )


def _worth(group: Sequence[Gpu], *, knows_peaks: bool) -> tuple[float, tuple[int, int]]:
    """Total memory times total peak if every card has a row, else total memory; ties go to the newer chip."""
    memory = len(group) * min(gpu.usable_bytes or gpu.memory_bytes for gpu in group)
    row = spec_of(group[0]) if knows_peaks else None
    peak = len(group) * row.fp16_flops_per_s if row is not None else 1
    return float(memory) * peak, group[0].compute_capability or (0, 0)


def _one_mig_slice(gpus: Sequence[Gpu]) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """The first of several MIG slices: CUDA shows a process one, and NCCL connects none."""
    if len(gpus) < 2 or not gpus[0].is_mig_on:
        return tuple(gpus), ()
    rest = [gpu.index for gpu in gpus[1:]]
    return (gpus[0],), (f"{name_gpus(rest)}: MIG slices do not work together; one is used",)


def _named(gpus: Sequence[Gpu], entry: str) -> tuple[Gpu, ...]:
    if entry.isdigit():
        return tuple(gpu for gpu in gpus if gpu.index == int(entry))
    return tuple(gpu for gpu in gpus if gpu.uuid and entry.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(entry))


def rank_gpu_names(plan: Plan) -> tuple[str, ...] | None:
    """A name for each rank's GPU as in CUDA_VISIBLE_DEVICES; None if there is nothing to select."""
    if plan.device_kind is not DeviceKind.CUDA:
        return None
    return _names_of_first(plan.hardware, plan.chosen.num_ranks)


def cuda_variables(hardware: Hardware, num_gpus: int, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to an inherited environment for a process on the first GPUs of a machine."""
    ours: dict[str, str] = {}
    if hardware.can_expand_segments and not any(name in inherited for name in ALLOCATOR_VARIABLES):
        ours["PYTORCH_ALLOC_CONF"] = _EXPANDABLE
    gpus = _names_of_first(hardware, num_gpus)
    if gpus is not None:
        ours["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # the order of nvidia-smi, if a card is named by its index
        ours["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return ours


def _names_of_first(hardware: Hardware, num_gpus: int) -> tuple[str, ...] | None:
    """Names of the first GPUs; None on several machines (their cards have other UUIDs, and the scheduler selects them)
    and if the hardware was described instead of probed."""
    if hardware.num_nodes > 1 or hardware.source != "probe":
        return None
    chosen = hardware.gpus[:num_gpus]
    if all(gpu.uuid for gpu in chosen):
        return tuple(str(gpu.uuid) for gpu in chosen)
    return tuple(str(gpu.index) for gpu in chosen)
