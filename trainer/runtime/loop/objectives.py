"""The objective of a plan, as it is trained and as it is scored on the held-out rows."""

from collections.abc import Callable
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shardwise.trainer.runtime.data.batches import MicroBatch, eval_micro_batches
from shardwise.trainer.runtime.loop.dpo import (
    REFERENCE_NAME,
    DpoLoss,
    Reference,
    RowLogps,
    ask_rows,
    no_reference,
    plain_base,
    read_reference,
    reference_fingerprint,
    turn_dropout_off,
    write_reference,
)
from shardwise.trainer.runtime.loop.evaluation import TokenScore
from shardwise.trainer.runtime.loop.session import Session
from shardwise.trainer.runtime.loop.step import Objective, Terms, TokenLoss, forward
from shardwise.trainer.runtime.loss.head import Answer
from shardwise.trainer.runtime.run.extension import Hooks
from shardwise.trainer.spec.data.shapes import objective_of
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job import sections as job
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.strategy import LossHead


class UserLoss(NamedTuple):
    """The loss of the user's extensions file, summed over the targets of a micro batch; scored by cross entropy."""

    hooks: Hooks
    figures: tuple[str, ...] = ()

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        logits = forward(model, micro_batch, device, answer=Answer.LOGITS)
        loss = self.hooks.call(Hook.LOSS, logits, micro_batch.labels.to(device))
        if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
            raise InputError("extensions: loss must return one number with a gradient: a tensor without dimensions")
        return Terms(loss, micro_batch.num_targets, micro_batch.num_targets)


class Objectives(NamedTuple):
    """Of training, and of evaluation."""

    train: Objective
    score: Objective


def build_objectives(session: Session, wants_stop: Callable[[], bool]) -> Objectives | None:
    """Objectives of the plan; built before the first step, as a reference may need the initial weights.

    None where a stop was wanted meanwhile. InputError where a loss head cannot, EnvironmentFaultError where a resumed
    run has no reference.
    """
    plan = session.plan
    if objective_of(plan.job.train.objective, plan.data.format) is not job.Objective.DPO:
        if session.hooks is not None and session.hooks.has(Hook.LOSS):
            return Objectives(UserLoss(session.hooks), TokenScore())
        return Objectives(TokenLoss(), TokenScore())
    if plan.chosen.loss is LossHead.FUSED_LINEAR:
        raise InputError(
            "pin.loss: fused_linear and train.objective: dpo exclude each other; Liger makes its gradients before the "
            "weight of a row is known: take pin.loss=chunked"
        )
    turn_dropout_off(session.model)
    reference = _reference(session, wants_stop)
    if reference is None:
        return None
    loss = DpoLoss(plan.job.train.dpo.beta, reference)
    return Objectives(loss, loss)


def _reference(session: Session, wants_stop: Callable[[], bool]) -> Reference | None:
    plan, paths, ranks = session.plan, session.paths, session.ranks
    if plan.chosen.method.freezes_base:
        return plain_base
    if plan.is_trial:
        return no_reference
    fingerprint = reference_fingerprint(plan)
    if session.state.resumed_from_step:  # from step 0 the weights are still those of the start
        path = paths.resume_dir / REFERENCE_NAME
        found = read_reference(path, fingerprint=fingerprint, ranks=ranks)
        if found is None:
            raise EnvironmentFaultError(
                f"--resume: {path} is missing: it holds the log-probabilities of every pair before step 1, which the "
                "changed weights cannot give again;\nput it back, or start a new run without --resume"
            )
        return found
    path = paths.run_dir / REFERENCE_NAME
    found = _of_an_earlier_attempt(session, fingerprint)
    if found is None:
        found = _ask_the_start(session, wants_stop)
        if found is not None:
            write_reference(path, found, fingerprint=fingerprint, ranks=ranks)
    return found


def _of_an_earlier_attempt(session: Session, fingerprint: str) -> RowLogps | None:
    """The reference of an attempt that ended before its first checkpoint."""
    try:
        return read_reference(session.paths.run_dir / REFERENCE_NAME, fingerprint=fingerprint, ranks=session.ranks)
    except InputError:
        return None  # of another start: it is written anew


def _ask_the_start(session: Session, wants_stop: Callable[[], bool]) -> RowLogps | None:
    """Runs the model on every row of both splits; progress is reported in tenths."""
    splits = [rows for rows in (session.train_rows, session.eval_rows) if rows is not None]
    accelerator, micro_batch = session.accelerator, session.plan.chosen.micro_batch
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    total = sum(-(-len(rows) // (num_ranks * micro_batch)) for rows in splits)
    count = 0

    def goes_on() -> bool:
        nonlocal count
        if count == 0 or count * 10 // total > (count - 1) * 10 // total:
            session.writer.write_status(f"asking the reference, {count * 100 // total} % done")
        count += 1
        return session.ranks.all_agree(not wants_stop())

    every = chain.from_iterable(
        eval_micro_batches(rows, rank=rank, num_ranks=num_ranks, micro_batch=micro_batch) for rows in splits
    )
    return ask_rows(session.model, every, accelerator.device, session.ranks, goes_on=goes_on)
