"""Checks of a dry run: supported requests, and conditions under which its bytes are those of a device.

Every library underneath changes from version to version. Where one of them runs another path on fake tensors than on
a device, nothing fails: the figures are only wrong. So each run looks for signs of such paths, and raises.
"""

import inspect
import sys

from torch import nn

from shardwise.trainer.runtime.run.types import compute_type
from shardwise.trainer.simulation.device_memory import Tracker
from shardwise.trainer.simulation.kernels import Kernels
from shardwise.trainer.spec.errors import InputError, ShardwiseError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.worker_requests import SimulationRequest
from shardwise.trainer.spec.strategy import FLASH_CAPABILITY, Attention, AttentionKernel, Method, Precision

_WINDOW_FIELDS = ("sliding_window", "attention_chunk_size")
_ALWAYS_MASKED = "allow_is_causal_skip=False"  # in the code of a model that needs its mask in any case


def check_supported(request: SimulationRequest) -> None:
    """InputError for a request that a dry run does not support."""
    sharding, ranks, group = request.sharding, request.num_ranks, request.shard_group or request.ranks_per_node
    for is_refused, sentence in (
        (
            sharding.uses_deepspeed and request.precision is Precision.FP16_MIXED,
            f"fp16-mixed under {sharding} has no dry run; bf16-mixed has",
        ),
        (
            sharding.uses_deepspeed and request.method is Method.QLORA,
            f"qlora under {sharding} has no dry run; none and ddp have",
        ),
        (request.method is Method.GALORE, "galore has no dry run; the closed form covers it"),
        (request.precision is Precision.FP8, "fp8 has no dry run; the closed form covers it"),
        (request.attention is Attention.FLASH, "flash-attn has no dry run; sdpa runs the same kernel"),
        (
            request.method is Method.QLORA and sharding.uses_fsdp,
            f"qlora under {sharding} has no dry run; none and ddp have",
        ),
        (
            request.device_kind is DeviceKind.CPU and not sharding.facts.is_one_rank,
            f"{sharding} on CPU devices has no dry run; a single device has",
        ),
        (sharding.facts.is_one_rank and ranks != 1, f"sharding none is one rank, the request has {ranks}"),
        (not sharding.facts.is_one_rank and ranks < 2, f"{sharding} needs 2 ranks or more, the request has {ranks}"),
        (
            sharding.facts.shards_within_group and ranks % group != 0,
            f"hsdp needs full groups: {ranks} ranks, {group} in a group",
        ),
    ):
        if is_refused:
            raise InputError(f"simulation: {sentence}")


def check_run(
    request: SimulationRequest, tracker: Tracker, kernels: Kernels, *, has_masks: bool, steady: int, after: int
) -> tuple[str, ...]:
    """Sentences on what was found in order; ShardwiseError where something was not."""
    return (
        _check_types(request, tracker),
        _check_attention(request, tracker, kernels, has_masks=has_masks),
        _check_activations(tracker),
        _check_steady(steady, after),
    )


def builds_masks(model: nn.Module, seq_len: int) -> bool:
    """True where a model's attention gets a mask although its rows have no padding."""
    config = getattr(model, "config", None)
    windows = [getattr(config, name, None) for name in _WINDOW_FIELDS]
    has_window = any(window is not None and window <= seq_len for window in windows)
    source = inspect.getsource(sys.modules[type(model).__module__])
    return has_window or getattr(config, "alibi", False) or _ALWAYS_MASKED in source


def _check_attention(request: SimulationRequest, tracker: Tracker, kernels: Kernels, *, has_masks: bool) -> str:
    if request.attention is not Attention.SDPA:
        return "attention: transformers' own"
    seen = sorted(kernels.attention)
    if not seen:
        raise _untrusted("the model never called scaled_dot_product_attention")
    if has_masks:
        return f"attention: {', '.join(seen)}, with masks that the model builds"
    if kernels.num_masked:
        raise _untrusted(f"a mask was built for {kernels.num_masked} attention calls that need none")
    if AttentionKernel.MATH not in seen and request.seq_len in tracker.square_bytes:
        size = tracker.square_bytes[request.seq_len]
        raise _untrusted(f"{size} bytes of a sequence x sequence tensor, with {', '.join(seen)} attention")
    has_flash = request.device_kind is DeviceKind.CUDA and request.compute_capability >= FLASH_CAPABILITY
    is_flash = seen == [AttentionKernel.FLASH] or kernels.num_narrow == sum(kernels.attention.values())
    if has_flash and request.precision is not Precision.FP32 and not is_flash:
        raise _untrusted(f"attention ran as {', '.join(seen)}, flash was expected")
    return f"attention: {', '.join(seen)}"


def _check_types(request: SimulationRequest, tracker: Tracker) -> str:
    """Autocast silently turns itself off where it detects no device; some models compute their routers in fp32."""
    expected, types = compute_type(request.precision), tracker.product_types
    if types[expected] <= sum(types.values()) / 2:
        others = sorted(str(dtype) for dtype in types if dtype != expected)
        raise _untrusted(f"matrix products in {', '.join(others) or 'no type'}, {expected} was expected")
    return f"matrix products in {expected}"


def _check_activations(tracker: Tracker) -> str:
    """A backward that falls apart into operations that no device runs allocates their temporaries."""
    name = "sigmoid.default"
    if tracker.backward_operations[name] and not tracker.forward_operations[name]:
        raise _untrusted(f"{tracker.backward_operations[name]} sigmoids in a backward whose forward has none")
    return "no activation's backward fell apart"


def _check_steady(steady: int, after: int) -> str:
    if after != steady:
        raise _untrusted(f"{after} bytes after the second step, {steady} after the first")
    return f"{steady} bytes after either step"


def _untrusted(sentence: str) -> ShardwiseError:
    return ShardwiseError(f"the dry run ran a path that no device runs: {sentence}")
