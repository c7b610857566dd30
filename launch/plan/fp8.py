"""The gain of FP8 on a model's own blocks, timed by a worker before `shardwise train` plans, and its cache.

It is timed only if the result could change the choice: an FP8 strategy could run, and the job allows FP8 without
pinning it, or two libraries could multiply. If the timing fails, one line gives the reason, and the plan does not
choose FP8.

The cache has one file for each model shape, device, versions, recipes and number of tokens. A file that cannot be read,
or was written for other values, is reported in a line, and the next `shardwise train` measures again.
"""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shardwise.launch.probe.measure import measuring_environment
from shardwise.launch.terminal import Console
from shardwise.launch.worker import ask
from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.rules.fp8 import compiles_in, possible_recipes
from shardwise.trainer.planning.schedule import DEFAULT_STEP_TOKENS
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import InputError, ShardwiseError
from shardwise.trainer.spec.hardware import Gpu, Hardware
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.messages.worker_requests import Fp8GainKey, Fp8GainRequest, StoredFp8Gain
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import Fp8Gain, Plan
from shardwise.trainer.spec.strategy import Precision
from shardwise.trainer.spec.units import format_seconds

FOLDER = "fp8"
LIBRARIES = ("torch", "transformer-engine", "torchao")
# A micro batch is not known before it is planned. From some thousand tokens on the casts of the weights, which more
# tokens share, are a small part, so what is timed is a power of two up to here, or a single row if that is longer.
USUAL_TOKENS, MOST_TOKENS = 4096, 8192


def fp8_key(job: Job, *, shape: ModelShape, hardware: Hardware, versions: dict[str, str]) -> Fp8GainKey:
    """Key under which a timing of FP8 holds for this job on this machine."""
    linears = [(linear, shape.num_layers - shape.num_dense_layers) for linear in shape.linears]
    linears += [(linear, shape.num_dense_layers) for linear in shape.dense_linears]
    compiles = compiles_in(job, shape)
    return Fp8GainKey(
        model_type=shape.model_type,
        layers=tuple((linear.num_inputs, linear.num_outputs, number) for linear, number in linears),
        device=device_of(hardware).name,
        recipes=possible_recipes(job, hardware.library_names, compiles=compiles),
        compiles=compiles,
        tokens=timed_tokens(job, hardware.num_devices),
        seq_len=job.train.seq_len,
        versions={name: versions.get(name, "none") for name in LIBRARIES},
    )


def timed_tokens(job: Job, num_ranks: int) -> int:
    """Tokens of the micro batch that is timed: no more than a rank has of a step, rounded down to a power of two."""
    seq_len = job.train.seq_len
    share = max(1, (job.train.tokens_per_step or DEFAULT_STEP_TOKENS) // (seq_len * num_ranks))
    rows = job.pin.micro_batch or max(1, min(share, USUAL_TOKENS // seq_len))
    return min(MOST_TOKENS, 1 << (rows * seq_len).bit_length() - 1)


def key_of(plan: Plan) -> Fp8GainKey:
    """The key of the timing that `plan` was, or would be, made with."""
    return fp8_key(plan.job, shape=plan.model_shape, hardware=plan.hardware, versions=plan.versions)


def read_fp8_gain(cache: Path, key: Fp8GainKey) -> tuple[Fp8Gain | None, str | None]:
    """The stored timing under `key` or None, and a line about a file that could not be used."""
    path = _path(cache, key)
    try:
        retained = codec.decode(path.read_bytes(), StoredFp8Gain, origin=str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None, None
    except (OSError, InputError):
        return None, f"{path}: is no timing of FP8 that this version can read, and is ignored"
    if retained.key != key:
        return None, f"{path}: is a timing of FP8 for another model or machine, and is ignored"
    return retained.gain, None


def store_fp8_gain(cache: Path, key: Fp8GainKey, gain: Fp8Gain) -> str | None:
    """Writes the timing; returns the reason if it cannot be written."""
    path = _path(cache, key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        codec.write(path, StoredFp8Gain(key=key, gain=gain))
    except OSError as error:
        return f"{path}: cannot be written: {error.strerror}"
    return None


def _path(cache: Path, key: Fp8GainKey) -> Path:
    return cache / FOLDER / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]}.json"


TIMEOUT_S = 300.0  # to import torch and two libraries from a cold disk, and to compile a block in both types
MODULE = "shardwise.trainer.runtime.tools.fp8_gain"
_WHAT = "timing FP8 on the model's own blocks"


def needs_timing(plan: Plan) -> bool:
    """True if `plan` ranks FP8 candidates by an assumed speed, and may choose one of them or another library."""
    is_open = plan.job.pin.precision is None or len(key_of(plan).recipes) > 1
    return (
        plan.fp8_gain is None
        and is_open
        and any(candidate.strategy.precision is Precision.FP8 for candidate in plan.candidates)
    )


def fp8_gain_for(plan: Plan, *, cache: Path, console: Console) -> Fp8Gain | None:
    """Gain of FP8 on this machine, timed now and stored; None if `plan` does not need it."""
    if not needs_timing(plan):
        return None
    key = key_of(plan)
    request = Fp8GainRequest(
        model_config=plan.model_config,
        tokens=key.tokens,
        seq_len=key.seq_len,
        recipes=key.recipes,
        compiles=key.compiles,
    )
    console.line(f"{_WHAT} ...")
    begin = time.monotonic()
    gain = time_fp8(request, [gpu for gpu in plan.hardware.gpus if key.device in (gpu.spec_name, gpu.name)])
    outcome = gain.text if gain.problem is None else f"{gain.text}; it is not chosen"
    console.line(f"{_WHAT}: {format_seconds(time.monotonic() - begin)}; fp8 {outcome}")
    obstacle = store_fp8_gain(cache, key, gain) if gain.problem is None else None
    if obstacle is not None:
        console.line(obstacle)
    return gain


def time_fp8(
    request: Fp8GainRequest, gpus: Sequence[Gpu], *, timeout_s: float = TIMEOUT_S, module: str = MODULE
) -> Fp8Gain:
    """The gain on the first of `gpus`; its `problem` states why it could not be timed within `timeout_s`."""
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
        return Fp8Gain(recipe=request.recipes[0], tokens=request.tokens, problem=" ".join(str(error).split()))
