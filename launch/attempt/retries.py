"""The decision after an attempt that failed, and the history of a run's attempts.

    out of memory         the next fallback of the plan that can resume from the checkpoint, at the same global batch
    died, hung, failed    the same configuration again from the newest checkpoint, a bounded number of times
    would happen again    the end of the run: an error that the user has to fix, or one before the first step

Restarts are counted since the last attempt that wrote a newer checkpoint, so a run that makes progress may be
interrupted often. A step that fails three times ends the run. Attempts are counted over all starts of a run, those
whose supervisor was killed included: a node that dies takes the supervisor with it, and a scheduler starts the job
again.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from launch.attempt.end import AttemptEnd
from launch.rundir.files import tail_rows
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.messages.heartbeat import heartbeat_path, read_heartbeat
from trainer.spec.plan import Candidate, Plan
from trainer.spec.report import AttemptRecord, Ending, Fault, Report
from trainer.spec.units import format_bytes

MAX_RESTARTS = 5  # without a newer checkpoint
MAX_SAME_STEP = 3  # attempts that end at one step


class Tried(NamedTuple):
    """One attempt that did not end in order."""

    candidate: int  # its place among the plan's chosen candidate and fallbacks
    fault: Fault
    step: int  # optimizer steps done
    saved_step: int  # of the newest checkpoint afterwards; 0: there is none
    cause: str = ""
    is_final: bool = False  # a person has to mend something
    had_no_chance: bool = False  # it did no step, for a reason that does not pass by itself

    @property
    def was_refused(self) -> bool:
        """Whether an error kept it from its first step, or is one for a person."""
        return self.is_final or (self.fault is Fault.ERROR and self.had_no_chance)


class Decision(NamedTuple):
    """What comes next."""

    candidate: int | None  # None: the run ends
    words: str  # what is done, or why nothing more is
    is_out_of_fallbacks: bool = False


def decide(
    tried: Sequence[Tried], candidates: Sequence[Candidate], obstacle: Callable[[Candidate], str | None]
) -> Decision:
    """The next attempt after `tried`, the newest last; `obstacle` says why a fallback is no help, after its name."""
    last = tried[-1]
    if last.fault.is_memory or _is_fallback_that_cannot_start(tried):
        return _next_fallback(last, candidates, obstacle)
    if last.is_final or (last.was_refused and (len(tried) == 1 or tried[-2].cause == last.cause)):
        return Decision(None, "the same would happen again: not restarted")
    recent = _without_progress(tried)
    if sum(1 for each in recent if each.step == last.step) >= MAX_SAME_STEP:
        return Decision(None, f"it was the {MAX_SAME_STEP}rd time at step {last.step}: not restarted")
    if len(recent) > MAX_RESTARTS:
        return Decision(None, f"restarted {MAX_RESTARTS} times without a newer checkpoint: not again")
    return Decision(last.candidate, f"starting again {_from(last.saved_step)}")


def _next_fallback(
    last: Tried, candidates: Sequence[Candidate], obstacle: Callable[[Candidate], str | None]
) -> Decision:
    skipped: list[str] = []
    for number, candidate in enumerate(candidates[last.candidate + 1 :], start=last.candidate + 1):
        reason = obstacle(candidate)
        if reason is None:
            words = f"going on with the next fallback at the same global batch, {_from(last.saved_step)}"
            return Decision(number, words)
        skipped.append(f"{candidate.strategy.name} {reason}")
    words = "no fallback is left" + (f" ({'; '.join(dict.fromkeys(skipped))})" if skipped else "")
    return Decision(None, words, is_out_of_fallbacks=True)


def _is_fallback_that_cannot_start(tried: Sequence[Tried]) -> bool:
    """Whether the attempt came in place of one that ran out of memory and was refused before it trained."""
    last = tried[-1]
    return len(tried) > 1 and tried[-2].candidate < last.candidate and last.was_refused and last.had_no_chance


def _without_progress(tried: Sequence[Tried]) -> Sequence[Tried]:
    """The attempts since the last that left a newer checkpoint, that one included."""
    begin = 0
    for number in range(1, len(tried)):
        if tried[number].saved_step > tried[number - 1].saved_step:
            begin = number
    return [each for each in tried[begin:] if not each.fault.is_memory]


def _from(saved_step: int) -> str:
    return f"from step {saved_step}" if saved_step else "from the beginning: there is no checkpoint"


MAX_IDLE = 10
_MOST_BYTES = 64 << 20  # of metrics.jsonl: a hundred thousand steps


def earlier_history(run_dir: Path) -> list[AttemptRecord]:
    """Records of every attempt there was, the oldest first."""
    try:
        told = {record.number: record for record in codec.read(run_dir / "report.json", Report).history}
    except InputError:
        told = {}  # killed before it could report
    folder = run_dir / "attempts"
    numbers = {int(path.name) for path in folder.glob("*") if path.name.isdigit()} if folder.is_dir() else set()
    untold = {number: record for number in numbers - told.keys() if (record := _made_record(folder / str(number)))}
    return [record for _, record in sorted((told | untold).items())]


def refuse_endless_restarts(run_dir: Path) -> None:
    """EnvironmentFaultError where a scheduler would start a run again that ends at the same step each time.

    By its own fault three times; stopped from outside before it did a step, ten times.
    """
    history = earlier_history(run_dir)
    if not history:
        return
    last = history[-1]
    idle = sum(1 for _ in itertools.takewhile(lambda record: record.step == last.step, reversed(history)))
    if idle > MAX_IDLE:
        raise EnvironmentFaultError(
            f"{run_dir}: {MAX_IDLE} jobs in a row were stopped before they did a step, all at step {last.step}\n"
            "give them more time (slurm.time), or another partition"
        )
    if num_at_step(history, last.step) >= MAX_SAME_STEP:
        raise EnvironmentFaultError(
            f"{run_dir}: {MAX_SAME_STEP} attempts in a row ended at step {last.step}, so it is not started again: "
            f"{(last.cause or 'no reason given').splitlines()[0]}\n"
            f"see {run_dir}/attempts/{last.number}/logs; once it is mended, submit it again or add --resume"
        )


def num_at_step(history: Sequence[AttemptRecord], step: int) -> int:
    """How many of the last attempts, without a break, ended badly at this step."""
    count = 0
    for record in reversed(history):
        if record.fault is None or record.step != step:
            break
        count += 1
    return count


def _made_record(attempt_dir: Path) -> AttemptRecord | None:
    """Of an attempt whose supervisor was killed; None where it had not begun."""
    try:
        candidate = codec.read(attempt_dir / "plan.json", Plan).chosen
    except InputError:
        return None
    beats = [beat for rank in range(candidate.num_ranks) if (beat := read_heartbeat(attempt_dir, rank)) is not None]
    if not beats:
        return None
    return AttemptRecord(
        number=int(attempt_dir.name),
        strategy=candidate.strategy.name,
        num_ranks=candidate.num_ranks,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        resumed_from_step=_first_step(attempt_dir.parent.parent, int(attempt_dir.name)),
        step=max(beat.step for beat in beats),
        ending=Ending.FAILED,
        fault=Fault.KILLED,
        cause="the process that started the ranks was killed",
        duration_s=_seconds_seen(attempt_dir, candidate.num_ranks),
        predicted_peak_bytes=candidate.memory.peak_allocated_bytes,
    )


def _first_step(run_dir: Path, attempt: int) -> int | None:
    """The step that an attempt went on from, as its first line of metrics tells; None: from the beginning, or none."""
    for line in tail_rows(run_dir / "metrics.jsonl", limit=_MOST_BYTES):
        if line.get("attempt") == attempt and "step" in line:
            return int(line["step"]) - 1 or None
    return None


def _seconds_seen(attempt_dir: Path, num_ranks: int) -> float:
    """From the plan to the last sign of life."""
    signs = [path for rank in range(num_ranks) if (path := heartbeat_path(attempt_dir, rank)).is_file()]
    newest = max(path.stat().st_mtime for path in signs)
    return max(0.0, newest - (attempt_dir / "plan.json").stat().st_mtime)


class Begin(NamedTuple):
    """Where an attempt began."""

    moment_s: float
    step: int | None  # None: from the beginning


def record_of(end: AttemptEnd, report: Report, attempt_dir: Path, begin: Begin) -> AttemptRecord:
    """What the report of the run keeps of an attempt that has just ended."""
    candidate, resumed = report.plan, report.resumed_from_step
    return AttemptRecord(
        number=int(attempt_dir.name),
        strategy=candidate.strategy.name,
        num_ranks=candidate.num_ranks,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        resumed_from_step=begin.step if resumed is None else resumed,
        step=max(report.step, begin.step or 0),
        ending=report.ending,
        fault=end.fault,
        cause=None if end.fault is None else report.error,
        duration_s=time.monotonic() - begin.moment_s,
        predicted_peak_bytes=candidate.memory.peak_allocated_bytes,
        measured_peak_bytes=report.measured.memory.peak_allocated_bytes,
    )


def incident_of(end: AttemptEnd, decision: Decision) -> str:
    """What went wrong with an attempt, and what follows, in a line."""
    if end.fault is Fault.OUT_OF_MEMORY:
        return f"{_memory_words(end.report)}; {decision.words}"
    words = (end.report.error or "no reason given").splitlines()[0]
    return f"step {end.report.step} with {end.report.plan.strategy.name}: {words}; {decision.words}"


def memory_report(plan: Plan, attempt_dir: Path, end: AttemptEnd, decision: Decision) -> str:
    """Where the report on an attempt stands that ran out of memory, as the end of a line; empty where there is none."""
    if end.fault is None or not end.fault.is_memory:
        return ""
    from launch.attempt.oom_report import write_oom_report

    candidates = (plan.chosen, *plan.fallbacks)
    following = None if decision.candidate is None else candidates[decision.candidate]
    path = write_oom_report(attempt_dir, plan, end.report, next_candidate=following, decision=decision.words)
    return "" if path is None else f" (what it held: {path})"


def _memory_words(report: Report) -> str:
    candidate = report.plan
    parts = candidate.memory.parts
    largest = max(parts, key=lambda name: parts[name]) if parts else "unknown"
    held = report.measured.memory.peak_allocated_bytes
    return (
        f"out of memory at step {report.step} with {candidate.strategy.name}, micro batch {candidate.micro_batch}: "
        f"predicted {format_bytes(candidate.memory.need_bytes)} of {format_bytes(candidate.memory.usable_bytes)}, "
        + ("" if held is None else f"held {format_bytes(held)}, ")
        + f"largest part {largest.replace('_', ' ')}"
    )
