"""Checks of a dry run: supported requests, and conditions under which its bytes are those of a device.

Every library underneath changes from version to version. Where one of them runs another path on fake tensors than on
a device, nothing fails: the figures are only wrong. So each run looks for signs of such paths, and raises.

Check that the loss trained here is the model's own: cross-entropy of hidden states x head, and nothing else.

Some models scale or mask their logits after the head, change the hidden states before it, or add a loss of another
kind. The loss heads of `trainer.runtime.loss` know a scale, a cap and a bias; they would train another loss than such a
model's unnoticed. So the model's own loss is run on fake tensors, and so are its hidden states and its head, and
the operations are compared one by one.
"""

import inspect
import sys
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from shardwise.trainer.runtime.attention.packed import known_rows
from shardwise.trainer.runtime.loss import LossForward, decoder_of
from shardwise.trainer.runtime.run.types import compute_type
from shardwise.trainer.simulation.build import materialise
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


NUM_TOKENS = 8
# What moves values or changes their form, labels shifted by one place among it.
_FREE = frozenset({
    "view", "_unsafe_view", "slice", "alias", "detach", "_to_copy", "select", "unsqueeze", "t", "index", "clone",
    "constant_pad_nd",
})  # fmt: skip
_CAP = ("div", "tanh", "mul")
_CROSS_ENTROPY = ("_log_softmax", "nll_loss_forward")


def loss_obstacle(model: PreTrainedModel, loss: LossForward) -> str | None:
    """Reason why a model on `meta` has another loss than the heads here, else None. It ends on fake tensors."""
    kernels = Kernels("cpu", (0, 0))
    model.eval()
    try:
        with kernels.installed(), known_rows(None), FakeTensorMode():
            materialise(model, "cpu")
            ids = torch.zeros((1, NUM_TOKENS), dtype=torch.long)
            theirs = _operations(lambda: loss.own_forward(input_ids=ids, labels=ids, use_cache=False))
            ours = _operations(lambda: _logits(model, ids))
    except _NOT_FOLLOWED as error:
        return f"its forward cannot be followed without values ({type(error).__name__})"
    scalings = ((),) if loss.logit_scale == 1 else (("mul",), ("div",))
    caps = _CAP if loss.softcap is not None else ()
    if any(theirs == [*ours, *scaling, *caps, *_CROSS_ENTROPY] for scaling in scalings):
        return None
    ours = [*ours, *caps, *_CROSS_ENTROPY]
    differing = next((own for own, other in zip_longest(theirs, ours) if own != other), None)
    return f"its loss is not just the cross-entropy of its hidden states times its head ({differing or 'less'})"


# What following a forward on fake tensors may end in: a question of values, or code for another kind of model.
_NOT_FOLLOWED = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)


def _logits(model: Any, ids: Tensor) -> Tensor:  # noqa: ANN401  # transformers' classes
    """The logits that the loss heads compute."""
    hidden = decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.get_output_embeddings()(hidden)
    assert isinstance(logits, Tensor)
    return logits


def _operations(compute: Any) -> list[str]:  # noqa: ANN401  # a function without arguments
    recorder = _Recorder()
    with torch.no_grad(), recorder:
        compute()
    return recorder.names


class _Recorder(TorchDispatchMode):
    """The names of the operations that compute something."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        name = func.__name__.partition(".")[0].rstrip("_")
        is_by_one = name in ("mul", "div") and any(isinstance(each, int | float) and each == 1 for each in args)
        if name not in _FREE and not is_by_one and func.namespace == "aten":
            self.names.append(name)
        return func(*args, **(kwargs or {}))
