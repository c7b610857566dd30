"""The checkpoints that a run saves on its way: when they are due, how they are written, and the first as a rehearsal.

The first is saved after the first step and read back (checkpoint/read_back.py), so that a disk that does not keep what
it is given ends the run when that has cost one step. It is written while training waits; the later ones as the plan
says (trainer/spec/messages/saving.py). Nothing is saved while steps are being skipped: it might be what a run has to go
back behind.
"""

import time

from trainer.runtime.checkpoint import folder_name
from trainer.runtime.checkpoint.files.read_back import check_read_back
from trainer.runtime.loop.save_timer import SaveTimer
from trainer.runtime.loop.saving import poll_save, save_state
from trainer.runtime.loop.session import Session
from trainer.spec.messages.saving import saving_choice


class PeriodicSaves:
    """Asked at the end of each step; collective."""

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
            return  # why there is none is told already
        check_read_back(
            session.paths.run_dir / relative,
            model=session.model,
            optimizer=session.optimizer,
            sharding=session.plan.chosen.strategy.sharding,
            ranks=session.ranks,
        )
