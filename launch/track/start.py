"""The supervisor's side of the sinks: starts their process, shows what it has to say, ends it within a bounded time.

Nothing that the process does, or fails to do, reaches the run: it is never waited for before the end, it gets two short
lines through a pipe that always has room for them, and a process that dies or does not end is a line on the console.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from launch.attempt.supervisor import StopKind, StopRequest
from launch.rundir import paths as run_dirs
from launch.rundir.files import point_of
from launch.terminal import Console
from launch.track.tracker import SAID, LastWord, SinkOrder
from launch.track.wandb.mode import wandb_mode
from trainer.spec.job.sections import WandbMode
from trainer.spec.plan import Plan
from trainer.spec.secrets import redact

END_S = 60.0  # for what is still to be sent
REQUEUE_END_S = 10.0  # a scheduler that stops a job gives it half a minute; the next job sends the rest
_URGENT_END_S = 2.0
_QUIET_S = 3.0  # before it is said that something is waited for
_LOOK_EVERY_S = 1.0
_LONGEST_ERROR = 2000  # characters: the pipe holds 64 KiB
_LONGEST_LINE = 300


def sink_order(plan: Plan, run_dir: Path, environment: Mapping[str, str]) -> SinkOrder:
    """What this plan's sinks are told to do; a trial has none."""
    group = run_dir.absolute().parent.name if point_of(run_dir) is not None else None
    name = plan.job.log.name or group or run_dir.name
    plain = SinkOrder(
        name=name if group is None else f"{name} {run_dir.name}",
        project=plan.job.log.project,
        group=group,
        first_attempt=run_dirs.next_attempt(run_dir),
    )
    if plan.is_trial:
        return plain
    return msgspec.structs.replace(
        plain,
        wandb=wandb_mode(plan.job, environment),
        tensorboard=plan.job.log.tensorboard,
        notify=plan.job.log.notify,
    )


class SinkProcess:
    """The process of a run's sinks; none where the job asks for no sink."""

    def __init__(self, order: SinkOrder, run_dir: Path, console: Console, environment: Mapping[str, str]) -> None:
        self._order, self._run_dir, self._console, self._environment = order, run_dir, console, environment
        self._log = run_dir / "logs" / "sinks.log"
        self._offset = 0
        self._looked_s = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        if not order.is_empty:
            self._start(order)

    def tick(self) -> None:
        """Shows what the process has to say, and that it died; costs nothing most of the time."""
        now_s = time.monotonic()
        if self._process is None or now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        is_over = self._process.poll() is not None  # before its lines are shown: none comes after its end
        self._show_lines()
        if is_over:
            words = f"{_end_words(self._process.returncode)}, {self._last_line()}"
            self._console.line(f"{self._names()}: the process of the sinks died ({words}); training goes on")
            self._forget()

    def end(self, word: LastWord, stop: StopRequest) -> None:
        """Lets the sinks finish, for as long as there is time, and ends what does not."""
        self.tick()
        if self._process is None and self._order.notify is not None:  # it died; whoever is to be told still is
            self._start(msgspec.structs.replace(self._order, wandb=WandbMode.OFF, tensorboard=False))
        if self._process is None:
            return
        _write(self._process, word)
        self._wait(self._process, stop)
        self._show_lines()
        self._forget()

    def _start(self, order: SinkOrder) -> None:
        try:
            self._log.parent.mkdir(exist_ok=True)
            with self._log.open("ab") as output:
                self._offset = output.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "launch.track.process", str(self._run_dir)],
                    env=dict(self._environment),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C is for the run, and there is no terminal to ask at
                )
        except OSError as error:
            self._console.line(f"{self._names()}: cannot be started: {error.strerror}; training goes on without")
            return
        _write(self._process, order)

    def _wait(self, process: subprocess.Popen[bytes], stop: StopRequest) -> None:
        began_s, interrupts, is_told = time.monotonic(), stop.num_interrupts, False
        most_s = _URGENT_END_S if stop.is_urgent else REQUEUE_END_S if stop.kind is StopKind.REQUEUE else END_S
        while process.poll() is None:
            waited_s = time.monotonic() - began_s
            if waited_s > most_s or stop.num_interrupts > interrupts:
                self._kill(process, waited_s)
                return
            if waited_s > _QUIET_S and not is_told:
                is_told = True
                self._console.line(f"waiting for {self._names()}, {most_s:.0f} s at most (Ctrl-C: no longer)")
            time.sleep(0.05)

    def _kill(self, process: subprocess.Popen[bytes], waited_s: float) -> None:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # with a command that it runs
        process.wait()
        self._console.line(
            f"{self._names()}: not done after {waited_s:.0f} s, and ended; {self._advice()}\n  log: {self._log}"
        )

    def _advice(self) -> str:
        if self._order.wandb is WandbMode.OFF:
            return "metrics.jsonl has everything"
        return (
            "metrics.jsonl has everything, and --resume sends wandb what is missing; "
            f"what was written offline: shardwise status {self._run_dir} --sync"
        )

    def _forget(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process = None

    def _names(self) -> str:
        order = self._order
        named = (
            ("wandb", order.wandb is not WandbMode.OFF),
            ("tensorboard", order.tensorboard),
            ("notify", order.notify is not None),
        )
        return ", ".join(name for name, is_asked in named if is_asked)

    def _show_lines(self) -> None:
        """Lines of the log that are meant for a person."""
        try:
            with self._log.open("rb") as stream:
                stream.seek(self._offset)
                content = stream.read()
        except OSError:
            return
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.decode(errors="replace").split("\n"):
            if line.startswith(SAID):
                self._console.line(_shown(line.removeprefix(SAID)))

    def _last_line(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").strip().splitlines()
        except OSError:
            return f"{self._log} is gone"
        return _shown(lines[-1]) if lines else "it said nothing"


def _end_words(code: int) -> str:
    """`SIGKILL`, `exit code 7`."""
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"exit code {code}"


@contextmanager
def running_sinks(
    plan: Plan, *, run_dir: Path, console: Console, environment: Mapping[str, str], stop: StopRequest
) -> Iterator[SinkProcess]:
    """The sinks of a run while its attempts run; they are told of an error that ends those, too."""
    order = sink_order(plan, run_dir, environment)
    sinks = SinkProcess(order, run_dir, console, environment)
    try:
        yield sinks
    except BaseException as error:
        words = redact(str(error) or type(error).__name__)[:_LONGEST_ERROR]
        sinks.end(LastWord(has_report=False, error=words), stop)
        raise
    sinks.end(LastWord(has_report=True), stop)


def _write(process: subprocess.Popen[bytes], value: SinkOrder | LastWord) -> None:
    """One line; a process that died is noticed elsewhere."""
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.write(msgspec.json.encode(value) + b"\n")
        process.stdin.flush()


def _shown(line: str) -> str:
    return redact("".join(letter if letter.isprintable() else " " for letter in line)[:_LONGEST_LINE])
