"""Whether FP8 pays for a model: `python -m trainer.runtime.fp8_gain REQUEST.json` times its own matrix shapes.

Each different shape among the layers that would be converted (`fp8_layers`) runs forward and backward on a micro batch
of random tokens, once as a plain layer under bf16 autocast and once as the library's, and counts as often as the model
has it. Small layers lose: casts cost more than the faster product saves. Needs a CUDA device; the answer, JSON on the
standard output, says what was timed, or why nothing was. A few seconds: at most BUDGET_S for each shape and type.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.runtime.fp8 import fp8_region
from trainer.runtime.fp8_layers import fp8_layers, token_multiple
from trainer.runtime.model import model_from_config
from trainer.runtime.stopwatch import best_seconds
from trainer.spec import codec
from trainer.spec.errors import InputError, ShardwiseError
from trainer.spec.strategy import Attention, Fp8Recipe
from trainer.spec.value import Value

BUDGET_S = 0.2
LEAST_GAIN = 1.05  # what is within the noise of a few repetitions is no gain

Shape = tuple[int, int]  # (in features, out features)


class Fp8GainRequest(Value, frozen=True, kw_only=True):
    """What to time: a model's config.json, the tokens of one micro batch, and how scales are found."""

    model_config: dict[str, Any]
    tokens: int
    recipe: Fp8Recipe = Fp8Recipe.CURRENT


class ShapeTimes(Value, frozen=True, kw_only=True):
    """Seconds of one forward and backward of a layer."""

    in_features: int
    out_features: int
    count: int  # layers of this shape in the model
    bf16_s: float
    fp8_s: float


class Fp8Gain(Value, frozen=True, kw_only=True):
    """How much faster the model's linear layers are in FP8."""

    recipe: Fp8Recipe
    tokens: int
    shapes: tuple[ShapeTimes, ...] = ()
    problem: str | None = None  # why nothing was timed

    @property
    def speedup(self) -> float | None:
        """Seconds of all layers in bf16 over their seconds in FP8; None where nothing was timed."""
        fp8_s = sum(shape.count * shape.fp8_s for shape in self.shapes)
        return sum(shape.count * shape.bf16_s for shape in self.shapes) / fp8_s if fp8_s else None

    @property
    def pays(self) -> bool:
        """Whether FP8 is worth its rounding."""
        return self.speedup is not None and self.speedup >= LEAST_GAIN


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


def answer(request: Fp8GainRequest) -> Fp8Gain:
    """The gain on this machine's GPU; a problem in words where there is none to time on."""
    try:
        shapes = _times(request)
    except ShardwiseError as error:
        return Fp8Gain(recipe=request.recipe, tokens=request.tokens, problem=str(error))
    return Fp8Gain(recipe=request.recipe, tokens=request.tokens, shapes=shapes)


def main(arguments: Sequence[str]) -> int:
    """Reads the request named in `arguments` and prints the answer; 2 where it cannot be read."""
    try:
        (path,) = arguments
        request = codec.read(Path(path), Fp8GainRequest)
    except ValueError:
        print("usage: python -m trainer.runtime.fp8_gain REQUEST.json", file=sys.stderr)  # noqa: T201  # of a program
        return 2
    except InputError as error:
        print(error, file=sys.stderr)  # noqa: T201  # the answer of a program
        return int(error.exit_code)
    gain = answer(request)
    told = {**json.loads(codec.encode(gain)), "speedup": gain.speedup, "pays": gain.pays}
    print(json.dumps(told, indent=1))  # noqa: T201  # the answer of a program
    return 0


def _times(request: Fp8GainRequest) -> tuple[ShapeTimes, ...]:
    if not torch.cuda.is_available():
        raise InputError("fp8: there is no CUDA device to time it on")
    shapes = linear_shapes(request.model_config, request.recipe)
    if not shapes:
        raise InputError("fp8: no layer of this model fits its tiles")
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
    sys.exit(main(sys.argv[1:]))
