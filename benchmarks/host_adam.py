"""The update of AdamW in host RAM: torch's kernels compared with DeepSpeed's, in turn, on all cores of this machine."""

import statistics
import time
from collections.abc import Callable

import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam

NUM_TENSORS, NUM_ELEMENTS = 4, 15_000_000
ROUNDS = 5
DEEPSPEED = "DeepSpeed, fp32"
KERNELS: dict[str, tuple[torch.dtype, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]]] = {
    DEEPSPEED: (torch.float32, lambda weights: DeepSpeedCPUAdam(weights, adamw_mode=True)),
    "torch fused, fp32": (torch.float32, lambda weights: torch.optim.AdamW(weights, fused=True)),
    "torch fused, bf16": (torch.bfloat16, lambda weights: torch.optim.AdamW(weights, fused=True)),
    "torch foreach, fp32": (torch.float32, lambda weights: torch.optim.AdamW(weights, foreach=True)),
}


def bench_host_adam() -> list[dict[str, object]]:
    """Median seconds of an update of 60 million parameters by each kernel, and their ratio to DeepSpeed's."""
    optimizers = {name: _optimizer(dtype, make) for name, (dtype, make) in KERNELS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in optimizers}
    for number in range(ROUNDS + 1):
        for name, optimizer in optimizers.items():
            started = time.perf_counter()
            optimizer.step()
            if number:
                seconds[name].append(time.perf_counter() - started)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return [
        {
            "kernel": name,
            "threads": torch.get_num_threads(),
            "median_s": round(value, 3),
            "ratio_to_deepspeed": round(value / median[DEEPSPEED], 2),
        }
        for name, value in median.items()
    ]


def _optimizer(
    dtype: torch.dtype, make: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
) -> torch.optim.Optimizer:
    weights = [torch.nn.Parameter(torch.randn(NUM_ELEMENTS, dtype=dtype)) for _ in range(NUM_TENSORS)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return make(weights)
