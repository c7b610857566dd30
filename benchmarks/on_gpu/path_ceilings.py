"""Measures a device's ceilings at the shapes of one model: `python path_ceilings.py WANTED.json OUT.json`.

In a process of its own, as whoever asks must hold nothing of the device. Matrix products and attention have the shapes
of the model, copies a size beyond every cache; each figure is the best of several repetitions, as those of
`shardwise probe --measure`, whose functions do the rest.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from msgspec.structs import replace

ROOT = Path(__file__).resolve().parents[2]
for place in (ROOT, ROOT / "benchmarks"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

from on_gpu.path_floors import Ceilings, Shape  # noqa: E402  (the path comes first)
from trainer.runtime.measure import (  # noqa: E402  (as above)
    attention_flops_per_s,
    host_copy_bytes_per_s,
    memory_bytes_per_s,
)
from trainer.runtime.stopwatch import best_seconds  # noqa: E402  (as above)
from trainer.spec import codec  # noqa: E402  (as above)
from trainer.spec.units import GIB, MIB  # noqa: E402  (as above)
from trainer.spec.value import Value  # noqa: E402  (as above)

CUDA_COPY_BYTES, CPU_COPY_BYTES = GIB, 128 * MIB


class Wanted(Value, frozen=True, kw_only=True):
    """What to measure, and how long."""

    device: str  # cuda or cpu
    dtype: str  # bfloat16 or float32
    shapes: tuple[Shape, ...]
    attention: tuple[int, int, int, int]  # batch, heads, row, head
    budget_s: float = 0.5  # of each figure


def main() -> int:
    """Writes what was measured to the file named last."""
    wanted, answer = codec.read(Path(sys.argv[1]), Wanted), Path(sys.argv[2])
    codec.write(answer, measure(wanted))
    return 0


def measure(wanted: Wanted) -> Ceilings:
    """The ceilings; a figure that cannot be had is a note."""
    device, dtype = torch.device(wanted.device), getattr(torch, wanted.dtype)
    found = Ceilings(flops_per_s={})
    for shape in wanted.shapes:
        try:
            rate = product_flops_per_s(shape, device, dtype, wanted.budget_s)
        except RuntimeError as error:
            found = replace(found, notes=(*found.notes, f"{shape.name}: {_first_line(error)}"))
            continue
        found = replace(found, flops_per_s=found.flops_per_s | {shape.name: rate})
    for name, figure in _others(wanted, device, dtype):
        try:
            found = replace(found, **{name: float(figure())})
        except RuntimeError as error:
            found = replace(found, notes=(*found.notes, f"{name}: {_first_line(error)}"))
    return found


def product_flops_per_s(shape: Shape, device: torch.device, dtype: torch.dtype, budget_s: float) -> float:
    """FLOP/s of one product of the forward, with the weight as a linear layer holds it."""
    inputs = torch.randn(shape.tokens, shape.inputs, device=device).to(dtype)
    weight = torch.randn(shape.outputs, shape.inputs, device=device).to(dtype)
    out = torch.empty(shape.tokens, shape.outputs, device=device, dtype=dtype)
    return shape.flops / best_seconds(lambda: torch.mm(inputs, weight.t(), out=out), device, budget_s)


def _others(wanted: Wanted, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], float]]]:
    budget, is_cuda = wanted.budget_s, device.type == "cuda"
    num_bytes = CUDA_COPY_BYTES if is_cuda else CPU_COPY_BYTES
    yield "attention_flops_per_s", lambda: attention_flops_per_s(device, dtype, wanted.attention, budget)
    yield "copy_bytes_per_s", lambda: memory_bytes_per_s(device, num_bytes, budget)
    if is_cuda:
        for name, to_device in (("host_to_device_bytes_per_s", True), ("device_to_host_bytes_per_s", False)):
            yield (
                name,
                lambda to_device=to_device: host_copy_bytes_per_s(device, num_bytes // 4, budget, to_device=to_device),
            )


def _first_line(error: RuntimeError) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    sys.exit(main())
