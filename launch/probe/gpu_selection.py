"""GPUs that a plan may use (visible, requested, not busy, all of one kind), and the environment that selects them.

A rank waits for the slowest of its peers and none may run out of memory, so a plan needs equal cards. Each card that is
left out gets a sentence with the process that uses it or the other model. Numbers are those of `nvidia-smi`; CUDA may
count cards of different models in another order, so processes get cards by UUID. The trial of `launch.probe.torch_fit`
and the ranks get the same variables.
"""

from collections.abc import Mapping, Sequence

from shardwise.trainer.planning.tables.gpu_names import spec_of
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind, Gpu, GpuProcess, Hardware
from shardwise.trainer.spec.packages import lacks_code
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import format_bytes

# Above a desktop's share of a large card, below the memory of any training process.
BUSY_SHARE = 0.25
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = "expandable_segments:True"  # segments that expand instead of fragmenting


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
    """Of busy cards, the number with the largest sum when each counts only as much as the fullest of them."""
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
