"""The agent of one machine in a run on several: starts the launcher there, passes stop requests on, ends what is left.

    python -m launch.nodes.agent RUN_DIR --node-rank N --head HOST[:PORT]      (Slurm: the rank is SLURM_NODEID)

It does what the supervisor says (`node_channel`) and outlives neither it nor, under Slurm, the attempt: a connection
that ends, ends the ranks.
"""

import argparse
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from launch.attempt.local_ranks import Ranks
from launch.attempt.supervisor import StopKind, StopRequest
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
from launch.nodes.start import NodeAttempt, start_on_node
from launch.terminal import Console
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, ShardwiseError
from trainer.spec.hardware import Hardware
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
            ranks.tell()
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
        for rank, stack in ranks.ask_stacks().items()
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
