"""Which steps are not taken: those whose loss or gradient is no number, or far above what the last steps had.

Pure: what all ranks agree on comes in, a verdict goes out, so that it is the same on every rank. Window and distance
are those of OLMo (allenai/OLMo-core, optim/skip_step_optimizer.py: the last 128 steps, 6 standard deviations, no
verdict before half a window). Unlike there, the steps that were not taken do not enter the window: one spike in it
would hide the next ones.

A step that is not taken is spent all the same: the next one has its own learning rate and its own rows. Where a run
goes back to a checkpoint, the rows since are passed over: from then on a step learns from the rows of a later one.
What must survive a resume is a value that stands in each checkpoint: the window, the steps in a row, what was passed
over.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from trainer.spec.value import Value

WINDOW_STEPS = 128
LEAST_STEPS = WINDOW_STEPS // 2  # in the window, before anything is far from them
SIGMAS = 6.0
# Of the mean, so that 12 % above it are no spike: where every step sees the same rows, 6 sigma are next to nothing.
LEAST_SIGMA = 0.02
# In a row: bad rows hardly ever meet so often, so the weights are the suspects.
STEPS_UNTIL_ROLL_BACK = 5
MAX_ROLL_BACKS = 20  # of a run; as often as PaLM's largest one was restarted before a spike (arXiv:2204.02311, 5.1)

Count = Annotated[int, Meta(ge=0)]
Window = Annotated[tuple[float, ...], Meta(max_length=WINDOW_STEPS)]


class PassedOver(Value, frozen=True, kw_only=True):
    """Rows that were passed over when a run went back: those of `num_steps` steps, after `after_step`."""

    after_step: Count
    num_steps: Annotated[int, Meta(ge=1)]


class SpikeRecord(Value, frozen=True, kw_only=True):
    """What the verdict on a step rests on, and what came of the verdicts so far."""

    losses: Window = ()  # of the last steps that were taken
    grad_norms: Window = ()  # before clipping; none where weights are updated in the backward pass
    in_a_row: Count = 0  # steps up to now that were not to be taken
    skipped_steps: tuple[Count, ...] = ()
    passed_over: tuple[PassedOver, ...] = ()


def find_fault(record: SpikeRecord, *, loss: float, grad_norm: float | None) -> str | None:
    """Why a step of this loss and gradient norm, both over all ranks, is not to be taken; None where it is."""
    figures = (("loss", loss, record.losses), ("gradient norm", grad_norm, record.grad_norms))
    for name, value, _ in figures:
        if value is not None and not math.isfinite(value):
            return f"the {name} is not finite"
    for name, value, window in figures:
        if value is None or len(window) < LEAST_STEPS:
            continue
        mean, sigma = _mean_and_sigma(window)
        if value > mean + SIGMAS * sigma:
            return (
                f"the {name}, {value:.4g}, is {(value - mean) / sigma:.0f} sigma above the mean of the last "
                f"{len(window)} steps, {mean:.4g}"
            )
    return None


def after_step(
    record: SpikeRecord, *, step: int, loss: float, grad_norm: float | None, fault: str | None, was_skipped: bool
) -> SpikeRecord:
    """The record once a step is over; `was_skipped` is False where a fault was found too late to skip it."""
    if fault is not None:
        skipped = (*record.skipped_steps, step) if was_skipped else record.skipped_steps
        return replace(record, in_a_row=record.in_a_row + 1, skipped_steps=skipped)
    norms = record.grad_norms if grad_norm is None else (*record.grad_norms, grad_norm)
    losses = (*record.losses, loss)
    return replace(record, losses=losses[-WINDOW_STEPS:], grad_norms=norms[-WINDOW_STEPS:], in_a_row=0)


def after_roll_back(saved: SpikeRecord, *, saved_step: int, step: int) -> SpikeRecord:
    """The record of a run that goes on from a checkpoint after a fault at a later step: that of the checkpoint, with
    the rows since passed over."""
    passed_over = PassedOver(after_step=saved_step, num_steps=step - saved_step)
    return replace(saved, in_a_row=0, passed_over=(*saved.passed_over, passed_over))


def step_of_rows(step: int, passed_over: Iterable[PassedOver]) -> int:
    """The step of the data order whose rows a step learns from; both count from 1."""
    return step + sum(each.num_steps for each in passed_over if each.after_step < step)


def _mean_and_sigma(window: Sequence[float]) -> tuple[float, float]:
    mean = math.fsum(window) / len(window)
    variance = math.fsum((value - mean) ** 2 for value in window) / (len(window) - 1)
    return mean, max(math.sqrt(variance), LEAST_SIGMA * abs(mean), math.ulp(mean))
