"""Saving in a run: when a checkpoint is due, how it is written, the best one, and the exported model.

A checkpoint is due by steps, by the clock, or, if the job leaves it open, by what saving costs. Every decision is the
same on all ranks: steps need no exchange; for seconds rank 0's clock decides, by a vote. A run whose job does not set
`checkpoint.every` waits after each save until saving has cost at most `max_share` of the time since the last one, as
measured: a save of a minute comes no sooner than after 33 minutes at 3 %.

The first checkpoint is a rehearsal: it is saved after the first step, while training waits, and read back
(checkpoint/verify.py), so that a disk that does not keep its data ends the run when that has cost one step. The later
ones are written as the plan says (trainer/spec/messages/saving.py). Nothing is saved while steps are being skipped: it
might be what a run has to go back behind.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.trainer.runtime.checkpoint import NonFiniteStateError, Ranks, folder_name, load_weights
from shardwise.trainer.runtime.checkpoint.folders import is_complete, open_checkpoint, verified
from shardwise.trainer.runtime.checkpoint.layout.optimizer_state import check_supported
from shardwise.trainer.runtime.checkpoint.ranks import on_first, together
from shardwise.trainer.runtime.checkpoint.save import BackgroundSave, Save
from shardwise.trainer.runtime.checkpoint.verify import check_read_back
from shardwise.trainer.runtime.export.folder import write_adapter_folder, write_model_folder
from shardwise.trainer.runtime.export.weights import gathered_weights
from shardwise.trainer.runtime.loop.session import Session, facts_of
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.optimizers import unwrapped
from shardwise.trainer.runtime.run.state import IncidentKind
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.messages.rank_files import SAVING_PHASE
from shardwise.trainer.spec.messages.saving import saving_choice
from shardwise.trainer.spec.plan import Schedule


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


def save_state(session: Session, occasion: str, *, in_background: bool = False) -> None:
    """Saves a checkpoint; where it cannot be saved the reason becomes an incident and the run goes on.

    In the background, it is copied now and committed by a later `poll_save` or `settle_save`; one that is on its way
    already is waited for. NonFiniteStateError where there is nothing worth saving any more: to train on would only
    cost time.
    """
    settle_save(session)
    plan, state = session.plan, session.state
    obstacle = _obstacle_to_checkpoints(session.optimizer)
    if obstacle is not None:
        if not state.log.count(IncidentKind.NO_CHECKPOINTS):
            state.log.note(f"no checkpoint: {obstacle}", IncidentKind.NO_CHECKPOINTS)
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
            state.checkpoint = f"checkpoints/{folder_name(state.step)}"


def _obstacle_to_checkpoints(optimizer: object) -> str | None:
    """Why a run of this (wrapped) optimizer saves no checkpoint, in a sentence; None where it does."""
    try:
        check_supported(unwrapped(optimizer))
    except InputError as error:
        return str(error)
    return None


def poll_save(session: Session) -> bool:
    """Commits a checkpoint that is on its way if every rank has written it; whether one was. Errors of `save_state`."""
    save = session.in_flight.save
    if save is None:
        return False
    with _failures_as_incidents(session, session.in_flight.occasion, step=save.step):
        if save.poll():
            session.state.checkpoint = f"checkpoints/{folder_name(save.step)}"
    if save.is_over:
        session.in_flight.save = None
    return save.is_over


def settle_save(session: Session) -> None:
    """Waits for a checkpoint that is on its way, if there is one. Errors of `save_state`."""
    save = session.in_flight.save
    if save is None:
        return
    session.writer.write_status(SAVING_PHASE, step=session.state.step)
    session.in_flight.save = None
    with _failures_as_incidents(session, session.in_flight.occasion, step=save.step):
        save.finish()
        session.state.checkpoint = f"checkpoints/{folder_name(save.step)}"


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
            state.log.note(f"no checkpoint at {occasion}: {error}")
            return
        state.log.note(f"at {occasion}: {error}")
        state.checkpoint = f"checkpoints/{folder_name(step)}"


def _best_saved(session: Session) -> tuple[int, ...]:
    """The best step among those that have a checkpoint, or are about to; none where the job keeps no best one."""
    job, state = session.plan.job, session.state
    if job.checkpoint.best is None and job.eval.early_stop is None:
        return ()
    root = session.paths.run_dir / "checkpoints"
    by_loss = sorted(state.evaluations, key=lambda evaluation: evaluation.loss)
    saved = (each.step for each in by_loss if each.step == state.step or (root / folder_name(each.step)).is_dir())
    best = next(saved, None)
    return () if best is None else (best,)


def keep_best(session: Session) -> None:
    """Keeps what the model is now: in a checkpoint, or, where none can be loaded again, as the export of the run."""
    if session.state.checkpoint != f"checkpoints/{folder_name(session.state.step)}":
        save_state(session, "the best evaluation")
    if _best_checkpoint(session) is None:
        export_model(session)


def load_best(session: Session) -> bool:
    """Puts the weights of the best evaluation into the model; False where no checkpoint of it can be loaded.

    Its optimizer is left as it is: nothing is trained after this.
    """
    folder = _best_checkpoint(session)
    if folder is None:
        return False
    session.writer.write_status("loading the best checkpoint", step=session.state.step)
    doing = f"{folder}: the best checkpoint cannot be read"
    on_first(session.ranks, lambda: bytes(verified(folder).path), doing=doing)
    checkpoint = together(session.ranks, lambda: open_checkpoint(folder), doing=doing)
    load_weights(session.model, session.optimizer, checkpoint, sharding=session.plan.chosen.strategy.sharding)
    return True


def _best_checkpoint(session: Session) -> Path | None:
    """The folder of the best evaluation's checkpoint; None where there is none."""
    best = session.state.best_step
    if best is None:
        return None
    for run_dir in (session.paths.run_dir, session.paths.resume_dir):
        folder = run_dir / "checkpoints" / folder_name(best)
        if session.ranks.all_agree(is_complete(folder)):
            return folder
    return None


def export_model(session: Session) -> None:
    """Writes the Hugging Face folder of the run as it is now; of adapters, PEFT's."""
    session.writer.write_status("exporting the model", step=session.state.step)
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
        self._is_background = saving_choice(plan, plan.chosen).is_background
        self._is_rehearsal = plan.schedule.rehearses_save and not plan.is_trial and session.state.step == 0
        self._is_due = self._is_rehearsal

    def after_step(self) -> None:
        """Commits what is written, and saves where that is due."""
        session, state = self._session, self._session.state
        begin = time.monotonic()
        if poll_save(session):
            self._timer.went_on_costing(time.monotonic() - begin)
        self._is_due |= self._timer.is_due(state.step)
        if not self._is_due or state.spikes.in_a_row:
            return
        self._is_due, begin = False, time.monotonic()
        if self._is_rehearsal:
            self._is_rehearsal = False
            self._rehearse()
        else:
            save_state(session, f"step {state.step}", in_background=self._is_background)
        self._timer.saved(time.monotonic() - begin)

    def _rehearse(self) -> None:
        session, state = self._session, self._session.state
        save_state(session, f"step {state.step}")
        relative = f"checkpoints/{folder_name(state.step)}"
        if state.checkpoint != relative:
            return  # the reason is an incident already
        check_read_back(
            session.paths.run_dir / relative,
            model=session.model,
            optimizer=session.optimizer,
            sharding=session.plan.chosen.strategy.sharding,
            ranks=session.ranks,
        )
