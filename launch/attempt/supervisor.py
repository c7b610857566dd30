"""Supervision of the ranks of one attempt: stop requests, the processes on this machine, and their end.

    shardwise, or a node's agent -> accelerate launch (own session, INT and USR1 ignored) -> ranks (own sessions)

- A stop request (Ctrl-C, USR1, TERM) reaches every rank. torchrun gives each rank its own session: a signal to the
  launcher's group does not reach a rank, and killing the launcher does not end the ranks. Ranks therefore register
  themselves in `pids/`, and a stop request is sent to exactly these processes as USR1; a rank that registers later
  receives it later. A second Ctrl-C ends the attempt at once, without a checkpoint.
- A scheduler signals every process of a job, and torchrun ends its ranks at TERM. The launcher therefore ignores TERM
  from its start, and torchrun is configured not to handle it (`launcher.launch_environment`).
- The launcher dies with this process, and each rank with its launcher (PR_SET_PDEATHSIG on both).
- If a rank fails or dies, the others wait in a collective: after `END_GRACE_S` they are ended. torchrun would
  end them 30 s after a death, and names the rank and its signal only then; if a rank died, the others are therefore
  killed first, and the launcher is waited for.
- Ranks without a heartbeat (`watchdog`) write their stacks into their logs, and then the attempt is ended.

A pid is valid on one machine only: in a folder that several machines share, each reads the records of its own ranks.
`attempts/N/environment.json` records the variables that determine how ranks find each other, their devices and their
files, without secrets, to compare the nodes of a run.
"""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from shardwise.launch.attempt.end import AttemptEnd, Observed, attempt_end, launcher_log, rank_reports
from shardwise.launch.attempt.watchdog import CallStack, Silence, Watchdog, read_stack, with_stacks
from shardwise.launch.engine.launcher import launch_command, launch_environment
from shardwise.launch.engine.offload import check_nvme, held_folder, nvme_folder
from shardwise.launch.engine.operators import remove_stale_locks
from shardwise.launch.inputs.staging import copy_staged
from shardwise.launch.probe.host import read_oom_kills
from shardwise.launch.rundir.process_record import (
    ProcessRecord,
    descendants,
    launcher_record,
    read_records,
    read_state,
    record_of,
    write_record,
)
from shardwise.launch.worker import ending_with_this_process
from shardwise.trainer.spec.codec import write_bytes
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.network import loopback_problem
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.secrets import RedactedStream, names_secret, redact

POLL_S = 0.1
END_GRACE_S = 15.0  # for the other ranks to fail as well, and to report
LAUNCHER_END_S = 10.0  # for the launcher to name the rank that died, once no rank is alive
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
UNREAD_S = 5.0  # that output may wait for a reader once a stop is requested
STOPPED_S = 5.0  # before a process that is stopped is reported
DUMP_S = 2.0  # for the ranks to write their stacks
KILL_GRACE_S = 10.0
_RECORDED = re.compile(
    r"(SLURM|SBATCH|SRUN|NCCL|GLOO|UCX|FI|CUDA|NVIDIA|ROCR|TORCH|PYTORCH|TRITON|OMP|MKL|KMP|DS|DEEPSPEED|ACCELERATE|PET"
    r"|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|SHARDWISE|WANDB|XDG|PYTHON|LD|LC|LOADEDMODULES|MODULEPATH|CONDA)(_.*)?"
    r"|PATH|HOME|USER|HOSTNAME|LANG|TMPDIR|VIRTUAL_ENV|.*_(PROXY|proxy)"
)


class StopKind(StrEnum):
    """Source of a stop request."""

    INTERRUPT = "interrupt"  # Ctrl-C
    REQUEUE = "requeue"  # TERM or USR1


class StoppedEarlyError(KeyboardInterrupt):
    """A stop before there is anything to save; handlers that clean up after Ctrl-C clean up after it as well."""


class StopRequest:
    """The stop requests that this process received as signals since `listening` began."""

    def __init__(self) -> None:
        self.kind: StopKind | None = None
        self.num_interrupts = 0
        self._is_raising = False

    def note(self, number: int, _frame: object) -> None:
        """Signal handler: records the signal and has unread output dropped; nothing else unless `raising`."""
        if number == signal.SIGINT:
            self.num_interrupts += 1
        _watch_output()
        if self.kind is None:
            self.kind = StopKind.INTERRUPT if number == signal.SIGINT else StopKind.REQUEUE
        if self._is_raising:
            self._is_raising = False
            raise StoppedEarlyError

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Ends the block with StoppedEarlyError at the first signal, for work that may be interrupted anywhere."""
        self._is_raising = True
        try:
            yield
        finally:
            self._is_raising = False

    @property
    def is_urgent(self) -> bool:
        """True after a second Ctrl-C."""
        return self.num_interrupts > 1

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handles INT, TERM and USR1 while the block runs."""
        before = {number: signal.signal(number, self.note) for number in _STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _watch_output() -> None:
    """From here on, output that is not read is dropped, until the end of the process."""
    if isinstance(sys.stdout, RedactedStream):  # of a command, not of Python functions in a program of the user's
        signal.signal(signal.SIGALRM, _drop_unread_output)
        signal.setitimer(signal.ITIMER_REAL, UNREAD_S, UNREAD_S)


def _drop_unread_output(_number: int, _frame: object) -> None:
    """Signal handler: a reader that has stopped (Ctrl-S, `less`, a frozen ssh) does not hold this process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, RedactedStream):
            stream.drop_if_unread(UNREAD_S)


class Ranks(Protocol):
    """The processes of one attempt, wherever they run. Its creator calls `end` however the attempt ended."""

    def poll(self) -> int | None:
        """Exit code of the launcher, minus the signal that ended it; None while it runs. Called often."""

    def request_stop(self) -> None:
        """Sends a stop request to every rank that did not get one yet."""

    def has_failed(self) -> bool:
        """True if a rank reported a failure, or ended without a report."""

    def end_survivors(self) -> tuple[int, ...]:
        """Ranks that ended without a report; kills the others, so that the launcher ends and names the signal."""

    def stopped(self) -> dict[str, ProcessRecord]:
        """The launcher and the ranks of this machine that a signal has stopped, by name. Called often."""

    def dump_stacks(self) -> dict[int, CallStack]:
        """Has every rank write its stacks into its log; returns them by rank."""

    def end(self) -> None:
        """Ends every living process and waits until it has ended."""

    @property
    def num_oom_kills(self) -> int | None:
        """Processes that the kernel killed for lack of memory since the start; None if nothing counts them."""

    @property
    def lost(self) -> str | None:
        """The machine that was lost, in a sentence."""


class LocalRanks:
    """A launcher on this machine and the ranks below it."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        attempt_dir: Path,
        environment: Mapping[str, str],
        node_rank: int = 0,
        ranks: range | None = None,
    ) -> None:
        """Starts the launcher; `ranks` are this machine's, None: all. EnvironmentFaultError if it cannot start."""
        self._attempt_dir = attempt_dir
        self._ranks = ranks
        self._notified: set[ProcessRecord] = set()
        self._kills_before = read_oom_kills()
        write_environment(attempt_dir, environment, node_rank=node_rank)
        log = launcher_log(attempt_dir, node_rank)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._launcher = _start(argv, environment, output.fileno())
        record = record_of(self._launcher.pid)
        if record is not None:
            write_record(launcher_record(attempt_dir, node_rank), record)

    def poll(self) -> int | None:
        return self._launcher.poll()

    def request_stop(self) -> None:
        waiting = {*self._records().values()} - self._notified
        self._notified |= {record for record in waiting if record.send(signal.SIGUSR1)}

    def has_failed(self) -> bool:
        reports = rank_reports(self._attempt_dir)
        if any(report.ending in (Ending.OUT_OF_MEMORY, Ending.FAILED) for report in reports.values()):
            return True
        return bool(self._lost_ranks())

    def _lost_ranks(self) -> set[int]:
        """Ranks that ended without a report; reports are read last, because one may be written meanwhile."""
        ended = {rank for rank, record in self._records().items() if not record.is_alive}
        return ended - rank_reports(self._attempt_dir).keys() if ended else ended

    def end_survivors(self) -> tuple[int, ...]:
        lost = self._lost_ranks()
        if lost:
            for record in self._records().values():
                record.send(signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self._launcher.wait(LAUNCHER_END_S)
        return tuple(sorted(lost))

    def stopped(self) -> dict[str, ProcessRecord]:
        launcher = record_of(self._launcher.pid)
        named = {f"rank {rank}": record for rank, record in self._records().items()}
        named |= {} if launcher is None else {"the launcher": launcher}
        return {name: record for name, record in named.items() if read_state(record.pid) == ("T", record.start_time)}

    def dump_stacks(self) -> dict[int, CallStack]:
        records = self._records()
        logs = {rank: self._attempt_dir / "logs" / f"rank-{rank}.log" for rank in records}
        ends = {rank: log.stat().st_size if log.is_file() else 0 for rank, log in logs.items()}
        for record in records.values():
            record.send(signal.SIGUSR2)
        time.sleep(DUMP_S)
        return {rank: read_stack(logs[rank], begin=ends[rank], pid=record.pid) for rank, record in records.items()}

    def end(self) -> None:
        ranks = [*self._records().values()]
        if self._launcher.poll() is None:
            ranks += descendants(self._launcher.pid)  # ranks that have not registered yet
            os.killpg(self._launcher.pid, signal.SIGKILL)
        self._launcher.wait()
        for rank in ranks:
            rank.send(signal.SIGKILL)
        deadline = time.monotonic() + KILL_GRACE_S
        while any(rank.is_alive for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)

    @property
    def num_oom_kills(self) -> int | None:
        kills = read_oom_kills()
        return None if kills is None or self._kills_before is None else kills - self._kills_before

    @property
    def lost(self) -> str | None:
        return None

    def _records(self) -> dict[int, ProcessRecord]:
        records = read_records(self._attempt_dir / "pids")
        found = {
            int(name.removeprefix("rank-")): record for name, record in records.items() if name.startswith("rank-")
        }
        return found if self._ranks is None else {rank: found[rank] for rank in self._ranks if rank in found}


@contextmanager
def started_ranks(
    plan: Plan,
    attempt_dir: Path,
    *,
    extensions_dir: Path,
    num_cores: int | None,
    environment: Mapping[str, str],
    on_progress: Callable[[str], None],
    node_rank: int = 0,
    ranks: range | None = None,
    more_environment: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[LocalRanks]:
    """Starts this machine's ranks of an attempt with what they read here; holds their NVMe folder while the block runs.

    `more_environment` overrides what the plan sets. EnvironmentFaultError if something is missing here.
    """
    remove_stale_locks(extensions_dir, on_progress=on_progress)  # an earlier rank may have left one
    copy_staged(plan.staged, on_progress=on_progress)
    check_nvme(plan)
    check_loopback(plan, ranks or range(plan.chosen.num_ranks))
    variables = launch_environment(environment, plan, extensions_dir=extensions_dir, cores=num_cores or 1)
    argv = launch_command(attempt_dir, log_dir=attempt_dir / "logs", python=sys.executable, node_rank=node_rank)
    with held_folder(nvme_folder(plan, attempt_dir.parent.parent, int(attempt_dir.name))):
        yield LocalRanks(
            argv,
            attempt_dir=attempt_dir,
            environment={**variables, **more_environment},
            node_rank=node_rank,
            ranks=ranks,
        )


def check_loopback(plan: Plan, ranks: range) -> None:
    """EnvironmentFaultError if `ranks`, those of this machine, meet through torchrun and its loopback does not work.

    Connections to the machine's own address pass through the loopback, too.
    """
    sharding = plan.chosen.strategy.sharding
    if plan.chosen.num_ranks == 1 and not sharding.uses_fsdp and not sharding.uses_deepspeed:
        return  # Accelerate starts the rank as its child
    found = loopback_problem()
    if found is not None:
        each_other = f"ranks {ranks.start} to {ranks.stop - 1} cannot reach each other"
        names = each_other if len(ranks) > 1 else f"rank {ranks.start} cannot reach its launcher"
        raise EnvironmentFaultError(f"{names} at {found.place}: {found.problem}\n{found.remedy}")


def write_environment(attempt_dir: Path, environment: Mapping[str, str], *, node_rank: int = 0) -> None:
    """Records the environment of this machine's ranks; a secret inside a value is written as `[redacted]`."""
    name = "environment.json" if node_rank == 0 else f"environment-{node_rank}.json"
    names = sorted(name for name in environment if _RECORDED.fullmatch(name) and not names_secret(name))
    content = {"host": socket.gethostname(), "variables": {name: environment[name] for name in names}}
    text = redact(json.dumps(content, indent=1), environment)
    try:
        write_bytes(attempt_dir / name, text.encode() + b"\n")
    except OSError as error:
        raise EnvironmentFaultError(f"{attempt_dir}: cannot be written: {error.strerror}") from error


def _start(argv: Sequence[str], environment: Mapping[str, str], log: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            list(argv),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=ending_with_this_process(signal.SIGKILL, ignored=_STOP_SIGNALS),
        )
    except OSError as error:
        raise EnvironmentFaultError(f"{argv[0]}: cannot be started: {error.strerror}") from error


def watch_attempt(
    ranks: Ranks,
    *,
    attempt_dir: Path,
    stop: StopRequest,
    on_tick: Callable[[], None],
    on_notice: Callable[[str], None],
    watchdog: Watchdog,
) -> AttemptEnd:
    """Watches ranks until they end, or have to be ended; returns their end, with their report or a made one.

    `on_notice` gets a line on processes that are stopped, and on ranks that may hang.
    """
    hung: str | None = None
    lost_ranks: tuple[int, ...] = ()
    try:
        silence = _watch(ranks, stop, on_tick, on_notice, watchdog)
        if silence is None and not stop.is_urgent and ranks.poll() is None:
            lost_ranks = ranks.end_survivors()
        hung = None if silence is None else with_stacks(silence, ranks.dump_stacks())
        return_code = ranks.poll()
    finally:
        ranks.end()
    on_tick()
    seen = Observed(
        return_code=return_code,
        hung=hung,
        lost_ranks=lost_ranks,
        step=watchdog.step,
        was_cut_short=stop.is_urgent,
        num_oom_kills=ranks.num_oom_kills,
        lost=ranks.lost,
    )
    return attempt_end(attempt_dir, seen)


def _watch(
    ranks: Ranks,
    stop: StopRequest,
    on_tick: Callable[[], None],
    on_notice: Callable[[str], None],
    watchdog: Watchdog,
) -> Silence | None:
    """Returns when the attempt has ended, or has to be ended; the silence of ranks that hang, if that is why."""
    failed_since: float | None = None
    stopped: dict[str, tuple[ProcessRecord, float]] = {}  # since when
    while ranks.poll() is None and not stop.is_urgent:
        if stop.kind is not None:
            ranks.request_stop()
        if failed_since is None and ranks.has_failed():
            failed_since = time.monotonic()
        if failed_since is not None and time.monotonic() - failed_since > END_GRACE_S:
            return None
        stopped = _notice_stopped(ranks.stopped(), stopped, on_notice)
        silence = watchdog.look()
        if silence is not None and silence.is_allowed:
            on_notice(with_stacks(silence, ranks.dump_stacks()))
        elif silence is not None:  # after the last heartbeat, only the processes remain to be ended
            return None if watchdog.has_ended else silence
        on_tick()
        time.sleep(POLL_S)
    return None


def _notice_stopped(
    found: Mapping[str, ProcessRecord],
    before: Mapping[str, tuple[ProcessRecord, float]],
    on_notice: Callable[[str], None],
) -> dict[str, tuple[ProcessRecord, float]]:
    """Reports each process once that is stopped for `STOPPED_S`; returns since when each is, infinity after that."""
    now, since = time.monotonic(), dict[str, tuple[ProcessRecord, float]]()
    for name, record in found.items():
        known, began = before.get(name, (record, now))
        since[name] = (record, began if known == record else now)
        if now - since[name][1] >= STOPPED_S:
            on_notice(f"{name} is stopped by a signal; kill -CONT {record.pid} continues it")
            since[name] = (record, math.inf)
    return since
