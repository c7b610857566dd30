"""What a precision means to the libraries: the type of the weights, and what Accelerate is asked for.

Mixed precision keeps fp32 weights and computes in 16 bit (autocast; under FSDP2 the parameters are cast when they are
gathered; under DeepSpeed the working copy is 16 bit and the fp32 masters are the engine's). `bf16` has no fp32 copy:
the model itself is bf16 and nothing is cast.
"""

import torch

from trainer.spec.errors import InputError
from trainer.spec.hardware import DeviceKind
from trainer.spec.strategy import Precision

_ACCELERATE_NAMES = {
    Precision.FP32: "no",
    Precision.FP16_MIXED: "fp16",
    Precision.BF16_MIXED: "bf16",
    Precision.BF16: "no",
}
_COMPUTE_TYPES = {
    Precision.FP32: torch.float32,
    Precision.FP16_MIXED: torch.float16,
    Precision.BF16_MIXED: torch.bfloat16,
    Precision.BF16: torch.bfloat16,
}


def check_precision(precision: Precision, device_kind: DeviceKind) -> None:
    """InputError for a precision that would silently be another one here."""
    if precision is Precision.FP8:
        raise InputError("pin.precision: fp8 comes with shardwise 0.3")
    if precision is Precision.FP16_MIXED and device_kind is DeviceKind.CPU:
        raise InputError(
            "pin.precision: fp16-mixed does nothing on a CPU (it would run in fp32); take bf16-mixed or fp32"
        )


def accelerate_precision(precision: Precision) -> str:
    """Accelerate's name of the autocast type; `no` where nothing is cast."""
    return _ACCELERATE_NAMES[precision]


def weight_type(precision: Precision) -> torch.dtype:
    """The type the model is built or loaded in."""
    return torch.bfloat16 if precision is Precision.BF16 else torch.float32


def compute_type(precision: Precision) -> torch.dtype:
    """The type of the inputs of a matrix product."""
    return _COMPUTE_TYPES[precision]
