"""The arithmetic of the loss heads: token losses of hidden states or of logits, a slice of tokens at a time.

`head` states the memory of each head. The result is the sum of all token losses, or one sum for each row of
`row_tokens` tokens, in float64: the rows of a pair are compared, and their sums are a thousand times their difference.
The gradients of a row's tokens are multiplied by that row's weight in fp32, before anything is rounded.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100  # label of a position that is not learned
FUSED_SLICE_TOKENS = 256


class Head(NamedTuple):
    """The head that maps hidden states [T, H] to logits: weight [V, H], bias [V], and a cap on the logits."""

    weight: Tensor
    bias: Tensor | None
    softcap: float | None

    def logits(self, hidden: Tensor) -> Tensor:
        """Capped logits [T, V] in fp32; the caller holds the only reference."""
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


class ChunkedLoss(torch.autograd.Function):
    """Token losses of hidden [T, H] under a head; logits of one slice alive, computed again backwards.

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
        row_tokens: int | None = None,
    ) -> Tensor:
        head = Head(weight, bias, softcap)
        losses = _no_losses(hidden, row_tokens)
        log_normalisers = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for part in _slices(hidden.shape[0], chunk_tokens):
            _take(
                losses,
                part,
                _slice_loss(hidden[part], head, targets[part], log_normalisers[part], is_summed=row_tokens is None),
            )
        log_normalisers.masked_fill_(targets == IGNORED, float("inf"))
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalisers)
        ctx.softcap, ctx.chunk_tokens, ctx.row_tokens = softcap, chunk_tokens, row_tokens
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
            grad_logits = _slice_gradient(hidden[part], head, targets[part], log_normalisers[part], share)
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            totals.add(grad_logits, hidden[part])
            del grad_logits  # before the next slice has its own
        grad_hidden *= scale
        grads = (None if total is None else total.mul_(scale).to(weight.dtype) for total in totals)
        return (grad_hidden, *grads, None, None, None, None)


def _slice_loss(hidden: Tensor, head: Head, targets: Tensor, log_normalisers: Tensor, *, is_summed: bool) -> Tensor:
    """Token losses of one slice, or their sum; fills in its normalisers. A function: its logits end with it."""
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

    Nothing else may read the logits: the product that made them does not keep them. In fp32 the gradient of a slice is
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


def scored(hidden: Tensor, head: Head, targets: Tensor, slice_tokens: int) -> Tensor:
    """[2] in float64, without a gradient: the sum of the token losses of hidden [T, H], and how many targets are the
    most likely token; at most `slice_tokens` tokens have logits at a time."""
    sums = torch.zeros(2, dtype=torch.float64, device=hidden.device)
    with torch.no_grad():
        for part in _slices(hidden.shape[0], slice_tokens):
            sums += _slice_score(hidden[part], head, targets[part])
    return sums


def _slice_score(hidden: Tensor, head: Head, targets: Tensor) -> Tensor:
    logits = head.logits(hidden)
    picked = logits.gather(-1, _index(targets)).squeeze(-1)
    highest, most_likely = logits.max(-1)
    log_normalisers = logits.sub_(highest.unsqueeze(-1)).exp_().sum(-1).log_().add_(highest)
    loss = (log_normalisers - picked).masked_fill_(targets == IGNORED, 0.0).sum(dtype=torch.float64)
    return torch.stack([loss, (most_likely == targets).sum(dtype=torch.float64)])


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
