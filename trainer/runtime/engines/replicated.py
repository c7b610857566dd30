"""One process, or DistributedDataParallel: every rank holds every tensor whole."""

from collections.abc import Mapping
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.trainer.runtime.engines.engine import Engine, EngineChoice, process_group
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.run.types import accelerate_precision
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.hardware import DeviceKind


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

    def runs(self, model: nn.Module) -> bool:
        return True  # every model that no other engine has wrapped

    def sharding_of(self, model: nn.Module) -> Sharding:
        return Sharding.DDP if isinstance(model, DistributedDataParallel) else Sharding.NONE

    def whole_weights(self, accelerator: Accelerator, model: nn.Module) -> Mapping[str, Tensor]:
        return plain_model(model).state_dict()
