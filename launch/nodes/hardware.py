"""Several machines as one `Hardware`: every rank has the same plan, so the weakest machine sets each value.

Machines with different GPUs or library versions are refused with both values: a run would be planned for one machine
and fail on another.
"""

import json
import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.hardware import Gpu, Hardware, Host
from shardwise.trainer.spec.units import format_bytes

_GPU_AMOUNTS = ("memory_bytes", "usable_bytes", "free_bytes")
_HOST_AMOUNTS = (
    "num_cores", "ram_bytes", "ram_available_bytes", "pinned_limit_bytes", "memlock_limit_bytes", "shm_bytes",
)  # fmt: skip


def combined_hardware(machines: Mapping[str, Hardware]) -> Hardware:
    """The hardware of a run on all `machines`, by name, the first machine first."""
    first_name, first = next(iter(machines.items()))
    for name, machine in machines.items():
        _refuse_unlike(first_name, first, name, machine)
    every = list(machines.values())
    alike = zip(*(machine.gpus for machine in every), strict=True)
    gpus = tuple(replace(cards[0], **_least(cards, _GPU_AMOUNTS)) for cards in alike)
    notes = [f"{name}: {note}" for name, machine in machines.items() for note in machine.notes]
    return replace(
        first,
        gpus=gpus,
        host=_weakest_host([machine.host for machine in every]),
        num_nodes=len(every),
        can_expand_segments=all(machine.can_expand_segments for machine in every),
        notes=tuple(dict.fromkeys(notes)),
    )


def parse_labelled_probes(text: str) -> list[Hardware]:
    """The probes in the output of `srun --label shardwise probe --json`, by node.

    EnvironmentFaultError for a node that printed no probe.
    """
    lines: dict[int, list[str]] = {}
    for line in text.splitlines():
        match = re.match(r"\s*(\d+): ?(.*)$", line)
        if match is not None:
            lines.setdefault(int(match[1]), []).append(match[2])
    probes = []
    for number, found in sorted(lines.items()):
        content = "\n".join(found)
        begin = content.find("{")
        try:
            json.loads(content[begin:])
        except ValueError:
            last = next((line for line in reversed(found) if line.strip()), "no output")
            raise EnvironmentFaultError(f"node {number} could not be probed: {last.strip()[:300]}") from None
        probes.append(codec.decode(content[begin:].encode(), Hardware, origin=f"the probe of node {number}"))
    return probes


def describe_difference(planned: Hardware, found: Hardware) -> str | None:
    """Differences from the hardware that a plan assumed, with both values; None if none affects the plan."""
    pairs = (
        ("nodes", planned.num_nodes, found.num_nodes),
        ("GPUs a node", _gpu_names(planned.gpus), _gpu_names(found.gpus)),
    )
    differences = [f"{name}: {then} planned, {now} found" for name, then, now in pairs if then != now]
    then, now = planned.host.ram_bytes, found.host.ram_bytes
    if then is not None and now is not None and now < 0.9 * then:
        differences.append(f"RAM a node: {format_bytes(then)} planned, {format_bytes(now)} found")
    return "; ".join(differences) or None


def _gpu_names(gpus: Sequence[Gpu]) -> str:
    names = {gpu.spec_name or gpu.name for gpu in gpus}
    return f"{len(gpus)} x {' and '.join(sorted(names))}" if gpus else "none"


def _refuse_unlike(first_name: str, first: Hardware, name: str, machine: Hardware) -> None:
    here, there = _gpu_names(first.gpus), _gpu_names(machine.gpus)
    if here != there:
        raise EnvironmentFaultError(
            f"{first_name} has {here}, {name} has {there}; every machine of a run needs the same:\n"
            f"exclude one (Slurm: --exclude={name}), or request equal ones (--constraint)"
        )
    for library in sorted(first.libraries.keys() | machine.libraries.keys()):
        then, now = first.libraries.get(library), machine.libraries.get(library)
        if then != now:
            raise EnvironmentFaultError(
                f"{first_name} has {library} {then or 'missing'}, {name} has {now or 'missing'}; "
                "every machine of a run needs the same installation"
            )


def _weakest_host(hosts: Sequence[Host]) -> Host:
    flags = tuple(flag for flag in hosts[0].cpu_flags if all(flag in host.cpu_flags for host in hosts))
    shared = set.intersection(*({disk.path for disk in host.disks} for host in hosts))
    disks = tuple(disk for disk in hosts[0].disks if disk.path in shared)
    return replace(hosts[0], **_least(hosts, _HOST_AMOUNTS), cpu_flags=flags, disks=disks)


def _least(machines: Sequence[object], names: Sequence[str]) -> dict[str, int]:
    """The smallest known value of each attribute."""
    known = {name: [value for each in machines if (value := getattr(each, name)) is not None] for name in names}
    return {name: min(values) for name, values in known.items() if values}
