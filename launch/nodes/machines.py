"""The machines of a run: those of a Slurm job, or those on which a person starts the same command.

    Slurm           the batch script starts one supervisor; `srun` probes the nodes and starts the agents
    --nodes N       `shardwise train JOB --nodes N --node-rank I --head HOST --run-dir D` on each; rank 0 supervises

Both need one run directory that every machine sees: checkpoints are committed there by one rename.
"""

import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.nodes.agent import Head, parse_head, run_agent
from shardwise.launch.nodes.channel import NodeServer
from shardwise.launch.nodes.hardware import combined_hardware, parse_labelled_probes
from shardwise.launch.nodes.ranks import Cluster, Step, agent_argv
from shardwise.launch.worker import import_settings
from shardwise.slurm.allocation import Allocation, find_allocation, srun_argv
from shardwise.slurm.jobs import read_seconds_left
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from shardwise.trainer.spec.hardware import Hardware

PROBE_S = 300.0  # srun may wait for a node to wake
CONNECT_ALL_S = 3600.0  # for people to start the command on every machine
DEFAULT_PORT = 29400  # next to torch's 29500


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
    if nodes is None and node_rank is None and head is None:
        return None
    if nodes is None or node_rank is None or head is None:
        raise InputError("several machines need all of --nodes N, --node-rank I (0 to N-1) and --head HOST, on each")
    if not 0 <= node_rank < nodes:
        raise InputError(f"--node-rank {node_rank}: {nodes} nodes are numbered 0 to {nodes - 1}")
    if nodes == 1:
        return None
    if run_dir is None:
        raise InputError(
            "several machines share one run directory: name it on each with --run-dir, on a file system that all see"
        )
    place = Membership(nodes, node_rank, parse_head(head), run_dir)
    if _is_loopback(place.head.host):
        raise InputError(f"--head {head}: every machine would connect to itself; name the machine of --node-rank 0")
    return place


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
            argv = agent_argv(run_dir, f"127.0.0.1:{self._server.port}", node_rank=0)
            yield Cluster(self._server, self._steps(argv), is_slurm=False, cache=cache, on_line=on_line)
            return
        assert self._allocation is not None
        with NodeServer(run_dir, num_nodes=self.num_nodes, on_line=on_line) as server:
            name = self._environment.get("SLURMD_NODENAME") or socket.gethostname()
            argv = srun_argv(self._allocation, agent_argv(run_dir, f"{name}:{server.port}"))
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
    limit_s: float = CONNECT_ALL_S,
) -> Iterator[Machines]:
    """The machines of a run for its supervisor; waits for those that people have yet to start."""
    if place is None:
        yield Machines(find_allocation(environment), None, environment)
        return
    _refuse_foreign_head(place.head.host)
    place.run_dir.mkdir(parents=True, exist_ok=True)
    port = place.head.port or DEFAULT_PORT
    with NodeServer(place.run_dir, num_nodes=place.num_nodes, port=port, on_line=on_line) as server:
        on_line(f"waiting for {place.num_nodes - 1} more machines at {place.head.host}:{port}")
        missing = server.wait_for_all(limit_s=limit_s, is_over=lambda: None, here=0)
        if missing is not None:
            raise EnvironmentFaultError(missing)
        on_line("machines: " + ", ".join(node.hello.host for _, node in sorted(server.nodes.items())) + " and this one")
        try:
            yield Machines(None, server, environment)
        finally:
            server.dismiss(int(ExitCode.ENVIRONMENT), f"the supervisor on {place.head.host} ended; see its output")


def serve(
    place: Membership, stop: StopRequest, *, on_line: Callable[[str], None], limit_s: float = CONNECT_ALL_S
) -> ExitCode:
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
        wait_s=limit_s,
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
            f"--head {host}: this machine does not know that name ({error.strerror}); an address would do"
        ) from error
    return {str(each[4][0]) for each in found}


def _refuse_unknown_host(host: str) -> None:
    addresses = _addresses(host)
    if all(_is_loopback(address) for address in addresses):
        raise EnvironmentFaultError(
            f"--head {host}: on this machine that is {', '.join(sorted(addresses))}, the machine itself; "
            "give the address of the machine of --node-rank 0"
        )


def _refuse_foreign_head(host: str) -> None:
    """Raises InputError if rank 0 is not started on the head: only a machine's own addresses can be bound."""
    for address in _addresses(host):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as own:
            try:
                own.bind((address, 0))
            except OSError:
                continue
            return
    raise InputError(
        f"--head {host}: is no address of this machine ({socket.gethostname()}); --node-rank 0 belongs on the head"
    )
