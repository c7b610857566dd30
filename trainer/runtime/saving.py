"""What a run leaves behind for others: checkpoints to go on from, and the exported model."""

import math

from trainer.runtime.checkpoint import NonFiniteStateError, folder_name, save_checkpoint
from trainer.runtime.checkpoint.search import verified
from trainer.runtime.checkpoint_facts import facts_of, obstacle_to_checkpoints
from trainer.runtime.export_run import gathered_weights, write_adapter_folder, write_model_folder
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
    best = (state.best_step,) if plan.job.checkpoint.best is not None and state.best_step is not None else ()
    try:
        save_checkpoint(
            session.paths.run_dir / "checkpoints",
            model=session.model,
            optimizer=session.optimizer,
            sharding=sharding,
            facts=facts_of(plan, state),
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


def export_model(session: Session) -> None:
    """Writes the Hugging Face folder of the run as it is now; of adapters, PEFT's."""
    session.writer.write_status("exporting the model", step=session.state.step)
    plan, out = session.plan, session.paths.run_dir / "export"
    weights = gathered_weights(session.accelerator, session.model)
    if session.is_first:
        if plan.chosen.method.freezes_base:
            incident = write_adapter_folder(weights, plan, out)
        else:
            model = plain_model(session.model)
            incident = write_model_folder(model, out, tokenizer_path=plan.tokenizer_path, state_dict=weights)
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
