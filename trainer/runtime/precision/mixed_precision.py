"""Mixed precision beyond the engine's own switches: autocast by us, a loss scaler, FP8 matrix products.

fp16-mixed: gradients below 6e-8 vanish in fp16, so the loss is scaled up before the backward pass and the gradients
are scaled down before they are clipped (arXiv:1710.03740, section 3.2). The scale is adapted during the run: an
overflow on any rank skips the step on all of them and halves it, a long run of steps without one doubles it. One path
serves GPUs and CPUs, where Accelerate's fp16 would silently be fp32 (docs/workarounds.md, W21): torch's autocast around
the model's own forward, and torch's GradScaler. Under FSDP2 the scaler's verdict is agreed by DTensor itself, under DDP
the gradients are the same on every rank. DeepSpeed's fp16 engine scales by itself; its scale and its verdict are read.

The scale and the number of good steps since it last changed are part of a checkpoint.
"""

from dataclasses import replace
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwise.trainer.runtime.models.build import Installed
from shardwise.trainer.runtime.optimizers import unwrapped
from shardwise.trainer.runtime.precision.fp8 import fp8_facts, install_fp8
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import Precision

INIT_SCALE = 2.0**16
GROWTH_FACTOR, BACKOFF_FACTOR = 2.0, 0.5
GROWTH_INTERVAL = 2000  # steps without an overflow before the scale is doubled
MIN_SCALE = 1.0  # a gradient that overflows unscaled is no gradient


class LossScaler(Protocol):
    """Dynamic loss scaling of fp16: ours, or what is seen of an engine's own."""

    num_skipped: int

    @property
    def loss_scale(self) -> float:
        """The factor that losses are multiplied by now."""

    @property
    def growth_tracker(self) -> int:
        """Steps without an overflow since the scale last changed."""

    def restore(self, loss_scale: float, growth_tracker: int) -> None:
        """Restores the scale of a checkpoint."""

    def scale(self, loss: Tensor) -> Tensor:
        """The loss whose gradients do not underflow."""

    def unscale(self, optimizer: object) -> None:
        """Brings the gradients back to their size, once all micro batches are in and before they are clipped."""

    def step(self, optimizer: Any) -> bool:  # noqa: ANN401  # Accelerate's wrapper
        """Updates the weights unless a gradient overflowed on any rank; whether the step was skipped."""

    def pass_over(self) -> bool:
        """Ends a step that did not overflow and is skipped for another reason; False, as from `step`."""


class AmpScaler:
    """Dynamic loss scaling by torch's GradScaler, on any device."""

    def __init__(
        self, device_type: str, *, init_scale: float = INIT_SCALE, growth_interval: int = GROWTH_INTERVAL
    ) -> None:
        self.num_skipped = 0
        self._scaler = torch.amp.GradScaler(
            device_type,
            init_scale=init_scale,
            growth_factor=GROWTH_FACTOR,
            backoff_factor=BACKOFF_FACTOR,
            growth_interval=growth_interval,
        )

    @property
    def loss_scale(self) -> float:
        return float(self._scaler.get_scale())

    @property
    def growth_tracker(self) -> int:
        return int(self._scaler.state_dict()["_growth_tracker"])

    def restore(self, loss_scale: float, growth_tracker: int) -> None:
        good_steps = growth_tracker % self._scaler.get_growth_interval()  # DeepSpeed's is not reset
        self._scaler.load_state_dict(self._scaler.state_dict() | {"scale": loss_scale, "_growth_tracker": good_steps})

    def scale(self, loss: Tensor) -> Tensor:
        return self._scaler.scale(loss)

    def unscale(self, optimizer: object) -> None:
        self._scaler.unscale_(unwrapped(optimizer))

    def step(self, optimizer: Any) -> bool:  # noqa: ANN401  # Accelerate's wrapper
        before = self.loss_scale
        self._scaler.step(unwrapped(optimizer))
        self._scaler.update()
        was_skipped = self.loss_scale < before  # only an overflow lowers it
        self.num_skipped += was_skipped
        return was_skipped

    def pass_over(self) -> bool:
        self._scaler.update()
        return False


def install_precision(model: PreTrainedModel, installed: Installed, chosen: Candidate, kind: DeviceKind) -> Installed:
    """Makes the model's forward run in the planned precision if neither Accelerate nor the engine does; before
    `prepare`. InputError if this device cannot."""
    precision = chosen.strategy.precision
    torch.backends.cuda.matmul.allow_tf32 = chosen.tf32  # sets fp32_precision too, which does not set this
    if precision is Precision.FP8:
        return replace(installed, fp8=install_fp8(model, chosen))
    if precision is Precision.FP16_MIXED:
        _check_updates_can_wait(chosen)
        if chosen.strategy.sharding.facts.has_own_fp16:
            _check_engine_has_fp16(kind)
        else:
            install_autocast(model, kind, torch.float16)
            return replace(installed, autocast=torch.float16)
    return installed


def install_autocast(model: PreTrainedModel, kind: DeviceKind, dtype: torch.dtype) -> None:
    """Runs the model's forward under torch's autocast; the loss stays fp32, as the loss heads make it."""
    forward = model.forward

    @wraps(forward)
    def autocast_forward(*inputs: Any, **named: Any) -> Any:  # noqa: ANN401  # the signature of any model
        with torch.autocast(str(kind), dtype=dtype):
            return forward(*inputs, **named)

    replaceable: Any = model
    replaceable.forward = autocast_forward


def check_scale(scaler: LossScaler) -> None:
    """EnvironmentFaultError where gradients overflow even at the smallest scale: every later step would be skipped."""
    if scaler.loss_scale <= MIN_SCALE:
        raise EnvironmentFaultError(
            f"fp16-mixed: gradients overflow at loss scale {scaler.loss_scale:g}, after {scaler.num_skipped} skipped "
            "steps; set a lower train.lr, or pin.precision: bf16-mixed"
        )


def precision_facts(installed: Installed, scaler: LossScaler | None) -> dict[str, str]:
    """Text of what was observed of the precision after a step: scale, skipped steps, FP8 products."""
    facts = fp8_facts(installed.fp8)
    if installed.autocast is not None:
        facts["autocast"] = str(installed.autocast).removeprefix("torch.")
    if scaler is not None:
        facts["loss scale"] = f"{scaler.loss_scale:g}"
        facts["skipped steps"] = str(scaler.num_skipped)
    return facts


def _check_updates_can_wait(chosen: Candidate) -> None:
    optimizer = chosen.strategy.optimizer
    if chosen.optimizer_in_backward or optimizer.facts.updates_in_backward:
        raise InputError(
            f"pin.precision: fp16-mixed updates weights once no gradient has overflowed, and {optimizer} in the "
            "backward pass does not wait; use bf16-mixed or fp32"
        )


def _check_engine_has_fp16(kind: DeviceKind) -> None:
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        where = "this CPU has no fp16 units (avx512_fp16)" if kind is DeviceKind.CPU else "this GPU has none"
        raise InputError(f"pin.precision: DeepSpeed runs fp16-mixed in hardware, and {where}; use fp32, or ddp")
