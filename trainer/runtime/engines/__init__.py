"""Sharding engines; `ENGINES` is all. Each builds, fills, steps, verifies and reads one. `Replicated` is here."""

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.trainer.runtime.engines.engine import Engine, EngineChoice, process_group
from shardwise.trainer.runtime.engines.fsdp import Fsdp
from shardwise.trainer.runtime.engines.sharded_loading import load_onto
from shardwise.trainer.runtime.engines.zero import Zero
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.models.meta_model import MetaModel
from shardwise.trainer.runtime.run.types import accelerate_precision
from shardwise.trainer.spec import engines as facts
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.value import complete


class Replicated(Engine):
    """Accelerate without a plugin."""

    def accelerator(self, choice: EngineChoice, ds_config: Mapping[str, Any] | None) -> Accelerator:
        return Accelerator(
            cpu=choice.device_kind is DeviceKind.CPU,
            mixed_precision=accelerate_precision(choice.precision),
            gradient_accumulation_steps=choice.accumulation,
            kwargs_handlers=[
                process_group(choice.device_kind),
                DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            ]
            if choice.num_ranks > 1
            else [],
        )

    def load_shards(self, meta_model: MetaModel, accelerator: Accelerator) -> None:
        load_onto(accelerator.device, meta_model)

    def runs(self, model: nn.Module) -> bool:
        return True  # every model that no other engine has wrapped

    def sharding_of(self, model: nn.Module) -> Sharding:
        return Sharding.DDP if isinstance(model, DistributedDataParallel) else Sharding.NONE

    def whole_weights(self, accelerator: Accelerator, model: nn.Module) -> Mapping[str, Tensor]:
        return plain_model(model).state_dict()


ENGINES: dict[facts.Engine, Engine] = complete(
    facts.Engine,
    {  # the first that wraps a model runs it
        facts.Engine.DEEPSPEED: Zero(),
        facts.Engine.FSDP: Fsdp(),
        facts.Engine.TORCH: Replicated(),
    },
    "ENGINES",
)


def engine_of(sharding: Sharding) -> Engine:
    """The engine of a plan."""
    return ENGINES[sharding.facts.engine]


def running_engine(model: nn.Module) -> Engine:
    """The engine that wraps a prepared model, by the classes of the objects themselves."""
    return next(engine for engine in ENGINES.values() if engine.runs(model))
