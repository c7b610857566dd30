"""Checkpoints in a run: when one is due, how it is written, the best one, the export, and going back to the last one.

A checkpoint is due by steps, by the clock, or, if the job sets neither, by the cost of saving. Every decision is the
same on all ranks: steps need no exchange; for seconds rank 0's clock decides, by a vote. A run whose job does not set
`checkpoint.every` waits after each save until saving has cost at most `max_share` of the time since the last one, as
measured: a save of a minute comes no sooner than after 33 minutes at 3 %.

The first checkpoint is a rehearsal: it is saved after the first step, while training waits, and read back
(`check_read_back`), so that a disk that loses data ends the run after one step. Later ones
are written as the plan states (trainer/spec/messages/rank_files.py). Nothing is saved while steps are being skipped:
the run may have to go back to before them.

A bad row costs a step. If the steps after it cannot be applied either, an earlier update may have damaged the weights.
So the run goes back to its last checkpoint, within the process and under every engine, and learns from the rows after
those that led here. If that ends at the same place, the run ends with its checkpoints as they are. Weights that are
updated within the backward pass have been changed by a loss that is not finite: such a run goes back at once.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from shardwise.trainer.runtime.checkpoint import (
    CheckpointFolder,
    NonFiniteStateError,
    Ranks,
    folder_name,
    import_state,
    load_weights,
)
from shardwise.trainer.runtime.checkpoint.folders import is_complete, open_checkpoint, verified
from shardwise.trainer.runtime.checkpoint.load import check_read_back
from shardwise.trainer.runtime.checkpoint.optimizer_state import check_supported
from shardwise.trainer.runtime.checkpoint.ranks import on_first, together
from shardwise.trainer.runtime.checkpoint.save import BackgroundSave, Save
from shardwise.trainer.runtime.export.folder import gathered_weights, write_adapter_folder, write_model_folder
from shardwise.trainer.runtime.loop.session import Session, facts_of
from shardwise.trainer.runtime.loop.step import StepResult
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.optimizers import unwrapped, updates_in_backward
from shardwise.trainer.runtime.run.state import (
    MAX_ROLL_BACKS,
    STEPS_UNTIL_ROLL_BACK,
    IncidentKind,
    IncidentLog,
    RunState,
    after_roll_back,
    after_step,
)
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.messages.rank_files import EXPORTING_PHASE, SAVING_PHASE, saving_choice
from shardwise.trainer.spec.plan import Schedule
from shardwise.trainer.spec.report import RollBack

_MAX_END_WAIT_S = 600.0
_END_RETRY_S = 1.0


class SaveTimer:
    """Decides once at the end of each step if a checkpoint is due, from the cost of the saves before."""

    def __init__(self, schedule: Schedule, ranks: Ranks, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._schedule = schedule
        self._ranks = ranks
        self._clock = clock
        self._saved_at = clock()
        self._cost_s = 0.0
        self._is_waiting = False  # due by steps, and put off

    def is_due(self, step: int) -> bool:
        """True if a checkpoint is due after this step; collective."""
        every_steps, every_s = self._schedule.checkpoint_every_steps, self._schedule.checkpoint_every_s
        max_share = self._schedule.saving_max_share
        is_by_step = self._is_waiting or (every_steps is not None and step % every_steps == 0)
        if every_s is None and max_share is None:
            return is_by_step
        waited = self._clock() - self._saved_at
        is_late = every_s is not None and waited >= every_s
        is_cheap = max_share is None or self._cost_s <= max_share * waited
        is_due = not self._ranks.all_agree(not (self._ranks.is_first and (is_by_step or is_late) and is_cheap))
        self._is_waiting = is_by_step and not is_due
        return is_due

    def saved(self, cost_s: float) -> None:
        """A checkpoint was saved, or was not, for so many seconds of training's time."""
        self._saved_at = self._clock()
        self._cost_s = cost_s
        self._is_waiting = False

    def went_on_costing(self, cost_s: float) -> None:
        """Adds the time that committing the last save has cost."""
        self._cost_s += cost_s


def _relative(step: int) -> str:
    """The folder of a step's checkpoint, relative to the run directory."""
    return f"checkpoints/{folder_name(step)}"


def save_state(session: Session, occasion: str, *, in_background: bool = False) -> None:
    """Saves a checkpoint; where it cannot be saved the reason becomes an incident and the run continues.

    In the background, it is copied now and committed by a later `poll_save` or `settle_save`; a pending one is waited
    for. NonFiniteStateError if the state is not worth saving: to train on would only cost time.
    """
    settle_save(session)
    plan, state = session.plan, session.state
    try:
        check_supported(unwrapped(session.optimizer))
    except InputError as error:
        if not state.log.count(IncidentKind.NO_CHECKPOINTS):
            state.log.note(f"no checkpoint: {error}", IncidentKind.NO_CHECKPOINTS)
        return
    session.writer.write_status(SAVING_PHASE, step=state.step)
    keep_every = plan.job.checkpoint.keep_every
    with _failures_as_incidents(session, occasion, step=state.step):
        save = Save(
            session.paths.run_dir / "checkpoints",
            model=session.model,
            optimizer=session.optimizer,
            sharding=plan.chosen.strategy.sharding,
            facts=facts_of(plan, state, session.scaler),
            ranks=session.ranks,
            keep=plan.job.checkpoint.keep,
            keep_every=None if keep_every is None else keep_every.steps,
            protect=_best_saved(session),
        )
        if in_background:
            session.in_flight.save, session.in_flight.occasion = BackgroundSave(save), occasion
        else:
            save.run()
            state.saved_bytes += save.all_bytes if save.is_needed else 0
            _note_saved(session, state.step)


def _note_saved(session: Session, step: int) -> None:
    state = session.state
    state.checkpoint, state.unsaved, session.writer.problem = _relative(step), None, ""


def save_last_state(session: Session, wants_stop: Callable[[], bool]) -> None:
    """Saves the state after the last step; waits for room for as long as the steps took, at most ten minutes."""
    save_state(session, "the end")
    trained_s = sum(done.step_s for done in session.state.steady_steps)
    until, ranks = time.monotonic() + min(_MAX_END_WAIT_S, trained_s), session.ranks
    while (
        session.state.unsaved is not None
        and ranks.all_agree(not wants_stop())
        and ranks.all_agree(not ranks.is_first or time.monotonic() < until)
    ):
        time.sleep(_END_RETRY_S)
        save_state(session, "the end")


def poll_save(session: Session) -> bool:
    """Commits the pending checkpoint if every rank has written it; True if it did. Errors of `save_state`."""
    save = session.in_flight.save
    if save is None:
        return False
    with _failures_as_incidents(session, session.in_flight.occasion, step=save.step):
        if save.poll():
            _note_saved(session, save.step)
    if save.is_over:
        session.in_flight.save = None
    return save.is_over


def settle_save(session: Session) -> None:
    """Waits for the pending checkpoint, if there is one. Errors of `save_state`."""
    save = session.in_flight.save
    if save is None:
        return
    session.writer.write_status(SAVING_PHASE, step=session.state.step)
    session.in_flight.save = None
    with _failures_as_incidents(session, session.in_flight.occasion, step=save.step):
        save.finish()
        _note_saved(session, save.step)


@contextmanager
def _failures_as_incidents(session: Session, occasion: str, *, step: int) -> Iterator[None]:
    """Makes an incident of a save of `step` that fails, and of a state that is not finite the end of the run."""
    state = session.state
    try:
        yield
    except NonFiniteStateError as error:
        state.evaluations = [each for each in state.evaluations if math.isfinite(each.loss)]  # JSON has no NaN
        last = f"the last checkpoint is {state.checkpoint}" if state.checkpoint else "there is no earlier checkpoint"
        raise NonFiniteStateError(f"{error}; {last}; a lower train.lr may keep the run finite") from error
    except EnvironmentFaultError as error:
        if not _is_saved(session, step):
            _note_unsaved(session, f"no checkpoint at {occasion}: {error}")
            return
        state.log.note(f"at {occasion}: {error}")
        _note_saved(session, step)


def _note_unsaved(session: Session, text: str) -> None:
    """Reports a save that failed, at once; of several in a row the first and the last are incidents."""
    state, writer = session.state, session.writer
    is_first = state.unsaved is None
    state.unsaved = writer.problem = text
    writer.beat(SAVING_PHASE, step=state.step)
    if is_first:
        state.log.note(text, IncidentKind.NOT_SAVED)
    else:
        state.log.replace(f"more saves failed, the last one: {text}", IncidentKind.MORE_NOT_SAVED)


def _best_saved(session: Session) -> tuple[int, ...]:
    """The best step among those that have a checkpoint, or are about to; none where the job retains no best one."""
    job, state = session.plan.job, session.state
    if job.checkpoint.best is None and job.eval.early_stop is None:
        return ()
    root = session.paths.run_dir / "checkpoints"
    by_loss = sorted(state.evaluations, key=lambda evaluation: evaluation.loss)
    saved = (each.step for each in by_loss if each.step == state.step or (root / folder_name(each.step)).is_dir())
    best = next(saved, None)
    return () if best is None else (best,)


def keep_best(session: Session) -> None:
    """Saves the model as it is now: in a checkpoint, or, where none can be loaded again, as the export of the run."""
    if session.state.checkpoint != _relative(session.state.step):
        save_state(session, "the best evaluation")
    if _best_checkpoint(session) is None:
        export_model(session)


def load_best(session: Session) -> bool:
    """Puts the weights of the best evaluation into the model; False where no checkpoint of it can be loaded.

    Its optimizer does not change: nothing is trained after this.
    """
    folder = _best_checkpoint(session)
    if folder is None:
        return False
    session.writer.write_status("loading the best checkpoint", step=session.state.step)
    checkpoint = _open_verified(session, folder, which="best")
    load_weights(session.model, session.optimizer, checkpoint, sharding=session.plan.chosen.strategy.sharding)
    return True


def _best_checkpoint(session: Session) -> Path | None:
    """The folder of the best evaluation's checkpoint; None where there is none."""
    best = session.state.best_step
    return None if best is None else _complete_folder(session, _relative(best))


def _complete_folder(session: Session, relative: str) -> Path | None:
    """A checkpoint of this run, or of the one it was resumed from; collective."""
    folders = (run_dir / relative for run_dir in (session.paths.run_dir, session.paths.resume_dir))
    return next((folder for folder in folders if session.ranks.all_agree(is_complete(folder))), None)


def _open_verified(session: Session, folder: Path, *, which: str) -> CheckpointFolder:
    """The checkpoint in a folder, every byte of it hashed by rank 0; collective."""
    doing = f"{folder}: the {which} checkpoint cannot be read"
    on_first(session.ranks, lambda: bytes(verified(folder).path), doing=doing)
    return together(session.ranks, lambda: open_checkpoint(folder), doing=doing)


def export_model(session: Session) -> None:
    """Writes the Hugging Face folder of the run as it is now; of adapters, PEFT's."""
    session.writer.write_status(EXPORTING_PHASE, step=session.state.step)
    plan, out = session.plan, session.paths.run_dir / "export"
    weights = gathered_weights(session.accelerator, session.model)
    if session.is_first:
        if plan.chosen.method.freezes_base:
            incident = write_adapter_folder(weights, plan, out)
        else:
            incident = write_model_folder(plain_model(session.model), plan, out, state_dict=weights)
        if incident is not None:
            session.state.log.note(incident)
    session.state.export = "export"


def _is_saved(session: Session, step: int) -> bool:
    """True if the checkpoint of a step was committed before saving failed; rank 0 checks, and all agree."""
    is_whole = True
    if session.is_first:
        try:
            verified(session.paths.run_dir / "checkpoints" / folder_name(step))
        except (InputError, OSError):
            is_whole = False
    return session.ranks.all_agree(is_whole)


class PeriodicSaves:
    """Saves at the ends of steps; every method is collective."""

    def __init__(self, session: Session) -> None:
        plan = session.plan
        self._session = session
        self._timer = SaveTimer(plan.schedule, session.ranks)
        self._is_background = saving_choice(plan.job, plan.hardware, plan.chosen).is_background
        self._is_rehearsal = plan.schedule.rehearses_save and not plan.is_trial and session.state.step == 0
        self._is_due = self._is_rehearsal
        self._retry_steps, self._retry_at = 1, math.inf  # a save that failed is tried again at this step

    def after_step(self) -> None:
        """Commits a written checkpoint, and saves one that is due."""
        session, state = self._session, self._session.state
        begin = time.monotonic()
        if poll_save(session):
            self._timer.went_on_costing(time.monotonic() - begin)
            self._plan_retry()
        self._is_due |= self._timer.is_due(state.step) or state.step >= self._retry_at
        if not self._is_due or state.spikes.in_a_row:
            return
        self._is_due, begin = False, time.monotonic()
        if self._is_rehearsal:
            self._rehearse()
            self._is_rehearsal = state.unsaved is not None
        else:
            save_state(session, f"step {state.step}", in_background=self._is_background)
        self._timer.saved(time.monotonic() - begin)
        self._plan_retry()

    def _plan_retry(self) -> None:
        """A failed save is tried again after 1, 2, 4, ... steps, the same on every rank."""
        state = self._session.state
        if state.unsaved is None:
            self._retry_steps, self._retry_at = 1, math.inf
        elif state.step >= self._retry_at or self._retry_at == math.inf:
            self._retry_at = state.step + self._retry_steps
            self._retry_steps *= 2

    def _rehearse(self) -> None:
        session, state = self._session, self._session.state
        before = state.saved_bytes
        save_state(session, f"step {state.step}")
        relative = _relative(state.step)
        if state.checkpoint != relative:
            return  # the reason is an incident already
        check_read_back(
            session.paths.run_dir / relative,
            model=session.model,
            optimizer=session.optimizer,
            sharding=session.plan.chosen.strategy.sharding,
            ranks=session.ranks,
        )
        state.saved_bytes += state.saved_bytes - before


_SHOWN_ROWS = 8
_SHOWN_STEPS = 20  # an incident each; then one for all that follow


def note_step(state: RunState, result: StepResult, *, step: int, rows: Sequence[int]) -> None:
    """Adds a step to the record; a step with a fault becomes an incident that names its rows."""
    state.fault, state.last_loss = result.fault, result.loss
    if result.was_skipped and result.fault is None:
        return  # an overflow of fp16 is no sign of bad rows or weights
    state.spikes = after_step(
        state.spikes,
        step=step,
        loss=result.loss,
        grad_norm=result.grad_norm,
        fault=result.fault,
        was_skipped=result.was_skipped,
    )
    if result.fault is not None:
        _note_fault(state.log, result, step=step, rows=rows)


def must_go_back(session: Session) -> bool:
    """True if the run must go back to its last checkpoint; the same on every rank."""
    state = session.state
    if session.plan.is_trial or state.fault is None:
        return False
    is_lost = state.last_loss is not None and not math.isfinite(state.last_loss)
    return (is_lost and updates_in_backward(session.optimizer)) or state.spikes.in_a_row >= STEPS_UNTIL_ROLL_BACK


def go_back(session: Session) -> None:
    """Loads the last checkpoint; the next step learns from the rows after those of this one. Collective.

    EnvironmentFaultError if there is no checkpoint, if the run went back to it before, or too often to others.
    """
    settle_save(session)
    state, step = session.state, session.state.step
    session.writer.write_status("going back to the last checkpoint", step=step)
    if state.checkpoint is None:
        raise _hopeless(state, "there is no checkpoint to go back to")
    folder = _complete_folder(session, state.checkpoint) or session.paths.resume_dir / state.checkpoint
    checkpoint = _open_verified(session, folder, which="last")
    saved = checkpoint.facts
    passed_over = state.spikes.passed_over
    if any(each.after_step >= saved.step for each in passed_over):
        tried = f"going back to step {saved.step} and past other rows did not help"
        raise _hopeless(state, f"{tried}; {state.checkpoint} is retained")
    if len(passed_over) >= MAX_ROLL_BACKS:
        raise _hopeless(state, f"the run went back {len(passed_over)} times already; {state.checkpoint} is retained")
    sharding = session.plan.chosen.strategy.sharding
    import_state(session.model, session.optimizer, checkpoint, sharding=sharding)
    if session.scaler is not None and saved.loss_scaler is not None:
        session.scaler.restore(saved.loss_scaler.scale, saved.loss_scaler.growth_tracker)
    after = f"and on from there with the rows after those of step {step}"
    state.log.note(f"went back from step {step} to step {saved.step}, {after}: {_why(state)}")
    state.roll_backs.append(RollBack(from_step=step, to_step=saved.step))
    state.spikes = after_roll_back(saved.spikes, saved_step=saved.step, step=step)
    state.step, state.fault = saved.step, None
    state.tokens_seen, state.targets_seen = saved.tokens_seen, saved.num_targets
    state.evaluations[:] = saved.evaluations


def _hopeless(state: RunState, what: str) -> EnvironmentFaultError:
    return EnvironmentFaultError(
        f"step {state.step}: {_why(state)};\n{what};\n"
        "use a lower train.lr or a longer train.warmup, or look at the rows that metrics.jsonl names (skipped_rows)"
    )


def _why(state: RunState) -> str:
    count = state.spikes.in_a_row
    several = f"{count} steps in a row could not be taken, the last as " if count > 1 else ""
    return f"{several}{state.fault}"


def _note_fault(log: IncidentLog, result: StepResult, *, step: int, rows: Sequence[int]) -> None:
    if log.count(IncidentKind.STEP_NOT_TAKEN) >= _SHOWN_STEPS:
        text = f"more steps were not taken, the last of them step {step}: metrics.jsonl names the rows of each"
        log.replace(text, IncidentKind.MORE_STEPS_NOT_TAKEN)
        return
    shown = ", ".join(map(str, sorted(rows)[:_SHOWN_ROWS]))
    more = f" and {len(rows) - _SHOWN_ROWS} more" if len(rows) > _SHOWN_ROWS else ""
    what = "was not taken" if result.was_skipped else "should not have been taken"
    kind = IncidentKind.STEP_NOT_TAKEN if result.was_skipped else IncidentKind.OTHER
    log.note(f"step {step} {what}: {result.fault} (rows {shown}{more})", kind)
