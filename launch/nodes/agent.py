"""The agent of one machine in a run on several: starts the launcher there, forwards stop requests, ends the ranks.

    python -m shardwise.launch.nodes.agent RUN_DIR --node-rank N --head HOST[:PORT]   (Slurm: the rank is SLURM_NODEID)

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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import yaml

from shardwise.launch.attempt.supervisor import LocalRanks, StopKind, StopRequest, started_ranks
from shardwise.launch.engine.launcher import GLOO_INTERFACE, accelerate_config, accelerate_file
from shardwise.launch.engine.operators import build_needed
from shardwise.launch.inputs.trusted_code import fetch_flash_kernel
from shardwise.launch.nodes.channel import (
    Bye,
    Channel,
    Command,
    Ended,
    FromSupervisor,
    Hello,
    Listening,
    NodesFile,
    Note,
    Order,
    Stacks,
    Start,
    StopRequested,
    Token,
    nodes_path,
)
from shardwise.launch.probe.host import interface_of, read_host
from shardwise.launch.terminal import Console
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, ShardwiseError
from shardwise.trainer.spec.hardware import DeviceKind, Hardware
from shardwise.trainer.spec.network import REACH_S, address_towards, connection_problem, open_firewall, unreachable
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.secrets import redacted_output

POLL_S = 0.1
CONNECT_S = 90.0  # a file of another machine: NFS refreshes a folder after a minute at most
RETRY_S = 1.0
HEAD_TRY_S = 0.2  # to connect to the launcher of rank 0, on the machine that it runs on
_INTERFACE_SETTINGS = {
    DeviceKind.CPU: (GLOO_INTERFACE,),
    DeviceKind.CUDA: ("NCCL_SOCKET_IFNAME", GLOO_INTERFACE),
}


class Head(NamedTuple):
    """The address of a supervisor."""

    host: str
    port: int | None = None  # None: as in its file


def parse_head(text: str) -> Head:
    """`HOST` or `HOST:PORT`; InputError for anything else."""
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
    hardware: Hardware | None = None,
    wait_s: float = CONNECT_S,
) -> ExitCode:
    """Serves a supervisor to the end of its run; EnvironmentFaultError if none can be reached, or it is lost."""
    channel = _connect(run_dir, head, node_rank, hardware, stop, wait_s)
    if channel is None:
        return ExitCode.REQUEUE if stop.kind is StopKind.REQUEUE else ExitCode.INTERRUPTED
    agent = _Agent(channel, node_rank=node_rank, stop=stop, environment=os.environ)
    try:
        end = agent.run()
    finally:
        agent.end_attempt()
        channel.close()
    if end.text:
        on_line(end.text)
    return ExitCode(end.exit_code)


class _Agent:
    def __init__(self, channel: Channel, *, node_rank: int, stop: StopRequest, environment: Mapping[str, str]) -> None:
        self._channel = channel
        self._node_rank = node_rank
        self._stop = stop
        self._environment = environment
        self._attempt: NodeAttempt | None = None
        self._start_message: Start | None = None
        self._is_stopping = self._has_sent_stop = self._is_listening = False

    def run(self) -> Bye:
        while True:
            for message in self._channel.receive(POLL_S):
                if isinstance(message, Bye):
                    return message
                if isinstance(message, Start):
                    self._start(message)
                elif isinstance(message, Command):
                    self._do(message.order)
            if not self._channel.is_open:
                raise EnvironmentFaultError("the supervisor of this run has ended: its connection ended")
            self._poll()

    def end_attempt(self) -> None:
        """Ends every process of the attempt."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.end()

    def _start(self, start: Start) -> None:
        self._is_stopping = self._is_listening = False
        self._start_message = start
        try:
            self._attempt = start_on_node(
                start,
                node_rank=self._node_rank,
                environment=self._environment,
                on_progress=self._send_note,
                should_stop=lambda: not self._channel.is_open,
            )
        except ShardwiseError as error:
            refusal = Ended(attempt_dir=start.attempt_dir, refusal=str(error), exit_code=int(error.exit_code))
            self._channel.send(refusal)

    def _send_note(self, line: str) -> None:
        self._channel.send(Note(text=line))

    def _do(self, order: Order) -> None:
        if order is Order.STOP:
            self._is_stopping = True
        elif order is Order.DUMP_STACKS:
            self._channel.send(Stacks(stacks={} if self._attempt is None else self._attempt.ranks.dump_stacks()))
        elif order is Order.TRY_HEAD:
            self._try_head()
        elif self._attempt is not None:
            self._report_end(None)

    def _try_head(self) -> None:
        """Ends the attempt if this machine cannot connect to the launcher of rank 0, which accepts connections."""
        start, attempt = self._start_message, self._attempt
        if start is None or attempt is None:
            return
        refusal = head_refusal(start, attempt.local_ranks, is_over=lambda: not self._channel.is_open)
        if refusal is not None:
            self.end_attempt()
            code = int(ExitCode.ENVIRONMENT)
            self._channel.send(Ended(attempt_dir=start.attempt_dir, refusal=refusal, exit_code=code))

    def _note_listening(self) -> None:
        """Reports once, on the machine of rank 0, that its launcher accepts connections."""
        start = self._start_message
        if self._node_rank or self._is_listening or start is None:
            return
        with contextlib.suppress(OSError):
            socket.create_connection((start.head, start.port), timeout=HEAD_TRY_S).close()
            self._is_listening = True
            self._channel.send(Listening(attempt_dir=start.attempt_dir))

    def _poll(self) -> None:
        """Forwards a stop request of this machine and the end of its launcher."""
        if self._stop.kind is not None:
            self._is_stopping = True  # a request to one rank is enough: the ranks agree at the next step
            if not self._has_sent_stop:
                self._has_sent_stop = True
                number = signal.SIGINT if self._stop.kind is StopKind.INTERRUPT else signal.SIGUSR1
                self._channel.send(StopRequested(signal_number=number))
        if self._attempt is None:
            return
        self._note_listening()
        return_code = self._attempt.ranks.poll()
        if return_code is not None:
            self._report_end(return_code)
        elif self._is_stopping:
            self._attempt.ranks.request_stop()

    def _report_end(self, return_code: int | None) -> None:
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


class NodeAttempt(NamedTuple):
    """An attempt on one machine."""

    ranks: LocalRanks
    resources: contextlib.ExitStack  # released at its end
    attempt_dir: Path
    local_ranks: range

    def files(self) -> tuple[str, ...]:
        """Reports of this machine's ranks in the attempt's folder."""
        names = [f"report-rank-{rank}.json" if rank else "report.json" for rank in self.local_ranks]
        return tuple(name for name in names if (self.attempt_dir / name).is_file())

    def end(self) -> None:
        """Ends every living process."""
        with self.resources:
            self.ranks.end()


def start_on_node(
    start: Start,
    *,
    node_rank: int,
    environment: Mapping[str, str],
    on_progress: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> NodeAttempt:
    """Starts this machine's ranks; a ShardwiseError names what is missing here."""
    attempt_dir, cache = Path(start.attempt_dir), Path(start.cache)
    plan = codec.read(attempt_dir / "plan.json", Plan)
    host = read_host()
    _check_folders(plan)
    fetch_flash_kernel(plan, on_progress=on_progress, should_stop=should_stop)
    here = msgspec.structs.replace(plan, hardware=msgspec.structs.replace(plan.hardware, host=host))
    extensions = build_needed(here, cache_home=cache, on_progress=on_progress, should_stop=should_stop)
    settings = accelerate_config(plan, attempt_dir=attempt_dir, node_rank=node_rank, head=start.head, port=start.port)
    codec.write_bytes(accelerate_file(attempt_dir, node_rank), yaml.safe_dump(settings, sort_keys=False).encode())
    interfaces = _interface_settings(environment, start, plan.device_kind)
    on_each = plan.chosen.num_ranks // plan.num_machines
    ranks = range(node_rank * on_each, (node_rank + 1) * on_each)
    way = " by " + " ".join(f"{name}={value}" for name, value in interfaces.items()) if interfaces else ""
    on_progress(f"ranks {ranks.start} to {ranks.stop - 1} meet at {start.head}:{start.port}{way}")
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(
            started_ranks(
                plan,
                attempt_dir,
                extensions_dir=extensions,
                num_cores=host.num_cores,
                environment=environment,
                on_progress=on_progress,
                node_rank=node_rank,
                ranks=ranks,
                more_environment=interfaces,
            )
        )
        return NodeAttempt(started, stack.pop_all(), attempt_dir, ranks)


def head_refusal(
    start: Start, ranks: range, *, limit_s: float = REACH_S, is_over: Callable[[], bool] = lambda: False
) -> str | None:
    """Why `ranks`, those of this machine, cannot connect to the launcher of rank 0, which listens; None if they can."""
    problem = connection_problem(start.head, start.port, limit_s=limit_s, is_over=is_over)
    if problem is None:
        return None
    who = f"rank {ranks.start}" if len(ranks) == 1 else f"ranks {ranks.start} to {ranks.stop - 1}"
    line = unreachable(who, "rank 0", address=start.head, port=start.port, problem=problem)
    own_address = address_towards(start.head, start.port)
    return f"{line}\n{open_firewall('the machine of rank 0', own_address=own_address)}"


def _interface_settings(environment: Mapping[str, str], start: Start, device_kind: DeviceKind) -> dict[str, str]:
    """The interface on the way to rank 0, for gloo and for NCCL's first contact; the user's own settings stay.

    By default gloo uses the address of the machine's own name, often 127.0.1.1, and NCCL may use the bridge of a
    container engine.
    """
    settings = _INTERFACE_SETTINGS[device_kind]
    address = address_towards(start.head, start.port)
    name = None if address is None else interface_of(address)
    own = {setting: environment[setting] for setting in settings if setting in environment}
    return own if name in (None, "lo") else {setting: str(name) for setting in settings} | own


def _check_folders(plan: Plan) -> None:
    """EnvironmentFaultError names a folder that this machine does not see."""
    needed = {
        "the model": plan.model_path,
        "the tokenizer": plan.tokenizer_path,
        "the prepared data": plan.data.cache_dir,
    }
    for name, path in needed.items():
        if path is not None and not Path(path).exists():
            raise EnvironmentFaultError(
                f"{name} is not there: {path}\nkeep it on a file system that every machine sees, "
                "such as folders.cache and folders.huggingface in config.yaml name"
            )


def _connect(
    run_dir: Path, head: Head, node_rank: int, hardware: Hardware | None, stop: StopRequest, wait_s: float
) -> Channel | None:
    """The connection to the supervisor; None after a stop request. The file of a run that ended has another token."""
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
                    continue
                channel, address = Channel(connection, FromSupervisor), connection.getsockname()[0]
                name = socket.gethostname()
                channel.send(Token(token=content.token))
                channel.send(Hello(node_rank=node_rank, host=name, address=address, hardware=hardware))
                return channel
            problem = problems[0]
        if time.monotonic() > end:
            raise EnvironmentFaultError(
                f"{socket.gethostname()}: {problem}\n"
                "every machine needs the same --run-dir on a file system that all see, and a way to the first one"
            )
        time.sleep(RETRY_S)
    return None


def _hosts(head: Head, content: NodesFile) -> list[str]:
    """Names and addresses of the supervisor: the resolver need not know a node's name in Slurm."""
    srun = os.environ.get("SLURM_LAUNCH_NODE_IPADDR")  # of the machine on which srun runs, which is the supervisor's
    return [*dict.fromkeys((head.host, *((content.host, srun) if srun else ())))]


def main() -> int:
    """The agent that Slurm starts on each node."""
    parser = argparse.ArgumentParser(prog="python -m shardwise.launch.nodes.agent", description="One machine of a run.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--head", type=parse_head, required=True)
    parser.add_argument("--node-rank", type=int, default=int(os.environ.get("SLURM_NODEID", "0")))
    options = parser.parse_args()
    stop = StopRequest()
    with redacted_output(), stop.listening():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the supervisor
        try:
            run_agent(
                options.run_dir, head=options.head, node_rank=options.node_rank, stop=stop, on_line=Console().line
            )
        except ShardwiseError as error:
            sys.stderr.write(f"{error}\n")
            return int(error.exit_code)
    return 0  # the supervisor reports the end of the run; another code here would end the other machines


if __name__ == "__main__":
    sys.exit(main())
