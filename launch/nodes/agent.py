"""The agent of one machine in a run on several: starts the launcher there, forwards stop requests, ends the ranks.

    python -m launch.nodes.agent RUN_DIR --node-rank N --head HOST[:PORT]      (Slurm: the rank is SLURM_NODEID)

It follows the supervisor's messages (`launch.nodes.channel`). When the connection ends, it ends the ranks. Each machine
checks its own folders, compiles operators for its own CPU, and uses its own NVMe folder, cores and network interface.
"""

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from launch.attempt.local_ranks import LocalRanks, Ranks
from launch.attempt.supervisor import StopKind, StopRequest
from launch.engine.accelerate_config import accelerate_config, accelerate_file
from launch.engine.command import launch_command, launch_environment
from launch.engine.nvme_folder import check_nvme, held_folder, nvme_folder
from launch.engine.operators import build_needed, remove_stale_locks
from launch.inputs.staging import copy_staged
from launch.inputs.trusted_code import fetch_flash_kernel
from launch.nodes.channel import (
    AskStacks,
    Bye,
    Channel,
    End,
    Ended,
    Failed,
    FromSupervisor,
    Hello,
    NodesFile,
    Note,
    Refused,
    StackOf,
    Stacks,
    Start,
    StopAsked,
    Tell,
    nodes_path,
)
from launch.probe.surroundings import interface_of, read_host
from launch.terminal import Console
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, ShardwiseError
from trainer.spec.hardware import DeviceKind, Hardware
from trainer.spec.plan import Plan
from trainer.spec.secrets import redacted_output

POLL_S = 0.1
SEEN_WITHIN_S = 90.0  # a file of another machine: NFS looks at a folder anew after a minute at most
RETRY_S = 1.0


class Head(NamedTuple):
    """Where a supervisor is called."""

    host: str
    port: int | None = None  # None: as its file says


def parse_head(text: str) -> Head:
    """`HOST` or `HOST:PORT`; InputError says so."""
    host, colon, port = text.rpartition(":") if text.count(":") == 1 else (text, "", "")
    if not host or (colon and not (port.isdigit() and 0 < int(port) < 1 << 16)):
        raise InputError(f"--head {text}: expected HOST or HOST:PORT")
    return Head(host, int(port) if colon else None)


def run_agent(
    run_dir: Path,
    *,
    head: Head,
    node_rank: int,
    stop: StopRequest,
    on_line: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
    hardware: Hardware | None = None,
    wait_s: float = SEEN_WITHIN_S,
) -> ExitCode:
    """Serves a supervisor to the end of its run; EnvironmentFaultError where none can be reached, or it is lost."""
    channel = _connect(run_dir, head, node_rank, hardware, stop, wait_s)
    if channel is None:
        return ExitCode.REQUEUE if stop.kind is StopKind.REQUEUE else ExitCode.INTERRUPTED
    agent = _Agent(channel, node_rank=node_rank, stop=stop, on_line=on_line, environment=environment)
    try:
        return agent.run()
    finally:
        agent.end_attempt()
        channel.close()


class _Agent:
    def __init__(
        self,
        channel: Channel,
        *,
        node_rank: int,
        stop: StopRequest,
        on_line: Callable[[str], None],
        environment: Mapping[str, str],
    ) -> None:
        self._channel = channel
        self._node_rank = node_rank
        self._stop = stop
        self._on_line = on_line
        self._environment = environment
        self._attempt: NodeAttempt | None = None
        self._is_told = self._has_told_of_stop = self._has_told_of_failure = False

    def run(self) -> ExitCode:
        while True:
            for message in self._channel.receive(POLL_S):
                if isinstance(message, Bye):
                    if message.words:
                        self._on_line(message.words)
                    return ExitCode(message.exit_code)
                self._do(message)
            if not self._channel.is_open:
                raise EnvironmentFaultError("the supervisor of this run is gone: its connection ended")
            self._look()

    def end_attempt(self) -> None:
        """Ends whatever runs here."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end()

    def _do(self, message: object) -> None:
        if isinstance(message, Start):
            self._start(message)
        elif isinstance(message, Tell):
            self._is_told = True
        elif isinstance(message, AskStacks):
            self._channel.send(Stacks(stacks=() if self._attempt is None else _stacks(self._attempt.ranks)))
        elif isinstance(message, End) and self._attempt is not None:
            self._finish(None)

    def _start(self, message: Start) -> None:
        self._is_told = self._has_told_of_failure = False
        try:
            self._attempt = start_on_node(
                message,
                node_rank=self._node_rank,
                environment=self._environment,
                on_progress=self._say,
                should_stop=lambda: not self._channel.is_open,
            )
        except ShardwiseError as error:
            self._channel.send(Refused(words=str(error), exit_code=int(error.exit_code)))

    def _say(self, words: str) -> None:
        self._channel.send(Note(words=words))

    def _look(self) -> None:
        if self._stop.kind is not None:
            self._is_told = True  # one rank that was asked is enough: they agree at the next step
            if not self._has_told_of_stop:
                self._has_told_of_stop = True
                self._channel.send(StopAsked(is_interrupt=self._stop.kind is StopKind.INTERRUPT))
        if self._attempt is None:
            return
        ranks = self._attempt.ranks
        return_code = ranks.poll()
        if return_code is not None:
            self._finish(return_code)
            return
        if self._is_told:
            ranks.request_stop()
        if not self._has_told_of_failure and ranks.has_failed():
            self._has_told_of_failure = True
            self._channel.send(Failed(attempt_dir=str(self._attempt.attempt_dir)))

    def _finish(self, return_code: int | None) -> None:
        attempt = self._attempt
        assert attempt is not None
        self.end_attempt()
        self._channel.send(
            Ended(
                attempt_dir=str(attempt.attempt_dir),
                return_code=return_code,
                num_oom_kills=attempt.ranks.num_oom_kills,
                files=attempt.files(),
            )
        )


def _stacks(ranks: Ranks) -> tuple[StackOf, ...]:
    return tuple(
        StackOf(rank=rank, frame=stack.frame, is_waiting=stack.is_waiting, state=stack.state)
        for rank, stack in ranks.dump_stacks().items()
    )


def _connect(
    run_dir: Path, head: Head, node_rank: int, hardware: Hardware | None, stop: StopRequest, wait_s: float
) -> Channel | None:
    """The connection to the supervisor; None after a stop request. The file of a run that ended says another token."""
    end = time.monotonic() + wait_s
    while stop.kind is None:
        problem = f"{run_dir} has no {nodes_path(run_dir).name}: no supervisor runs there, or this machine sees another"
        try:
            content = codec.read(nodes_path(run_dir), NodesFile)
        except InputError:
            content = None
        if content is not None:
            port, problems = head.port or content.port, []
            for host in _hosts(head, content):
                try:
                    connection = socket.create_connection((host, port), timeout=10.0)
                except OSError as error:
                    problems.append(f"{host} port {port} cannot be reached: {error.strerror or error}")
                else:
                    return _greeted(connection, content, node_rank, hardware)
            problem = problems[0]
        if time.monotonic() > end:
            raise EnvironmentFaultError(
                f"{socket.gethostname()}: {problem}\n"
                "every machine needs the same --run-dir on a file system that all see, and a way to the first one"
            )
        time.sleep(RETRY_S)
    return None


def _hosts(head: Head, content: NodesFile) -> list[str]:
    """Where the supervisor may be called: a node's name in Slurm need not mean anything to the resolver."""
    srun = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")  # of the machine on which srun runs, which is the supervisor's
    return [*dict.fromkeys((head.host, *((content.host, srun) if srun else ())))]


def _greeted(connection: socket.socket, content: NodesFile, node_rank: int, hardware: Hardware | None) -> Channel:
    from launch.probe.surroundings import interface_of

    address = connection.getsockname()[0]
    channel = Channel(connection, FromSupervisor)
    channel.send(
        Hello(
            token=content.token,
            node_rank=node_rank,
            host=socket.gethostname(),
            address=address,
            interface=interface_of(address),
            hardware=hardware,
        )
    )
    return channel


def main() -> int:
    """The agent that Slurm starts on each node."""
    parser = argparse.ArgumentParser(prog="python -m launch.nodes.agent", description="One machine of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--head", type=parse_head, required=True)
    parser.add_argument("--node-rank", type=int, default=int(os.environ.get("SLURM_NODEID", "0")))
    options = parser.parse_args()
    stop = StopRequest()
    with redacted_output(), stop.listening():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's to hear
        try:
            run_agent(
                options.run_dir,
                head=options.head,
                node_rank=options.node_rank,
                stop=stop,
                on_line=Console().line,
            )
        except ShardwiseError as error:
            sys.stderr.write(f"{error}\n")
            return int(error.exit_code)
    return 0  # how the run ended is the supervisor's to tell; a code of ours would end the other machines


if __name__ == "__main__":
    sys.exit(main())


_INTERFACE_SETTINGS = {
    DeviceKind.CPU: ("GLOO_SOCKET_IFNAME",),
    DeviceKind.CUDA: ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
}


class NodeAttempt(NamedTuple):
    """An attempt as one machine runs it."""

    ranks: LocalRanks
    held: contextlib.ExitStack  # what goes with its end
    attempt_dir: Path
    mine: range  # ranks

    def files(self) -> tuple[str, ...]:
        """What this machine's ranks left in the attempt's folder for the supervisor to read."""
        names = [f"report-rank-{rank}.json" if rank else "report.json" for rank in self.mine]
        return tuple(name for name in names if (self.attempt_dir / name).is_file())

    def end(self) -> None:
        """Ends whatever is alive."""
        with self.held:
            self.ranks.end()


def start_on_node(
    start: Start,
    *,
    node_rank: int,
    environment: Mapping[str, str],
    on_progress: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> NodeAttempt:
    """Starts this machine's ranks; a ShardwiseError says what is missing here."""
    attempt_dir, cache = Path(start.attempt_dir), Path(start.cache)
    plan = codec.read(attempt_dir / "plan.json", Plan)
    host = read_host()
    _check_folders(plan)
    copy_staged(plan.staged, on_progress=on_progress)
    check_nvme(plan)
    fetch_flash_kernel(plan, on_progress=on_progress, should_stop=should_stop)
    here = msgspec.structs.replace(plan, hardware=msgspec.structs.replace(plan.hardware, host=host))
    extensions = build_needed(here, cache_home=cache, on_progress=on_progress, should_stop=should_stop)
    remove_stale_locks(extensions, on_progress=on_progress)  # a rank before may have left one
    settings = accelerate_config(plan, attempt_dir=attempt_dir, node_rank=node_rank, head=start.head, port=start.port)
    file = accelerate_file(attempt_dir, node_rank)
    codec.write_bytes(file, yaml.safe_dump(settings, sort_keys=False).encode())
    argv = launch_command(attempt_dir, log_dir=attempt_dir / "logs", python=sys.executable, node_rank=node_rank)
    variables = launch_environment(environment, plan, extensions_dir=extensions, cores=host.num_cores or 1)
    interfaces = interface_settings(environment, start, _INTERFACE_SETTINGS[plan.device_kind])
    mine, way = _ranks_of(plan, node_rank), " ".join(f"{name}={value}" for name, value in interfaces.items())
    on_progress(f"ranks {mine.start} to {mine.stop - 1} meet at {start.head}:{start.port}{' by ' + way if way else ''}")
    with contextlib.ExitStack() as stack:
        stack.enter_context(held_folder(nvme_folder(plan, attempt_dir.parent.parent, int(attempt_dir.name))))
        ranks = LocalRanks(
            argv, attempt_dir=attempt_dir, environment=variables | interfaces, node_rank=node_rank, ranks=mine
        )
        return NodeAttempt(ranks, stack.pop_all(), attempt_dir, mine)


def interface_settings(environment: Mapping[str, str], start: Start, settings: Sequence[str]) -> dict[str, str]:
    """The interface for gloo, and for NCCL's first contact: the one on the way to rank 0. What a person set stays.

    Left alone gloo takes whatever the machine's own name means, on many machines 127.0.1.1, and NCCL may take the
    bridge of a container engine.
    """
    name = interface_of(_address_towards(start.head, start.port))
    own = {setting: environment[setting] for setting in settings if setting in environment}
    return own if name in (None, "lo") else {setting: str(name) for setting in settings} | own


def _address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((host, port))
        address: str = route.getsockname()[0]
    return address


def _ranks_of(plan: Plan, node_rank: int) -> range:
    on_each = plan.chosen.num_ranks // plan.num_machines
    return range(node_rank * on_each, (node_rank + 1) * on_each)


def _check_folders(plan: Plan) -> None:
    """EnvironmentFaultError names what this machine does not see."""
    needed = {
        "the model": plan.model_path,
        "the tokenizer": plan.tokenizer_path,
        "the prepared data": plan.data.cache_dir,
    }
    for what, path in needed.items():
        if path is not None and not Path(path).exists():
            raise EnvironmentFaultError(
                f"{what} is not there: {path}\nkeep it on a file system that every machine sees, "
                "such as folders.cache and folders.huggingface in config.yaml name"
            )
