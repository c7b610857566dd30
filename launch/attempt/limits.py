"""Time limits of a run: the stop ahead of them, with enough time for a checkpoint.

A scheduler sets a deadline (the time limit of a job), after which the run continues in the next job. `limits.hours` and
`limits.cost` end the run. They count the hours of all attempts of all starts, each from the launch of its ranks to
their end; the cost is these hours times the ranks of the attempt and `price_per_gpu_hour`. Data preparation, planning
and queueing do not count. `spent.json` in the run directory names the limit that ended a run, so that a resumption with
the same limit is refused even if a few seconds of it are left.
"""

import math
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from shardwise.launch.attempt.retries import earlier_history
from shardwise.launch.attempt.supervisor import StopKind, StopRequest
from shardwise.launch.attempt.watchdog import Watchdog
from shardwise.launch.terminal import Console
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import AttemptRecord, Ending, Report
from shardwise.trainer.spec.units import format_seconds
from shardwise.trainer.spec.value import Value

MAX_MARGIN_S = 45.0
SPENT_FILE = "spent.json"
_HEADROOM = 1.05  # of the limit that is proposed


class Deadline(NamedTuple):
    """The time at which the run has to have ended."""

    moment_s: float  # on the monotonic clock
    margin_s: float  # for processes to end, after the last step and the last save

    @classmethod
    def in_seconds(cls, left_s: float) -> "Deadline":
        """The deadline so many seconds from now; a short time has a short margin."""
        return cls(time.monotonic() + left_s, min(MAX_MARGIN_S, max(0.0, left_s) / 10))

    @property
    def left_s(self) -> float:
        return self.moment_s - time.monotonic()

    def needed_s(self, watchdog: Watchdog) -> float:
        """Seconds for a step and a save, as measured in this attempt, and an end."""
        return self.margin_s + watchdog.stop_s

    def is_near(self, watchdog: Watchdog) -> bool:
        """True if the time left is no more than a stop needs."""
        return self.left_s < self.needed_s(watchdog)

    def stop_in_time(self, stop: StopRequest, watchdog: Watchdog, console: Console) -> None:
        """Requests a stop after which a scheduler starts the run again, if the deadline is near."""
        if stop.kind is None and self.is_near(watchdog):
            console.line(
                f"the time limit is {format_seconds(max(self.left_s, 0.0))} away, a step, a save and an end take up to "
                f"{format_seconds(self.needed_s(watchdog))}: stopping with a checkpoint"
            )
            stop.note(signal.SIGUSR1, None)


class SpentLimit(Value, frozen=True, kw_only=True):
    """Content of `spent.json`: the limit that ended a run, with its value at that time."""

    limit: str
    allowed_hours: float


class Limit(NamedTuple):
    """A limit of the job, and the part of it that was used before an attempt."""

    name: str
    allowed: float  # hours, or money
    allowed_hours: float  # hours of the run, or of all GPUs together
    used_hours: float  # the same
    hours_per_hour: int  # used in an hour of the attempt: 1, or its ranks

    @property
    def left_s(self) -> float:
        """Seconds of the attempt until it is spent."""
        return (self.allowed_hours - self.used_hours) / self.hours_per_hour * 3600

    def after(self, seconds: float) -> "Limit":
        """The limit after so many seconds of the attempt."""
        return self._replace(used_hours=self.used_hours + seconds / 3600 * self.hours_per_hour)

    @property
    def summary(self) -> str:
        """`limits.hours allows 24 h 00 min, 23 h 59 min are used`."""
        if self.name == "limits.hours":
            allowed, used = format_seconds(self.allowed_hours * 3600), format_seconds(self.used_hours * 3600)
            return f"{self.name} allows {allowed}, {used} are used"
        price = self.allowed / self.allowed_hours
        return f"{self.name} allows {self.allowed:g}, {price * self.used_hours:.2f} are used at {price:g} a GPU-hour"

    def remedy(self, step: int, num_steps: int) -> str:
        """The limit to set, at the pace of the steps that were done."""
        if step < 1:
            return f"raise {self.name} and add --resume"
        needed = self.used_hours * num_steps / step * self.allowed / self.allowed_hours * _HEADROOM
        enough = rounded_up(max(needed, self.allowed * _HEADROOM))
        return f"raise it and add --resume; {self.name}={enough:g} is about what {num_steps} steps take"


def limits_of(job: Job, history: Sequence[AttemptRecord], *, num_ranks: int = 1) -> tuple[Limit, ...]:
    """The limits of a job before an attempt on so many ranks."""
    hours = sum(record.duration_s for record in history) / 3600
    limits = []
    if job.limits.hours is not None:
        limits.append(Limit("limits.hours", job.limits.hours, job.limits.hours, hours, 1))
    cost, price = job.limits.cost, job.price_per_gpu_hour
    if cost is not None and price is not None:
        gpu_hours = sum(record.duration_s * record.num_ranks for record in history) / 3600
        limits.append(Limit("limits.cost", cost, cost / price, gpu_hours, num_ranks))
    return tuple(limits)


def refuse_spent(run_dir: Path, plan: Plan) -> None:
    """Raises InputError if a limit of the job is spent, or ended the run before and was not raised since."""
    history = earlier_history(run_dir)
    try:
        spent = codec.read(run_dir / SPENT_FILE, SpentLimit)
    except InputError:
        spent = None
    step = max((record.step for record in history), default=0)
    for limit in limits_of(plan.job, history):
        has_ended_it = spent is not None and spent.limit == limit.name and limit.allowed_hours <= spent.allowed_hours
        if limit.left_s <= 0 or has_ended_it:
            remedy = limit.remedy(step, plan.schedule.num_steps)
            raise InputError(f"--resume: {run_dir}: {limit.summary}, at step {step};\n{remedy}")


class LimitWatch:
    """The limits of a run during one of its attempts."""

    def __init__(self, run_dir: Path, plan: Plan, history: Sequence[AttemptRecord], *, num_ranks: int) -> None:
        self._run_dir, self._num_steps = run_dir, plan.schedule.num_steps
        self._began_s = time.monotonic()
        limits = limits_of(plan.job, history, num_ranks=num_ranks)
        self._limits = [(limit, Deadline.in_seconds(limit.left_s)) for limit in limits]
        self._spent: Limit | None = None

    def stop_in_time(self, stop: StopRequest, watchdog: Watchdog, console: Console) -> None:
        """Ends the run with a checkpoint, without a restart, if the time left is no more than a stop needs."""
        if stop.kind is not None or watchdog.step >= self._num_steps:
            return
        for limit, deadline in self._limits:
            if deadline.is_near(watchdog):
                self._spent, stop.kind = limit, StopKind.INTERRUPT
                with suppress(OSError):  # of a full disk: the report states the hours as well
                    spent = SpentLimit(limit=limit.name, allowed_hours=limit.allowed_hours)
                    codec.write(self._run_dir / SPENT_FILE, spent)
                needed_s = deadline.needed_s(watchdog)
                stop_time = f", and a stop needs up to {format_seconds(needed_s)}" if needed_s else ""
                console.line(f"{self._now(limit).summary}{stop_time}: stopping with a checkpoint")
                return

    def limit_of(self, report: Report) -> str | None:
        """The limit that ended the run; None if it ended in another way."""
        return self._spent.name if self._spent is not None and report.ending is Ending.STOPPED else None

    def incidents(self, report: Report) -> tuple[str, ...]:
        """The incident of a run that a limit ended; () for other runs."""
        if self._spent is None or self.limit_of(report) is None:
            return ()
        limit = self._now(self._spent)
        remedy = limit.remedy(report.step, report.num_steps)
        return (f"{limit.summary}: stopped at step {report.step} of {report.num_steps}; to continue, {remedy}",)

    def _now(self, limit: Limit) -> Limit:
        return limit.after(time.monotonic() - self._began_s)


def rounded_up(value: float) -> float:
    """`value` rounded up to two significant digits: 34.3 is 35, 0.0121 is 0.013."""
    unit: float = 10.0 ** (math.floor(math.log10(value)) - 1)
    return math.ceil(round(value / unit, 6)) * unit
