"""The loss head: hidden states and labels to the sum of token losses, with a known amount of logits alive.

A causal language model returns its loss as a sum over tokens here, never as a mean: the step divides by the number
of targets in the global batch, so that the loss does not depend on how rows fall on ranks and micro batches.
Position t learns token t + 1; the shift happens here, labels come unshifted, `IGNORED` marks what is not learned.
A `LossOutput` selects the result: that sum, or the log-probability of each row, or a score.

    eager         as transformers by default: logits of all tokens, upcast to fp32, softmax saved for the backward
    chunked       plain torch: `chunk_tokens` tokens at a time, once in the forward and once more in the backward
    fused         plain torch: logits of all tokens, once, in the computing type; their gradient replaces them
    fused_linear  Liger's kernels for CUDA: logits of a slice of tokens, gradients made in the forward

Memory of `chunked`, T tokens in a micro batch, C in a slice, V vocabulary, H hidden size, c bytes of the computing
type: only T x 4 bytes survive the forward in addition to the hidden states, saved in any case. A slice holds C x V x 8
bytes in the forward (fp32 logits and their log-softmax) and C x V x 4 in the backward, C x V x (4 + c) under 16 bit;
there, T x H x c more hold the gradient of the hidden states and V x H x 4 that of the head (which in fp32 becomes the
parameter's own gradient; under 16 bit V x H x c more hold one slice's part of it). It costs one more matrix product of
the head per token. Small slices stay in a CPU's cache.

Memory of `fused`: the logits, T x V x c bytes from the forward to the head's backward, and T x 4 bytes. In addition,
V x 4 bytes for each of min(T, FUSED_SLICE_TOKENS) tokens, while the losses are computed in the forward (twice that
under a cap) and, in 16 bit, while gradients are computed in the backward; then the result of the head's product. It
needs no second matrix product, so it is the faster one where the logits fit. Its backward can run once only.

A head may have a bias (Phi-2), and a model may cap its logits (Gemma 2: c x tanh(logits / c)); both heads then do, and
the chunked one holds C x V x 4 bytes more in the backward for the slope of the cap.

Sums of rows (`LossOutput.ROWS`) cost T x 4 bytes more, twice and never both at a time: the token losses until they are
summed in the forward, the weights of the tokens in the backward. A micro batch of P pairs is 2 P rows, so T is 2 P S:
the logits of both halves are in one head. `fused_linear` has none: Liger makes gradients in the forward, for one weight
of all tokens, and a row's weight is known after it.

A score (`LossOutput.SCORE`) has no gradient. It is computed in slices under every head, C x V x (4 + c) bytes at most:
of `chunk_tokens` tokens, of no more than FUSED_SLICE_TOKENS, or of as many as give no more logits than hidden states.

All heads run inside the model's forward, `chunked` and `fused_linear` moreover inside the forward of `lm_head`. So an
engine that gathers sharded weights around a module's forward and backward (ZeRO-3, FSDP2) has gathered them when they
are read. `fused` only follows that forward.

Rows of several documents come with positions; attention/packed.py separates their documents.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from shardwise.trainer.runtime.attention.packed import packed_inputs
from shardwise.trainer.runtime.loss.slices import (
    FUSED_SLICE_TOKENS,
    IGNORED,
    ChunkedLoss,
    FusedLoss,
    Head,
    capped,
    scored,
    sum_rows,
)
from shardwise.trainer.runtime.run.operators import check_triton_compiler
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.packages import extra_line
from shardwise.trainer.spec.strategy import LossHead

__all__ = ["DEFAULT_CHUNK_TOKENS", "FUSED_SLICE_TOKENS", "IGNORED", "LossOutput", "install_loss_head", "shift"]

DEFAULT_CHUNK_TOKENS = 1024


class LossOutput(StrEnum):
    """Outputs of a model with labels."""

    SUM = "sum"  # the token losses added up: a scalar in fp32
    ROWS = "rows"  # the log-probability of what each row learns, the sum over its targets: [B] in float64
    LOGITS = "logits"  # [B, S, V] in the computing type, of whole rows: for a loss of the user's own
    SCORE = "score"  # the token losses added up, and how many targets are the most likely token: [2] in float64


def install_loss_head(model: PreTrainedModel, head: LossHead, *, chunk_tokens: int | None) -> "LossForward":
    """Makes `model(input_ids=..., labels=..., output=...)` return the sum of token losses, or another `LossOutput`.

    Without labels the model returns what it returned before (generation needs it).
    """
    linear: Any = model.get_output_embeddings()
    config: Any = model.config.get_text_config()
    if not isinstance(linear, nn.Linear):
        raise InputError(f"{type(model).__name__} has no plain lm_head; its loss cannot be computed here")
    if getattr(config, "output_router_logits", False):
        raise InputError(
            "config.json: output_router_logits is true, which adds a loss that balances experts; shardwise computes "
            "the loss of tokens only: set it to false"
        )
    softcap = getattr(config, "final_logit_softcapping", None)
    liger = _liger_loss(softcap) if head is LossHead.FUSED_LINEAR else None
    replaceable: Any = model
    of_head: Any = linear
    of_head.forward = _HeadForward(linear, head, chunk_tokens or DEFAULT_CHUNK_TOKENS, softcap, liger).forward
    loss = LossForward(head, softcap, model.forward)
    replaceable.forward = MethodType(loss.forward, model)  # a method of the model: Accelerate binds its function anew
    return loss


def shift(labels: Tensor) -> Tensor:
    """Target of each position: labels [B, S] moved left by one, the last position ignored."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


@dataclass(frozen=True, slots=True)
class LossForward:
    """The forward of a model with a loss head."""

    head: LossHead
    softcap: float | None
    own_forward: Callable[..., Any]  # the model's forward before

    def forward(
        self,
        model: Any,  # noqa: ANN401  # a PreTrainedModel, whose class an engine may change
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        output: LossOutput = LossOutput.SUM,
        attention_mask: Tensor | None = None,  # by name: `generate` looks for it in the signature
        **inputs: Any,  # noqa: ANN401  # the signature of the model's own forward
    ) -> Any:  # noqa: ANN401  # as above
        """The requested output; without labels, the result of the model's own forward."""
        if attention_mask is not None:
            inputs["attention_mask"] = attention_mask
        if labels is None:
            return self.own_forward(input_ids=input_ids, **inputs)
        if output is LossOutput.ROWS and self.head is LossHead.FUSED_LINEAR:
            raise InputError(
                "pin.loss: fused_linear makes its gradients before the weight of a row is known, so it has no sums of "
                "rows (DPO); use pin.loss=chunked"
            )
        hidden = _hidden_states(model, input_ids, **inputs)
        targets = shift(labels)
        linear = model.get_output_embeddings()
        if output is LossOutput.LOGITS:
            return capped(linear(hidden), self.softcap)
        if output is LossOutput.SCORE or self.head in (LossHead.CHUNKED, LossHead.FUSED_LINEAR):
            found = linear(hidden, targets, output=output)
        else:
            row_tokens = targets.shape[1] if output is LossOutput.ROWS else None
            logits = linear(hidden).flatten(0, 1)
            found = _loss_of_logits(self.head, logits, targets.flatten(), self.softcap, row_tokens)
        return -found if output is LossOutput.ROWS else found


def _hidden_states(model: Any, input_ids: Tensor | None, **inputs: Any) -> Tensor:  # noqa: ANN401  # the model's own inputs
    """The last hidden states [B, S, H]; with positions of packed rows, each document's as if it stood alone."""
    assert input_ids is not None, "labels belong to ids"
    position_ids, bounds = inputs.pop("position_ids", None), inputs.pop("document_bounds", ())
    ids = {"input_ids": input_ids}
    if position_ids is not None:
        ids = packed_inputs(model, input_ids, position_ids, bounds)
    hidden = model.get_decoder()(**ids, use_cache=False, **inputs).last_hidden_state
    assert isinstance(hidden, Tensor)
    return hidden.view(*input_ids.shape, -1)


def _loss_of_logits(
    head: LossHead, logits: Tensor, targets: Tensor, softcap: float | None, row_tokens: int | None
) -> Tensor:
    """Losses, added up or by row, of logits [T, V] of all tokens."""
    if head is LossHead.FUSED:
        loss = FusedLoss.apply(logits, targets, softcap, row_tokens)  # type: ignore[no-untyped-call]  # torch's
        assert isinstance(loss, Tensor)
        return loss
    reduction = "sum" if row_tokens is None else "none"
    losses = functional.cross_entropy(
        capped(logits, softcap).float(), targets, ignore_index=IGNORED, reduction=reduction
    )
    return sum_rows(losses, row_tokens)


@dataclass(frozen=True, slots=True)
class _HeadForward:
    """The forward of `lm_head`: logits as before, or with targets the requested output for hidden [B, S, H]."""

    linear: nn.Linear
    head: LossHead
    chunk_tokens: int
    softcap: float | None
    liger: nn.Module | None  # the loss of `fused_linear`

    def forward(self, hidden: Tensor, targets: Tensor | None = None, *, output: LossOutput = LossOutput.SUM) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        if targets is None:
            return functional.linear(hidden, weight, bias)
        row_tokens = targets.shape[1] if output is LossOutput.ROWS else None
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if output is not LossOutput.SCORE and self.liger is not None:
            loss: Tensor = self.liger(weight, hidden, targets, bias)
            return loss.float()
        hidden, head = _in_computing_type(hidden, Head(weight, bias, self.softcap))
        if output is LossOutput.SCORE:
            return scored(hidden, head, targets, self._score_tokens(hidden.shape[0]))
        found = ChunkedLoss.apply(hidden, *head, targets, self.chunk_tokens, row_tokens)  # type: ignore[no-untyped-call]  # torch's
        assert isinstance(found, Tensor)
        return found

    def _score_tokens(self, num_tokens: int) -> int:
        """Tokens whose logits a score may hold at a time: no more than the head holds in training."""
        if self.head is LossHead.CHUNKED:
            return self.chunk_tokens
        if self.head is LossHead.FUSED_LINEAR:
            hidden_size, vocab = self.linear.in_features, self.linear.out_features
            return max(1, min(FUSED_SLICE_TOKENS, num_tokens * hidden_size // vocab))
        return FUSED_SLICE_TOKENS


def _in_computing_type(hidden: Tensor, head: Head) -> tuple[Tensor, Head]:
    """Both in the type that a product would have under autocast."""
    if not torch.is_autocast_enabled(hidden.device.type):
        return hidden, head
    dtype = torch.get_autocast_dtype(hidden.device.type)
    bias = None if head.bias is None else head.bias.to(dtype)
    return hidden.to(dtype), head._replace(weight=head.weight.to(dtype), bias=bias)


def _liger_loss(softcap: float | None) -> nn.Module:
    """Liger's loss of hidden states under a head; InputError or EnvironmentFaultError where it cannot run."""
    if not torch.cuda.is_available():
        raise InputError("pin.loss: fused_linear is Liger's, which needs a GPU; pin.loss=fused does without")
    if importlib.util.find_spec("liger_kernel") is None:
        raise InputError(
            "pin.loss: fused_linear is Liger's, and liger-kernel is not installed; use pin.loss=fused or chunked, or\n"
            f"{extra_line('liger')}"
        )
    check_triton_compiler("pin.loss")
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORED, reduction="sum", softcap=softcap, accum_dtype=torch.float32
    )
    assert isinstance(loss, nn.Module)
    return loss
