"""Recovery from steps that are not taken: they are reported, and after several in a row the run goes back.

A bad row costs a step. Where the steps after it cannot be taken either, the weights may have been spoilt by an update
before them. So the run goes back to its last checkpoint, within the process and under every engine, and from there
learns from the rows after those that led here. Where that ends at the same place, nothing here can help, and the run
ends with its checkpoints as they are.

Weights that are updated within the backward pass have taken a loss that is no number: such a run goes back at once.
"""

import math
from collections.abc import Sequence

from shardwise.trainer.runtime.checkpoint import CheckpointFolder, import_state
from shardwise.trainer.runtime.checkpoint.folders import is_complete, open_checkpoint, verified
from shardwise.trainer.runtime.checkpoint.ranks import on_first, together
from shardwise.trainer.runtime.loop.saving import settle_save
from shardwise.trainer.runtime.loop.session import Session
from shardwise.trainer.runtime.loop.step import StepResult
from shardwise.trainer.runtime.optimizers import updates_in_backward
from shardwise.trainer.runtime.run.state import (
    MAX_ROLL_BACKS,
    STEPS_UNTIL_ROLL_BACK,
    IncidentKind,
    IncidentLog,
    RunState,
    after_roll_back,
    after_step,
)
from shardwise.trainer.spec.errors import EnvironmentFaultError

_SHOWN_ROWS = 8
_SHOWN_STEPS = 20  # an incident each; then one for all that follow


def note_step(state: RunState, result: StepResult, *, step: int, rows: Sequence[int]) -> None:
    """Takes a step into the record; one that had a fault becomes an incident that names its rows."""
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

    EnvironmentFaultError where there is no checkpoint, or the run has gone back to it before, or too often to others.
    """
    settle_save(session)
    state, step = session.state, session.state.step
    session.writer.write_status("going back to the last checkpoint", step=step)
    checkpoint = _last_checkpoint(session)
    saved = checkpoint.facts
    passed_over = state.spikes.passed_over
    if any(each.after_step >= saved.step for each in passed_over):
        tried = f"going back to step {saved.step} and past other rows did not help"
        raise _hopeless(state, f"{tried}; {state.checkpoint} is kept")
    if len(passed_over) >= MAX_ROLL_BACKS:
        raise _hopeless(state, f"the run went back {len(passed_over)} times already; {state.checkpoint} is kept")
    sharding = session.plan.chosen.strategy.sharding
    import_state(session.model, session.optimizer, checkpoint, sharding=sharding)
    if session.scaler is not None and saved.loss_scaler is not None:
        session.scaler.restore(saved.loss_scaler.scale, saved.loss_scaler.growth_tracker)
    after = f"and on from there with the rows after those of step {step}"
    state.log.note(f"went back from step {step} to step {saved.step}, {after}: {_why(state)}")
    state.spikes = after_roll_back(saved.spikes, saved_step=saved.step, step=step)
    state.step, state.tokens_seen, state.fault = saved.step, saved.tokens_seen, None
    state.evaluations[:] = saved.evaluations


def _last_checkpoint(session: Session) -> CheckpointFolder:
    state, ranks = session.state, session.ranks
    if state.checkpoint is None:
        raise _hopeless(state, "there is no checkpoint to go back to")
    here, there = (run_dir / state.checkpoint for run_dir in (session.paths.run_dir, session.paths.resume_dir))
    folder = here if ranks.all_agree(is_complete(here)) else there
    doing = f"{folder}: the last checkpoint cannot be read"
    on_first(ranks, lambda: bytes(verified(folder).path), doing=doing)
    return together(ranks, lambda: open_checkpoint(folder), doing=doing)


def _hopeless(state: RunState, what: str) -> EnvironmentFaultError:
    return EnvironmentFaultError(
        f"step {state.step}: {_why(state)};\n{what};\n"
        "take a lower train.lr or a longer train.warmup, or look at the rows that metrics.jsonl names (skipped_rows)"
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
