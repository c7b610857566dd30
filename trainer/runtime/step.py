"""One optimizer step under any engine: forward and backward of each micro batch, clipping, update.

What is learned is an `Objective`: it makes of a micro batch a sum of terms, token losses or those of pairs (`dpo`). The
loss of a step is that sum over all ranks and micro batches, divided by the number of terms in the global batch: its
targets, or its pairs. Every rank knows that number without asking the others. What a rank passes to its engine is
compensated for what engines do on their own:

    they average gradients over the ranks           x num_ranks
    Accelerate or DeepSpeed divide by accumulation  x accumulation

Gradients are summed over the ranks with the last micro batch only. Under fp16 the loss is moreover scaled, and the
gradients scaled back before they are clipped; a step whose gradients overflow is skipped on every rank.

Dropout masks are a function of (seed, step, index of the micro batch in the global batch): nothing has to be saved,
and a step can be repeated exactly.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn

from trainer.runtime.data import MicroBatch
from trainer.runtime.loss import Answer
from trainer.runtime.mixed_precision import LossScaler, check_scale
from trainer.runtime.optimizers import set_learning_rate, unwrapped, updates_in_backward
from trainer.spec.value import Value


class Clock:
    """Seconds spent in each phase of a step; on a GPU between events, so that nothing waits while the step runs."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Adds the time of the block to `phase`."""
        if self._is_cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((phase, begin, end))
        else:
            start = time.perf_counter()
            yield
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def seconds(self, phase: str) -> float:
        """Seconds of a phase so far; waits for the device."""
        for name, begin, end in self._events:
            end.synchronize()
            self._seconds[name] = self._seconds.get(name, 0.0) + begin.elapsed_time(end) / 1000
        self._events.clear()
        return self._seconds.get(phase, 0.0)


class Terms(NamedTuple):
    """What an objective makes of one micro batch; all of it adds up over micro batches and ranks."""

    loss: Tensor  # a scalar with its gradient
    num_terms: int  # what a mean of losses or figures is over: targets, or pairs
    num_targets: int  # tokens that count
    figures: Sequence[Tensor] = ()  # sums without a gradient, one for each name of the objective


class Objective(Protocol):
    """What is asked of the model."""

    @property
    def figures(self) -> tuple[str, ...]:
        """What is told beside the loss, a mean over the terms each."""

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        """Runs the model, through whatever wraps it, on one micro batch."""


class TokenLoss(NamedTuple):
    """Every target counts alike: pre-training, and fine-tuning on what the labels leave."""

    figures: tuple[str, ...] = ()

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        loss = forward(model, micro_batch, device)
        return Terms(loss, micro_batch.num_targets, micro_batch.num_targets)


class StepResult(Value, frozen=True, kw_only=True):
    """What one optimizer step came to, over all ranks."""

    loss: float  # mean over the terms of the global batch
    num_targets: int
    grad_norm: float | None  # before clipping
    was_skipped: bool = False  # an fp16 overflow
    loss_scale: float | None = None  # of fp16
    figures: dict[str, float] = {}  # those of the objective, means over the terms


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
) -> StepResult:
    """Runs the micro batches of this rank and updates the parameters once; `num_terms` are of the global batch."""
    set_learning_rate(unwrapped(optimizer), lr)
    sums = Sums(objective, accelerator.device)
    is_deepspeed = accelerator.distributed_type is DistributedType.DEEPSPEED  # its engine knows the last micro batch
    assert len(micro_batches) == accelerator.gradient_accumulation_steps
    scale = accelerator.num_processes * len(micro_batches) / num_terms
    for index, micro_batch in enumerate(micro_batches):
        is_last = index == len(micro_batches) - 1
        seed_dropout(seed, step, index * accelerator.num_processes + accelerator.process_index)
        accelerator.sync_gradients = is_last
        with nullcontext() if is_last or is_deepspeed else accelerator.no_sync(model):
            with clock.measure("forward"):
                terms = objective(model, micro_batch, accelerator.device)
            sums.add(terms)
            with clock.measure("backward"):
                loss = terms.loss * scale
                accelerator.backward(loss if scaler is None else scaler.scale(loss))
    loss_scale = None if scaler is None else scaler.loss_scale  # that this step had, before it moves on
    with clock.measure("optimizer"):
        grad_norm, was_skipped = _update(accelerator, model, optimizer, clip, scaler)
    means = sums.means()
    assert means.num_terms == num_terms, "the gradients were divided by another number"
    return StepResult(
        loss=means.loss,
        num_targets=means.num_targets,
        grad_norm=grad_norm,
        was_skipped=was_skipped,
        loss_scale=loss_scale,
        figures=means.figures,
    )


class Means(NamedTuple):
    """What an objective came to over micro batches and ranks."""

    loss: float
    num_terms: int
    num_targets: int
    figures: dict[str, float]


class Sums:
    """Adds up what an objective makes of micro batches, on the device, so that no micro batch waits for it."""

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self._names = objective.figures
        self._counts = [0, 0]  # of terms, of targets
        self._values = torch.zeros(1 + len(self._names), dtype=torch.float64, device=device)

    def add(self, terms: Terms) -> None:
        """Takes one micro batch of this rank."""
        self._counts[0] += terms.num_terms
        self._counts[1] += terms.num_targets
        self._values += torch.stack([value.detach().double() for value in (terms.loss, *terms.figures)])

    def means(self) -> Means:
        """The means over the terms of all ranks; collective."""
        counts = torch.tensor(self._counts, dtype=torch.float64, device=self._values.device)
        num_terms, num_targets, *values = sum_over_ranks(torch.cat([counts, self._values])).tolist()
        loss, *figures = (value / num_terms for value in values)
        return Means(loss, int(num_terms), int(num_targets), dict(zip(self._names, figures, strict=True)))


def forward(model: nn.Module, micro_batch: MicroBatch, device: torch.device, *, answer: Answer = Answer.SUM) -> Tensor:
    """What the model answers to one micro batch: the sum of its token losses, a scalar, or what else is asked for."""
    inputs = {"input_ids": micro_batch.input_ids, "labels": micro_batch.labels}
    if micro_batch.position_ids is not None:
        inputs["position_ids"] = micro_batch.position_ids
    asked = {} if answer is Answer.SUM else {"answer": answer}
    found = model(**{name: value.to(device, non_blocking=True) for name, value in inputs.items()}, **asked)
    assert isinstance(found, Tensor) and found.ndim == _DIMENSIONS.get(answer, 1)
    return found


_DIMENSIONS = {Answer.SUM: 0, Answer.LOGITS: 3}


def sum_over_ranks(value: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, on every rank."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value)
    return value


def seed_dropout(seed: int, step: int, index: int) -> None:
    """Seeds torch's generators for one micro batch of the global batch."""
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def _update(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401  # see run_step
    clip: float,
    scaler: LossScaler | None,
) -> tuple[float | None, bool]:
    """Clips, steps and clears the gradients; DeepSpeed has done all three in the last backward.

    (Norm before clipping, None where there is none; whether an overflow kept the weights as they were).
    """
    if updates_in_backward(optimizer):
        return None, False  # each gradient was used and freed as it came
    if scaler is not None:
        scaler.unscale(optimizer)
    norm = accelerator.clip_grad_norm_(model.parameters(), clip if clip > 0 else float("inf"))
    if scaler is None:
        optimizer.step()
        was_skipped = False
    else:
        was_skipped = scaler.step(optimizer)
    optimizer.zero_grad(set_to_none=True)
    if was_skipped:
        assert scaler is not None
        check_scale(scaler)
    return None if was_skipped or norm is None else _number(norm), was_skipped


def _number(norm: Any) -> float:  # noqa: ANN401  # a tensor, a DTensor, or DeepSpeed's float
    full = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return float(full)
