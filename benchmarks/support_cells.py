"""Cells of the support matrix: values of some axes, defaults for the others, on a machine."""

from functools import cache
from typing import NamedTuple

from shardwise.trainer.planning.device import Device, device_of
from shardwise.trainer.planning.rules.rule_input import RuleInput
from shardwise.trainer.planning.tables.gpu_names import hardware_from_spec
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.hardware import Host
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Checkpointing, Fp8Recipe, LossHead, Method, Precision, Strategy
from shardwise.trainer.spec.units import GIB

_HOST = Host(cpu_name=None, num_cores=8, ram_bytes=1024 * GIB, ram_available_bytes=1024 * GIB)
_LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
}


class Cell(NamedTuple):
    """Values of some axes; the others have their defaults."""

    sharding: Sharding = Sharding.NONE
    offload: Offload = Offload.NONE
    method: Method = Method.FULL
    optimizer: Optimizer | None = None  # None: the AdamW of the layout
    precision: Precision = Precision.BF16_MIXED
    checkpointing: Checkpointing = Checkpointing.NONE
    loss: LossHead = LossHead.CHUNKED
    compile: bool = False
    activation_offload: bool = False
    embedding_on_host: bool = False
    optimizer_in_backward: bool = False
    fp8_recipe: Fp8Recipe | None = None
    gpu: str = "B200"

    @property
    def strategy(self) -> Strategy:
        is_on_host = self.offload is not Offload.NONE and self.sharding.uses_deepspeed
        plain = Optimizer.ADAMW if self.method is Method.GALORE else Optimizer.ADAMW_FUSED
        return Strategy(
            name="",
            sharding=self.sharding,
            offload=self.offload,
            optimizer=self.optimizer or (Optimizer.DEEPSPEED_CPU_ADAM if is_on_host else plain),
            precision=self.precision,
            is_exact=False,
        )

    def on(self, device: Device) -> RuleInput:
        """The cell on a machine, without accumulation."""
        return RuleInput(
            strategy=self.strategy,
            method=self.method,
            num_ranks=device.num_devices,
            device=device,
            shape=_shape(),
            accumulation=1,
            checkpointing=self.checkpointing,
            loss=self.loss,
            compile=self.compile,
            activation_offload=self.activation_offload,
            embedding_on_host=self.embedding_on_host,
            optimizer_in_backward=self.optimizer_in_backward,
            fp8_recipe=self.fp8_recipe,
        )


@cache
def device_named(spec: str) -> Device:
    """A machine of the catalogue with ample host RAM."""
    return device_of(hardware_from_spec(spec, local_host=lambda: _HOST))


@cache
def _shape() -> ModelShape:
    return read_model_shape(_LLAMA)
