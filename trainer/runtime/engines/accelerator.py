"""Accelerate's object for a plan, built from plan.json alone.

Accelerate also receives its YAML file as environment variables. They say the same (`verification` checks what came
out), but every setting is passed explicitly, because a plugin fills each field that is left open from the environment.
"""

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator

from shardwise.trainer.runtime.engines import engine_of
from shardwise.trainer.runtime.engines.engine import EngineChoice
from shardwise.trainer.runtime.precision.fp8 import check_precision
from shardwise.trainer.runtime.run.process import world_size_of_launch
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.plan import Candidate, Plan


def build_accelerator(plan: Plan, *, ds_config: Mapping[str, Any] | None) -> Accelerator:
    """The Accelerator of the chosen candidate; its engine is what `prepare` will wrap the model in."""
    chosen = plan.chosen
    check_precision(chosen.strategy.precision)
    _check_sharding(plan)
    _check_launch(chosen)
    choice = EngineChoice(
        sharding=chosen.strategy.sharding,
        precision=chosen.strategy.precision,
        num_ranks=chosen.num_ranks,
        accumulation=chosen.accumulation,
        device_kind=plan.device_kind,
        block_class=plan.model_shape.block_class,
        offload=chosen.strategy.offload,
        hybrid_mesh=plan.hybrid_mesh,
    )
    return engine_of(choice.sharding).accelerator(choice, ds_config)


def _check_sharding(plan: Plan) -> None:
    chosen, mesh = plan.chosen, plan.hybrid_mesh
    if mesh is not None and min(mesh) < 2:
        machines, on_each = mesh
        raise InputError(
            f"pin.sharding: hsdp spreads over several devices of each of several machines; the plan has {machines} of "
            f"{on_each}; take {'fsdp' if machines < 2 else 'ddp'}"
        )
    if chosen.strategy.sharding.facts.is_one_rank and chosen.num_ranks != 1:
        raise InputError(f"pin.sharding: none drives one device, the plan has {chosen.num_ranks} ranks; take ddp")


def _check_launch(chosen: Candidate) -> None:
    """Before Accelerate looks for the other ranks, which it would wait for or do without."""
    started = world_size_of_launch()
    if started != chosen.num_ranks:
        raise EnvironmentFaultError(
            f"ranks: the plan has {chosen.num_ranks}, {started} were started; start it with accelerate launch "
            "--config_file and the accelerate.yaml in the folder of plan.json"
        )
