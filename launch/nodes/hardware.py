"""Several machines as one `Hardware`: every rank has the same plan, so the weakest machine sets each value.

Machines with different GPUs or library versions are refused with both values: a run would be planned for one machine
and fail on another.
"""

import json
import re
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.hardware import Gpu, Hardware, Host
from trainer.spec.units import format_bytes


def combined_hardware(machines: Mapping[str, Hardware]) -> Hardware:
    """The hardware of a run on all `machines`, by name, the first machine first."""
    first_name, first = next(iter(machines.items()))
    for name, machine in machines.items():
        _refuse_unlike(first_name, first, name, machine)
    every = list(machines.values())
    gpus = tuple(_weakest_gpu([machine.gpus[index] for machine in every]) for index in range(len(first.gpus)))
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


def _weakest_gpu(alike: Sequence[Gpu]) -> Gpu:
    def least(values: Sequence[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return min(known) if known else None

    return replace(
        alike[0],
        memory_bytes=min(gpu.memory_bytes for gpu in alike),
        usable_bytes=least([gpu.usable_bytes for gpu in alike]),
        free_bytes=least([gpu.free_bytes for gpu in alike]),
    )


def _weakest_host(hosts: Sequence[Host]) -> Host:
    first = hosts[0]
    least: dict[str, int] = {}
    for name in (
        "num_cores",
        "ram_bytes",
        "ram_available_bytes",
        "pinned_limit_bytes",
        "memlock_limit_bytes",
        "shm_bytes",
    ):
        known = [value for host in hosts if (value := getattr(host, name)) is not None]
        if known:
            least[name] = min(known)
    flags = tuple(flag for flag in first.cpu_flags if all(flag in host.cpu_flags for host in hosts))
    disks = tuple(
        disk for disk in first.disks if all(disk.path in {each.path for each in host.disks} for host in hosts)
    )
    return replace(first, **least, cpu_flags=flags, disks=disks)
