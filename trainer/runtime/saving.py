"""What a run leaves behind for others: checkpoints to go on from, and the exported model."""

import math
from pathlib import Path

from trainer.runtime.checkpoint import NonFiniteStateError, folder_name, load_weights, save_checkpoint
from trainer.runtime.checkpoint.agreement import on_first, together
from trainer.runtime.checkpoint.search import is_complete, open_checkpoint, verified
from trainer.runtime.checkpoint_facts import facts_of, obstacle_to_checkpoints
from trainer.runtime.export_folder import write_adapter_folder, write_model_folder
from trainer.runtime.export_gather import gathered_weights
from trainer.runtime.model import plain_model
from trainer.runtime.session import Session
from trainer.spec.errors import EnvironmentFaultError, InputError


def save_state(session: Session, occasion: str) -> None:
    """Saves a checkpoint; where it cannot be saved the reason becomes an incident and the run goes on.

    NonFiniteStateError where there is nothing worth saving any more: to train on would only cost time.
    """
    plan, state, sharding = session.plan, session.state, session.plan.chosen.strategy.sharding
    obstacle = obstacle_to_checkpoints(sharding, session.optimizer)
    if obstacle is not None:
        incident = f"no checkpoint: {obstacle}"
        if incident not in state.incidents:
            state.incidents.append(incident)
        return
    session.writer.write_status("saving a checkpoint", step=state.step)
    keeps_best = plan.job.checkpoint.best is not None or plan.job.eval.early_stop is not None
    best = (state.best_step,) if keeps_best and state.best_step is not None else ()
    try:
        save_checkpoint(
            session.paths.run_dir / "checkpoints",
            model=session.model,
            optimizer=session.optimizer,
            sharding=sharding,
            facts=facts_of(plan, state, session.scaler),
            ranks=session.ranks,
            keep=plan.job.checkpoint.keep,
            protect=best,
        )
    except NonFiniteStateError as error:
        state.evaluations = [each for each in state.evaluations if math.isfinite(each.loss)]  # JSON has no NaN
        last = f"the last checkpoint is {state.checkpoint}" if state.checkpoint else "there is no earlier checkpoint"
        raise NonFiniteStateError(f"{error}; {last}; a lower train.lr may keep the run finite") from error
    except EnvironmentFaultError as error:
        if not _is_saved(session):
            state.incidents.append(f"no checkpoint at {occasion}: {error}")
            return
        state.incidents.append(f"at {occasion}: {error}")
    state.checkpoint = f"checkpoints/{folder_name(state.step)}"


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
        session.state.incidents += [incident] if incident is not None else []
    session.state.export = "export"


def _is_saved(session: Session) -> bool:
    """Whether this step's checkpoint was committed before saving failed; rank 0 looks, and all agree."""
    is_whole = True
    if session.is_first:
        try:
            verified(session.paths.run_dir / "checkpoints" / folder_name(session.state.step))
        except (InputError, OSError):
            is_whole = False
    return session.ranks.all_agree(is_whole)
