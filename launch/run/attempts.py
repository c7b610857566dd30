"""The attempts of a run: one launcher each, until one ends in order or nothing more is worth trying.

After an out of memory the plan's next fallback runs, after a death or a hang the same again (`retries`), from the
newest checkpoint. The global batch stays: a fallback differs in micro batch, accumulation or mechanism, never in what a
step learns from. The report of the run has every attempt.
"""

import contextlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwise.launch.attempt.end import AttemptEnd
from shardwise.launch.attempt.limits import Deadline, LimitWatch
from shardwise.launch.attempt.retries import (
    MAX_SAME_STEP,
    Begin,
    Decision,
    Tried,
    attempt_record,
    decide,
    earlier_history,
    incident_of,
    newest_facts,
    num_at_step,
    obstacle_to_resume,
)
from shardwise.launch.attempt.supervisor import Ranks, StopKind, StopRequest, started_ranks, watch_attempt
from shardwise.launch.attempt.watchdog import Watchdog, WatchLimits
from shardwise.launch.engine.launcher import prepare_attempt
from shardwise.launch.engine.operators import build_operators, needed_operators
from shardwise.launch.nodes.ranks import Cluster, ClusterRanks
from shardwise.launch.rundir import paths as run_dirs
from shardwise.launch.rundir.lock import HeldFolder, is_cancelled
from shardwise.launch.show.follow import Progress
from shardwise.launch.terminal import Console
from shardwise.launch.track.start import TrackerProcess, running_trackers
from shardwise.trainer.planning.candidates import run_time
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.rank_files import report_room_path
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.report import AttemptRecord, Ending, Fault, Report, RollBack
from shardwise.trainer.spec.units import format_seconds


class RunOutcome(NamedTuple):
    """Outcome of a run, with its report if it wrote one."""

    exit_code: ExitCode
    report: Report | None
    run_dir: Path | None = None


class RunContext(NamedTuple):
    """Values that all attempts of a run share."""

    plan: Plan
    run_dir: Path
    extensions_dir: Path
    console: Console
    stop: StopRequest
    environment: Mapping[str, str]
    limits: WatchLimits
    cluster: Cluster | None  # of a run on several machines
    deadline: Deadline | None
    trackers: TrackerProcess
    folder: HeldFolder

    def follow_folder(self) -> None:
        """Reports that the run directory was moved; EnvironmentFaultError if the run cannot follow it."""
        sentence = self.folder.follow()
        if sentence is not None:
            self.console.line(sentence)


def run_attempts(
    plan: Plan,
    *,
    run_dir: Path,
    resume: bool,
    extensions_dir: Path,
    console: Console,
    stop: StopRequest,
    environment: Mapping[str, str] = os.environ,
    limits: WatchLimits = WatchLimits(),  # noqa: B008  # it never changes
    cluster: Cluster | None = None,
    deadline: Deadline | None = None,
) -> RunOutcome:
    """Runs the chosen candidate, then what follows from how each attempt ended, until one ends in order.

    Ahead of `deadline` the run stops with a checkpoint as after USR1.
    EnvironmentFaultError where an attempt cannot be started at all.
    """
    with (
        HeldFolder(run_dir) as folder,
        running_trackers(plan, run_dir=run_dir, console=console, environment=environment, stop=stop) as trackers,
    ):
        context = RunContext(
            plan, run_dir, extensions_dir, console, stop, environment, limits, cluster, deadline, trackers, folder
        )
        return _run_all(context, resume=resume)


def _run_all(context: RunContext, *, resume: bool) -> RunOutcome:
    plan, run_dir, console, stop = context.plan, context.run_dir, context.console, context.stop
    past = _History(history=earlier_history(run_dir) if resume else [])
    candidates = (plan.chosen, *plan.fallbacks)
    number: int | None = _place_of_last(run_dir, candidates, console) if resume else 0
    while number is not None:
        context.follow_folder()
        may_resume = bool(run_dirs.committed_checkpoints(run_dir)) and (resume or bool(past.tried))
        begin = Begin(time.monotonic(), _saved_step(run_dir) if may_resume else None)
        attempt_dir = prepare_attempt(plan, candidates[number], run_dir=run_dir, resume=may_resume)
        spending = LimitWatch(run_dir, plan, past.history, num_ranks=candidates[number].num_ranks)
        end = _run_one(context, attempt_dir, past, spending, _started(context, attempt_dir))
        decision = _after(past, end, number, context)
        number = None if stop.kind is not None else decision.candidate
        report = _concluded(context, attempt_dir, past, spending, begin, end, decision)
    return RunOutcome(ExitCode(report.exit_code), report, run_dir)


def _concluded(
    context: RunContext,
    attempt_dir: Path,
    past: "_History",
    spending: LimitWatch,
    begin: Begin,
    end: AttemptEnd,
    decision: Decision,
) -> Report:
    """The report of the run after an attempt, which is written."""
    plan, run_dir, console, stop = context.plan, context.run_dir, context.console, context.stop
    report = _run_report(end, decision, stop, run_dir)
    past.history.append(attempt_record(end, report, attempt_dir, begin))
    past.roll_backs += report.roll_backs
    past.incidents += [*end.report.incidents, *spending.incidents(report)]
    if end.fault is not None:
        incident = incident_of(end, decision)
        past.incidents.append(incident)
        console.line(incident + _oom_note(plan, attempt_dir, end, decision))
    predicted = run_time(context_of(plan), report.plan)
    has_speed = context_of(plan).device.has_known_speed
    report = msgspec.structs.replace(
        report,
        incidents=tuple(dict.fromkeys(past.incidents)),
        roll_backs=tuple(past.roll_backs),
        history=tuple(past.history),
        attempts=len(past.history),
        duration_s=sum(record.duration_s for record in past.history),
        predicted_s=predicted.total_s if has_speed else None,
        predicted_parts_s=predicted.parts_s if has_speed else {},
        phases_s=_summed(record.phases_s for record in past.history),
        limit=spending.limit_of(report),
    )
    return _write_report(run_dir, attempt_dir, report, console)


def watch_by_hand(context: RunContext, attempt_dir: Path, ranks: Ranks) -> Report:
    """Does for an attempt whose ranks run already what a run does for those that it starts; none follows it."""
    number = int(attempt_dir.name)
    past = _History(history=[each for each in earlier_history(context.run_dir) if each.number != number])
    chosen = codec.read(attempt_dir / "plan.json", Plan).chosen
    spending = LimitWatch(context.run_dir, context.plan, past.history, num_ranks=chosen.num_ranks)
    begin = Begin(time.monotonic(), _saved_step(context.run_dir) or None)
    end = _run_one(context, attempt_dir, past, spending, contextlib.nullcontext(ranks))
    if end.report.ending is Ending.PREEMPTED and context.stop.kind is None:  # torchrun sends TERM at Ctrl-C
        is_queued = "SLURM_JOB_ID" in context.environment
        context.stop.kind = StopKind.REQUEUE if is_queued else StopKind.INTERRUPT
    decision = Decision(None, "the run was started by hand: not restarted; --resume continues it")
    return _concluded(context, attempt_dir, past, spending, begin, end, decision)


def _oom_note(plan: Plan, attempt_dir: Path, end: AttemptEnd, decision: Decision) -> str:
    """Path of the report on an attempt that ran out of memory, as the end of a line; empty if there is none."""
    if end.fault is None or not end.fault.is_memory:
        return ""
    from shardwise.launch.attempt.oom_report import write_oom_report

    following = None if decision.candidate is None else (plan.chosen, *plan.fallbacks)[decision.candidate]
    path = write_oom_report(attempt_dir, plan, end.report, next_candidate=following, decision=decision.reason)
    return "" if path is None else f" (memory report: {path})"


@dataclass(slots=True)
class _History:
    """History of the attempts so far."""

    history: list[AttemptRecord]
    tried: list[Tried] = field(default_factory=list)
    incidents: list[str] = field(default_factory=list)
    roll_backs: list[RollBack] = field(default_factory=list)


def _run_one(
    context: RunContext,
    attempt_dir: Path,
    past: _History,
    spending: LimitWatch,
    started: contextlib.AbstractContextManager[Ranks],
) -> AttemptEnd:
    plan = codec.read(attempt_dir / "plan.json", Plan)
    progress = Progress(
        context.console,
        attempt_dir=attempt_dir,
        plan=plan,
        incidents=past.incidents,
        environment=context.environment,
    )
    watchdog = Watchdog(attempt_dir, num_ranks=plan.chosen.num_ranks, limits=context.limits.scaled_to(plan))

    has_announced_stop = False

    def tick() -> None:
        nonlocal has_announced_stop
        if context.stop.num_interrupts and not has_announced_stop:
            has_announced_stop = True
            context.console.line(_stop_text(watchdog))
        context.follow_folder()
        progress.tick()
        context.trackers.tick()
        if context.stop.kind is None and is_cancelled(context.run_dir):  # on another machine, perhaps
            context.stop.kind = StopKind.INTERRUPT
        spending.stop_in_time(context.stop, watchdog, context.console)
        if context.deadline is not None:
            context.deadline.stop_in_time(context.stop, watchdog, context.console)

    with contextlib.ExitStack() as held:
        held.enter_context(progress.shown())
        ranks = held.enter_context(started)
        return watch_attempt(
            ranks,
            attempt_dir=attempt_dir,
            stop=context.stop,
            on_tick=tick,
            on_notice=context.console.line,
            watchdog=watchdog,
        )


def _stop_text(watchdog: Watchdog) -> str:
    if not watchdog.step:
        return "stopping at the next step; Ctrl-C again to stop now"
    needed = f", up to {format_seconds(watchdog.stop_s)}" if watchdog.stop_s else ""
    return f"stopping after this step with a checkpoint{needed}; Ctrl-C again to stop now, without one"


@contextlib.contextmanager
def _started(context: RunContext, attempt_dir: Path) -> Iterator[Ranks]:
    """The ranks of an attempt, on this machine or on several; their resources are held until they have ended."""
    plan = codec.read(attempt_dir / "plan.json", Plan)
    if plan.num_machines > 1:
        if context.cluster is None:
            raise EnvironmentFaultError(
                f"the plan is for {plan.num_machines} machines, this is one of them; start it with shardwise submit "
                "under Slurm, else with --nodes, --node-rank and --head on each"
            )
        yield ClusterRanks(context.cluster, attempt_dir=attempt_dir, stop=context.stop)
        return
    _build_operators(context, plan.chosen)  # a run that is resumed with a fallback may not have them
    with started_ranks(
        plan,
        attempt_dir,
        extensions_dir=context.extensions_dir,
        num_cores=plan.hardware.host.num_cores,
        environment=context.environment,
        on_progress=context.console.line,
    ) as ranks:
        yield ranks


def _after(past: _History, end: AttemptEnd, number: int, context: RunContext) -> Decision:
    """The next step after this end; records the attempt."""
    if end.fault is None:
        return Decision(None, "")
    plan, saved = context.plan, newest_facts(context.run_dir)
    saved_step = 0 if saved is None else saved.step
    past.tried.append(
        Tried(
            candidate=number,
            fault=end.fault,
            step=end.report.step,
            saved_step=saved_step,
            cause=end.report.error or "",
            is_final=end.is_final,
            had_no_chance=not end.has_trained and not end.is_transient,
        )
    )
    if context.stop.is_urgent:
        return Decision(None, f"what was learned after step {saved_step} is lost")
    if end.is_machine_lost and context.cluster is not None and context.cluster.is_slurm:
        return _after_lost_machine(past, end, context)
    if plan.is_trial and not end.fault.is_memory:
        return Decision(None, "a trial is not repeated")

    def obstacle(candidate: Candidate) -> str | None:
        if end.fault is Fault.HOST_OUT_OF_MEMORY and not _needs_less_of_host(plan, candidate, end.report.plan):
            return "needs no less of the host's memory"
        return obstacle_to_resume(saved, candidate) or _obstacle_to_build(context, candidate)

    return decide(past.tried, (plan.chosen, *plan.fallbacks), obstacle)


def _obstacle_to_build(context: RunContext, candidate: Candidate) -> str | None:
    """Builds the operators of a fallback; if that fails, the end of a sentence that begins with its name."""
    if context.plan.num_machines > 1:
        return None  # each machine builds its own when it starts the attempt
    try:
        _build_operators(context, candidate)
    except EnvironmentFaultError as error:
        context.console.line(f"fallback {candidate.strategy.name} is left out: {error}")
        return "needs an operator that cannot be built here"
    return None


def _build_operators(context: RunContext, candidate: Candidate) -> None:
    build_operators(
        needed_operators(candidate),
        extensions_dir=context.extensions_dir,
        on_progress=context.console.line,
        device_kind=context.plan.device_kind,
        should_stop=lambda: context.stop.kind is not None,
    )


def _after_lost_machine(past: _History, end: AttemptEnd, context: RunContext) -> Decision:
    """A job that lost a node gets no replacement: Slurm has to start it again on other nodes."""
    if context.stop.kind is None and num_at_step(past.history, end.report.step) + 1 >= MAX_SAME_STEP:
        return Decision(None, f"it was the {MAX_SAME_STEP}rd time at step {end.report.step}: not given back to Slurm")
    if context.stop.kind is None:
        context.stop.kind = StopKind.REQUEUE
    return Decision(0, "the job is returned to Slurm, which starts it again")


def _needs_less_of_host(plan: Plan, candidate: Candidate, now: Candidate) -> bool:
    """True if a candidate offloads less; on a CPU, the device is the host."""
    if plan.device_kind is DeviceKind.CPU:
        return True
    then, host = now.memory, candidate.memory
    return host.pinned_bytes + host.host_bytes < then.pinned_bytes + then.host_bytes


def _saved_step(run_dir: Path) -> int:
    saved = newest_facts(run_dir)
    return 0 if saved is None else saved.step


def _place_of_last(run_dir: Path, candidates: tuple[Candidate, ...], console: Console) -> int:
    """The candidate of the newest attempt, which may be a fallback."""
    newest = run_dir / "attempts" / str(run_dirs.next_attempt(run_dir) - 1) / "plan.json"
    try:
        place = candidates.index(codec.read(newest, Plan).chosen)
    except (InputError, ValueError):
        return 0  # the plan is another one now, or nothing ran yet
    if place:
        console.line(f"continuing with fallback {place} of the plan, as in the attempt before")
    return place


def _run_report(end: AttemptEnd, decision: Decision, stop: StopRequest, run_dir: Path) -> Report:
    """The attempt's report with the ending, exit code and newest checkpoint of the run.

    Only this process knows whether Ctrl-C, or TERM or USR1, was the request to stop. A stopped run whose attempt failed
    meanwhile, and would have been followed by another, counts as stopped: it can be resumed.
    """
    report = end.report
    ending = Ending.OUT_OF_MEMORY if decision.is_out_of_fallbacks else report.ending
    is_stopped = ending in (Ending.STOPPED, Ending.PREEMPTED) or decision.candidate is not None or stop.is_urgent
    if stop.kind is not None and is_stopped and ending is not Ending.FINISHED:
        ending = Ending.PREEMPTED if stop_code(stop, run_dir) is ExitCode.REQUEUE else Ending.STOPPED
    code = {
        Ending.FINISHED: ExitCode.DONE,
        Ending.STOPPED: ExitCode.INTERRUPTED,
        Ending.PREEMPTED: ExitCode.REQUEUE,
        Ending.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
        Ending.FAILED: ExitCode.ENVIRONMENT,
    }[ending]
    committed = run_dirs.committed_checkpoints(run_dir)
    newest = f"checkpoints/{committed[-1].name}" if committed else None
    return msgspec.structs.replace(report, ending=ending, exit_code=int(code), checkpoint=report.checkpoint or newest)


def _summed(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for each in parts:
        total.update(each)
    return dict(total)


def stop_code(stop: StopRequest, run_dir: Path | None = None) -> ExitCode:
    """The exit code of a run that was stopped by request; nothing continues one that a person cancelled."""
    is_for_good = stop.kind is not StopKind.REQUEUE or (run_dir is not None and is_cancelled(run_dir))
    return ExitCode.INTERRUPTED if is_for_good else ExitCode.REQUEUE


def _write_report(run_dir: Path, attempt_dir: Path, report: Report, console: Console) -> Report:
    """Writes the report of the run; where that fails, the returned one has no longer the exit code of success."""
    report_room_path(attempt_dir).unlink(missing_ok=True)
    try:
        codec.write_redacted(run_dir / "report.json", report)
    except OSError as error:
        console.line(f"{run_dir}: the report cannot be written: {error.strerror}")
        return msgspec.structs.replace(report, exit_code=report.exit_code or int(ExitCode.ENVIRONMENT))
    return report
