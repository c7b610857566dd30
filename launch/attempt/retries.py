"""The decision after an attempt that failed, and the history of a run's attempts.

    out of memory         the next fallback of the plan that can resume from the checkpoint, at the same global batch
    died, hung, failed    the same configuration again from the newest checkpoint, a bounded number of times
    would happen again    the end of the run: an error that the user has to fix, or one before the first step

Restarts are counted since the last attempt that wrote a newer checkpoint, so a run that makes progress may be
interrupted often. A step that fails three times ends the run. Attempts are counted over all starts of a run, those
whose supervisor was killed included: a node that fails ends the supervisor as well, and a scheduler starts the job
again.

A fallback that its ranks would refuse costs a start without progress, so the manifest of the checkpoint is read here,
without torch. The remaining checks of the ranks (names, shapes, the base under adapters) are the same for every
fallback.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shardwise.launch.attempt.end import AttemptEnd
from shardwise.launch.rundir.files import read_value
from shardwise.launch.rundir.lock import local_owner, recorded_owner
from shardwise.launch.rundir.metrics import first_step
from shardwise.launch.rundir.paths import committed_checkpoints
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.messages.rank_files import heartbeat_path, read_heartbeat
from shardwise.trainer.spec.optimizers import Optimizer, have_same_state
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.report import AttemptRecord, Ending, Fault, Report
from shardwise.trainer.spec.strategy import Method, Precision
from shardwise.trainer.spec.units import format_bytes

_SILENT_S = 120.0  # a write to a shared file system may appear a minute late
MAX_RESTARTS = 5  # without a newer checkpoint
MAX_SAME_STEP = 3  # attempts that end at one step
MAX_IDLE = 10  # jobs that were stopped before they did a step


class Tried(NamedTuple):
    """One attempt that did not end in order."""

    candidate: int  # index into the plan's chosen candidate and fallbacks
    fault: Fault
    step: int  # optimizer steps done
    saved_step: int  # of the newest checkpoint afterwards; 0: there is none
    cause: str = ""
    is_final: bool = False  # the user has to fix something
    had_no_chance: bool = False  # it did no step, for a reason that is not transient

    @property
    def was_refused(self) -> bool:
        """True if an error prevented its first step, or the user has to fix it."""
        return self.is_final or (self.fault is Fault.ERROR and self.had_no_chance)


class Decision(NamedTuple):
    """The next attempt, or the end of the run."""

    candidate: int | None  # None: the run ends
    reason: str
    is_out_of_fallbacks: bool = False


def decide(
    tried: Sequence[Tried], candidates: Sequence[Candidate], obstacle: Callable[[Candidate], str | None]
) -> Decision:
    """The next attempt after `tried`, the newest last. Pure.

    `obstacle` returns why a fallback would not help, to follow its name in a sentence; None if it may help.
    """
    last = tried[-1]
    is_fallback = len(tried) > 1 and tried[-2].candidate < last.candidate
    if last.fault.is_memory or (is_fallback and last.was_refused and last.had_no_chance):
        return _next_fallback(last, candidates, obstacle)
    if last.is_final or (last.was_refused and (len(tried) == 1 or tried[-2].cause == last.cause)):
        return Decision(None, "the same would happen again: not restarted")
    recent = _without_progress(tried)
    if sum(1 for each in recent if each.step == last.step) >= MAX_SAME_STEP:
        return Decision(None, f"it was the {MAX_SAME_STEP}rd time at step {last.step}: not restarted")
    if len(recent) > MAX_RESTARTS:
        return Decision(None, f"restarted {MAX_RESTARTS} times without a newer checkpoint: not again")
    return Decision(last.candidate, f"starting again {_from(last.saved_step)}")


def earlier_history(run_dir: Path) -> list[AttemptRecord]:
    """Records of every attempt of the run, the oldest first; those without a report are made from their heartbeats."""
    try:
        reported = {record.number: record for record in codec.read(run_dir / "report.json", Report).history}
    except InputError:
        reported = {}  # killed before it could report
    folder = run_dir / "attempts"
    numbers = {int(path.name) for path in folder.glob("*") if path.name.isdecimal()} if folder.is_dir() else set()
    made = {number: _record_of_killed(folder / str(number)) for number in numbers - reported.keys()}
    return [record for _, record in sorted((reported | made).items()) if record is not None]


def is_alive(run_dir: Path, attempt: int) -> bool:
    """True if the supervisor of this attempt runs here, or elsewhere and the attempt gave a sign of life lately."""
    owner = recorded_owner(run_dir)
    if owner is None or owner.is_local:
        return local_owner(run_dir) is not None
    heartbeat = heartbeat_path(run_dir / "attempts" / str(attempt), 0)
    return heartbeat.is_file() and time.time() - heartbeat.stat().st_mtime < _SILENT_S


def refuse_endless_restarts(run_dir: Path) -> None:
    """Raises EnvironmentFaultError if a scheduler would restart a run that ends at the same step each time.

    That is three failures, or ten jobs that were stopped before they did a step.
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
            f"see {run_dir}/attempts/{last.number}/logs; after fixing the cause, submit it again or add --resume"
        )


def num_at_step(history: Sequence[AttemptRecord], step: int) -> int:
    """Number of consecutive last attempts that failed at this step."""
    failed = itertools.takewhile(lambda record: record.fault is not None and record.step == step, reversed(history))
    return sum(1 for _ in failed)


class Begin(NamedTuple):
    """The start of an attempt."""

    moment_s: float  # on the monotonic clock
    step: int | None  # None: from the beginning


def attempt_record(end: AttemptEnd, report: Report, attempt_dir: Path, begin: Begin) -> AttemptRecord:
    """The record of an attempt that has just ended, for the report of the run."""
    resumed = report.resumed_from_step
    return _record(
        attempt_dir,
        report.plan,
        resumed_from_step=begin.step if resumed is None else resumed,
        step=max(report.step, begin.step or 0),
        ending=report.ending,
        fault=end.fault,
        cause=None if end.fault is None else report.error,
        duration_s=time.monotonic() - begin.moment_s,
        measured_peak_bytes=report.measured.memory.peak_allocated_bytes,
        phases_s=report.phases_s,
    )


def incident_of(end: AttemptEnd, decision: Decision) -> str:
    """The failure of an attempt and the decision, in one line."""
    report, candidate = end.report, end.report.plan
    if end.fault is not Fault.OUT_OF_MEMORY:
        cause = (report.error or "no reason given").splitlines()[0].rstrip(";")
        return f"step {report.step} with {candidate.strategy.name}: {cause}; {decision.reason}"
    memory, held = candidate.memory, report.measured.memory.peak_allocated_bytes
    largest = max(memory.parts, key=lambda name: memory.parts[name]) if memory.parts else "unknown"
    return (
        f"out of memory at step {report.step} with {candidate.strategy.name}, micro batch {candidate.micro_batch}: "
        f"predicted {format_bytes(memory.need_bytes)} of {format_bytes(memory.usable_bytes)}, "
        + ("" if held is None else f"held {format_bytes(held)}, ")
        + f"largest part {largest.replace('_', ' ')}; {decision.reason}"
    )


class SavedFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a manifest that decide; the ranks read the whole manifest, strictly."""

    step: int
    optimizer: Optimizer
    precision: Precision
    lora: dict[str, Any] | None = None
    galore: dict[str, Any] | None = None
    is_quantised: bool = False


class _Manifest(msgspec.Struct, frozen=True, kw_only=True):
    facts: SavedFacts


def read_facts(checkpoint: Path) -> SavedFacts | None:
    """The facts on a checkpoint; None if its manifest cannot be read, which the ranks report with the reason."""
    try:
        return msgspec.json.decode(codec.read_file(checkpoint / "MANIFEST.json"), type=_Manifest).facts
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def newest_facts(run_dir: Path) -> SavedFacts | None:
    """The facts on the newest checkpoint of a run whose manifest can be read; None if there is none."""
    facts = (read_facts(folder) for folder in reversed(committed_checkpoints(run_dir)))
    return next((each for each in facts if each is not None), None)


def obstacle_to_resume(saved: SavedFacts | None, candidate: Candidate) -> str | None:
    """The reason why a candidate cannot resume from a checkpoint, to follow its name in a sentence; None if it can."""
    if saved is None:
        return None
    strategy, method = candidate.strategy, candidate.method
    if not have_same_state(saved.optimizer, strategy.optimizer):
        return f"cannot resume from a checkpoint of {saved.optimizer}"
    if (saved.lora is not None) is not method.freezes_base or saved.is_quantised is not (method is Method.QLORA):
        return "trains other weights than the checkpoint holds"
    if (saved.galore is not None) is not (method is Method.GALORE):
        return "keeps moments of other gradients than the checkpoint holds"
    if strategy.precision.master_bytes < saved.precision.master_bytes:
        return f"keeps weights in fewer bits than the checkpoint of {saved.precision}"
    return None


def _next_fallback(
    last: Tried, candidates: Sequence[Candidate], obstacle: Callable[[Candidate], str | None]
) -> Decision:
    skipped: list[str] = []
    for number, candidate in enumerate(candidates[last.candidate + 1 :], start=last.candidate + 1):
        reason = obstacle(candidate)
        if reason is None:
            return Decision(
                number, f"continuing with the next fallback at the same global batch, {_from(last.saved_step)}"
            )
        skipped.append(f"{candidate.strategy.name} {reason}")
    reasons = f" ({'; '.join(dict.fromkeys(skipped))})" if skipped else ""
    return Decision(None, f"no fallback is left{reasons}", is_out_of_fallbacks=True)


def _without_progress(tried: Sequence[Tried]) -> Sequence[Tried]:
    """The attempts from the last one that wrote a newer checkpoint on, without those that ran out of memory."""
    begin = 0
    for number in range(1, len(tried)):
        if tried[number].saved_step > tried[number - 1].saved_step:
            begin = number
    return [each for each in tried[begin:] if not each.fault.is_memory]


def _from(saved_step: int) -> str:
    return f"from step {saved_step}" if saved_step else "from the beginning: there is no checkpoint"


def _record(attempt_dir: Path, candidate: Candidate, **fields: object) -> AttemptRecord:
    return AttemptRecord(
        number=int(attempt_dir.name),
        strategy=candidate.strategy.name,
        num_ranks=candidate.num_ranks,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        predicted_peak_bytes=candidate.memory.peak_allocated_bytes,
        **fields,  # type: ignore[arg-type] # its other fields
    )


def _record_of_killed(attempt_dir: Path) -> AttemptRecord | None:
    """The record of an attempt whose supervisor was killed; None if it had not begun."""
    plan = read_value(attempt_dir / "plan.json", Plan)
    if plan is None:
        return None
    candidate = plan.chosen
    ranks = range(candidate.num_ranks)
    beats = [beat for rank in ranks if (beat := read_heartbeat(attempt_dir, rank)) is not None]
    if not beats:
        return None
    files = [path for rank in ranks if (path := heartbeat_path(attempt_dir, rank)).is_file()]
    first = first_step(attempt_dir.parent.parent / "metrics.jsonl", int(attempt_dir.name))
    seconds = max(path.stat().st_mtime for path in files) - (attempt_dir / "plan.json").stat().st_mtime
    return _record(
        attempt_dir,
        candidate,
        resumed_from_step=None if first is None else first - 1 or None,
        step=max(beat.step for beat in beats),
        ending=Ending.FAILED,
        fault=Fault.KILLED,
        cause="the process that started the ranks was killed",
        duration_s=max(0.0, seconds),
    )
