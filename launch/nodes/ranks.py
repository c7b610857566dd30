"""The ranks of one attempt on several machines: one agent each, all told the same.

Under Slurm one `srun` starts the agents of an attempt and its end ends them (`Step`); without it people start them, one
a machine, and they stay for the attempts to come.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from launch.attempt.local_ranks import DUMP_S
from launch.attempt.supervisor import StopRequest
from launch.attempt.watchdog import Stack
from launch.nodes.channel import (
    AskStacks,
    End,
    Ended,
    Failed,
    NodeServer,
    Refused,
    Stacks,
    Start,
    StopAsked,
    Tell,
    meeting_place,
)
from trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, ShardwiseError

START_S = 300.0  # for every agent of a step to start and call: srun may wait for a node to wake
FILES_S = 65.0  # a file that another machine wrote shows after NFS's longest look at a folder
STEP_END_S = 40.0  # for srun to end; Slurm's own KillWait is 30 s by default
_POLL_S = 0.1
# What Slurm says of a node that does not answer, by version; our own words in the same log say other things.
_NODE_IS_GONE = re.compile(
    r"^(srun|slurmstepd)\b.*(node failure|communication connection failure|launch .*failed|not responding|timed out"
    r"|no route to host|connection (refused|reset)|nodes? .*\b(down|fail))",
    re.IGNORECASE | re.MULTILINE,
)


class Step:
    """The `srun` that holds the agents of an attempt, or the one agent that this machine needs without Slurm."""

    def __init__(self, argv: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self._name = log, Path(argv[0]).name
        with log.open("ab") as output:
            self._process = _start(argv, environment, output)

    def poll(self) -> int | None:
        return self._process.poll()

    @property
    def words(self) -> str | None:
        """Why it ended before its time; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        last = f": {lines[-1].strip()[:300]}" if lines else ""
        return f"{self._name} ended with code {code}{last}"

    def check_nodes(self) -> None:
        """EnvironmentFaultError where it ended, and not because a node is gone: it would end so again."""
        words = self.words
        if words is not None and _NODE_IS_GONE.search(self.log.read_text(errors="replace")) is None:
            raise EnvironmentFaultError(f"the nodes could not be started: {words}\nlog: {self.log}")

    def end(self, grace_s: float = STEP_END_S) -> None:
        """Waits for it to end by itself, then ends it."""
        for number, wait_s in ((None, grace_s), (signal.SIGTERM, STEP_END_S), (signal.SIGKILL, STEP_END_S)):
            if number is not None and self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                return


def _start(argv: Sequence[str], environment: Mapping[str, str], output: BinaryIO) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(argv),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C is this process's to hear, and srun would end at it
        )
    except OSError as error:
        raise EnvironmentFaultError(f"{argv[0]}: cannot be started: {error.strerror}") from error


class Cluster(NamedTuple):
    """The machines of a run, as the supervisor reaches them."""

    server: NodeServer
    start_step: Callable[[Path], Step]  # for the attempt whose folder it is given
    is_slurm: bool
    cache: Path  # of operators
    on_line: Callable[[str], None]


class ClusterRanks:
    """The ranks of one attempt on every machine of a cluster."""

    def __init__(self, cluster: Cluster, *, attempt_dir: Path, stop: StopRequest) -> None:
        """Starts the agents that are not there, then the attempt; one that does not come is `lost`."""
        self._server, self._stop, self._is_slurm = cluster.server, stop, cluster.is_slurm
        self._attempt_dir = attempt_dir.absolute()
        self._ended: dict[int, Ended] = {}
        self._has_failed = False
        self._stacks: dict[int, dict[int, Stack]] = {}
        self._lost: str | None = None
        self._running: set[int] = set()  # machines that were told to start and have not said that they ended
        self._is_over = False
        self._server.gone.clear()
        self._step = cluster.start_step(attempt_dir)
        try:
            self._say_who_is_missing(cluster)
            self._lost = self._server.wait_for_all(limit_s=START_S, is_over=self._reason_to_wait_no_more)
            if self._lost is not None and self._stop.kind is None and cluster.is_slurm:
                self._step.check_nodes()
            if self._lost is None:
                head, port = meeting_place(self._server.nodes), free_port()
                folder = str(self._attempt_dir)
                self._server.send(Start(attempt_dir=folder, head=head, port=port, cache=str(cluster.cache)))
                self._running = {*self._server.nodes}
        except BaseException:
            self.end()
            raise

    def poll(self) -> int | None:
        self._hear()
        codes = [ended.return_code for ended in self._ended.values()]
        if self._lost is not None:
            return 1
        if len(codes) < self._server.num_nodes:
            return None
        self._wait_for_files()
        return next((code for code in codes if code), 0)

    def request_stop(self) -> None:
        self._server.send(Tell())

    def has_failed(self) -> bool:
        return self._has_failed or any(ended.return_code for ended in self._ended.values())

    def dump_stacks(self) -> dict[int, Stack]:
        self._stacks = {}
        self._server.send(AskStacks())
        end = time.monotonic() + 5 * DUMP_S  # who does not answer hangs as well
        while len(self._stacks) < len(self._server.nodes) and time.monotonic() < end:
            self._hear()
            time.sleep(_POLL_S)
        return {rank: stack for stacks in self._stacks.values() for rank, stack in stacks.items()}

    def end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._server.send(End())
        deadline = time.monotonic() + 2 * DUMP_S + 10
        while self._running & self._server.nodes.keys() and time.monotonic() < deadline:
            self._hear(may_refuse=False)
            time.sleep(_POLL_S)
        self._server.dismiss(0, only=None if self._is_slurm else 0)  # machines of people stay for the next attempt
        self._step.end(grace_s=5.0)

    @property
    def num_oom_kills(self) -> int | None:
        counts = [ended.num_oom_kills for ended in self._ended.values() if ended.num_oom_kills is not None]
        return sum(counts) if counts else None

    @property
    def lost(self) -> str | None:
        return self._lost

    def _say_who_is_missing(self, cluster: Cluster) -> None:
        """What people start, people start again."""
        missing = sorted(set(range(1, self._server.num_nodes)) - self._server.nodes.keys())
        if missing and not cluster.is_slurm:
            names = " and ".join(f"node {rank}" for rank in missing)
            cluster.on_line(f"waiting for {names}: start the same command there again")

    def _reason_to_wait_no_more(self) -> str | None:
        if self._stop.kind is not None:
            return "a stop was asked for"
        return self._step.words

    def _hear(self, *, may_refuse: bool = True) -> None:
        self._server.poll()
        for node, message in self._server.take():
            if isinstance(message, Ended | Failed) and message.attempt_dir != str(self._attempt_dir):
                continue  # of an attempt that is over
            if isinstance(message, Ended):
                self._ended[node.rank] = message
                self._running.discard(node.rank)
            elif isinstance(message, Failed):
                self._has_failed = True
            elif isinstance(message, Stacks):
                self._stacks[node.rank] = {
                    each.rank: Stack(each.frame, each.is_waiting, each.state) for each in message.stacks
                }
            elif isinstance(message, StopAsked):
                number = signal.SIGINT if message.is_interrupt else signal.SIGUSR1
                if self._stop.kind is None:
                    self._stop.note(number, None)
            elif isinstance(message, Refused):
                self._running.discard(node.rank)
                if may_refuse:
                    raise _as_error(f"{node.hello.host}: {message.words}", message.exit_code)
        if self._server.gone and self._lost is None:
            self._lost = self._server.gone[0]

    def _wait_for_files(self) -> None:
        """Until this machine sees what the ranks of the others wrote."""
        names = {name for ended in self._ended.values() for name in ended.files}
        end = time.monotonic() + FILES_S
        while not all((self._attempt_dir / name).is_file() for name in names) and time.monotonic() < end:
            time.sleep(_POLL_S)


def _as_error(words: str, exit_code: int) -> ShardwiseError:
    kinds = {ExitCode.INPUT: InputError, ExitCode.ENVIRONMENT: EnvironmentFaultError}
    return kinds.get(ExitCode(exit_code), ShardwiseError)(words)


def free_port() -> int:
    """A port of this machine that nobody listens on: several runs may share it."""
    with socket.create_server(("", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def agent_argv(run_dir: Path, head: str, *, node_rank: int | None = None) -> list[str]:
    """What starts an agent; without a rank Slurm's number of the node is taken."""
    argv = [sys.executable, "-m", "launch.nodes.agent", str(run_dir.absolute()), "--head", head]
    return argv if node_rank is None else [*argv, "--node-rank", str(node_rank)]


def agent_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with our packages first, wherever the working directory is."""
    packages = str(Path(__file__).resolve().parents[2])
    rest = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return {**environment, "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join([packages, *rest])}
