"""The machines of a run: those of a Slurm job, or those on which a person starts the same command.

    Slurm           the batch script starts one supervisor; `srun` probes the nodes and starts the agents
    --nodes N       `shardwise train JOB --nodes N --node-rank I --head HOST --run-dir D` on each; rank 0 supervises

Both need one run directory that every machine sees: checkpoints are committed there by one rename.

Several machines are one `Hardware`: every rank has the same plan, so the weakest machine sets each value. Machines with
different GPUs or library versions are refused with both values: a run would be planned for one machine and fail on
another.
"""

import contextlib
import ipaddress
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.nodes.agent import Head, parse_head, run_agent
from shardwise.launch.nodes.channel import NodeServer
from shardwise.launch.nodes.ranks import Cluster, Step, agent_argv
from shardwise.launch.worker import import_settings
from shardwise.slurm.jobs import Allocation, find_allocation, read_seconds_left, srun_argv
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from shardwise.trainer.spec.hardware import Gpu, Hardware, Host
from shardwise.trainer.spec.units import format_bytes

PROBE_S = 300.0  # srun may wait for a node to wake
CONNECT_ALL_S = 3600.0  # for people to start the command on every machine
DEFAULT_PORT = 29400  # next to torch's 29500


class Place(NamedTuple):
    """The place of a machine among several."""

    num_nodes: int
    node_rank: int
    head: Head


def place_among(*, nodes: int | None, node_rank: int | None, head: str | None) -> Place | None:
    """The place of this machine among several, from the command line; None for one machine.

    InputError for incomplete or impossible options.
    """
    if nodes is None and node_rank is None and head is None:
        return None
    if nodes is None or node_rank is None or head is None:
        raise InputError("several machines need all of --nodes N, --node-rank I (0 to N-1) and --head HOST, on each")
    if not 0 <= node_rank < nodes:
        raise InputError(f"--node-rank {node_rank}: {nodes} nodes are numbered 0 to {nodes - 1}")
    place = Place(nodes, node_rank, parse_head(head))
    if nodes > 1 and _is_loopback(place.head.host):
        raise InputError(f"--head {head}: every machine would connect to itself; name the machine of --node-rank 0")
    return None if nodes == 1 else place


class Membership(NamedTuple):
    """The place of this machine in a run on several, from the command line."""

    num_nodes: int
    node_rank: int
    head: Head
    run_dir: Path


def membership(
    *, nodes: int | None, node_rank: int | None, head: str | None, run_dir: Path | None
) -> Membership | None:
    """The place of this machine among several that a person starts; None for one machine.

    InputError for incomplete or impossible options.
    """
    place = place_among(nodes=nodes, node_rank=node_rank, head=head)
    if place is None:
        return None
    if run_dir is None:
        raise InputError(
            "several machines share one run directory: name it on each with --run-dir, on a file system that all see"
        )
    return Membership(*place, run_dir)


class Machines:
    """The machines of a run: one, unless Slurm or the command line names several."""

    def __init__(
        self, allocation: Allocation | None, server: NodeServer | None, environment: Mapping[str, str]
    ) -> None:
        self._allocation = allocation
        self._server = server  # for machines that people start
        self._environment = environment

    @property
    def num_nodes(self) -> int:
        if self._server is not None:
            return self._server.num_nodes
        return 1 if self._allocation is None else self._allocation.num_nodes

    @property
    def was_restarted(self) -> bool:
        """True if a scheduler, and not a person, starts this run again."""
        return self._allocation is not None and self._allocation.num_restarts > 0

    def end(self, exit_code: ExitCode, text: str) -> None:
        """Sends the end of the run to the machines that people started."""
        if self._server is not None:
            self._server.dismiss(int(exit_code), text)

    def read_hardware(self) -> Hardware | None:
        """The hardware of all machines; None if this is the only one."""
        if self.num_nodes == 1:
            return None
        if self._server is not None:
            from shardwise.launch.probe.machine import read_hardware

            mine = read_hardware()
            others = sorted(self._server.nodes.items())
            named = {node.name: node.hello.hardware for _, node in others if node.hello.hardware is not None}
            machines = {socket.gethostname(): mine, **named}
        else:
            assert self._allocation is not None
            probes = _probe_nodes(self._allocation, self._environment)
            machines = {f"node {number}": probe for number, probe in enumerate(probes)}
        return combined_hardware(machines)

    def seconds_left(self) -> int | None:
        """Seconds until Slurm ends this job; None without a limit."""
        return None if self._allocation is None else read_seconds_left(self._allocation.job_id)

    @contextlib.contextmanager
    def serving(self, run_dir: Path, *, cache: Path, on_line: Callable[[str], None]) -> Iterator[Cluster | None]:
        """The machines, ready to start agents; None if this is the only one."""
        if self.num_nodes == 1:
            yield None
            return
        if self._server is not None:
            argv = agent_argv(run_dir, f"{self._server.own_address}:{self._server.port}", node_rank=0)
            yield Cluster(self._server, self._steps(argv), is_slurm=False, cache=cache, on_line=on_line)
            return
        assert self._allocation is not None
        name = self._environment.get("SLURMD_NODENAME") or socket.gethostname()
        address = _slurm_address(name)
        with NodeServer(run_dir, num_nodes=self.num_nodes, address=address, on_line=on_line) as server:
            argv = srun_argv(self._allocation, agent_argv(run_dir, f"{address or name}:{server.port}"))
            yield Cluster(server, self._steps(argv), is_slurm=True, cache=cache, on_line=on_line)

    def _steps(self, argv: list[str]) -> Callable[[Path], Step]:
        environment = {**self._environment, **import_settings(self._environment)}
        return lambda attempt_dir: Step(argv, environment=environment, log=attempt_dir / "logs" / "agents.log")


@contextlib.contextmanager
def machines_of(
    place: Membership | None,
    *,
    on_line: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
) -> Iterator[Machines]:
    """The machines of a run for its supervisor; waits for those that people have yet to start."""
    if place is None:
        yield Machines(find_allocation(environment), None, environment)
        return
    address = _head_address(place.head.host)
    place.run_dir.mkdir(parents=True, exist_ok=True)
    port = place.head.port or DEFAULT_PORT
    with NodeServer(place.run_dir, num_nodes=place.num_nodes, address=address, port=port, on_line=on_line) as server:
        on_line(f"waiting for {place.num_nodes - 1} more machines at {place.head.host}:{port}")
        missing = server.wait_for_all(limit_s=CONNECT_ALL_S, is_over=lambda: None, here=0)
        if missing is not None:
            raise EnvironmentFaultError(missing)
        on_line("machines: " + ", ".join(node.hello.host for _, node in sorted(server.nodes.items())) + " and this one")
        try:
            yield Machines(None, server, environment)
        finally:
            server.dismiss(int(ExitCode.ENVIRONMENT), f"the supervisor on {place.head.host} ended; see its output")


def serve(place: Membership, stop: StopRequest, *, on_line: Callable[[str], None]) -> ExitCode:
    """Runs this machine's ranks for the supervisor of rank 0; the exit code of the run."""
    from shardwise.launch.probe.machine import read_hardware

    _refuse_unknown_host(place.head.host)
    head = Head(place.head.host, place.head.port or DEFAULT_PORT)
    on_line(f"node {place.node_rank} of {place.num_nodes}: connecting to {head.host}:{head.port}")
    return run_agent(
        place.run_dir,
        head=head,
        node_rank=place.node_rank,
        stop=stop,
        on_line=on_line,
        hardware=read_hardware(),
        wait_s=CONNECT_ALL_S,
    )


def _probe_nodes(allocation: Allocation, environment: Mapping[str, str]) -> list[Hardware]:
    """The probes of every node of a job, in Slurm's order."""
    nodes = f"the {allocation.num_nodes} nodes of job {allocation.job_id}"
    argv = srun_argv(allocation, [sys.executable, "-m", "shardwise.launch.cli", "probe", "--json"], labels=True)
    try:
        done = subprocess.run(
            argv,
            env={**environment, **import_settings(environment)},
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentFaultError(f"srun cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise EnvironmentFaultError(f"{nodes} could not be probed within {PROBE_S:.0f} s") from None
    if done.returncode != 0:
        lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        first = (lines or ["no output"])[0][:300]
        raise EnvironmentFaultError(f"{nodes} could not be probed (srun ended with code {done.returncode}): {first}")
    probes = parse_labelled_probes(done.stdout)
    if len(probes) != allocation.num_nodes:
        raise EnvironmentFaultError(f"{len(probes)} of {nodes} were probed")
    return probes


def _is_loopback(host: str) -> bool:
    if host.lower() in ("localhost", "localhost.localdomain"):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return address.is_loopback or address.is_unspecified


def _addresses(host: str) -> set[str]:
    """IPv4 addresses of a name; EnvironmentFaultError if it cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EnvironmentFaultError(
            f"--head {host}: this machine cannot resolve that name ({error.strerror}); give an address"
        ) from error
    return {str(each[4][0]) for each in found}


def _refuse_unknown_host(host: str) -> None:
    addresses = _addresses(host)
    if all(_is_loopback(address) for address in addresses):
        raise EnvironmentFaultError(
            f"--head {host}: on this machine that is {', '.join(sorted(addresses))}, the machine itself; "
            "give the address of the machine of --node-rank 0"
        )


def _head_address(host: str) -> str:
    """The address to bind on the head; InputError if rank 0 is not started there."""
    own = _own_addresses(host)
    if not own:
        raise InputError(
            f"--head {host}: is no address of this machine ({socket.gethostname()}); --node-rank 0 belongs on the head"
        )
    return _bindable(own)


def _slurm_address(name: str) -> str:
    try:
        return _bindable(_own_addresses(name))
    except EnvironmentFaultError:  # the resolver need not know a node's name
        return ""


def _own_addresses(host: str) -> list[str]:
    """The addresses of a name that are this machine's."""
    own = []
    for address in sorted(_addresses(host)):
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            own.append(address)
    return own


def _bindable(own: Sequence[str]) -> str:
    """The address that other machines reach; empty, for all, if a machine's own name leads to its loopback alone."""
    return next((address for address in own if not _is_loopback(address)), "")


_GPU_AMOUNTS = ("memory_bytes", "usable_bytes", "free_bytes")
_HOST_AMOUNTS = (
    "num_cores", "ram_bytes", "ram_available_bytes", "usable_ram_bytes", "pinned_limit_bytes", "memlock_limit_bytes",
    "shm_bytes",
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
