"""The course of a run, the same lines on every rank: steps, evaluations, checkpoints, the end.

What happens at which step is a function of the step and of what all ranks agreed on, never of one rank's view: the
stop flag is put to a vote at each step boundary, and checkpoints that are due by time go by rank 0's clock.

Under `eval.early_stop` a run also ends after so many evaluations in a row that were no better than the best before
them. They are in each checkpoint, so a resumed run continues to count. The best weights are then sampled and exported.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext

import msgspec
from msgspec.structs import replace

from shardwise.trainer.runtime.data.batches import MicroBatch, padding_share, step_micro_batches
from shardwise.trainer.runtime.data.stream.rows import POLL_S, StepRows
from shardwise.trainer.runtime.engines.accelerator import facts_after_step
from shardwise.trainer.runtime.loop.adapter_check import AdapterCheck
from shardwise.trainer.runtime.loop.first_steps import FirstSteps
from shardwise.trainer.runtime.loop.memory_profile import MemoryProfile
from shardwise.trainer.runtime.loop.metrics import DoneStep, MetricsFile, StepMetrics, StepObserver
from shardwise.trainer.runtime.loop.objectives import (
    Objectives,
    build_objectives,
    can_sample,
    continue_prompt,
    evaluate,
    evaluations_without_gain,
    prompt_of,
)
from shardwise.trainer.runtime.loop.profile_step import is_traced, traced_step
from shardwise.trainer.runtime.loop.saving import (
    PeriodicSaves,
    export_model,
    go_back,
    keep_best,
    load_best,
    must_go_back,
    note_step,
    save_last_state,
    save_state,
)
from shardwise.trainer.runtime.loop.session import Session, build_session
from shardwise.trainer.runtime.loop.step import run_step
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.models.fused_adapters import check_fused_ran
from shardwise.trainer.runtime.precision.fp8 import check_fp8_ran, timed_facts
from shardwise.trainer.runtime.run.clock import CardWatch, Clock, CoreQueue
from shardwise.trainer.runtime.run.device_time import DeviceSample, sampled_steps
from shardwise.trainer.runtime.run.state import (
    SKIPPED_STEPS,
    IncidentKind,
    ReportWriter,
    RunPaths,
    RunState,
    SteadyStep,
    find_fault,
    step_of_rows,
)
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.messages.rank_files import EVALUATING_PHASE, HOOK_PHASE, SAMPLING_PHASE
from shardwise.trainer.spec.plan import Plan, learning_rate
from shardwise.trainer.spec.report import Ending, Evaluation


def train(plan: Plan, paths: RunPaths, writer: ReportWriter, state: RunState, wants_stop: Callable[[], bool]) -> Ending:
    """Runs the plan to its end or to a stop; `state` is up to date whenever this raises."""
    session = build_session(plan, paths, writer, state)
    with closing(session.stream) if session.stream is not None else nullcontext():
        objectives = build_objectives(session, wants_stop)
        if objectives is None:
            save_state(session, "the stop")
            ending = Ending.STOPPED
        else:
            if not plan.is_trial:
                _sample(session, is_before=True)
            ending = _run_steps(session, objectives, wants_stop)
            if ending is Ending.FINISHED and not plan.is_trial:
                _finish(session, objectives, wants_stop)
    session.ranks.barrier()  # a rank that ends early would break collectives of the others
    return ending


def _run_steps(session: Session, objectives: Objectives, wants_stop: Callable[[], bool]) -> Ending:
    schedule, state = session.plan.schedule, session.state
    saves, watch, adapters = PeriodicSaves(session), StepWatch(session), AdapterCheck(session)
    checks, from_start = FirstSteps(session, objectives.train), state.log.texts_of(IncidentKind.AT_START)
    with (
        MetricsFile(session.paths.run_dir / "metrics.jsonl", is_writer=session.is_first) as metrics,
        CardWatch(session.accelerator.device).watching() as card,
    ):
        observer, sample = StepObserver(session, card), _device_sample(session)
        while state.step < schedule.num_steps and not _has_stalled(session):
            if not _continues(session, wants_stop, observer):
                if not session.plan.is_trial:
                    save_state(session, "the stop")
                return Ending.STOPPED
            done = _one_step(session, objectives, observer, checks, sample)
            done = done._replace(incidents=(*from_start, *done.incidents, *adapters.after_step()))
            from_start = ()
            goes_back = must_go_back(session)
            every = schedule.eval_every_steps
            is_eval_due = not goes_back and every is not None and state.step % every == 0
            evaluation = _evaluate(session, objectives) if is_eval_due else None
            figures = observer.line(done, evaluation)
            if _is_logged(session, figures):
                metrics.append(figures)
                observer.line_written()
            watch.call(figures)
            checks.end_if_certain()
            if goes_back:
                go_back(session)
                continue
            with observer.saving():
                saves.after_step()
            stops_early = session.plan.job.eval.early_stop is not None
            if evaluation is not None and stops_early and state.best_step == state.step:
                keep_best(session)
    return Ending.FINISHED


def _is_logged(session: Session, figures: StepMetrics) -> bool:
    """True if a step is logged under `log.every`; the first, the last, scored, skipped and reported are."""
    every, first = session.plan.job.log.every.steps or 1, (session.state.resumed_from_step or 0) + 1
    is_edge = figures.step in (first, session.plan.schedule.num_steps)
    is_news = bool(figures.skipped) or any(
        value is not None for value in (figures.eval_loss, figures.incidents, figures.gpu_idle_share)
    )
    return is_edge or is_news or figures.step % every == 0


def _continues(session: Session, wants_stop: Callable[[], bool], observer: StepObserver) -> bool:
    """False if a stop is requested, also while all wait for a window of a stream; all ranks agree."""
    stream, step = session.stream, _place_of_rows(session, session.state.step + 1)

    def agrees() -> bool:
        with observer.waiting():
            return session.ranks.all_agree(not wants_stop())

    while agrees():
        is_there = stream is None or not stream.is_next_window(step)
        if is_there or session.ranks.all_agree(stream is not None and stream.is_ready(step)):
            return True
        time.sleep(POLL_S)
    return False


class StepWatch:
    """Calls `on_step` of the user's extensions file on the first rank; an error in it becomes one incident."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._hooks = session.hooks if session.hooks is not None and session.hooks.has(Hook.ON_STEP) else None
        self._has_failed = False

    def call(self, metrics: StepMetrics) -> None:
        """Calls the hook with the step and its line of metrics.jsonl."""
        if self._hooks is None:
            return
        self._session.writer.beat(HOOK_PHASE, step=metrics.step)  # on every rank: the others wait for the first
        if not self._session.is_first or self._has_failed:
            return
        figures = {name: value for name, value in msgspec.to_builtins(metrics).items() if value is not None}
        try:
            self._hooks.call(Hook.ON_STEP, metrics.step, figures)
        except InputError as error:
            self._session.state.log.note(f"{error}; it was not called again")
            self._has_failed = True


def _has_stalled(session: Session) -> bool:
    """True if the run is to end early; all ranks agree."""
    patience = session.plan.job.eval.early_stop
    if patience is None or session.plan.is_trial:
        return False
    return not session.ranks.all_agree(evaluations_without_gain(session.state.evaluations) < patience)


def _device_sample(session: Session) -> DeviceSample:
    """The sample of the GPU's time: the steps after the one whose memory is profiled."""
    plan, device = session.plan, session.accelerator.device
    is_sampled = plan.job.log.device_time and device.type == "cuda" and not plan.is_trial and plan.profile is None
    profiled = (session.state.resumed_from_step or 0) + SKIPPED_STEPS + 1
    steps = sampled_steps(after=profiled, num_steps=plan.schedule.num_steps) if is_sampled else range(0)
    return DeviceSample(device, steps, is_recording=session.is_first)


def _one_step(
    session: Session, objectives: Objectives, observer: StepObserver, checks: FirstSteps, sample: DeviceSample
) -> DoneStep:
    """Runs one step and records its measurements."""
    plan, state, device = session.plan, session.state, session.accelerator.device
    step = state.step + 1
    if state.core_queue is None and step - (state.resumed_from_step or 0) > SKIPPED_STEPS:
        state.core_queue = CoreQueue()
    clock = Clock(device, on_phase=lambda phase: session.writer.beat(phase, step=step - 1))
    checks.before_step()
    sample.begin(step)
    begin = time.perf_counter()
    with clock.measure("data"):
        of_step = _rows_of_step(session, step)
        micro_batches, num_terms = _micro_batches(session, of_step)
    lr = learning_rate(plan.schedule, plan.job.train, step)
    with _maybe_profiled(session, step, clock) as is_profiled:
        result = run_step(
            session.accelerator,
            session.model,
            session.optimizer,
            micro_batches,
            num_terms=num_terms,
            step=step,
            seed=plan.job.train.seed,
            lr=lr,
            clip=plan.job.train.clip,
            clock=clock,
            scaler=session.scaler,
            objective=objectives.train,
            judge=lambda loss, grad_norm: find_fault(
                state.spikes, loss=loss, grad_norm=grad_norm, skips_spikes=plan.job.train.skip_spikes
            ),
        )
    clock.seconds("optimizer")  # waits for it: a step ends with its update
    step_s = time.perf_counter() - begin
    sampled = sample.end(step)
    state.step, state.device_time = step, sampled or state.device_time
    state.tokens_seen += result.num_tokens
    state.targets_seen += result.num_targets
    state.final_loss = result.loss if math.isfinite(result.loss) else state.final_loss
    rows = _row_numbers(session, step) if result.fault is not None else ()
    note_step(state, result, step=step, rows=rows)
    if not is_profiled and not sample.includes(step) and step - (state.resumed_from_step or 0) > SKIPPED_STEPS:
        state.steady_steps.append(SteadyStep(step_s, result.num_tokens, result.num_targets))
        state.steady_parts.append(observer.parts(clock))
    session.writer.write_status("training", step=step)
    if state.verified is not None and not state.verified.facts and not result.was_skipped:
        check_fp8_ran(session.installed.fp8, plain_model(session.model))
        check_fused_ran(plain_model(session.model))
        if session.installed.head is not None:
            session.installed.head.check_ran()
        seen = facts_after_step(session.model, session.optimizer, session.installed, session.scaler)
        compilation = session.installed.compilation
        breaks = {} if compilation is None else compilation.breaks()
        state.verified = replace(state.verified, facts=seen | timed_facts(session.plan), graph_breaks=breaks)
    _note_fallbacks(session, step)
    problems = checks.after_step(of_step, micro_batches, result)
    idle_share = None if sampled is None else sampled.idle_share
    return DoneStep(
        result, clock, lr, step_s, padding_share(micro_batches), rows, _epoch(session), problems, idle_share
    )


def _note_fallbacks(session: Session, step: int) -> None:
    """Logs once what runs as plain torch because it failed to compile."""
    installed, log = session.installed, session.state.log
    for kind, found, text in (
        (IncidentKind.NOT_COMPILED, installed.compilation, "blocks run eagerly, not compiled"),
        (IncidentKind.NOT_FUSED, installed.fused, "blocks run as plain torch, without Liger's kernels"),
        (
            IncidentKind.LOSS_NOT_FUSED,
            installed.loss,
            "the loss is computed in slices by torch, not by Liger",
        ),
    ):
        if found is not None and found.problem is not None and not log.count(kind):
            log.note(f"step {step}: {text}: {found.problem}", kind)
    compilation, verified = installed.compilation, session.state.verified
    if compilation is not None and compilation.failure is not None and verified is not None:
        session.state.verified = replace(verified, not_compiled=compilation.failure)


def _micro_batches(session: Session, of_step: StepRows) -> tuple[Sequence[MicroBatch], int]:
    chosen = session.plan.chosen
    rows, place, seed = of_step
    return step_micro_batches(
        rows,
        step=place,
        seed=seed,
        sequences_per_step=session.plan.schedule.sequences_per_step,
        rank=session.accelerator.process_index,
        num_ranks=session.accelerator.num_processes,
        micro_batch=chosen.micro_batch,
        accumulation=chosen.accumulation,
    )


def _rows_of_step(session: Session, step: int) -> StepRows:
    """The rows of a step: a function of the step and of the rows that were passed over."""
    place = _place_of_rows(session, step)
    if session.stream is not None:
        return session.stream.at(place)
    return StepRows(session.train_rows, place, session.plan.job.train.seed)


def _place_of_rows(session: Session, step: int) -> int:
    """The step of the data order, which counts from 0, that a step of the run learns from."""
    return step_of_rows(step, session.state.spikes.passed_over) - 1


def _row_numbers(session: Session, step: int) -> tuple[int, ...]:
    """The rows of the global batch of a step, as the prepared data counts them."""
    rows, place, seed = _rows_of_step(session, step)
    order = rows.order(seed=seed, sequences_per_step=session.plan.schedule.sequences_per_step)
    return tuple(sorted(order.rows_of_step(place)))


@contextmanager
def _maybe_profiled(session: Session, step: int, clock: Clock) -> Iterator[bool]:
    """Measures the memory of the first steady step, once; of the last one where a run is shorter than that."""
    if is_traced(session.plan, step):
        with traced_step(session, step, clock):
            yield True
        return
    first = session.state.resumed_from_step or 0
    if step != min(first + SKIPPED_STEPS + 1, session.plan.schedule.num_steps):
        yield False
        return
    profile = MemoryProfile(session.model, session.optimizer, session.accelerator.device)
    with profile.step(clock):
        yield True
    session.state.memory = profile.figures()


def _epoch(session: Session) -> float | None:
    """Passes over the data so far; None for a stream, whose length is unknown."""
    plan, state = session.plan, session.state
    if plan.data.is_stream:
        return None
    return (_place_of_rows(session, state.step) + 1) * plan.schedule.sequences_per_step / plan.data.num_rows


def _evaluate(session: Session, objectives: Objectives) -> Evaluation | None:
    state, rows = session.state, session.eval_rows
    if rows is None:
        return None
    session.writer.write_status(EVALUATING_PHASE, step=state.step)
    evaluation = evaluate(
        session.accelerator, session.model, rows, session.plan, step=state.step, objective=objectives.score
    )
    state.evaluations.append(evaluation)
    return evaluation


def _finish(session: Session, objectives: Objectives, wants_stop: Callable[[], bool]) -> None:
    """Runs everything after the last step: the last evaluation, checkpoint and sample, and the export.

    EnvironmentFaultError if the last state could not be saved.
    """
    state = session.state
    is_early = state.step < session.plan.schedule.num_steps
    if not state.evaluations or state.evaluations[-1].step != state.step:
        _evaluate(session, objectives)
    if state.checkpoint != f"checkpoints/step-{state.step:08d}":
        save_last_state(session, wants_stop)
    is_best_loaded = is_early and _go_back_to_best(session)
    _sample(session, is_before=False)
    try:
        if is_best_loaded or not is_early or state.export is None:
            export_model(session)
    except EnvironmentFaultError as error:
        if state.unsaved is None:
            raise
        state.log.note(str(error))
    if state.unsaved is not None:
        since = state.checkpoint or "the beginning"
        raise EnvironmentFaultError(
            f"{state.unsaved};\nmake room and add --resume, which repeats the steps after {since} and saves the end"
        )


def _go_back_to_best(session: Session) -> bool:
    """Ends a run that gained nothing more: notes why, and loads the best weights where a checkpoint has them."""
    state, best = session.state, session.state.best_step
    is_loaded = load_best(session)
    what = f"the export is of step {best}, the best"
    if not is_loaded and state.export is None:
        what = f"the export is of this step: there is no checkpoint of step {best}, the best"
    state.log.note(
        f"early stop at step {state.step} of {session.plan.schedule.num_steps}: {session.plan.job.eval.early_stop} "
        f"evaluations without a lower held-out loss (eval.early_stop); {what}"
    )
    return is_loaded


def _sample(session: Session, *, is_before: bool) -> None:
    state, rows = session.state, session.eval_rows or session.train_rows
    if session.tokenizer is None or not session.is_first or not can_sample(session.plan.chosen.strategy.sharding):
        return
    session.writer.write_status(SAMPLING_PHASE, step=state.step)
    prompt = prompt_of(rows)
    state.prompt = str(session.tokenizer.decode(prompt, skip_special_tokens=True))
    text = continue_prompt(plain_model(session.model), prompt, session.tokenizer)
    if is_before:
        state.sample_before = text
    else:
        state.sample_after = text
