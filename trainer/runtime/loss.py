"""The loss head: hidden states and labels to the sum of token losses, with a known amount of logits alive.

A causal language model returns its loss as a sum over tokens here, never as a mean: the step divides by the number
of targets in the global batch, so that the loss does not depend on how rows fall on ranks and micro batches.
Position t learns token t + 1; the shift happens here, labels come unshifted, `IGNORED` marks what is not learned.
A `LossOutput` selects the result: that sum, or the log-probability of each row, or a score.

    eager         as transformers by default: logits of all tokens, upcast to fp32, softmax saved for the backward
    chunked       plain torch: `chunk_tokens` tokens at a time, once in the forward and once more in the backward; a
                  `SliceBody` may compute the slices instead (`memory.compiled_head`)
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

A head may have a bias (Phi-2), and a model may scale its hidden states or logits (Granite) and cap the logits (Gemma 2:
c x tanh(logits / c)). Every head then does; the chunked one holds C x V x 4 bytes more in the backward for the slope of
the cap. `logits_rule` finds both in the model's own forward. A model whose logits are another function of its hidden
states (a dense layer before the head, a bias after it) computes its own, and `eager` alone makes its loss from them.

Sums of rows (`LossOutput.ROWS`) cost T x 4 bytes more, twice and never both at a time: the token losses until they are
summed in the forward, the weights of the tokens in the backward. A micro batch of P pairs is 2 P rows, so T is 2 P S:
the logits of both halves are in one head. `fused_linear` has none: Liger makes gradients in the forward, for one weight
of all tokens, and a row's weight is known after it.

Scores and losses of tokens (`SCORE`, `TOKENS`) have no gradient. They are computed in slices under every head,
C x V x (4 + c) bytes at most: of `chunk_tokens` tokens, of no more than FUSED_SLICE_TOKENS, or of as many as give no
more logits than hidden states.

All heads run inside the model's forward, `chunked` and `fused_linear` moreover inside the forward of `lm_head`. So an
engine that gathers sharded weights around a module's forward and backward (ZeRO-3, FSDP2) has gathered them when they
are read. `fused` only follows that forward.

Sums of rows are in float64: the rows of a pair are compared, and their sums are a thousand times their difference. The
gradients of a row's tokens are multiplied by that row's weight in fp32, before anything is rounded.

Rows of several documents come with positions; attention/packed.py separates their documents.
"""

import importlib.util
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from shardwise.trainer.runtime.attention.frequencies import own_frequencies
from shardwise.trainer.runtime.attention.packed import (
    counted_positions,
    known_rows,
    own_masks,
    own_positions,
    packed_inputs,
    replaced_forwards,
)
from shardwise.trainer.runtime.run.operators import KernelFallback
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.packages import extra_line
from shardwise.trainer.spec.strategy import LossHead

IGNORED = -100  # label of a position that is not learned
FUSED_SLICE_TOKENS = 256
DEFAULT_CHUNK_TOKENS = 1024


class LossOutput(StrEnum):
    """Outputs of a model with labels."""

    SUM = "sum"  # the token losses added up: a scalar in fp32
    ROWS = "rows"  # the log-probability of what each row learns, the sum over its targets: [B] in float64
    LOGITS = "logits"  # [B, S, V] in the computing type, of whole rows: for a loss of the user's own
    SCORE = "score"  # the token losses added up, and how many targets are the most likely token: [2] in float64
    TOKENS = "tokens"  # the loss of the target of each token, 0 where there is none: [B, S] in float64


_WITHOUT_GRADIENT = (LossOutput.SCORE, LossOutput.TOKENS)


def install_loss_head(
    model: PreTrainedModel,
    head: LossHead,
    *,
    chunk_tokens: int | None,
    is_pinned: bool = True,
    body: "SliceBody | None" = None,
) -> "LossForward":
    """Makes `model(input_ids=..., labels=..., output=...)` return the sum of token losses, or another `LossOutput`.

    Without labels the model returns what it returned before (generation needs it). If `fused_linear` is not pinned,
    `chunked` computes the loss where Liger's kernels fail to compile. `body` computes the slices of `chunked`, each of
    `chunk_tokens` tokens.
    """
    config: Any = model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise InputError(
            "config.json: output_router_logits is true, which adds a loss that balances experts; shardwise computes "
            "it by a setting of the job: set it to false, and train.router_aux_loss to the coefficient"
        )
    rule = logits_rule(model)
    if rule is None and head is not LossHead.EAGER:
        raise InputError(f"pin.loss: {type(model).__name__} computes logits of its own; use pin.loss=eager")
    softcap = None if rule is None else rule.softcap
    liger = LigerLoss(softcap, is_pinned=is_pinned) if head is LossHead.FUSED_LINEAR else None
    replaceable: Any = model
    if rule is not None:
        of_head: Any = model.get_output_embeddings()
        default = FUSED_SLICE_TOKENS if liger is not None else DEFAULT_CHUNK_TOKENS
        of_head.forward = _HeadForward(of_head, head, chunk_tokens or default, softcap, liger, body).forward
    loss = LossForward(head, rule, model.forward, liger)
    replaceable.forward = MethodType(loss.forward, model)  # a method of the model: Accelerate binds its function anew
    return loss


class LogitsRule(NamedTuple):
    """Logits as `capped(head(scale x hidden states), softcap)`."""

    scale: float
    softcap: float | None


def logits_rule(model: PreTrainedModel) -> LogitsRule | None:
    """The rule of a model's logits; None where its logits, or the loss that it makes from them, are anything else.

    The model's own forward runs on known numbers in place of the results of its decoder and its head, so that no weight
    is used, and the model may be on `meta`.
    """
    linear, cpu, length = model.get_output_embeddings(), torch.device("cpu"), 4
    if not isinstance(linear, nn.Linear):
        return None
    hidden = (torch.arange(length * linear.in_features, device=cpu) % 7 + 1.0).view(1, length, -1)  # exact in 16 bit
    products = torch.linspace(-64, 64, length * linear.out_features, device=cpu).view(1, length, -1)
    products[..., 0], products[..., 1] = _SMALL, _LARGE
    labels = torch.arange(length, device=cpu)[None]
    try:
        given, output = _on_known_numbers(model, linear, hidden, products, labels)
        before, after = float(given[0, 0, 0] / hidden[0, 0, 0]), float(output.logits[0, 0, 0]) / _SMALL
        after = 1.0 if math.isclose(after, 1, rel_tol=_EXACT) else after
        largest = float(output.logits[0, 0, 1])
        softcap = None if math.isclose(largest, after * _LARGE, rel_tol=_EXACT) else largest
        logits = capped(products * after, softcap)
        for found, expected in ((given, hidden * before), (output.logits, logits)):
            torch.testing.assert_close(found, expected, rtol=_EXACT, atol=0, check_dtype=False)
        is_plain = is_cross_entropy(float(output.loss), logits, labels)
    except _NOT_FOLLOWED:
        return None
    return LogitsRule(before * after, softcap) if is_plain and (after == 1 or linear.bias is None) else None


def is_cross_entropy(loss: float, logits: Tensor, labels: Tensor) -> bool:
    """True of the mean of the losses of next tokens, or of labels [B, S] that were shifted before."""
    of = (logits[:, :-1], labels[:, 1:]), (logits, labels)
    means = (float(functional.cross_entropy(each.flatten(0, 1).float(), to.flatten())) for each, to in of)
    return any(math.isclose(loss, mean, rel_tol=_SAME_LOSS) for mean in means)


def _on_known_numbers(
    model: PreTrainedModel, linear: nn.Linear, hidden: Tensor, products: Tensor, labels: Tensor
) -> tuple[Tensor, Any]:
    """What a model gives to its head, and its output, with these results of its decoder and its head.

    RuntimeError for a forward that uses a weight after its decoder.
    """
    inputs, weights = list[Tensor](), _WithoutWeights()

    def decode(*_: object, **__: object) -> _Decoded:
        weights.are_refused = True
        return _Decoded(last_hidden_state=hidden)

    def multiply(given: Tensor) -> Tensor:
        inputs.append(given)
        return products.clone()

    ids = torch.zeros(labels.shape, dtype=torch.long, device=linear.weight.device)
    with torch.no_grad(), replaced_forwards({decoder_of(model): decode, linear: multiply}), weights:
        output = model(input_ids=ids, labels=labels, use_cache=False)
    (given,) = inputs
    return given, output


class _WithoutWeights(TorchFunctionMode):
    """Raises RuntimeError for an operation on a parameter, once they are refused."""

    are_refused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401  # torch's
        inputs = (*args, *(kwargs or {}).values())
        if self.are_refused and func.__name__ != "__get__" and any(isinstance(each, nn.Parameter) for each in inputs):
            raise RuntimeError(f"{func.__name__} of a weight")
        return func(*args, **(kwargs or {}))


_SMALL, _LARGE = 2.0**-14, 2.0**10  # logits that no cap changes, and that every cap makes its own
_EXACT, _SAME_LOSS = 1e-5, 1e-6  # relative
# What a forward may end in that needs other results of its decoder, or weights that are not there.
_NOT_FOLLOWED = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


class _Decoded(BaseModelOutputWithPast):
    """The hidden states of a decoder, which has nothing else."""

    def __getattr__(self, name: str) -> None:
        return None


def shift(labels: Tensor) -> Tensor:
    """Target of each position: labels [B, S] moved left by one, the last position ignored."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


@dataclass(frozen=True, slots=True)
class LossForward:
    """The forward of a model with a loss head."""

    head: LossHead
    rule: LogitsRule | None  # None: the loss is made from the model's own logits
    own_forward: Callable[..., Any]  # the model's forward before
    liger: "LigerLoss | None" = None

    @property
    def problem(self) -> str | None:
        """Why `chunked` computes the loss of `fused_linear`, or None."""
        return None if self.liger is None else self.liger.fallback.problem

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
        targets = shift(labels)
        find = self._of_own_logits if self.rule is None else partial(self._of_hidden_states, self.rule)
        found = find(model, input_ids, targets, output, **inputs)
        return -found if output is LossOutput.ROWS else found

    def _of_hidden_states(
        self,
        rule: LogitsRule,
        model: Any,  # noqa: ANN401  # as in `forward`
        input_ids: Tensor | None,
        targets: Tensor,
        output: LossOutput,
        **inputs: Any,  # noqa: ANN401  # as in `forward`
    ) -> Tensor:
        hidden = hidden_states(model, input_ids, **inputs)
        if rule.scale != 1:
            hidden = hidden * rule.scale
        linear = model.get_output_embeddings()
        if output is LossOutput.LOGITS:
            return capped(linear(hidden), rule.softcap)
        if output in _WITHOUT_GRADIENT or self.head in (LossHead.CHUNKED, LossHead.FUSED_LINEAR):
            found: Tensor = linear(hidden, targets, output=output)
            return found
        row_tokens = targets.shape[1] if output is LossOutput.ROWS else None
        return _loss_of_logits(self.head, linear(hidden).flatten(0, 1), targets.flatten(), rule.softcap, row_tokens)

    def _of_own_logits(
        self,
        model: Any,  # noqa: ANN401  # as in `forward`
        input_ids: Tensor | None,
        targets: Tensor,
        output: LossOutput,
        **inputs: Any,  # noqa: ANN401  # as in `forward`
    ) -> Tensor:
        logits = self._own_logits(model, input_ids, **inputs)
        if output is LossOutput.LOGITS:
            return logits
        logits, shape, targets = logits.flatten(0, 1), targets.shape, targets.flatten()
        if output in _WITHOUT_GRADIENT:
            found = judged(lambda part: logits[part].float(), targets, FUSED_SLICE_TOKENS, output)
            return found if output is LossOutput.SCORE else found.view(shape)
        return _loss_of_logits(self.head, logits, targets, None, shape[1] if output is LossOutput.ROWS else None)

    def _own_logits(self, model: Any, input_ids: Tensor | None, **inputs: Any) -> Tensor:  # noqa: ANN401  # as in `forward`
        """Logits [B, S, V] of the model's own forward."""
        with _documents_apart(model, input_ids, inputs) as of_decoder:
            ids, decoder = of_decoder.pop("input_ids"), decoder_of(model)
            decode = decoder.forward

            def decoded(*args: Any, **named: Any) -> Any:  # noqa: ANN401  # the decoder's own inputs
                return decode(*args, **{**named, **of_decoder})

            with replaced_forwards({decoder: decoded} if of_decoder else {}):
                logits = self.own_forward(input_ids=ids, use_cache=False, **inputs).logits
        assert isinstance(logits, Tensor) and input_ids is not None
        return logits.view(*input_ids.shape, -1)

    def head_input(self, model: Any, input_ids: Tensor, **inputs: Any) -> Tensor:  # noqa: ANN401  # as in `forward`
        """What the head multiplies [B, S, H]: the hidden states, or what a model of its own logits makes of them."""
        if self.rule is not None:
            return hidden_states(model, input_ids, **inputs)
        with replaced_forwards({model.get_output_embeddings(): lambda given: given}):
            return self._own_logits(model, input_ids, **inputs)


def hidden_states(model: Any, input_ids: Tensor | None, **inputs: Any) -> Tensor:  # noqa: ANN401  # the model's own inputs
    """The last hidden states [B, S, H]; with positions of packed rows, each document's as if it stood alone."""
    with _documents_apart(model, input_ids, inputs) as of_decoder:
        hidden = decoder_of(model)(**of_decoder, use_cache=False, **inputs).last_hidden_state
    assert isinstance(hidden, Tensor) and input_ids is not None
    return hidden.view(*input_ids.shape, -1)


@contextmanager
def _documents_apart(model: Any, input_ids: Tensor | None, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:  # noqa: ANN401  # as above
    """The ids and what keeps documents apart, as inputs of the decoder; removes what describes rows from `inputs`."""
    assert input_ids is not None, "labels belong to ids"
    position_ids, bounds = inputs.pop("position_ids", None), inputs.pop("document_bounds", ())
    lengths = inputs.pop("row_lengths", ())
    of_decoder = {"input_ids": input_ids}
    if position_ids is not None:
        of_decoder = packed_inputs(model, input_ids, position_ids, bounds)
    decoder = decoder_of(model)
    positions = of_decoder.get("position_ids")
    frequencies = own_frequencies(decoder, input_ids.shape, bounds=bounds, lengths=lengths)
    if positions is not None:
        of_decoder["position_ids"] = counted_positions(decoder, of_decoder["input_ids"], positions)
    with known_rows(positions), own_positions(decoder, positions), own_masks(decoder, positions) as masks, frequencies:
        yield of_decoder | masks


def decoder_of(model: Any) -> nn.Module:  # noqa: ANN401  # transformers' classes
    """The model without its head; transformers finds itself, or a head that is called `decoder` (W65)."""
    found = model.get_decoder()
    decoder = model.model if found is model or found is model.get_output_embeddings() else found
    assert isinstance(decoder, nn.Module)
    return decoder


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


class SliceBody(Protocol):
    """What a slice of `chunked` computes, in another way than by plain torch."""

    def losses(self, hidden: Tensor, head: "Head", targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the log of the normaliser of each token [C] of hidden [C, H], both in fp32."""

    def gradient(
        self, hidden: Tensor, head: "Head", targets: Tensor, log_normalisers: Tensor, shares: Tensor | None
    ) -> Tensor:
        """The gradient of the logits [C, V] before the cap, in the head's type; `shares` [C, 1] multiply it."""


class Head(NamedTuple):
    """The head that maps hidden states [T, H] to logits: weight [V, H], bias [V], and a cap on the logits."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        """Capped logits [T, V] in fp32; the caller holds the only reference."""
        logits = functional.linear(hidden, self.weight, self.bias).float()
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)


@dataclass(frozen=True, slots=True)
class _HeadForward:
    """The forward of `lm_head`: logits as before, or with targets the requested output for hidden [B, S, H]."""

    linear: nn.Linear
    head: LossHead
    chunk_tokens: int
    softcap: float | None
    liger: "LigerLoss | None"  # the loss of `fused_linear`
    body: "SliceBody | None"  # of the slices of `chunked`

    def forward(self, hidden: Tensor, targets: Tensor | None = None, *, output: LossOutput = LossOutput.SUM) -> Tensor:
        weight, bias = self.linear.weight, self.linear.bias
        if targets is None:
            return functional.linear(hidden, weight, bias)
        row_tokens, shape = targets.shape[1] if output is LossOutput.ROWS else None, targets.shape
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        hidden, head = _in_computing_type(hidden, Head(weight, bias, self.softcap))
        if output in _WITHOUT_GRADIENT:
            found = judged(lambda part: head.logits(hidden[part]), targets, self._score_tokens(hidden.shape[0]), output)
            return found if output is LossOutput.SCORE else found.view(shape)
        chunked = partial(self._chunked, row_tokens=row_tokens)
        found = (
            chunked(hidden, head, targets) if self.liger is None else self.liger.loss(hidden, head, targets, chunked)
        )
        assert isinstance(found, Tensor)
        return found

    def _chunked(self, hidden: Tensor, head: Head, targets: Tensor, *, row_tokens: int | None) -> Any:  # noqa: ANN401  # a tensor
        return ChunkedLoss.apply(hidden, *head, targets, self.chunk_tokens, row_tokens, self.body)  # type: ignore[no-untyped-call]  # torch's

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


class LigerLoss:
    """Liger's loss of hidden states under a head; InputError or EnvironmentFaultError where it cannot run."""

    def __init__(self, softcap: float | None, *, is_pinned: bool) -> None:
        self._kernels = liger_loss(softcap)
        self.fallback = KernelFallback("pin.loss", is_pinned=is_pinned)

    def loss(self, hidden: Tensor, head: Head, targets: Tensor, chunked: Callable[..., Any]) -> Tensor:
        """The token losses of hidden [T, H] added up, in fp32."""
        found: Tensor = self.fallback.run(self._fused, chunked, hidden, head, targets)
        return found

    def _fused(self, hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
        found: Tensor = self._kernels(head.weight, hidden, targets, head.bias)
        return found.float()


def liger_loss(softcap: float | None) -> nn.Module:
    """Liger's module, which a dry run replaces."""
    if not torch.cuda.is_available():
        raise InputError("pin.loss: fused_linear is Liger's, which needs a GPU; pin.loss=fused does without")
    if importlib.util.find_spec("liger_kernel") is None:
        raise InputError(
            "pin.loss: fused_linear is Liger's, and liger-kernel is not installed; use pin.loss=fused or chunked, or\n"
            f"{extra_line('liger')}"
        )
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORED, reduction="sum", softcap=softcap, accum_dtype=torch.float32
    )
    assert isinstance(loss, nn.Module)
    return loss


class _Gradients(NamedTuple):
    """Sums over slices, in fp32; None for a parameter that is not trained."""

    weight: Tensor | None
    bias: Tensor | None

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        if self.weight is not None:
            _add_product(self.weight, grad_logits, hidden)
        if self.bias is not None:
            self.bias.add_(grad_logits.sum(0, dtype=torch.float32))


class ChunkedLoss(torch.autograd.Function):
    """Token losses of hidden [T, H] under a head; logits of one slice alive, computed again backwards.

    The forward saves the log of each token's normaliser, so that the backward has the softmax in two passes over the
    logits. It is infinite for a token that is not learned: its softmax, and so its gradient, is then zero.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        softcap: float | None,
        targets: Tensor,
        chunk_tokens: int,
        row_tokens: int | None = None,
        body: SliceBody | None = None,
    ) -> Tensor:
        head = Head(weight, bias, softcap)
        losses = _no_losses(hidden, row_tokens)
        log_normalisers = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for part in _slices(hidden.shape[0], chunk_tokens):
            values = (hidden[part], head, targets[part], log_normalisers[part])
            _take(losses, part, _slice_loss(*values, is_summed=row_tokens is None, body=body))
        log_normalisers.masked_fill_(targets == IGNORED, float("inf"))
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalisers)
        ctx.softcap, ctx.chunk_tokens, ctx.row_tokens, ctx.body = softcap, chunk_tokens, row_tokens, body
        return sum_rows(losses, row_tokens)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # torch's context
        hidden, weight, bias, targets, log_normalisers = ctx.saved_tensors
        (scale,) = grad_outputs
        shares = None  # of the largest weight that a row has: a product in fp16 neither overflows nor vanishes
        if ctx.row_tokens is not None:
            largest = scale.abs().max().clamp(min=torch.finfo(torch.float32).tiny).float()
            shares, scale = _token_weights(scale / largest, ctx.row_tokens), largest
        head = Head(weight, bias, ctx.softcap)
        grad_hidden = torch.empty_like(hidden)
        totals = _Gradients(
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None,
        )
        for part in _slices(hidden.shape[0], ctx.chunk_tokens):
            share = None if shares is None else shares[part]
            gradient_of = _slice_gradient if ctx.body is None else ctx.body.gradient
            grad_logits = gradient_of(hidden[part], head, targets[part], log_normalisers[part], share)
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            totals.add(grad_logits, hidden[part])
            del grad_logits  # before the next slice has its own
        grad_hidden *= scale
        grads = (None if total is None else total.mul_(scale).to(weight.dtype) for total in totals)
        return (grad_hidden, *grads, None, None, None, None, None)


def _slice_loss(
    hidden: Tensor, head: Head, targets: Tensor, log_normalisers: Tensor, *, is_summed: bool, body: SliceBody | None
) -> Tensor:
    """Token losses of one slice, or their sum; fills in its normalisers. A function: its logits end with it."""
    if body is not None:
        losses, of_body = body.losses(hidden, head, targets)
        log_normalisers.copy_(of_body)
        return losses.sum() if is_summed else losses
    logits = head.logits(hidden)
    log_shares = functional.log_softmax(logits, dim=-1)
    index = _index(targets)
    log_normalisers.copy_((logits.gather(-1, index) - log_shares.gather(-1, index)).squeeze(-1))
    reduction = "sum" if is_summed else "none"
    return functional.nll_loss(log_shares, targets, ignore_index=IGNORED, reduction=reduction)


def _slice_gradient(
    hidden: Tensor, head: Head, targets: Tensor, log_normalisers: Tensor, shares: Tensor | None
) -> Tensor:
    """The gradient of a slice's logits [C, V] before the cap, in the head's type; `shares` [C, 1] multiply it."""
    logits = head.logits(hidden)
    slope = None if head.softcap is None else (logits / head.softcap).square_().neg_().add_(1)  # of the cap
    grad_logits = _grad_of_logits(logits, targets, log_normalisers)
    for factor in (slope, shares):
        if factor is not None:
            grad_logits *= factor
    return grad_logits.to(head.weight.dtype)


class FusedLoss(torch.autograd.Function):
    """Token losses of logits [T, V], whose gradient is written over them; `softcap` is still to be applied.

    Nothing else may read the logits: the product that made them does not save them. In fp32 the gradient of a slice is
    made where its logits are; in 16 bit it is made in fp32 and then rounded, scaled already, so that fp16's own loss
    scale counts.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401  # torch's context
        logits: Tensor,
        targets: Tensor,
        softcap: float | None,
        row_tokens: int | None = None,
    ) -> Tensor:
        losses = _no_losses(logits, row_tokens)
        log_normalisers = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        for part in _slices(logits.shape[0], FUSED_SLICE_TOKENS):
            _take(
                losses,
                part,
                _losses_of(logits[part], targets[part], softcap, log_normalisers[part], is_summed=row_tokens is None),
            )
        log_normalisers.masked_fill_(targets == IGNORED, float("inf"))
        ctx.save_for_backward(logits, targets, log_normalisers)
        ctx.softcap, ctx.row_tokens, ctx.is_used = softcap, row_tokens, False
        return sum_rows(losses, row_tokens)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # torch's context
        if ctx.is_used:
            raise RuntimeError("the fused loss head can run backward once: the gradient has replaced its logits")
        ctx.is_used = True
        logits, targets, log_normalisers = ctx.saved_tensors
        (scale,) = grad_outputs
        weights = None if ctx.row_tokens is None else _token_weights(scale, ctx.row_tokens)
        for part in _slices(logits.shape[0], FUSED_SLICE_TOKENS):
            weight = scale if weights is None else weights[part]
            _overwrite_by_gradient(logits[part], targets[part], ctx.softcap, log_normalisers[part], weight)
        return logits, None, None, None


def _losses_of(
    logits: Tensor, targets: Tensor, softcap: float | None, log_normalisers: Tensor, *, is_summed: bool
) -> Tensor:
    """Token losses of one slice, or their sum; the slice stays as it is. Fills in its normalisers."""
    shifted = capped(logits.float(), softcap)
    picked = shifted.gather(-1, _index(targets)).squeeze(-1)
    highest = shifted.amax(-1, keepdim=True)
    is_own = logits.dtype is not torch.float32 or softcap is not None
    shifted = shifted.sub_(highest) if is_own else shifted - highest
    log_normalisers.copy_(shifted.exp_().sum(-1).log_().add_(highest.squeeze(-1)))
    losses = (log_normalisers - picked).masked_fill_(targets == IGNORED, 0.0)
    return losses.sum() if is_summed else losses


def _overwrite_by_gradient(
    logits: Tensor, targets: Tensor, softcap: float | None, log_normalisers: Tensor, scale: Tensor
) -> None:
    slope = None
    grad = logits.float()  # the logits themselves in fp32
    if softcap is not None:
        grad.div_(softcap).tanh_()
        slope = grad.square().neg_().add_(1)
        grad.mul_(softcap)
    _grad_of_logits(grad, targets, log_normalisers).mul_(scale)
    if slope is not None:
        grad.mul_(slope)
    if logits.dtype is not torch.float32:
        logits.copy_(grad)


@torch.no_grad()
def judged(logits_of: Callable[[slice], Tensor], targets: Tensor, slice_tokens: int, output: LossOutput) -> Tensor:
    """The score [2] or the losses of tokens [T], in float64, of targets [T]; at most `slice_tokens` at a time.

    `logits_of` returns the logits [C, V] of a slice of tokens in fp32; they are overwritten.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=targets.device)
    losses = torch.empty(targets.shape, dtype=torch.float64, device=targets.device)
    for part in _slices(targets.shape[0], slice_tokens):
        losses[part], is_most_likely = _judged_slice(logits_of(part), targets[part])
        sums += torch.stack([losses[part].sum(), is_most_likely.sum(dtype=torch.float64)])
    return sums if output is LossOutput.SCORE else losses


def _judged_slice(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of each target, 0 without one, and whether it is the most likely token."""
    picked = logits.gather(-1, _index(targets)).squeeze(-1)
    highest, most_likely = logits.max(-1)
    log_normalisers = logits.sub_(highest.unsqueeze(-1)).exp_().sum(-1).log_().add_(highest)
    losses = (log_normalisers - picked).masked_fill_(targets == IGNORED, 0.0)
    return losses.double(), most_likely == targets


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits squeezed into (-softcap, softcap), as Gemma 2 does."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def sum_rows(losses: Tensor, row_tokens: int | None) -> Tensor:
    """Sums [B] in float64 of token losses [B x row_tokens]; without `row_tokens`, what came in."""
    return losses if row_tokens is None else losses.view(-1, row_tokens).sum(-1, dtype=torch.float64)


def _no_losses(like: Tensor, row_tokens: int | None) -> Tensor:
    """Where token losses go: into one sum, or to a place for each token [T]."""
    if row_tokens is None:
        return torch.zeros((), dtype=torch.float32, device=like.device)
    return torch.empty(like.shape[0], dtype=torch.float32, device=like.device)


def _take(losses: Tensor, part: slice, found: Tensor) -> None:
    if losses.ndim:
        losses[part] = found
    else:
        losses += found


def _token_weights(weights: Tensor, row_tokens: int) -> Tensor:
    """The weights of rows [B] as fp32 weights of their tokens [T, 1]."""
    return weights.float().repeat_interleave(row_tokens).unsqueeze(-1)


def _slices(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    return (slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens))


def _grad_of_logits(logits: Tensor, targets: Tensor, log_normalisers: Tensor) -> Tensor:
    """Softmax - one-hot, zero for tokens that are not learned; overwrites `logits` [C, V]."""
    logits.sub_(log_normalisers.unsqueeze(-1)).exp_()
    return logits.scatter_add_(-1, _index(targets), -(targets != IGNORED).to(logits.dtype).unsqueeze(-1))


def _index(targets: Tensor) -> Tensor:
    """Each target as an index [C, 1] into its row of logits; any where there is no target."""
    return targets.clamp(min=0).unsqueeze(-1)


def _add_product(total: Tensor, grad_logits: Tensor, hidden: Tensor) -> None:
    """Adds grad_logits^T x hidden to the fp32 `total` [V, H], in place where the types allow it."""
    if grad_logits.dtype == torch.float32:
        total.addmm_(grad_logits.t(), hidden)
    else:
        total += grad_logits.t() @ hidden
