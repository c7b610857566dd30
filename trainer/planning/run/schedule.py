"""The run in steps: how many, how long warmup is, at which rate, and when to score and to save.

Pure. All but the rate is a function of the job and the data alone: two machines of any size train the same steps. The
global batch is a number of examples: sequences, or pairs of sequences under DPO. One that is no whole number of them is
rounded to the nearest, never below one. A learning rate that the job leaves open is looked up by optimizer, method,
size and objective (`learning_rates`). One epoch is the default of every objective: what is learned twice gains less
each time, though up to four times little is lost (Muennighoff et al. 2023, arXiv:2305.16264).
"""

import math
from typing import NamedTuple

from shardwise.trainer.planning.tables.learning_rates import DefaultRate, default_rate
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.data.shapes import objective_of, rows_per_example
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.kinds import Every, Warmup
from shardwise.trainer.spec.job.sections import Job, Objective, TrainJob
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import Schedule
from shardwise.trainer.spec.strategy import Method, Optimizer

MAX_SAVING_SHARE = 0.03  # of the run's time, of a checkpoint.every that is left open
EVALUATIONS_PER_RUN = 10  # of an eval.every that is left open
CHECKPOINT_EVERY_S = 1200.0  # of a checkpoint.every that is left open: what a killed run may lose


class DefaultWarmup(NamedTuple):
    """The share of a run in which the rate rises, and who trained so."""

    share: float
    source: str


_WARMUP = DefaultWarmup(0.03, "QLoRA, arXiv:2305.14314; OLMo 7B, arXiv:2402.00838")
_DPO_WARMUP = DefaultWarmup(0.10, "Zephyr 7B, arXiv:2310.16944; OLMo 7B, arXiv:2402.00838")


def make_schedule(
    job: Job,
    data: DataProfile,
    shape: ModelShape,
    *,
    method: Method = Method.FULL,
    optimizer: Optimizer | None = None,
) -> Schedule:
    """The steps of `job` on `data`; InputError where a step would not hold one sequence or the data is empty.

    The rate is that of `optimizer`; before a row is chosen, of the one that the job pins, or of AdamW.
    """
    train = job.train
    objective = objective_of(train.objective, data.format)
    num_rows = rows_per_example(objective)
    sequences = sequences_per_step(train, rows_per_example=num_rows)
    num_steps = _num_steps(train, data, sequences)
    optimizer = optimizer or job.pin.optimizer or Optimizer.ADAMW
    lr, lr_source = _learning_rate(job, shape, method, optimizer, objective)
    default_warmup = _DPO_WARMUP if objective is Objective.DPO else _WARMUP
    warmup_steps, warmup_source = _warmup_steps(train, num_steps, default_warmup)
    evaluations = _eval_every(job, data, num_steps)
    checkpoints = _checkpoint_every(job, evaluations, num_steps)
    return Schedule(
        num_steps=num_steps,
        length_source=_length_source(train),
        sequences_per_step=sequences,
        tokens_per_step=sequences * num_rows * train.seq_len,
        warmup_steps=warmup_steps,
        lr=lr,
        lr_source=lr_source,
        warmup_source=warmup_source,
        eval_every_steps=evaluations.steps,
        eval_every_s=evaluations.seconds,
        checkpoint_every_steps=checkpoints.steps,
        checkpoint_every_s=checkpoints.seconds,
        saving_max_share=MAX_SAVING_SHARE if job.checkpoint.every is None else None,
        rehearses_save=num_steps > 1,
    )


def sequences_per_step(train: TrainJob, *, rows_per_example: int = 1) -> int:
    """Sequences, or pairs of them, of one optimizer step over all ranks."""
    num_tokens = rows_per_example * train.seq_len
    if train.tokens_per_step < num_tokens:
        what = "one sequence" if rows_per_example == 1 else "one pair of sequences"
        raise InputError(
            f"train.tokens_per_step is {train.tokens_per_step} and {what} of train.seq_len {train.seq_len} "
            f"has {num_tokens} tokens; raise tokens_per_step to {num_tokens} or more"
        )
    return round(train.tokens_per_step / num_tokens)


def _num_steps(train: TrainJob, data: DataProfile, sequences: int) -> int:
    if data.num_rows < 1:
        raise InputError("data.train has no rows to train on")
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return max(1, math.ceil(train.tokens / (sequences * _tokens_per_row(train, data)) - 1e-9))
    epochs = 1.0 if train.epochs is None else train.epochs
    return max(1, math.ceil(epochs * data.num_rows / sequences - 1e-9))


def _length_source(train: TrainJob) -> str:
    if train.steps is not None:
        return "train.steps of the job file"
    if train.tokens is not None:
        return "train.tokens of the job file"
    epochs = 1.0 if train.epochs is None else train.epochs
    if epochs == 1:
        return "1 epoch, as by default: arXiv:2305.16264"
    return f"{epochs:g} epochs"


def _tokens_per_row(train: TrainJob, data: DataProfile) -> float:
    """Tokens that are learned from in an average row: padding is none."""
    return float(train.seq_len) if data.source == "estimated" else data.num_tokens / data.num_rows


def _warmup_steps(train: TrainJob, num_steps: int, default: DefaultWarmup) -> tuple[int, str]:
    """Steps until the full rate, and where they are from; at least one step is left after them."""
    asked, source = train.warmup, "train.warmup of the job file"
    if asked is None:
        asked, source = Warmup(share=default.share), f"{default.share:.0%}: {default.source}"
    wanted = asked.steps if asked.steps is not None else round((asked.share or 0) * num_steps)
    return min(wanted, num_steps - 1), source


def _learning_rate(
    job: Job, shape: ModelShape, method: Method, optimizer: Optimizer, objective: Objective
) -> DefaultRate:
    if job.train.lr is not None:
        return DefaultRate(job.train.lr, "train.lr of the job file")
    return default_rate(
        optimizer=optimizer,
        method=method,
        is_from_scratch=job.model.config is not None,
        num_parameters=shape.num_parameters,
        objective=objective,
    )


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
