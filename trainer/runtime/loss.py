"""The loss head: hidden states and labels to the sum of token losses, with a known amount of logits alive.

A causal language model returns its loss as a sum over tokens here, never as a mean: the step divides by the number
of targets in the global batch, so that the loss does not depend on how rows fall on ranks and micro batches.
Position t learns token t + 1; the shift happens here, labels come unshifted, `IGNORED` marks what is not learned.

    eager         what transformers does by default: logits of all tokens, upcast to fp32, softmax kept for the backward
    chunked       plain torch: `chunk_tokens` tokens at a time, once in the forward and once more in the backward
    fused         plain torch: logits of all tokens, once, in the computing type; their gradient takes their place
    fused_linear  Liger's kernels for CUDA: logits of a slice of tokens, gradients made in the forward

Memory of `chunked`, T tokens in a micro batch, C in a slice, V vocabulary, H hidden size, c bytes of the computing
type: only T x 4 bytes survive the forward beside the hidden states, which are kept anyway. A slice holds C x V x 8
bytes in the forward (fp32 logits and their log-softmax) and C x V x 4 in the backward, C x V x (4 + c) under 16 bit;
there, T x H x c more hold the gradient of the hidden states and V x H x 4 that of the head (which in fp32 becomes the
parameter's own gradient; under 16 bit V x H x c more hold one slice's part of it). It costs one more matrix product of
the head per token. Small slices stay in a CPU's cache.

Memory of `fused`: the logits, T x V x c bytes from the forward to the head's backward, and T x 4 bytes. Beside them
V x 4 bytes for each of min(T, FUSED_SLICE_TOKENS) tokens, while the losses are taken in the forward (twice that under a
cap) and, in 16 bit, while gradients are made in the backward; then what the product of the head gives back. It needs no
second matrix product, so it is the faster one where the logits fit. Its backward can run once only.

A head may have a bias (Phi-2), and a model may cap its logits (Gemma 2: c x tanh(logits / c)); both heads then do, and
the chunked one holds C x V x 4 bytes more in the backward for the slope of the cap.

All heads run inside the model's forward, `chunked` and `fused_linear` moreover inside the forward of `lm_head`, so that
whatever gathers sharded weights around a module's forward and backward (ZeRO-3, FSDP2) has them there when they are
read. `fused` only follows that forward.

Rows of several documents come with positions; what keeps their documents apart is in packed_attention.py.
"""

import importlib.util
from collections.abc import Iterator
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from trainer.runtime.packed_attention import packed_inputs
from trainer.spec.errors import InputError
from trainer.spec.strategy import LossHead

IGNORED = -100  # label of a position that is not learned
DEFAULT_CHUNK_TOKENS = 1024
FUSED_SLICE_TOKENS = 256


def install_loss_head(model: PreTrainedModel, head: LossHead, *, chunk_tokens: int | None) -> None:
    """Makes `model(input_ids=..., labels=...)` answer the sum of token losses, a scalar fp32 tensor.

    Without labels the model answers as before (generation needs it).
    """
    seam: Any = model  # both modules get settings and a forward of their own below
    linear: Any = model.get_output_embeddings()
    config: Any = model.config.get_text_config()
    is_plain = isinstance(linear, nn.Linear)
    if not is_plain:
        raise InputError(f"{type(model).__name__} has no plain lm_head; its loss cannot be computed here")
    if getattr(config, "output_router_logits", False):
        raise InputError(
            "config.json: output_router_logits is true, which adds a loss that balances experts; shardwise computes "
            "the loss of tokens only: set it to false"
        )
    softcap = getattr(config, "final_logit_softcapping", None)
    if head is LossHead.CHUNKED:
        linear.loss_chunk_tokens = chunk_tokens or DEFAULT_CHUNK_TOKENS
        linear.loss_softcap = softcap
        linear.forward = MethodType(_linear_or_chunked_loss, linear)
    if head is LossHead.FUSED_LINEAR:
        linear.loss_of_liger = _liger_loss(softcap)
        linear.forward = MethodType(_linear_or_liger_loss, linear)
    seam.shardwise_loss_head = head
    seam.shardwise_softcap = softcap
    seam.shardwise_forward = model.forward
    seam.forward = MethodType(_loss_or_logits, model)


def shift(labels: Tensor) -> Tensor:
    """What each position is to predict: labels [B, S] moved left by one, the last position ignored."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _loss_or_logits(self: Any, input_ids: Tensor | None = None, labels: Tensor | None = None, **inputs: Any) -> Any:  # noqa: ANN401  # the signature of whatever model it replaces
    if labels is None:
        return self.shardwise_forward(input_ids=input_ids, **inputs)
    hidden = _hidden_states(self, input_ids, **inputs)
    targets = shift(labels)
    linear = self.get_output_embeddings()
    if self.shardwise_loss_head in (LossHead.CHUNKED, LossHead.FUSED_LINEAR):
        return linear(hidden, targets)
    logits = linear(hidden).flatten(0, 1)
    if self.shardwise_loss_head is LossHead.FUSED:
        return _FusedLoss.apply(logits, targets.flatten(), self.shardwise_softcap)  # type: ignore[no-untyped-call]  # torch's
    return _sum_of_token_losses(_capped(logits, self.shardwise_softcap).float(), targets.flatten())


def _hidden_states(model: Any, input_ids: Tensor | None, **inputs: Any) -> Tensor:  # noqa: ANN401  # the model's own inputs
    """The last hidden states [B, S, H]; with positions of packed rows, each document's as if it stood alone."""
    assert input_ids is not None, "labels belong to ids"
    position_ids = inputs.pop("position_ids", None)
    ids = {"input_ids": input_ids}
    if position_ids is not None:
        ids = packed_inputs(model, input_ids, position_ids)
    hidden = model.get_decoder()(**ids, use_cache=False, **inputs).last_hidden_state
    assert isinstance(hidden, Tensor)
    return hidden.view(*input_ids.shape, -1)


def _liger_loss(softcap: float | None) -> nn.Module:
    """Liger's loss of hidden states under a head; InputError where it cannot run."""
    if not torch.cuda.is_available():
        raise InputError("pin.loss: fused_linear is Liger's, which needs a GPU; pin.loss=fused does without")
    if importlib.util.find_spec("liger_kernel") is None:
        raise InputError(
            "pin.loss: fused_linear is Liger's, and liger-kernel is not installed;\n"
            "pip install 'shardwise[liger]', or take pin.loss=fused or chunked"
        )
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORED, reduction="sum", softcap=softcap, accum_dtype=torch.float32
    )
    assert isinstance(loss, nn.Module)
    return loss


def _linear_or_liger_loss(self: nn.Linear, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
    if targets is None:
        return functional.linear(hidden, self.weight, self.bias)
    liger: Any = self.loss_of_liger  # set by install_loss_head
    loss = liger(self.weight, hidden.flatten(0, 1), targets.flatten(), self.bias)
    assert isinstance(loss, Tensor)
    return loss.float()


def _linear_or_chunked_loss(self: nn.Linear, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
    weight: Tensor = self.weight
    bias: Tensor | None = self.bias
    if targets is None:
        return functional.linear(hidden, weight, bias)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    head = _Head(weight, bias, self.loss_softcap)  # type: ignore[arg-type]  # set by install_loss_head
    chunk_tokens: int = self.loss_chunk_tokens  # type: ignore[assignment]  # set by install_loss_head
    loss = _ChunkedLoss.apply(hidden.flatten(0, 1), *head, targets.flatten(), chunk_tokens)  # type: ignore[no-untyped-call]  # torch's
    assert isinstance(loss, Tensor)
    return loss


def _sum_of_token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits squeezed into (-softcap, softcap), as Gemma 2 does."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


class _Head(NamedTuple):
    """What makes logits of hidden states [T, H]: weight [V, H], bias [V], and a cap on what comes out."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        """Capped logits [T, V] in fp32; nobody else holds them."""
        logits = functional.linear(hidden, self.weight, self.bias).float()
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)


class _Gradients(NamedTuple):
    """Sums over slices, in fp32; None for what is not trained."""

    weight: Tensor | None
    bias: Tensor | None

    def add(self, grad_logits: Tensor, hidden: Tensor) -> None:
        if self.weight is not None:
            _add_product(self.weight, grad_logits, hidden)
        if self.bias is not None:
            self.bias.add_(grad_logits.sum(0, dtype=torch.float32))


class _ChunkedLoss(torch.autograd.Function):
    """Sum of token losses of hidden [T, H] under a head; logits of one slice alive, computed again backwards.

    The forward keeps the log of each token's normaliser, so that the backward has the softmax in two passes over the
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
    ) -> Tensor:
        head = _Head(weight, bias, softcap)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        log_normalisers = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for part in _slices(hidden.shape[0], chunk_tokens):
            total += _slice_loss(hidden[part], head, targets[part], log_normalisers[part])
        log_normalisers.masked_fill_(targets == IGNORED, float("inf"))
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalisers)
        ctx.softcap, ctx.chunk_tokens = softcap, chunk_tokens
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # torch's context
        hidden, weight, bias, targets, log_normalisers = ctx.saved_tensors
        (scale,) = grad_outputs
        head = _Head(weight, bias, ctx.softcap)
        grad_hidden = torch.empty_like(hidden)
        totals = _Gradients(
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None,
            torch.zeros_like(bias, dtype=torch.float32) if ctx.needs_input_grad[2] else None,
        )
        for part in _slices(hidden.shape[0], ctx.chunk_tokens):
            grad_logits = _slice_gradient(hidden[part], head, targets[part], log_normalisers[part])
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            totals.add(grad_logits, hidden[part])
            del grad_logits  # before the next slice has its own
        grad_hidden *= scale
        grads = (None if total is None else total.mul_(scale).to(weight.dtype) for total in totals)
        return (grad_hidden, *grads, None, None, None)


def _slice_loss(hidden: Tensor, head: _Head, targets: Tensor, log_normalisers: Tensor) -> Tensor:
    """Sum of token losses of one slice; fills in its normalisers. A function, so that its logits end with it."""
    logits = head.logits(hidden)
    log_shares = functional.log_softmax(logits, dim=-1)
    index = _index(targets)
    log_normalisers.copy_((logits.gather(-1, index) - log_shares.gather(-1, index)).squeeze(-1))
    return functional.nll_loss(log_shares, targets, ignore_index=IGNORED, reduction="sum")


def _slice_gradient(hidden: Tensor, head: _Head, targets: Tensor, log_normalisers: Tensor) -> Tensor:
    """The gradient of a slice's logits [C, V] before the cap, in the head's type."""
    logits = head.logits(hidden)
    slope = None if head.softcap is None else (logits / head.softcap).square_().neg_().add_(1)  # of the cap
    grad_logits = _grad_of_logits(logits, targets, log_normalisers)
    if slope is not None:
        grad_logits *= slope
    return grad_logits.to(head.weight.dtype)


class _FusedLoss(torch.autograd.Function):
    """Sum of token losses of logits [T, V], whose gradient is written over them; `softcap` is still to be applied.

    Nothing else may read the logits: the product that made them does not keep them. In fp32 the gradient of a slice is
    made where its logits are; in 16 bit it is made in fp32 and then rounded, scaled already, so that fp16's own loss
    scale counts.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, softcap: float | None) -> Tensor:  # noqa: ANN401  # torch's context
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        log_normalisers = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
        for part in _slices(logits.shape[0], FUSED_SLICE_TOKENS):
            total += _losses_of(logits[part], targets[part], softcap, log_normalisers[part])
        log_normalisers.masked_fill_(targets == IGNORED, float("inf"))
        ctx.save_for_backward(logits, targets, log_normalisers)
        ctx.softcap, ctx.is_used = softcap, False
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # torch's context
        if ctx.is_used:
            raise RuntimeError("the fused loss head can run backward once: the gradient has replaced its logits")
        ctx.is_used = True
        logits, targets, log_normalisers = ctx.saved_tensors
        (scale,) = grad_outputs
        for part in _slices(logits.shape[0], FUSED_SLICE_TOKENS):
            _overwrite_by_gradient(logits[part], targets[part], ctx.softcap, log_normalisers[part], scale)
        return logits, None, None


def _losses_of(logits: Tensor, targets: Tensor, softcap: float | None, log_normalisers: Tensor) -> Tensor:
    """Sum of token losses of one slice, which stays as it is; fills in its normalisers."""
    shifted = _capped(logits.float(), softcap)
    picked = shifted.gather(-1, _index(targets)).squeeze(-1)
    highest = shifted.amax(-1, keepdim=True)
    is_own = logits.dtype is not torch.float32 or softcap is not None
    shifted = shifted.sub_(highest) if is_own else shifted - highest
    log_normalisers.copy_(shifted.exp_().sum(-1).log_().add_(highest.squeeze(-1)))
    return (log_normalisers - picked).masked_fill_(targets == IGNORED, 0.0).sum()


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
