"""One optimizer step under any engine: forward and backward of each micro batch, clipping, update.

An `Objective` turns a micro batch into a sum of terms: token losses, or losses of pairs (`dpo`). The
loss of a step is that sum over all ranks and micro batches, divided by the number of terms in the global batch: its
targets, or its pairs. Every rank knows that number without communication. What a rank passes to its engine is
compensated for what engines do on their own:

    they average gradients over the ranks           x num_ranks
    Accelerate or DeepSpeed divide by accumulation  x accumulation

Gradients are summed over the ranks with the last micro batch only. Under fp16 the loss is moreover scaled, and the
gradients scaled back before they are clipped; a step whose gradients overflow is skipped on every rank.

Before the weights change, a loss and a gradient norm that all ranks share decide whether the step is applied (`Judge`).
A step that is not applied changes no bit of the weights, the moments or the step counts. Where weights are updated
within the backward pass, they have changed before that decision.

Dropout masks are a function of (seed, step, index of the micro batch in the global batch): nothing has to be saved,
and a step can be repeated exactly.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn

from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.loss import LossOutput
from shardwise.trainer.runtime.memory.host_embedding import ids_on_host
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.models.router_loss import RouterLoss, row_mask
from shardwise.trainer.runtime.optimizers import set_learning_rate, unwrapped, updates_in_backward
from shardwise.trainer.runtime.precision.mixed_precision import LossScaler, check_scale
from shardwise.trainer.runtime.run.clock import Clock
from shardwise.trainer.spec.value import Value


class Terms(NamedTuple):
    """Sums of an objective over one micro batch; they add up over micro batches and ranks."""

    loss: Tensor  # a scalar with its gradient
    num_terms: int  # what a mean of losses or figures is over: targets, or pairs
    num_targets: int  # tokens that count
    figures: Sequence[Tensor] = ()  # sums without a gradient, one for each name of the objective
    added: Tensor | None = None  # a scalar with its gradient that is trained in addition to the loss


class Objective(Protocol):
    """An objective: the sum of loss terms that is trained or scored."""

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the figures in addition to the loss; each is a mean over the terms."""

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        """Runs the model, through all its wrappers, on one micro batch."""


class TokenLoss(NamedTuple):
    """Every target counts alike: pre-training, and fine-tuning on the labelled tokens."""

    figures: tuple[str, ...] = ()

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        loss = forward(model, micro_batch, device)
        return Terms(loss, micro_batch.num_targets, micro_batch.num_targets)


class BalancedTokenLoss(NamedTuple):
    """Token losses, and in addition the loss that balances experts (`models/router_loss.py`)."""

    routers: RouterLoss
    coefficient: float
    figures: tuple[str, ...] = ("router_aux_loss",)

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        self.routers.begin()
        loss = forward(model, micro_batch, device)
        mask = row_mask(micro_batch.row_lengths, micro_batch.input_ids.shape[1], device)
        balance = self.routers.end(mask).to(device) * micro_batch.num_targets
        num_targets = micro_batch.num_targets
        return Terms(loss, num_targets, num_targets, (balance.detach(),), added=self.coefficient * balance)


class StepResult(Value, frozen=True, kw_only=True):
    """Result of one optimizer step, over all ranks."""

    loss: float  # mean over the terms of the global batch
    num_targets: int
    num_tokens: int  # positions that went through the model, without padding
    grad_norm: float | None  # before clipping; None where it is no number, or there is none
    was_skipped: bool = False  # the weights are what they were: an fp16 overflow, or a fault
    fault: str | None = None  # why the step was not to be applied
    loss_scale: float | None = None  # of fp16
    figures: dict[str, float] = {}  # those of the objective, means over the terms


# From the loss and the gradient norm of a step: why it is not applied, or None if it is. The same on every rank.
Judge = Callable[[float, float | None], str | None]


def _accepts_all(_loss: float, _grad_norm: float | None) -> str | None:
    return None


def run_step(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401  # Accelerate's wrapper around torch's or DeepSpeed's
    micro_batches: Sequence[MicroBatch],
    *,
    num_terms: int,
    step: int,
    seed: int,
    lr: float,
    clip: float,
    clock: Clock,
    scaler: LossScaler | None = None,
    objective: Objective = TokenLoss(),  # noqa: B008  # it never changes
    judge: Judge = _accepts_all,
) -> StepResult:
    """Runs the micro batches of this rank and updates the parameters once; `num_terms` are of the global batch."""
    set_learning_rate(unwrapped(optimizer), lr)
    sums = Sums(objective, accelerator.device)
    decision = Decision(sums, judge, may_overflow=scaler is not None)
    engine = running_engine(model)
    assert len(micro_batches) == accelerator.gradient_accumulation_steps
    scale = accelerator.num_processes * len(micro_batches) / num_terms
    loss_scale = None if scaler is None else scaler.loss_scale  # before it moves on, in DeepSpeed's last backward
    for index, micro_batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        seed_dropout(seed, step, index * accelerator.num_processes + accelerator.process_index)
        accelerator.sync_gradients = is_last
        with nullcontext() if is_last else engine.without_sync(accelerator, model):
            with clock.measure("forward"):
                terms = objective(model, micro_batch, accelerator.device)
            sums.add(terms, num_tokens=micro_batch.num_tokens)
            deciding = engine.deciding_update(model, decision.accepts) if is_last else nullcontext()
            with clock.measure("backward"), deciding:
                loss = (terms.loss if terms.added is None else terms.loss + terms.added) * scale
                accelerator.backward(loss if scaler is None else scaler.scale(loss))
    with clock.measure("optimizer"):
        has_overflown = _update(accelerator, model, optimizer, decision, clip=clip, scaler=scaler)
    means = decision.means
    assert means.num_terms == num_terms, "the gradients were divided by another number"
    is_refused = decision.fault is not None and not updates_in_backward(optimizer)
    return StepResult(
        loss=means.loss,
        num_targets=means.num_targets,
        num_tokens=means.num_tokens,
        grad_norm=means.grad_norm if means.grad_norm is not None and math.isfinite(means.grad_norm) else None,
        was_skipped=has_overflown or is_refused,
        fault=decision.fault,
        loss_scale=loss_scale,
        figures=means.figures,
    )


class Means(NamedTuple):
    """Means of an objective over micro batches and ranks."""

    loss: float
    num_terms: int
    num_targets: int
    num_tokens: int
    figures: dict[str, float]
    grad_norm: float | None = None


class Sums:
    """Adds up the terms of micro batches on the device, so that no micro batch waits for the sum."""

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self._names = objective.figures
        self._counts = [0, 0, 0]  # of terms, of targets, of tokens
        self._values = torch.zeros(1 + len(self._names), dtype=torch.float64, device=device)

    def add(self, terms: Terms, *, num_tokens: int = 0) -> None:
        """Adds the terms of one micro batch of this rank."""
        self._counts[0] += terms.num_terms
        self._counts[1] += terms.num_targets
        self._counts[2] += num_tokens
        self._values += torch.stack([value.detach().double() for value in (terms.loss, *terms.figures)])

    def means(self, grad_norm: Tensor | None = None) -> Means:
        """The means over the terms of all ranks, and over the ranks that of a norm they all have; collective."""
        device = self._values.device
        counts = torch.tensor(self._counts, dtype=torch.float64, device=device)
        norm = torch.zeros((), dtype=torch.float64) if grad_norm is None else grad_norm.detach().double()
        sums = sum_over_ranks(torch.cat([counts, norm.to(device).view(1), self._values]))
        num_terms, num_targets, num_tokens, norms, *values = sums.tolist()
        loss, *figures = (value / num_terms for value in values)
        return Means(
            loss,
            int(num_terms),
            int(num_targets),
            int(num_tokens),
            dict(zip(self._names, figures, strict=True)),
            None if grad_norm is None else norms / _num_ranks(),
        )


class Decision:
    """The decision to apply a step or not: made once, on every rank, from values that all ranks share."""

    def __init__(self, sums: Sums, judge: Judge, *, may_overflow: bool) -> None:
        self._sums = sums
        self._judge = judge
        self._may_overflow = may_overflow
        self._means: Means | None = None
        self.fault: str | None = None

    @property
    def means(self) -> Means:
        """Means of the step; collective if they have not been read yet, as after an overflow in an engine."""
        if self._means is None:
            self._means = self._sums.means()
        return self._means

    def accepts(self, grad_norm: Tensor | None) -> bool:
        """True if the step is applied, from the norm over all ranks; collective. fp16's scaler handles an overflow."""
        self._means = self._sums.means(grad_norm)
        norm = self._means.grad_norm
        if not self._may_overflow or norm is None or math.isfinite(norm):
            self.fault = self._judge(self._means.loss, norm)
        return self.fault is None


def forward(
    model: nn.Module, micro_batch: MicroBatch, device: torch.device, *, output: LossOutput = LossOutput.SUM
) -> Tensor:
    """Output of the model for one micro batch: the sum of its token losses, a scalar, or another `LossOutput`."""
    inputs = {"input_ids": micro_batch.input_ids, "labels": micro_batch.labels}
    if micro_batch.position_ids is not None:
        inputs["position_ids"] = micro_batch.position_ids
    extra: dict[str, Any] = {} if output is LossOutput.SUM else {"output": output}
    if micro_batch.document_bounds:
        extra["document_bounds"] = micro_batch.document_bounds
    if micro_batch.row_lengths:
        extra["row_lengths"] = micro_batch.row_lengths
    sent = {name: value.to(device, non_blocking=True) for name, value in inputs.items()}
    with ids_on_host(plain_model(model), micro_batch.input_ids, sent["input_ids"]):
        found = model(**sent, **extra)
    assert isinstance(found, Tensor) and found.ndim == _DIMENSIONS.get(output, 1)
    return found


_DIMENSIONS = {LossOutput.SUM: 0, LossOutput.LOGITS: 3}


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, on every rank."""
    if _num_ranks() > 1:
        dist.all_reduce(value)
    return value


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def seed_dropout(seed: int, step: int, index: int) -> None:
    """Seeds torch's generators for one micro batch of the global batch.

    The generators of `torch.manual_seed` that a rank has. For each kind of device that is missing, `torch.manual_seed`
    would walk the stack.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    number = int.from_bytes(digest[:8], "big") >> 1
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def _update(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401  # see run_step
    decision: Decision,
    *,
    clip: float,
    scaler: LossScaler | None,
) -> bool:
    """Clips, decides, steps and clears the gradients; DeepSpeed has done all four in the last backward.

    Returns True if an overflow of fp16 prevented the update.
    """
    if updates_in_backward(optimizer):
        decision.accepts(None)  # each gradient was used and freed as it came
        return False
    is_taken, has_overflown = decision.fault is None, False
    if not running_engine(model).updates_in_last_backward:
        if scaler is not None:
            scaler.unscale(optimizer)
        norm = accelerator.clip_grad_norm_(model.parameters(), clip if clip > 0 else float("inf"))
        is_taken = decision.accepts(_on_one_device(norm))
        if is_taken and scaler is None:
            optimizer.step()
    if scaler is not None:
        has_overflown = scaler.step(optimizer) if is_taken else scaler.pass_over()
    optimizer.zero_grad(set_to_none=True)
    if has_overflown:
        assert scaler is not None
        check_scale(scaler)
    return has_overflown


def _on_one_device(norm: Any) -> Tensor:  # noqa: ANN401  # a tensor or a DTensor
    full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    assert isinstance(full, Tensor)
    return full
