"""The launcher's side of the trackers: checks what they need, starts their process, ends it within a bounded time.

Nothing that the process does, or fails to do, affects the run. The supervisor does not wait for it before the end, and
writes two short lines to a pipe that always has room for them. A process that dies or does not end is a line on the
console.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardwise.launch.probe.installed import installed_version
from shardwise.launch.rundir import paths as run_dirs
from shardwise.launch.rundir.files import point_of
from shardwise.launch.terminal import Console
from shardwise.launch.track.notify import NotifyError, url_in
from shardwise.launch.track.tracker import SHOWN, EndNotice, TrackerOrder, ViewRequest, WandbResult
from shardwise.launch.worker import ask
from shardwise.trainer.spec.errors import InputError, InputProblemsError, ShardwiseError
from shardwise.trainer.spec.job.kinds import is_url, variable_of
from shardwise.trainer.spec.job.sections import Job, NodeNetwork, WandbMode
from shardwise.trainer.spec.packages import extra_line, pip_line
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.secrets import REDACTED, printable, redact

if TYPE_CHECKING:
    from shardwise.launch.attempt.supervisor import StopRequest  # `submit` checks trackers and supervises nothing

END_S = 60.0  # for the data that is still to be sent
REQUEUE_END_S = 10.0  # a scheduler gives a job half a minute to stop; the next job sends the rest
_URGENT_END_S = 2.0
_QUIET_S = 3.0  # before a line states that the trackers are waited for
_LOOK_EVERY_S = 1.0
_MAX_ERROR_CHARS = 2000  # the pipe holds 64 KiB
_MAX_LINE_CHARS = 300
_LOGIN_TIMEOUT_S = 60.0  # to import wandb from a slow file system
_WANDB_MODES = {
    "online": WandbMode.ONLINE,
    "run": WandbMode.ONLINE,
    "offline": WandbMode.OFFLINE,
    "dryrun": WandbMode.OFFLINE,
    "disabled": WandbMode.OFF,
}


def check_trackers(job: Job, environment: Mapping[str, str] = os.environ, *, on_node: bool | None = None) -> None:
    """Raises InputProblemsError with everything that the trackers of this job lack: packages, a login, a command."""
    problems = tuple(_problems(job, environment, on_node=on_node))
    if problems:
        raise InputProblemsError(problems)


def wandb_mode(job: Job, environment: Mapping[str, str], *, on_node: bool | None = None) -> WandbMode:
    """The mode of wandb: that of the job, unless WANDB_MODE names another or the compute nodes have no network.

    WANDB_MODE does not enable wandb if the job has it off; InputError if it is not a mode. `on_node` is True for a run
    on a compute node; the default is True if Slurm started this process.
    """
    if job.log.wandb is WandbMode.OFF:
        return WandbMode.OFF
    named = environment.get("WANDB_MODE", "").strip()
    mode = _WANDB_MODES.get(named) if named else job.log.wandb
    if mode is None:
        raise InputError(f"WANDB_MODE is {named!r}; expected online, offline or disabled")
    is_on_node = "SLURM_JOB_ID" in environment if on_node is None else on_node
    if mode is WandbMode.ONLINE and is_on_node and job.slurm.network is NodeNetwork.NONE:
        return WandbMode.OFFLINE
    return mode


def login_problem(environment: Mapping[str, str]) -> str | None:
    """The reason why wandb cannot be online, with the remedy; None if it can. Reads no key."""
    problem = run_wandb_command("login", None, environment, timeout_s=_LOGIN_TIMEOUT_S).problem
    return None if problem is None else f"{problem}; run wandb login, or set WANDB_API_KEY"


def run_wandb_command(
    command: str, request: ViewRequest | None, environment: Mapping[str, str], *, timeout_s: float
) -> WandbResult:
    """The result of a process of its own that imports wandb; without a terminal, wandb does not prompt."""
    module = "shardwise.launch.track.wandb"
    try:
        return ask(
            module, request, WandbResult, subject="wandb", flags=(command,), inherited=environment, timeout_s=timeout_s
        )
    except ShardwiseError as error:
        return WandbResult(problem=str(error))


def tracker_order(
    plan: Plan, run_dir: Path, environment: Mapping[str, str], *, first_attempt: int | None = None
) -> TrackerOrder:
    """The trackers of a plan from an attempt on, by default the next one; a trial has none.

    The points of a sweep are one group, named after its directory.
    """
    is_point = point_of(run_dir) is not None
    group = run_dir.absolute().parent.name if is_point else None
    name = plan.job.log.name or group or run_dir.name
    plain = TrackerOrder(
        name=f"{name} {run_dir.name}" if is_point else name,
        project=plan.job.log.project,
        group=group,
        first_attempt=run_dirs.next_attempt(run_dir) if first_attempt is None else first_attempt,
    )
    if plan.is_trial:
        return plain
    return msgspec.structs.replace(
        plain,
        wandb=wandb_mode(plan.job, environment),
        tensorboard=plan.job.log.tensorboard,
        notify=plan.job.log.notify,
    )


@contextmanager
def running_trackers(
    plan: Plan,
    *,
    run_dir: Path,
    console: Console,
    environment: Mapping[str, str],
    stop: "StopRequest",
    first_attempt: int | None = None,
) -> Iterator["TrackerProcess"]:
    """The trackers of a run while its attempts run; they also receive an error that ends the run."""
    order = tracker_order(plan, run_dir, environment, first_attempt=first_attempt)
    trackers = TrackerProcess(order, run_dir, console, environment)
    try:
        yield trackers
    except BaseException as error:
        reason = redact(str(error) or type(error).__name__)[:_MAX_ERROR_CHARS]
        trackers.end(EndNotice(has_report=False, error=reason), stop)
        raise
    trackers.end(EndNotice(has_report=True), stop)


class TrackerProcess:
    """The process of a run's trackers; there is none if the job has no tracker."""

    def __init__(self, order: TrackerOrder, run_dir: Path, console: Console, environment: Mapping[str, str]) -> None:
        self._order, self._run_dir, self._console, self._environment = order, run_dir, console, environment
        self._log = run_dir / "logs" / "sinks.log"
        self._offset = 0
        self._looked_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        if order.names:
            self._start(order)

    def tick(self) -> None:
        """Shows new lines of the process, and its death; costs nothing most of the time."""
        now_s = time.monotonic()
        if self._process is None or now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        is_over = self._process.poll() is not None  # before its lines are shown: none comes after its end
        self._show_lines()
        if is_over:
            code = self._process.returncode
            end = signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"
            self._console.line(
                f"{self._names()}: the process of the trackers died ({end}, {self._last_line()}); training goes on"
            )
            self._forget()

    def end(self, notice: EndNotice, stop: "StopRequest") -> None:
        """Lets the trackers finish for a bounded time, then kills their process."""
        self.tick()
        if self._process is None and self._order.notify is not None:  # it died; the notification is sent all the same
            self._start(msgspec.structs.replace(self._order, wandb=WandbMode.OFF, tensorboard=False))
        if self._process is None:
            return
        _write(self._process, notice)
        self._wait(self._process, stop)
        self._show_lines()
        self._forget()

    def _start(self, order: TrackerOrder) -> None:
        try:
            self._log.parent.mkdir(exist_ok=True)
            with self._log.open("ab") as output:
                self._offset = output.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "shardwise.launch.track.process", str(self._run_dir)],
                    env=dict(self._environment),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is for the run; and without a terminal, wandb does not prompt
                )
        except OSError as error:
            self._console.line(f"{self._names()}: cannot be started: {error.strerror}; training goes on without")
            return
        _write(self._process, order)

    def _wait(self, process: subprocess.Popen[bytes], stop: "StopRequest") -> None:
        from shardwise.launch.attempt.supervisor import StopKind

        began_s, interrupts, is_shown = time.monotonic(), stop.num_interrupts, False
        limit_s = _URGENT_END_S if stop.is_urgent else REQUEUE_END_S if stop.kind is StopKind.REQUEUE else END_S
        while process.poll() is None:
            waited_s = time.monotonic() - began_s
            if waited_s > limit_s or stop.num_interrupts > interrupts:
                self._kill(process, waited_s)
                return
            if waited_s > _QUIET_S and not is_shown:
                is_shown = True
                self._console.line(f"waiting for {self._names()}, at most {limit_s:.0f} s (Ctrl-C: no longer)")
            time.sleep(0.05)

    def _kill(self, process: subprocess.Popen[bytes], waited_s: float) -> None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # with the command of log.notify
        process.wait()
        advice = "metrics.jsonl has everything"
        if self._order.wandb is not WandbMode.OFF:
            advice += (
                ", and --resume sends wandb what is missing; "
                f"what was written offline: shardwise status {self._run_dir} --sync"
            )
        self._console.line(f"{self._names()}: not done after {waited_s:.0f} s, killed; {advice}\n  log: {self._log}")

    def _forget(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process = None

    def _names(self) -> str:
        return ", ".join(self._order.names)

    def _show_lines(self) -> None:
        """Shows the lines of the log that are for a person."""
        try:
            with self._log.open("rb") as stream:
                stream.seek(self._offset)
                content = stream.read()
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").split("\n"):
            if line.startswith(SHOWN):
                self._console.line(_printable(line.removeprefix(SHOWN)))

    def _last_line(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return f"{self._log} is missing"
        return _printable(lines[-1]) if lines else "no output"


def _problems(job: Job, environment: Mapping[str, str], *, on_node: bool | None) -> Iterator[str]:
    mode = wandb_mode(job, environment, on_node=on_node)
    if mode is not WandbMode.OFF and installed_version("wandb") is None:
        yield f"log.wandb: {mode}: wandb is not installed; set log.wandb=off, or {pip_line('wandb')}"
    elif mode is WandbMode.ONLINE:
        problem = login_problem(environment)
        if problem is not None:
            yield f"log.wandb: online: {problem}, or set log.wandb=offline"
    if job.log.tensorboard and installed_version("tensorboard") is None:
        yield f"log.tensorboard: tensorboard is not installed; {extra_line('tensorboard')}"
    notify = job.log.notify
    if notify is None or is_url(notify):
        if notify is not None and REDACTED in notify[0]:
            yield "log.notify: a run does not store the URL; name it again with log.notify=URL, or start the job file"
        return
    variable = variable_of(notify)
    if variable is not None:
        try:
            url_in(variable, environment)
        except NotifyError as error:
            yield f"log.notify: {error}"
    elif shutil.which(str(Path(notify[0]).expanduser()), path=environment.get("PATH")) is None:
        yield f"log.notify: there is no program {notify[0]}; give its path, or a URL"


def _write(process: subprocess.Popen[bytes], value: TrackerOrder | EndNotice) -> None:
    """Writes one line; `tick` notices a process that died."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(msgspec.json.encode(value) + b"\n")
        process.stdin.flush()


def _printable(line: str) -> str:
    return redact(printable(line)[:_MAX_LINE_CHARS])
