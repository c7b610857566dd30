"""The run in steps: how many, how long warmup is, at which rate, and when to score and to save.

Pure, and a function of the job and the data alone: two machines of any size train the same steps. The global batch
is a number of sequences; one that is no whole number of sequences is rounded to the nearest, never below one.

A learning rate that the job leaves open is looked up by method and size; each row names where it is published. It is
a place to start, not an optimum: published runs differ by three in either direction.
"""

import math
from typing import NamedTuple

from trainer.spec.data_profile import DataProfile
from trainer.spec.errors import InputError
from trainer.spec.job import Every, Job, TrainJob
from trainer.spec.model_shape import ModelShape
from trainer.spec.plan import Schedule
from trainer.spec.strategy import Method, Optimizer
from trainer.spec.units import format_count

EVALUATIONS_PER_RUN = 10  # of an eval.every that is left open
CHECKPOINT_EVERY_S = 1200.0  # of a checkpoint.every that is left open: what a killed run may lose


class PublishedRate(NamedTuple):
    """A learning rate for models of at most `max_parameters`, and who trained with it."""

    max_parameters: float
    lr: float
    source: str


_FROM_SCRATCH = (
    PublishedRate(20e6, 2e-3, "a step above Pythia 70M's 1e-3 (arXiv:2304.01373), as rates fall with size"),
    PublishedRate(100e6, 1e-3, "Pythia 70M (arXiv:2304.01373)"),
    PublishedRate(350e6, 6e-4, "GPT-3 125M and Pythia 160M (arXiv:2005.14165, table 2.1; arXiv:2304.01373)"),
    PublishedRate(3e9, 4e-4, "TinyLlama 1.1B (arXiv:2401.02385, sec. 2.3)"),
    PublishedRate(20e9, 3e-4, "Llama 2 7B and 13B (arXiv:2307.09288, table 1)"),
    PublishedRate(math.inf, 1.5e-4, "Llama 2 70B (arXiv:2307.09288, table 1)"),
)
_FULL = (
    PublishedRate(3e9, 5e-5, "the default of transformers' TrainingArguments"),
    PublishedRate(10e9, 2e-5, "Llama 2 chat (arXiv:2307.09288, sec. 3.1) and Stanford Alpaca 7B"),
    PublishedRate(math.inf, 1e-5, "Stanford Alpaca 13B"),
)
_ADAPTERS = (
    PublishedRate(15e9, 2e-4, "QLoRA 7B and 13B (arXiv:2305.14314, app. B.2)"),
    PublishedRate(math.inf, 1e-4, "QLoRA 33B and 65B (arXiv:2305.14314, app. B.2)"),
)
_GALORE_FROM_SCRATCH = (
    PublishedRate(2e9, 1e-2, "GaLore 60M to 1B (arXiv:2403.03507, app. C)"),
    PublishedRate(math.inf, 5e-3, "GaLore 7B (arXiv:2403.03507, sec. 5.2)"),
)
_SGD = (PublishedRate(math.inf, 1e-1, "a common start for plain SGD; nobody publishes one for language models"),)


def make_schedule(job: Job, data: DataProfile, shape: ModelShape, *, method: Method = Method.FULL) -> Schedule:
    """The steps of `job` on `data`; InputError where a step would not hold one sequence or the data is empty."""
    train = job.train
    sequences = sequences_per_step(train)
    num_steps = _num_steps(train, data, sequences)
    lr, lr_source = _learning_rate(job, shape, method)
    evaluations = _eval_every(job, data, num_steps)
    checkpoints = _checkpoint_every(job, evaluations, num_steps)
    return Schedule(
        num_steps=num_steps,
        sequences_per_step=sequences,
        tokens_per_step=sequences * train.seq_len,
        warmup_steps=_warmup_steps(train, num_steps),
        lr=lr,
        lr_source=lr_source,
        eval_every_steps=evaluations.steps,
        eval_every_s=evaluations.seconds,
        checkpoint_every_steps=checkpoints.steps,
        checkpoint_every_s=checkpoints.seconds,
    )


def sequences_per_step(train: TrainJob) -> int:
    """Sequences of one optimizer step over all ranks."""
    if train.tokens_per_step < train.seq_len:
        raise InputError(
            f"train.tokens_per_step is {train.tokens_per_step} and one sequence has train.seq_len {train.seq_len} "
            f"tokens; raise tokens_per_step to {train.seq_len} or more"
        )
    return round(train.tokens_per_step / train.seq_len)


def _num_steps(train: TrainJob, data: DataProfile, sequences: int) -> int:
    if data.num_rows < 1:
        raise InputError("data.train has no rows to train on")
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return max(1, math.ceil(train.tokens / (sequences * _tokens_per_row(train, data)) - 1e-9))
    epochs = 1.0 if train.epochs is None else train.epochs
    return max(1, math.ceil(epochs * data.num_rows / sequences - 1e-9))


def _tokens_per_row(train: TrainJob, data: DataProfile) -> float:
    """Tokens that are learned from in an average row: padding is none."""
    return float(train.seq_len) if data.is_packed or data.source == "estimated" else data.num_tokens / data.num_rows


def _warmup_steps(train: TrainJob, num_steps: int) -> int:
    """Steps until the full rate; at least one step is left after them."""
    wanted = train.warmup.steps if train.warmup.steps is not None else round((train.warmup.share or 0) * num_steps)
    return min(wanted, num_steps - 1)


def _learning_rate(job: Job, shape: ModelShape, method: Method) -> tuple[float, str]:
    if job.train.lr is not None:
        return job.train.lr, "train.lr of the job file"
    is_from_scratch = job.model.config is not None
    rows, verb = _rates(job, method, is_from_scratch=is_from_scratch)
    row = next(row for row in rows if shape.num_parameters <= row.max_parameters)
    return row.lr, f"{verb} of {format_count(shape.num_parameters)} parameters: {row.source}"


def _rates(job: Job, method: Method, *, is_from_scratch: bool) -> tuple[tuple[PublishedRate, ...], str]:
    if job.pin.optimizer is Optimizer.SGD:
        return _SGD, "SGD"
    if method.freezes_base:
        return _ADAPTERS, f"{method} adapters"
    if not is_from_scratch:
        return _FULL, "fine-tuning"
    return (_GALORE_FROM_SCRATCH if method is Method.GALORE else _FROM_SCRATCH), "training from scratch"


def _eval_every(job: Job, data: DataProfile, num_steps: int) -> Every:
    if not data.num_eval_rows:
        return Every()
    return job.eval.every or Every(steps=max(1, num_steps // EVALUATIONS_PER_RUN))


def _checkpoint_every(job: Job, evaluations: Every, num_steps: int) -> Every:
    """Left open: with every evaluation (so that the best one is there to keep), and at least every 20 minutes."""
    if job.checkpoint.every is not None:
        return job.checkpoint.every
    steps = evaluations.steps or max(1, num_steps // EVALUATIONS_PER_RUN)
    return Every(steps=steps, seconds=CHECKPOINT_EVERY_S)
