"""The ranks of one attempt on several machines, through one agent on each.

Under Slurm one `srun` starts the agents of an attempt, and they end with it (`Step`). Without Slurm people start them,
one on each machine, and they serve all attempts of the run.
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
from typing import NamedTuple

from shardwise.launch.attempt.end import rank_reports
from shardwise.launch.attempt.supervisor import DUMP_S, StopRequest
from shardwise.launch.attempt.watchdog import CallStack
from shardwise.launch.nodes.channel import (
    Command,
    Ended,
    Listening,
    NodeServer,
    Order,
    Stacks,
    Start,
    StopRequested,
    head_address,
)
from shardwise.launch.rundir.process_record import ProcessRecord
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, ShardwiseError
from shardwise.trainer.spec.report import Ending

START_S = 300.0  # for every agent of a step to start and connect: srun may wait for a node to wake
FILES_S = 65.0  # for a file of another machine to appear: NFS refreshes a folder after a minute at most
STEP_END_S = 40.0  # for srun to end; Slurm's own KillWait is 30 s by default
_POLL_S = 0.1
# Messages of Slurm on a node that does not respond, by version. The agents' own messages are in the same log.
_NODE_IS_LOST = re.compile(
    r"^(srun|slurmstepd)\b.*(node failure|communication connection failure|launch .*failed|not responding|timed out"
    r"|no route to host|connection (refused|reset)|nodes? .*\b(down|fail))",
    re.IGNORECASE | re.MULTILINE,
)


class Step:
    """The `srun` with the agents of an attempt, or the agent of this machine without Slurm."""

    def __init__(self, argv: Sequence[str], *, environment: Mapping[str, str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.log, self._name = log, Path(argv[0]).name
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    list(argv),
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is handled by this process, and srun would end at it
                )
        except OSError as error:
            raise EnvironmentFaultError(f"{argv[0]}: cannot be started: {error.strerror}") from error

    def poll(self) -> int | None:
        return self._process.poll()

    @property
    def failure(self) -> str | None:
        """The reason for its early end; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        last = f": {lines[-1].strip()[:300]}" if lines else ""
        return f"{self._name} ended with code {code}{last}"

    def check_nodes(self) -> None:
        """Raises EnvironmentFaultError if it ended for another reason than a lost node: that would happen again."""
        failure = self.failure
        if failure is not None and _NODE_IS_LOST.search(self.log.read_text(errors="replace")) is None:
            raise EnvironmentFaultError(f"the nodes could not be started: {failure}\nlog: {self.log}")

    def end(self, grace_s: float = STEP_END_S) -> None:
        """Waits `grace_s` for its end, then ends it."""
        for number, wait_s in ((None, grace_s), (signal.SIGTERM, STEP_END_S), (signal.SIGKILL, STEP_END_S)):
            if number is not None and self._process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
                return


class Cluster(NamedTuple):
    """The machines of a run, for its supervisor."""

    server: NodeServer
    start_step: Callable[[Path], Step]  # for the attempt in this folder
    is_slurm: bool
    cache: Path  # of operators
    on_line: Callable[[str], None]


class ClusterRanks:
    """The ranks of one attempt on every machine of a cluster."""

    def __init__(self, cluster: Cluster, *, attempt_dir: Path, stop: StopRequest) -> None:
        """Starts missing agents, then the attempt; `lost` names an agent that does not connect."""
        self._server, self._stop, self._is_slurm = cluster.server, stop, cluster.is_slurm
        self._attempt_dir = attempt_dir.absolute()
        self._ended: dict[int, Ended] = {}
        self._stacks: dict[int, dict[int, CallStack]] = {}
        self._lost: str | None = None
        self._running: set[int] = set()  # machines between Start and Ended
        self._is_over = False
        self._server.lost.clear()
        self._step = cluster.start_step(attempt_dir)
        try:
            missing = sorted(set(range(1, self._server.num_nodes)) - self._server.nodes.keys())
            if missing and not cluster.is_slurm:
                names = " and ".join(f"node {rank}" for rank in missing)
                cluster.on_line(f"waiting for {names}: start the same command there again")
            self._lost = self._server.wait_for_all(limit_s=START_S, is_over=self._reason_not_to_wait)
            if self._lost is not None and self._stop.kind is None and cluster.is_slurm:
                self._step.check_nodes()
            if self._lost is None:
                head, port, folder = head_address(self._server.nodes), free_port(), str(self._attempt_dir)
                self._server.send(Start(attempt_dir=folder, head=head, port=port, cache=str(cluster.cache)))
                self._running = {*self._server.nodes}
        except BaseException:
            self.end()
            raise

    def poll(self) -> int | None:
        self._receive()
        if self._lost is not None:
            return 1
        if len(self._ended) < self._server.num_nodes:
            return None
        self._wait_for_files()
        return next((ended.return_code for ended in self._ended.values() if ended.return_code), 0)

    def request_stop(self) -> None:
        self._server.send(Command(order=Order.STOP))

    def has_failed(self) -> bool:
        """True after a report of a failure in the shared folder, or after a launcher ended with an error."""
        failed = (Ending.OUT_OF_MEMORY, Ending.FAILED)
        is_reported = any(report.ending in failed for report in rank_reports(self._attempt_dir).values())
        return is_reported or any(ended.return_code for ended in self._ended.values())

    def end_survivors(self) -> tuple[int, ...]:
        return ()  # a machine whose launcher ended has named its rank

    def stopped(self) -> dict[str, ProcessRecord]:
        return {}  # the messages of a silence name those of other machines

    def dump_stacks(self) -> dict[int, CallStack]:
        self._stacks = {}
        self._server.send(Command(order=Order.DUMP_STACKS))
        end = time.monotonic() + 5 * DUMP_S  # an agent that does not reply hangs as well
        while len(self._stacks) < len(self._server.nodes) and time.monotonic() < end:
            self._receive()
            time.sleep(_POLL_S)
        return {rank: stack for stacks in self._stacks.values() for rank, stack in stacks.items()}

    def end(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        self._server.send(Command(order=Order.END))
        deadline = time.monotonic() + 2 * DUMP_S + 10
        while self._running & self._server.nodes.keys() and time.monotonic() < deadline:
            self._receive()
            time.sleep(_POLL_S)
        self._server.dismiss(0, only=None if self._is_slurm else 0)  # agents of people stay for the next attempt
        self._step.end(grace_s=5.0)

    @property
    def num_oom_kills(self) -> int | None:
        counts = [ended.num_oom_kills for ended in self._ended.values() if ended.num_oom_kills is not None]
        return sum(counts) if counts else None

    @property
    def lost(self) -> str | None:
        return self._lost

    def _reason_not_to_wait(self) -> str | None:
        return self._step.failure if self._stop.kind is None else "a stop was requested"

    def _receive(self) -> None:
        """Handles the messages of the agents; a refusal is raised as an error, unless the attempt is over."""
        self._server.poll()
        for node, message in self._server.take():
            if isinstance(message, Ended) and message.attempt_dir == str(self._attempt_dir):
                self._running.discard(node.rank)
                if message.refusal is None:
                    self._ended[node.rank] = message
                elif not self._is_over:
                    raise _as_error(f"{node.hello.host}: {message.refusal}", message.exit_code)
            elif isinstance(message, Listening) and message.attempt_dir == str(self._attempt_dir):
                self._server.send(Command(order=Order.TRY_HEAD))
            elif isinstance(message, Stacks):
                self._stacks[node.rank] = message.stacks
            elif isinstance(message, StopRequested) and self._stop.kind is None:
                self._stop.note(message.signal_number, None)
        if self._server.lost and self._lost is None:
            self._lost = self._server.lost[0]

    def _wait_for_files(self) -> None:
        """Waits until this machine sees the reports that were written on the others."""
        names = {name for ended in self._ended.values() for name in ended.files}
        end = time.monotonic() + FILES_S
        while not all((self._attempt_dir / name).is_file() for name in names) and time.monotonic() < end:
            time.sleep(_POLL_S)


def _as_error(text: str, exit_code: int) -> ShardwiseError:
    kinds = {ExitCode.INPUT: InputError, ExitCode.ENVIRONMENT: EnvironmentFaultError}
    return kinds.get(ExitCode(exit_code), ShardwiseError)(text)


def free_port() -> int:
    """A free port of this machine: several runs may share it."""
    with socket.create_server(("", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def agent_argv(run_dir: Path, head: str, *, node_rank: int | None = None) -> list[str]:
    """The command that starts an agent; without a rank it uses Slurm's number of the node."""
    argv = [sys.executable, "-m", "shardwise.launch.nodes.agent", str(run_dir.absolute()), "--head", head]
    return argv if node_rank is None else [*argv, "--node-rank", str(node_rank)]
