"""What a precision needs beside the engine's own switches: autocast by us, a loss scaler, FP8 matrix products."""

from typing import Any

from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from trainer.spec.hardware import DeviceKind
from trainer.spec.plan import Candidate


class LossScaler:
    """Dynamic loss scaling of fp16 where the engine has none of its own."""

    def scale(self, loss: Any) -> Any:  # noqa: ANN401  # a tensor
        """The loss whose gradients do not underflow."""
        raise NotImplementedError


def install_precision(model: PreTrainedModel, chosen: Candidate, kind: DeviceKind) -> None:
    """Makes the model's forward run in the planned precision where neither Accelerate nor the engine does; before
    `prepare`."""


def loss_scaler(accelerator: Accelerator, model: nn.Module, chosen: Candidate, kind: DeviceKind) -> LossScaler | None:
    """The scaler of an fp16 run, after `prepare`; None where nothing is scaled or the engine scales by itself."""
    return None


def precision_facts(model: nn.Module, scaler: LossScaler | None) -> dict[str, str]:
    """What is seen of the precision after a step, in words: scale, skipped steps, FP8 products that ran."""
    return {}
