"""Has FP8 timed on a model's own matrix shapes before `shardwise train` takes a plan, in a process with an end.

Only where the answer could change what is taken: the job allows FP8 and does not pin it, and a row in it could run.
What was timed is kept in the cache. What could not be timed is told in a line, and FP8 is not taken by that plan.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from launch.plan.fp8_store import keep_fp8_gain, key_of
from launch.probe.measure import measuring_environment
from launch.terminal import Console
from launch.worker import ask
from trainer.spec.errors import ShardwiseError
from trainer.spec.hardware import Gpu
from trainer.spec.messages.measurement import Fp8GainRequest
from trainer.spec.plan import Fp8Gain, Plan
from trainer.spec.strategy import Precision
from trainer.spec.units import format_seconds

TIMEOUT_S = 120.0  # importing torch and the library from a cold disk takes most of it; the timing itself some seconds
MODULE = "trainer.runtime.tools.fp8_gain"
_WHAT = "timing FP8 on the model's own matrix shapes"


def asks_for_timing(plan: Plan) -> bool:
    """True if `plan` ranks FP8 candidates by an assumed speed and may choose one of them."""
    is_open = plan.job.pin.precision is None and plan.fp8_gain is None
    return is_open and any(candidate.strategy.precision is Precision.FP8 for candidate in plan.candidates)


def fp8_gain_for(plan: Plan, *, cache: Path, console: Console) -> Fp8Gain | None:
    """Gain of FP8 on this machine, timed now and stored; None if `plan` does not need it."""
    if not asks_for_timing(plan):
        return None
    key = key_of(plan)
    request = Fp8GainRequest(model_config=plan.model_config, tokens=key.tokens, recipe=key.recipe)
    console.line(f"{_WHAT} ...")
    begin = time.monotonic()
    gain = time_fp8(request, [gpu for gpu in plan.hardware.gpus if key.device in (gpu.spec_name, gpu.name)])
    outcome = gain.words if gain.problem is None else f"{gain.words}; it is not taken"
    console.line(f"{_WHAT}: {format_seconds(time.monotonic() - begin)}; fp8 {outcome}")
    obstacle = keep_fp8_gain(cache, key, gain) if gain.problem is None else None
    if obstacle is not None:
        console.line(obstacle)
    return gain


def time_fp8(
    request: Fp8GainRequest, gpus: Sequence[Gpu], *, timeout_s: float = TIMEOUT_S, module: str = MODULE
) -> Fp8Gain:
    """The gain on the first of `gpus`; a problem in words where it could not be timed within `timeout_s`."""
    try:
        return ask(
            module,
            request,
            Fp8Gain,
            subject="it",
            environment=measuring_environment(gpus[:1]),
            timeout_s=timeout_s,
        )
    except ShardwiseError as error:
        return Fp8Gain(recipe=request.recipe, tokens=request.tokens, problem=" ".join(str(error).split()))
