"""Tells a rank that hangs from one that works: each gives signs of life, and each phase has a limit for its silence.

Within a step the limit comes from the steps of this attempt: twenty times the usual one, three times the longest, never
under five minutes. Before enough steps were seen, and in every other phase (loading, saving, evaluating, exporting),
it is an hour and the time that a slow disk needs for the state. A wrong alarm costs a restart, a late one idle time:
hence the generosity.

Time that this process did not run is not counted: a job that is suspended, or a machine that sleeps, hangs nobody.

Every rank waits for one that hangs, so all fall silent. Who hangs: the one that is behind, by its step and its signs at
that step, as all run the same lines. The others wait, however long that may take. Where several are equally far, the
stacks decide: who stands in a collective waits.
"""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

from launch.rundir.process_record import read_state
from trainer.spec.messages.heartbeat import END_PHASES, HOOK_PHASE, SAVING_PHASE, STEP_PHASES, Heartbeat, read_heartbeat
from trainer.spec.plan import Plan
from trainer.spec.units import format_seconds

_LOOK_EVERY_S = 0.5
_LONGEST_LOOK_S = 5.0  # between two looks; more than that this process was stopped, and so were the ranks
_NUM_WARM_STEPS = 2  # that allocate, compile and fill caches
_NUM_STEPS_KEPT = 50
_DISK_BYTES_PER_S = 50e6  # of a slow shared file system
_STATE_BYTES_PER_PARAMETER = 16  # weights, gradients and both moments in fp32
_STATES = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk or a driver", "Z": "dead"}


class WatchLimits(NamedTuple):
    """Seconds of silence, by what a rank does."""

    phase_s: float = 3600.0  # everything but a step, and the first steps
    least_step_s: float = 300.0
    end_s: float = 120.0  # between the last word of a rank and the end of its process
    data_s: float | None = None  # to wait for the data of a step; None: as for the rest of it
    times_usual_step: float = 20.0
    times_longest_step: float = 3.0

    def scaled_to(self, plan: Plan) -> "WatchLimits":
        """With the time that a disk needs for this model, and that the first steps of this plan may take."""
        on_disk_s = plan.model_shape.num_parameters * _STATE_BYTES_PER_PARAMETER / _DISK_BYTES_PER_S
        first_step_s = self.times_usual_step * plan.chosen.speed.step_s
        phase_s = max(self.phase_s + on_disk_s, first_step_s)
        return self._replace(phase_s=phase_s, data_s=phase_s if plan.job.data.streaming else self.data_s)


class Silence(NamedTuple):
    """Ranks that gave no sign of life for longer than their phase allows."""

    ranks: tuple[int, ...]  # that hang, as far as their signs tell
    phase: str
    step: int  # optimizer steps done
    silent_s: float
    limit_s: float

    @property
    def words(self) -> str:
        """`rank 1 hung in backward of step 8: no sign of life for 5 min 1 s, 5 min are allowed`."""
        names = " and ".join(f"rank {rank}" for rank in self.ranks)
        where = f"while {self.phase}"
        if self.phase in STEP_PHASES:
            where = f"in {self.phase} of step {self.step + 1}"
        elif self.phase == HOOK_PHASE:
            where = f"in {self.phase} after step {self.step}"
        return (
            f"{names} hung {where}: no sign of life for {format_seconds(self.silent_s)}, "
            f"{format_seconds(self.limit_s)} are allowed"
        )


@dataclass(slots=True)
class _Rank:
    last: Heartbeat | None = None
    silent_s: float = 0.0
    since_step_s: float | None = None  # since the last step ended; None: not seen, or something else came between
    steps_s: list[float] = field(default_factory=list)
    save_s: float = 0.0  # of the save it is in
    longest_save_s: float = 0.0


class Watchdog:
    """Watches the ranks of one attempt."""

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

    @property
    def step(self) -> int:
        """Optimizer steps done, as far as any rank told."""
        return max((rank.last.step for rank in self._ranks.values() if rank.last is not None), default=0)

    @property
    def stop_s(self) -> float:
        """Seconds that a stop with a checkpoint may take: the longest step and the longest save, twice over.

        The first save comes at step 1 and is read back, so something is known from then on.
        """
        steps = [step_s for rank in self._ranks.values() for step_s in rank.steps_s]
        saves = [rank.longest_save_s for rank in self._ranks.values()]
        return 2 * max(steps, default=0.0) + 2 * max(saves, default=0.0)

    @property
    def has_ended(self) -> bool:
        """Whether every rank said its last word."""
        return all(rank.last is not None and rank.last.phase in END_PHASES for rank in self._ranks.values())

    def look(self) -> Silence | None:
        """Reads the signs, at most twice a second; the silence that is too long, if there is one."""
        now = self._clock()
        passed = now - self._looked_at
        if passed < _LOOK_EVERY_S:
            return None
        self._looked_at = now
        for number, rank in self._ranks.items():
            _note(rank, read_heartbeat(self._attempt_dir, number), min(passed, _LONGEST_LOOK_S))
        least = min(_progress(rank) for rank in self._ranks.values())
        behind = {number: rank for number, rank in self._ranks.items() if _progress(rank) == least}
        late = max(behind.values(), key=lambda rank: rank.silent_s)  # of the others, all wait for these
        return self._silence(late, tuple(behind)) if late.silent_s > self._limit_s(late) else None

    def _limit_s(self, rank: _Rank) -> float:
        phase = None if rank.last is None else rank.last.phase
        if phase in END_PHASES:
            return self._limits.end_s
        if phase == "data" and self._limits.data_s is not None:
            return self._limits.data_s
        if phase not in STEP_PHASES or len(rank.steps_s) <= _NUM_WARM_STEPS:
            return self._limits.phase_s
        usual = rank.steps_s[_NUM_WARM_STEPS:]
        return max(
            self._limits.least_step_s,
            self._limits.times_usual_step * median(usual),
            self._limits.times_longest_step * max(usual),
        )

    def _silence(self, late: _Rank, behind: tuple[int, ...]) -> Silence:
        return Silence(
            ranks=behind,
            phase="starting" if late.last is None else late.last.phase,
            step=self.step if late.last is None else late.last.step,
            silent_s=late.silent_s,
            limit_s=self._limit_s(late),
        )


def _progress(rank: _Rank) -> tuple[int, int]:
    """What is less in a rank that is behind: (steps, signs at this step)."""
    return (-1, 0) if rank.last is None else (rank.last.step, rank.last.count)


def _note(rank: _Rank, beat: Heartbeat | None, passed_s: float) -> None:
    """Takes one look at a rank, `passed_s` after the look before."""
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
            rank.steps_s = [*rank.steps_s, *[rank.since_step_s / done] * min(done, _NUM_STEPS_KEPT)]
            del rank.steps_s[_NUM_WARM_STEPS:-_NUM_STEPS_KEPT]
        rank.since_step_s = 0.0


class Stack(NamedTuple):
    """What a rank was doing when it was asked."""

    frame: str | None  # `loss (mine.py, line 12)`: the innermost; None: it did not answer
    is_waiting: bool  # inside a collective
    state: str | None  # of a process that could not answer


def read_stack(log: Path, *, begin: int, pid: int | None) -> Stack:
    """The stack that a rank wrote into its log after byte `begin`; its process state says why it wrote none."""
    try:
        with log.open("rb") as stream:
            stream.seek(begin)
            text = stream.read().decode(errors="replace")
    except OSError:
        text = ""
    dump = _CURRENT_THREAD.search(text)
    frames = _FRAME.findall(dump[1]) if dump else []
    state = None if pid is None else read_state(pid)
    return Stack(
        frame=None if not frames else f"{frames[0][2]} ({Path(frames[0][0]).name}, line {frames[0][1]})",
        is_waiting=any("/torch/distributed/" in path for path, _, _ in frames),
        state=None if state is None else _STATES.get(state[0]),
    )


_CURRENT_THREAD = re.compile(r"^Current thread [^\n]*\n((?:  File [^\n]*\n)+)", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]*)", line (\d+) in (\S+)')


def with_stacks(silence: Silence, stacks: dict[int, Stack]) -> str:
    """Who hangs once the stacks have been seen, and where it stands, in a sentence."""
    ranks = _named(silence.ranks, stacks)
    places = [place for rank in ranks if rank in stacks and (place := _place(stacks[rank])) is not None]
    words = silence._replace(ranks=ranks).words
    return words + (f"; it stands in {' and '.join(dict.fromkeys(places))}" if places else "")


def _named(ranks: Sequence[int], stacks: dict[int, Stack]) -> tuple[int, ...]:
    """Of those who are equally far: who was stopped, else who does not wait for the others; all if none stands out."""
    known = {rank: stacks[rank] for rank in ranks if rank in stacks}
    stopped = tuple(rank for rank, stack in known.items() if stack.state is not None)
    busy = tuple(rank for rank, stack in known.items() if stack.frame is not None and not stack.is_waiting)
    return stopped or busy or tuple(ranks)


def _place(stack: Stack) -> str | None:
    return stack.frame if stack.state is None else f"a process that is {stack.state}"
