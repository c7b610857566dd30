"""Measures what this machine's device reaches: `python -m trainer.runtime.measure OUT.json cuda|cpu [SECONDS]`.

Three ceilings, each the best of several repetitions: a square matrix product in the fastest precision that the device
trains in, a copy within the device's memory, and a copy from pinned host memory to the device. A copy within memory
reads and writes every byte, and both count. SECONDS is spent on each figure; the first repetition, which loads
kernels, is not counted.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trainer.spec import codec
from trainer.spec.hardware import DeviceKind, MeasuredRates
from trainer.spec.units import GIB, MIB

BUDGET_S = 1.0  # for each figure
_PRECISIONS = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def main(arguments: Sequence[str]) -> int:
    """Writes the rates of the device named in `arguments` to the file named there."""
    answer, kind, *rest = arguments
    device = torch.device(DeviceKind(kind))
    codec.write(Path(answer), measure(device, budget_s=float(rest[0]) if rest else BUDGET_S))
    return 0


def measure(device: torch.device, *, budget_s: float = BUDGET_S) -> MeasuredRates:
    """The ceilings of one device."""
    is_cuda = device.type == "cuda"
    size = 8192 if is_cuda else 1024
    num_bytes = min(GIB, _free_bytes(device) // 8) if is_cuda else 256 * MIB  # beyond every cache
    flops = {dtype: matmul_flops_per_s(device, dtype, size, budget_s) for dtype in trainable_dtypes(device)}
    fastest = max(flops, key=lambda dtype: flops[dtype])
    return MeasuredRates(
        matmul_flops_per_s=flops[fastest],
        matmul_precision=_PRECISIONS[fastest],
        memory_bytes_per_s=memory_bytes_per_s(device, num_bytes, budget_s),
        host_to_device_bytes_per_s=host_to_device_bytes_per_s(device, num_bytes // 4, budget_s) if is_cuda else None,
    )


def trainable_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The element types to compare; a GPU trains in its native 16-bit type, a CPU in whichever is faster."""
    if device.type != "cuda":
        return (torch.float32, torch.bfloat16)
    return (torch.bfloat16,) if torch.cuda.get_device_capability(device) >= (8, 0) else (torch.float16,)


def matmul_flops_per_s(device: torch.device, dtype: torch.dtype, size: int, budget_s: float) -> int:
    """Floating-point operations per second of a `size` x `size` product, 2 * size**3 of them in each."""
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    return round(2 * size**3 / _best_s(lambda: torch.mm(a, b, out=out), device, budget_s))


def memory_bytes_per_s(device: torch.device, num_bytes: int, budget_s: float) -> int:
    """Bytes read and written per second by a copy within the device's memory."""
    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return round(2 * source.nbytes / _best_s(lambda: target.copy_(source), device, budget_s))


def host_to_device_bytes_per_s(device: torch.device, num_bytes: int, budget_s: float) -> int:
    """Bytes per second from pinned host memory to the device."""
    source = torch.ones(num_bytes // 4).pin_memory()
    target = torch.empty_like(source, device=device)
    return round(source.nbytes / _best_s(lambda: target.copy_(source, non_blocking=True), device, budget_s))


def _best_s(work: Callable[[], object], device: torch.device, budget_s: float) -> float:
    """Seconds of the fastest repetition; at least three, then as many as the time allows."""
    work()
    _wait(device)
    best, ends, repetitions = float("inf"), time.perf_counter() + budget_s, 0
    while repetitions < 3 or time.perf_counter() < ends:
        started = time.perf_counter()
        work()
        _wait(device)
        best = min(best, time.perf_counter() - started)
        repetitions += 1
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free_bytes(device: torch.device) -> int:
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
