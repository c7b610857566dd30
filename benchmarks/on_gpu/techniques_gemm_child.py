"""Times linear layers in bf16 and FP8 in a process of its own: `python -m on_gpu.techniques_gemm_child REQUEST ROWS`.

REQUEST is JSON: `shapes` (inputs, outputs), `tokens`, `rounds`, `device`. ROWS gets a line of JSON for every shape and
number of tokens as soon as it is timed, so that a crash leaves what was known before it.

One measurement is a forward and both products of the backward of one layer with bf16 weights, without bias. The kinds
of layers take turns, A B C A B C, so that a clock that falls slows all alike; inputs and gradients are drawn, and
rotate through several tensors so that none is in the cache from the time before. Medians; on a GPU by its own events.
FP8 layers are made by the product (`trainer.runtime.fp8`), as they are and, those of torchao, compiled.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainer.runtime import fp8_torchao
from trainer.runtime.fp8 import fp8_region, package_of
from trainer.spec.errors import InputError
from trainer.spec.strategy import Fp8Recipe

BF16, COMPILED = "bf16", " compiled"  # Transformer Engine's layers are cut out of what is compiled
RECIPES = (Fp8Recipe.TORCHAO_TENSORWISE, Fp8Recipe.TORCHAO_ROWWISE, Fp8Recipe.CURRENT)
WARM_UP, ROTATED = 3, 4
AHEAD_CYCLES = 4_000_000  # about 2 ms that the card waits, so that the host is ahead and no launch is timed
LEAST_CAPABILITY = (8, 9)  # FP8 products from Ada and Hopper on


class Layer(NamedTuple):
    """One kind of layer: its forward, the weights under it, and what has to be open around it."""

    forward: Callable[[Tensor], Tensor]
    plain: nn.Module
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def kinds() -> tuple[str, ...]:
    """The names of what is compared, bf16 first."""
    compiled = (f"{recipe}{COMPILED}" for recipe in RECIPES if package_of(recipe) == fp8_torchao.PACKAGE)
    return (BF16, *map(str, RECIPES), *compiled)


def layer_of(kind: str, plain: nn.Linear) -> Layer:
    """A layer of a kind around the weights of `plain`; InputError where there is no such thing here."""
    if kind == BF16:
        return Layer(plain, plain)
    region = fp8_region(Fp8Recipe(kind.removesuffix(COMPILED)))
    with region.opened():
        made = region.converted(plain)
    forward = torch.compile(made, dynamic=True) if kind.endswith(COMPILED) else made
    return Layer(forward, made, region.opened)


def check_device(kind: str, device: torch.device) -> None:
    """InputError where the device has no units for this kind of layer."""
    if kind == BF16:
        return
    if device.type != "cuda":
        raise InputError(f"FP8 products need a GPU of compute capability 8.9; the device is a {device.type}")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise InputError(f"FP8 products need compute capability 8.9; the device has {capability[0]}.{capability[1]}")


def time_shape(inputs: int, outputs: int, tokens: int, *, rounds: int, device: torch.device) -> dict[str, Any]:
    """Median seconds of every kind that runs here, and why the others do not."""
    torch.manual_seed(0)
    drawn: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    plain = nn.Linear(inputs, outputs, bias=False, **drawn)
    sources = [torch.randn(tokens, inputs, **drawn, requires_grad=True) for _ in range(ROTATED)]
    gradients = [torch.randn(tokens, outputs, **drawn) for _ in range(ROTATED)]
    layers: dict[str, Layer] = {}
    refused: dict[str, str] = {}
    for kind in kinds():
        try:
            check_device(kind, device)
            layer = layer_of(kind, plain)
            for number in range(WARM_UP):
                _step(layer, sources[number], gradients[number], device)
            layers[kind] = layer
        except Exception as error:  # noqa: BLE001  # whatever a library raises, the other kinds are timed
            refused[kind] = " ".join(str(error).split())[:300] or type(error).__name__
    seconds: dict[str, list[float]] = {kind: [] for kind in layers}
    for number in range(rounds):
        for turn, (kind, layer) in enumerate(layers.items()):
            place = (number + turn) % ROTATED
            seconds[kind].append(_step(layer, sources[place], gradients[place], device))
    return {
        "inputs": inputs,
        "outputs": outputs,
        "tokens": tokens,
        "flops": 6 * inputs * outputs * tokens,
        "seconds": {kind: statistics.median(found) for kind, found in seconds.items()},
        "least_s": {kind: min(found) for kind, found in seconds.items()},
        "most_s": {kind: max(found) for kind, found in seconds.items()},
        "refused": refused,
    }


def _step(layer: Layer, source: Tensor, gradient: Tensor, device: torch.device) -> float:
    """Seconds of one forward and backward, gradients not there before."""
    source.grad = None
    for parameter in layer.plain.parameters():
        parameter.grad = None
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(AHEAD_CYCLES)
        begin.record()
        _forward_backward(layer, source, gradient)
        end.record()
        torch.cuda.synchronize(device)
        return float(begin.elapsed_time(end)) / 1000
    started = time.perf_counter()
    _forward_backward(layer, source, gradient)
    return time.perf_counter() - started


def _forward_backward(layer: Layer, source: Tensor, gradient: Tensor) -> None:
    with layer.around():
        out = layer.forward(source)
    out.backward(gradient)


def main(arguments: list[str]) -> int:
    """Answers the request that `arguments` name."""
    request = json.loads(Path(arguments[0]).read_text())
    device = torch.device(request["device"])
    with Path(arguments[1]).open("a") as stream:
        for inputs, outputs in request["shapes"]:
            torch._dynamo.reset()
            for tokens in request["tokens"]:
                row = time_shape(inputs, outputs, tokens, rounds=request["rounds"], device=device)
                stream.write(json.dumps(row) + "\n")
                stream.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
