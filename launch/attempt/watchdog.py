"""Detection of ranks that hang: each rank writes heartbeats, and each phase has a limit for the time without one.

Within a step the limit follows from the steps of this attempt: twenty times the median, three times the longest, at
least five minutes. A silence of 45 s that is three times the longest step is reported before. Until enough steps were
seen, and in every other phase (loading, saving, evaluating, exporting), the limit is an hour plus the time that a slow
disk needs for the state. A false alarm costs a restart, a late one idle time, so the limits are generous. Time in which
this process did not run does not count: a suspended job does not hang.

All ranks wait for one that hangs, so all are silent. The rank that hangs is the one that is behind, by its step and its
heartbeats at that step, as all ranks run the same code; the others may wait for any time. If several are equally far,
their stacks decide: a rank inside a collective waits.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from shardwise.launch.rundir.process_record import read_state
from shardwise.trainer.spec.messages.rank_files import (
    END_PHASES,
    HOOK_PHASE,
    SAVING_PHASE,
    STEP_PHASES,
    Heartbeat,
    read_heartbeat,
)
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import format_seconds

_LOOK_EVERY_S = 0.5
_MAX_INTERVAL_S = 5.0  # between two looks; for any longer this process was stopped, and so were the ranks
_NUM_WARM_STEPS = 2  # with allocation, compilation and cold caches
_NUM_STEPS_RETAINED = 50
_DISK_BYTES_PER_S = 50e6  # of a slow shared file system
_STATE_BYTES_PER_PARAMETER = 16  # weights, gradients and both moments in fp32
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk or a driver", "Z": "dead"}


class WatchLimits(NamedTuple):
    """Allowed seconds without a heartbeat, by phase."""

    phase_s: float = 3600.0  # everything but a step, and the first steps
    least_step_s: float = 300.0
    end_s: float = 120.0  # between the last heartbeat of a rank and the end of its process
    data_s: float | None = None  # to wait for the data of a step; None: as for other phases of a step
    times_usual_step: float = 20.0
    times_longest_step: float = 3.0
    notice_s: float = 45.0  # in a step, before a hang is reported; it is ended at its limit

    def scaled_to(self, plan: Plan) -> "WatchLimits":
        """The limits with the time that a disk needs for this model and that the first steps of this plan may take."""
        on_disk_s = plan.model_shape.num_parameters * _STATE_BYTES_PER_PARAMETER / _DISK_BYTES_PER_S
        first_step_s = self.times_usual_step * plan.chosen.speed.step_s
        phase_s = max(self.phase_s + on_disk_s, first_step_s)
        return self._replace(phase_s=phase_s, data_s=phase_s if plan.job.data.streaming else self.data_s)


class Silence(NamedTuple):
    """Ranks without a heartbeat for longer than their phase allows."""

    ranks: tuple[int, ...]  # that hang, according to their heartbeats
    phase: str
    step: int  # optimizer steps done
    silent_s: float
    limit_s: float

    @property
    def is_allowed(self) -> bool:
        """True while the ranks may still go on by themselves."""
        return self.silent_s <= self.limit_s

    @property
    def message(self) -> str:
        """`rank 1 hung in backward of step 8: no heartbeat for 5 min 1 s, 5 min are allowed`."""
        names = " and ".join(f"rank {rank}" for rank in self.ranks)
        where = f"while {self.phase}"
        if self.phase in STEP_PHASES:
            where = f"in {self.phase} of step {self.step + 1}"
        elif self.phase == HOOK_PHASE:
            where = f"in {self.phase} after step {self.step}"
        return (
            f"{names} hung {where}: no heartbeat for {format_seconds(self.silent_s)}, "
            f"{format_seconds(self.limit_s)} are allowed"
        )


@dataclass(slots=True)
class _Rank:
    last: Heartbeat | None = None
    silent_s: float = 0.0
    since_step_s: float | None = None  # since the last step ended; None: not seen, or another phase intervened
    steps_s: list[float] = field(default_factory=list)
    save_s: float = 0.0  # of the save it is in
    longest_save_s: float = 0.0

    @property
    def is_in_usual_step(self) -> bool:
        """True in a step of an attempt of which the usual duration of a step is known."""
        return self.last is not None and self.last.phase in STEP_PHASES and len(self.steps_s) > _NUM_WARM_STEPS


class Watchdog:
    """Heartbeats of the ranks of one attempt."""

    def __init__(
        self,
        attempt_dir: Path,
        *,
        num_ranks: int,
        limits: WatchLimits = WatchLimits(),  # noqa: B008  # it never changes
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._attempt_dir = attempt_dir
        self._ranks = {rank: _Rank() for rank in range(num_ranks)}
        self._limits = limits
        self._clock = clock
        self._looked_at = clock()
        self._noticed: tuple[int, int] | None = None  # the progress at which a silence was reported

    @property
    def step(self) -> int:
        """Optimizer steps done, of the furthest rank."""
        return max((rank.last.step for rank in self._ranks.values() if rank.last is not None), default=0)

    @property
    def stop_s(self) -> float:
        """Seconds that a stop with a checkpoint may take: twice the longest step and the longest save.

        The first save is at step 1 and is read back, so both are known from then on.
        """
        steps = [step_s for rank in self._ranks.values() for step_s in rank.steps_s]
        saves = [rank.longest_save_s for rank in self._ranks.values()]
        return 2 * max(steps, default=0.0) + 2 * max(saves, default=0.0)

    @property
    def has_ended(self) -> bool:
        """True if every rank has written its last heartbeat."""
        return all(rank.last is not None and rank.last.phase in END_PHASES for rank in self._ranks.values())

    def look(self) -> Silence | None:
        """Reads the heartbeats, at most twice a second; returns a silence that is too long.

        An unusual one that `is_allowed` still is returned once.
        """
        now = self._clock()
        passed = now - self._looked_at
        if passed < _LOOK_EVERY_S:
            return None
        self._looked_at = now
        for number, rank in self._ranks.items():
            _note(rank, read_heartbeat(self._attempt_dir, number), min(passed, _MAX_INTERVAL_S))
        least = min(_progress(rank) for rank in self._ranks.values())
        behind = {number: rank for number, rank in self._ranks.items() if _progress(rank) == least}
        late = max(behind.values(), key=lambda rank: rank.silent_s)  # all other ranks wait for these
        limit_s = self._limit_s(late)
        notice_s = max(self._limits.notice_s, self._limits.times_longest_step * max(late.steps_s, default=0.0))
        is_notice = late.is_in_usual_step and late.silent_s > notice_s and self._noticed != least
        if late.silent_s <= limit_s and not is_notice:
            return None
        self._noticed = least
        phase, step = ("starting", self.step) if late.last is None else (late.last.phase, late.last.step)
        return Silence(ranks=tuple(behind), phase=phase, step=step, silent_s=late.silent_s, limit_s=limit_s)

    def _limit_s(self, rank: _Rank) -> float:
        phase = None if rank.last is None else rank.last.phase
        if phase in END_PHASES:
            return self._limits.end_s
        if phase == "data" and self._limits.data_s is not None:
            return self._limits.data_s
        if not rank.is_in_usual_step:
            return self._limits.phase_s
        usual = rank.steps_s[_NUM_WARM_STEPS:]
        return max(
            self._limits.least_step_s,
            self._limits.times_usual_step * median(usual),
            self._limits.times_longest_step * max(usual),
        )


def _progress(rank: _Rank) -> tuple[int, int]:
    """(steps, heartbeats at this step), which is less for a rank that is behind."""
    return (-1, 0) if rank.last is None else (rank.last.step, rank.last.count)


def _note(rank: _Rank, beat: Heartbeat | None, passed_s: float) -> None:
    """Updates a rank with its heartbeat, `passed_s` after the last update."""
    if rank.since_step_s is not None:
        rank.since_step_s += passed_s
    if rank.last is not None and rank.last.phase == SAVING_PHASE:
        rank.save_s += passed_s
        rank.longest_save_s = max(rank.longest_save_s, rank.save_s)
    if beat is None or beat == rank.last:
        rank.silent_s += passed_s
        return
    before, rank.last, rank.silent_s = rank.last, beat, 0.0
    if beat.phase != SAVING_PHASE:
        rank.save_s = 0.0
    if beat.phase not in STEP_PHASES and beat.phase != HOOK_PHASE:
        rank.since_step_s = None  # a save or an evaluation is no part of a step
    elif before is not None and beat.step > before.step:
        if rank.since_step_s is not None:
            done = beat.step - before.step
            rank.steps_s = [*rank.steps_s, *[rank.since_step_s / done] * min(done, _NUM_STEPS_RETAINED)]
            del rank.steps_s[_NUM_WARM_STEPS:-_NUM_STEPS_RETAINED]
        rank.since_step_s = 0.0


class CallStack(NamedTuple):
    """The position of a rank in its code, from its call stack."""

    frame: str | None  # the innermost: `loss (mine.py, line 12)`; None: it wrote no stack
    is_waiting: bool  # inside a collective
    state: str | None  # of a process that cannot write its stack


def read_stack(log: Path, *, begin: int, pid: int | None) -> CallStack:
    """The stack that a rank wrote into its log after byte `begin`, with the state of its process if it is stopped."""
    try:
        with log.open("rb") as stream:
            stream.seek(begin)
            text = stream.read().decode(errors="replace")
    except OSError:
        text = ""
    dump = _CURRENT_THREAD.search(text)
    frames = _FRAME.findall(dump[1]) if dump else []
    state = None if pid is None else read_state(pid)
    return CallStack(
        frame=None if not frames else f"{frames[0][2]} ({Path(frames[0][0]).name}, line {frames[0][1]})",
        is_waiting=any("/torch/distributed/" in path for path, _, _ in frames),
        state=None if state is None else _STATES.get(state[0]),
    )


_CURRENT_THREAD = re.compile(r"^Current thread [^\n]*\n((?:  File [^\n]*\n)+)", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')


def with_stacks(silence: Silence, stacks: dict[int, CallStack]) -> str:
    """The message of a silence, with the ranks that hang according to their stacks, and their positions.

    Of ranks that are equally far, those whose process is stopped hang, else those outside a collective, else all.
    """
    known = {rank: stacks[rank] for rank in silence.ranks if rank in stacks}
    stopped = tuple(rank for rank, stack in known.items() if stack.state is not None)
    busy = tuple(rank for rank, stack in known.items() if stack.frame is not None and not stack.is_waiting)
    ranks = stopped or busy or silence.ranks
    frames = [_position(known[rank]) for rank in ranks if rank in known]
    positions = [*dict.fromkeys(filter(None, frames))]
    message = silence._replace(ranks=ranks).message
    return message + (f"; it is in {' and '.join(positions)}" if positions else "")


def _position(stack: CallStack) -> str | None:
    return stack.frame if stack.state is None else f"a process that is {stack.state}"
