"""A training loop of your own on shardwise's parts: its plan, engine, order of rows, step, checkpoints and export.

    shardwise train JOB --dry-run --run-dir RUN     plans, prepares the data, writes what starts the ranks; then
    accelerate launch --config_file RUN/attempts/1/accelerate.yaml examples/train_loop.py RUN/attempts/1/plan.json

The job decides model, data, sharding, precision and memory; this file decides what a step learns and what follows it.
The ranks of every engine execute the same lines. With `--resume` in the first command the run continues from its last
checkpoint, also after a change of engine or of the number of ranks.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from shardwise.trainer.runtime.data.batches import MicroBatch, step_micro_batches
from shardwise.trainer.runtime.loop.saving import export_model, save_last_state, save_state
from shardwise.trainer.runtime.loop.session import Session, build_session
from shardwise.trainer.runtime.loop.step import StepResult, Terms, forward, run_step
from shardwise.trainer.runtime.loss import LossOutput
from shardwise.trainer.runtime.run import process
from shardwise.trainer.runtime.run.clock import Clock
from shardwise.trainer.runtime.run.state import ReportWriter, RunState, run_paths, start_of_launch
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan, learning_rate

SAVE_EVERY = 100  # steps
SMOOTHING = 0.1


class SmoothedLoss(NamedTuple):
    """Label smoothing: a share of each target is spread over the vocabulary. Any sum of terms can stand here."""

    figures: tuple[str, ...] = ("entropy",)  # further means over the targets of a step

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        """The sum over this micro batch; the step divides by the targets of all ranks and micro batches."""
        logits = forward(model, micro_batch, device, output=LossOutput.LOGITS)[:, :-1].float()  # [B, S - 1, V]
        targets = micro_batch.labels[:, 1:].to(device)  # -100 where nothing is learned
        spread = nn.functional.cross_entropy(
            logits.transpose(1, 2), targets, reduction="sum", ignore_index=-100, label_smoothing=SMOOTHING
        )
        entropy = torch.distributions.Categorical(logits=logits[targets != -100].detach()).entropy().sum()
        return Terms(spread, micro_batch.num_targets, micro_batch.num_targets, (entropy,))


def train(session: Session) -> None:
    """All steps of the plan that are still to do, a checkpoint now and then, the export."""
    schedule, state = session.plan.schedule, session.state
    while state.step < schedule.num_steps:
        result = one_step(session, state.step + 1)
        state.step += 1
        state.tokens_seen += result.num_tokens
        state.targets_seen += result.num_targets
        if session.is_first:
            print(f"step {state.step}: loss {result.loss:.4f}, entropy {result.figures['entropy']:.3f}", flush=True)
        if state.step % SAVE_EVERY == 0:
            save_state(session, f"step {state.step}")
    save_last_state(session, wants_stop=lambda: False)
    export_model(session)


def one_step(session: Session, step: int) -> StepResult:
    """The micro batches of this rank forward and backward, and one update."""
    plan, accelerator = session.plan, session.accelerator
    micro_batches, num_targets = step_micro_batches(
        session.train_rows,
        step=step - 1,
        seed=plan.job.train.seed,
        sequences_per_step=plan.schedule.sequences_per_step,
        rank=accelerator.process_index,
        num_ranks=accelerator.num_processes,
        micro_batch=plan.chosen.micro_batch,
        accumulation=plan.chosen.accumulation,
    )
    return run_step(
        accelerator,
        session.model,
        session.optimizer,
        micro_batches,
        num_terms=num_targets,
        step=step,
        seed=plan.job.train.seed,
        lr=learning_rate(plan.schedule, plan.job.train, step),
        clip=plan.job.train.clip,
        clock=Clock(accelerator.device),
        scaler=session.scaler,
        objective=SmoothedLoss(),
    )


if __name__ == "__main__":
    plan_path = Path(sys.argv[1])
    started = start_of_launch(world_size=process.world_size_of_launch())
    paths = run_paths(plan_path, started_at=started)
    writer = ReportWriter(paths, rank=process.rank_of_this_process())
    train(build_session(codec.read(plan_path, Plan), paths, writer, RunState()))
