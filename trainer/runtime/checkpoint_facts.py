"""What a checkpoint of a run says of it, and which engines have checkpoints."""

from trainer.runtime.checkpoint import CheckpointFacts
from trainer.runtime.checkpoint.manifest import config_sha256
from trainer.runtime.report_writer import installed_versions
from trainer.runtime.state import RunState
from trainer.spec.plan import Plan
from trainer.spec.strategy import Sharding


def has_checkpoints(sharding: Sharding) -> bool:
    """True for the engines whose state this version saves."""
    return sharding in (Sharding.NONE, Sharding.DDP)


def facts_of(plan: Plan, state: RunState) -> CheckpointFacts:
    """What a checkpoint of this moment is of."""
    return CheckpointFacts(
        run_name=plan.name,
        step=state.step,
        tokens_seen=state.tokens_seen,
        seed=plan.job.train.seed,
        sequences_per_step=plan.schedule.sequences_per_step,
        tokens_per_step=plan.schedule.tokens_per_step,
        model_config_sha256=config_sha256(plan.model_config),
        data_fingerprint=plan.data.fingerprint,
        optimizer=plan.chosen.strategy.optimizer,
        sharding=plan.chosen.strategy.sharding,
        world_size=plan.chosen.num_ranks,
        precision=plan.chosen.strategy.precision,
        versions=installed_versions(),
        evaluations=tuple(state.evaluations),
        best_step=state.best_step,
    )
