"""Types of a precision: of the weights, of the computation, and the setting for Accelerate.

Mixed precision keeps fp32 weights and computes in 16 bit (autocast; under FSDP2 the parameters are cast when they are
gathered; under DeepSpeed the working copy is 16 bit and the fp32 masters are the engine's). `bf16` has no fp32 copy:
the model itself is bf16 and nothing is cast. `fp8` is bf16-mixed to every library: its matrix products are ours. So is
the autocast of fp16-mixed, which Accelerate omits on a CPU (`mixed_precision`).
"""

import torch

from shardwise.trainer.spec.strategy import Precision

_ACCELERATE_NAMES = {
    Precision.FP32: "no",
    Precision.FP16_MIXED: "no",
    Precision.BF16_MIXED: "bf16",
    Precision.BF16: "no",
    Precision.FP8: "bf16",
}
_COMPUTE_TYPES = {
    Precision.FP32: torch.float32,
    Precision.FP16_MIXED: torch.float16,
    Precision.BF16_MIXED: torch.bfloat16,
    Precision.BF16: torch.bfloat16,
    Precision.FP8: torch.bfloat16,
}


def accelerate_precision(precision: Precision) -> str:
    """Accelerate's name of the autocast type; `no` where nothing is cast."""
    return _ACCELERATE_NAMES[precision]


def weight_type(precision: Precision) -> torch.dtype:
    """The type the model is built or loaded in."""
    return torch.bfloat16 if precision is Precision.BF16 else torch.float32


def compute_type(precision: Precision) -> torch.dtype:
    """The type of the inputs of a matrix product."""
    return _COMPUTE_TYPES[precision]
