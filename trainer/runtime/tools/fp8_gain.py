"""Times a model's matrix shapes in bf16 and FP8: `python -m shardwise.trainer.runtime.tools.fp8_gain REQUEST RESULT`.

Each different shape among the layers that would be converted (`fp8_layers`) runs forward and backward on a micro batch
of random tokens, once as a plain layer under bf16 autocast and once as the library's, and counts as often as the model
has it. Small layers lose: casts cost more than the faster product saves. Needs a CUDA device; the result lists what was
timed, or why nothing was. A few seconds: at most BUDGET_S for each shape and type.
"""

from collections import Counter
from typing import Any

import torch
from torch import nn

from shardwise.trainer.runtime.models.build import model_from_config
from shardwise.trainer.runtime.precision.fp8 import fp8_layers, fp8_region, library_of, token_multiple
from shardwise.trainer.runtime.run.clock import best_seconds
from shardwise.trainer.runtime.run.process import run_request_and_exit
from shardwise.trainer.spec.errors import InputError, ShardwiseError
from shardwise.trainer.spec.messages.worker_requests import Fp8GainRequest
from shardwise.trainer.spec.plan import Fp8Gain, ShapeTimes
from shardwise.trainer.spec.strategy import Attention, Fp8Recipe

BUDGET_S = 0.2

Shape = tuple[int, int]  # (in features, out features)


def linear_shapes(model_config: dict[str, Any], recipe: Fp8Recipe) -> Counter[Shape]:
    """The shapes that would be converted, with how many layers have each; nothing is allocated."""
    with torch.device("meta"):
        model = model_from_config(model_config, dtype=torch.float32, attention=Attention.SDPA)
    return Counter((layer.in_features, layer.out_features) for layer in fp8_layers(model, recipe).chosen.values())


def time_shapes(
    shapes: Counter[Shape], recipe: Fp8Recipe, device: torch.device, *, tokens: int, budget_s: float = BUDGET_S
) -> tuple[ShapeTimes, ...]:
    """Times every shape in both types."""
    region = fp8_region(recipe)
    times = []
    for (in_features, out_features), count in sorted(shapes.items()):
        plain = nn.Linear(in_features, out_features, bias=False, device=device)
        bf16_s = _step_seconds(plain, tokens, device, budget_s)
        with region.opened():
            fp8_s = _step_seconds(region.converted(plain), tokens, device, budget_s)
        times.append(
            ShapeTimes(in_features=in_features, out_features=out_features, count=count, bf16_s=bf16_s, fp8_s=fp8_s)
        )
    return tuple(times)


def measure_gain(request: Fp8GainRequest) -> Fp8Gain:
    """The gain on this machine's GPU; a problem if there is none."""
    try:
        shapes = _times(request)
    except ShardwiseError as error:
        return Fp8Gain(recipe=request.recipe, tokens=request.tokens, problem=str(error))
    return Fp8Gain(recipe=request.recipe, tokens=request.tokens, library=library_of(request.recipe), shapes=shapes)


def _times(request: Fp8GainRequest) -> tuple[ShapeTimes, ...]:
    if not torch.cuda.is_available():
        raise InputError("there is no CUDA device")
    shapes = linear_shapes(request.model_config, request.recipe)
    if not shapes:
        raise InputError("no layer of this model fits its tiles")
    multiple = token_multiple(request.recipe)
    tokens = -(-request.tokens // multiple) * multiple
    return time_shapes(shapes, request.recipe, torch.device("cuda"), tokens=tokens)


def _step_seconds(layer: nn.Module, tokens: int, device: torch.device, budget_s: float) -> float:
    """Best time of a forward and a backward that gives both gradients."""
    features: int = layer.in_features  # type: ignore[assignment]  # of a linear layer
    inputs = torch.randn(tokens, features, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = layer(inputs)
        out.backward(out.detach())

    return best_seconds(step, device, budget_s)


if __name__ == "__main__":
    run_request_and_exit(Fp8GainRequest, measure_gain)
