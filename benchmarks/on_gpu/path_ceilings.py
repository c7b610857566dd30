"""Measures a device's ceilings at the shapes of one model: `python path_ceilings.py WANTED.json OUT.json`.

In a process of its own, as whoever asks must hold nothing of the device. Matrix products and attention have the shapes
of the model, forward and gradients apart, copies a size beyond every cache; each figure is the best of several
repetitions, as those of `shardwise probe --measure`, whose functions measure copies. Of attention's kernels the fastest
counts.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from msgspec.structs import replace
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[2]
for place in (ROOT, ROOT / "benchmarks"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

from on_gpu.path_floors import ATTENTION_BACKWARD, PRODUCT_BACKWARD, Ceilings, Rates, Shape  # noqa: E402  (path first)
from trainer.runtime.measure import host_copy_bytes_per_s, memory_bytes_per_s  # noqa: E402  (as above)
from trainer.runtime.stopwatch import best_seconds  # noqa: E402  (as above)
from trainer.spec import codec  # noqa: E402  (as above)
from trainer.spec.units import GIB, MIB  # noqa: E402  (as above)
from trainer.spec.value import Value  # noqa: E402  (as above)

CUDA_COPY_BYTES, CPU_COPY_BYTES = GIB, 128 * MIB
NUM_STARTED = 1000
ATTENTION_KERNELS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)


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
    found = Ceilings()
    for shape in wanted.shapes:
        try:
            rates = product_rates(shape, device, dtype, wanted.budget_s)
        except RuntimeError as error:
            found = replace(found, notes=(*found.notes, f"{shape.name}: {_first_line(error)}"))
            continue
        found = replace(found, products=found.products | {shape.name: rates})
    for name, figure in _others(wanted, device, dtype):
        try:
            found = replace(found, **{name: figure()})
        except RuntimeError as error:
            found = replace(found, notes=(*found.notes, f"{name}: {_first_line(error)}"))
    return found


def product_rates(shape: Shape, device: torch.device, dtype: torch.dtype, budget_s: float) -> Rates:
    """Of a linear layer's product, and of those of its gradients: of its inputs, of its weight."""
    inputs = torch.randn(shape.tokens, shape.inputs, device=device, dtype=dtype)
    weight = torch.randn(shape.outputs, shape.inputs, device=device, dtype=dtype)
    outputs = torch.randn(shape.tokens, shape.outputs, device=device, dtype=dtype)
    of_inputs, of_weight = torch.empty_like(inputs), torch.empty_like(weight)
    backward_s = best_seconds(lambda: torch.mm(outputs, weight, out=of_inputs), device, budget_s)
    backward_s += best_seconds(lambda: torch.mm(outputs.t(), inputs, out=of_weight), device, budget_s)
    forward_s = best_seconds(lambda: torch.mm(inputs, weight.t(), out=outputs), device, budget_s)
    return Rates(forward=shape.flops / forward_s, backward=PRODUCT_BACKWARD * shape.flops / backward_s)


def attention_rates(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int], budget_s: float
) -> Rates:
    """Of causal attention of (batch, heads, row, head) without a row x row array: the kernel fastest in both."""
    batch, heads, row, head = shape
    flops = 4.0 * batch * heads * row * row * head / 2
    found: list[Rates] = []
    problem: RuntimeError | None = None
    for kernel in ATTENTION_KERNELS if device.type == "cuda" else (SDPBackend.FLASH_ATTENTION,):
        try:
            forward_s, backward_s = _attention_seconds(kernel, device, dtype, shape, budget_s)
        except RuntimeError as error:
            problem = error
            continue
        found.append(Rates(forward=flops / forward_s, backward=ATTENTION_BACKWARD * flops / backward_s))
    if problem is not None and not found:
        raise problem
    return min(found, key=lambda rates: rates.seconds(flops, num_forwards=1, backward=ATTENTION_BACKWARD))


def start_seconds(device: torch.device, budget_s: float) -> float:
    """Of one of many small kernels in a row: what the host takes to start it, or the device where that is longer."""
    tiny = torch.zeros(8, device=device)

    def start() -> None:
        for _ in range(NUM_STARTED):
            tiny.add_(1.0)

    return best_seconds(start, device, budget_s) / NUM_STARTED


def _attention_seconds(
    kernel: SDPBackend, device: torch.device, dtype: torch.dtype, shape: tuple[int, int, int, int], budget_s: float
) -> tuple[float, float]:
    """Of a forward, and of its gradients."""
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def attend() -> torch.Tensor:
        with sdpa_kernel(kernel):
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True)

    outputs = attend()
    gradient = torch.randn_like(outputs)
    backward_s = best_seconds(
        lambda: torch.autograd.grad(outputs, (query, key, value), gradient, retain_graph=True), device, budget_s
    )
    return best_seconds(attend, device, budget_s), backward_s


def _others(
    wanted: Wanted, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], float | Rates]]]:
    budget, is_cuda = wanted.budget_s, device.type == "cuda"
    num_bytes = CUDA_COPY_BYTES if is_cuda else CPU_COPY_BYTES
    yield "attention", lambda: attention_rates(device, dtype, wanted.attention, budget)
    yield "start_s", lambda: start_seconds(device, budget)
    yield "copy_bytes_per_s", lambda: memory_bytes_per_s(device, num_bytes, budget)
    if is_cuda:
        for name, to_device in (("host_to_device_bytes_per_s", True), ("device_to_host_bytes_per_s", False)):
            yield name, partial(host_copy_bytes_per_s, device, num_bytes // 4, budget, to_device=to_device)


def _first_line(error: RuntimeError) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    sys.exit(main())
