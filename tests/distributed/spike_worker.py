"""One rank of the tests of steps that are not taken: seven steps under each engine, three of which have a fault.

    rank_launch.py NUM_RANKS spike_worker.py PLAN.json [PLAN.json ...]

    step 3    a gradient of the last rank is NaN, in its first micro batch; every loss is a number
    step 4    the loss of the last rank is NaN
    step 5    nothing is wrong, and the step is refused

Beside each plan it leaves `steps-RANK.json`: each step's result, and the digests of this rank's weights, moments and
step counts before and after it; and rank 0 `weights.safetensors`.
"""

import json
import math
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from rank_process import attempt, end_group
from safetensors.torch import save_file
from torch import nn

from shardwise.trainer.runtime.checkpoint import state_digest
from shardwise.trainer.runtime.data.batches import MicroBatch, step_micro_batches
from shardwise.trainer.runtime.export.folder import gathered_weights
from shardwise.trainer.runtime.loop.session import Session, build_session
from shardwise.trainer.runtime.loop.step import StepResult, Terms, TokenLoss, run_step
from shardwise.trainer.runtime.run.clock import Clock
from shardwise.trainer.runtime.run.state import ReportWriter, RunState, SpikeRecord, find_fault, run_paths
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan, learning_rate

NUM_STEPS = 7
BAD_GRADIENT, BAD_LOSS, REFUSED = 3, 4, 5


class Spoilt(NamedTuple):
    """The loss of tokens; in the first micro batch a gradient or the value is no number."""

    step: int
    called: list[bool]
    figures: tuple[str, ...] = ()

    def __call__(self, model: nn.Module, micro_batch: MicroBatch, device: torch.device) -> Terms:
        terms = TokenLoss()(model, micro_batch, device)
        self.called.append(True)
        if len(self.called) > 1:
            return terms
        if self.step == BAD_LOSS:
            return terms._replace(loss=terms.loss * math.nan)
        loss = terms.loss * 1
        loss.register_hook(lambda gradient: gradient * math.nan)
        return terms._replace(loss=loss)


def run_one(session: Session, step: int) -> StepResult:
    plan, accelerator = session.plan, session.accelerator
    is_last = accelerator.process_index == accelerator.num_processes - 1
    micro_batches, num_terms = step_micro_batches(
        session.train_rows, step=step - 1, seed=plan.job.train.seed,
        sequences_per_step=plan.schedule.sequences_per_step, rank=accelerator.process_index,
        num_ranks=accelerator.num_processes, micro_batch=plan.chosen.micro_batch, accumulation=plan.chosen.accumulation,
    )  # fmt: skip
    return run_step(
        accelerator, session.model, session.optimizer, micro_batches, num_terms=num_terms, step=step,
        seed=plan.job.train.seed, lr=learning_rate(plan.schedule, plan.job.train, step), clip=plan.job.train.clip,
        clock=Clock(accelerator.device), scaler=session.scaler,
        objective=Spoilt(step, []) if is_last and step in (BAD_GRADIENT, BAD_LOSS) else TokenLoss(),
        judge=lambda loss, grad_norm: (
            "refused"
            if step == REFUSED
            else find_fault(SpikeRecord(), loss=loss, grad_norm=grad_norm, skips_spikes=False)
        ),
    )  # fmt: skip


def run_all(plan: Plan, path: Path, rank: int) -> None:
    paths = run_paths(path, started_at=datetime.now(UTC))
    session = build_session(plan, paths, ReportWriter(paths, rank=rank), RunState())
    answers = []

    def digest() -> str:
        return state_digest(session.model, session.optimizer, sharding=plan.chosen.strategy.sharding)

    for step in range(1, NUM_STEPS + 1):
        before = digest()
        result = msgspec.to_builtins(run_one(session, step))
        loss = result.pop("loss")
        answers.append({"loss": loss if math.isfinite(loss) else None, "digests": [before, digest()], **result})
    path.with_name(f"steps-{rank}.json").write_text(json.dumps(answers))
    weights = gathered_weights(session.accelerator, session.model)
    if rank == 0:
        save_file(
            {name: value.float().contiguous() for name, value in weights.items()}, path.with_name("weights.safetensors")
        )


def main(arguments: list[str]) -> None:
    rank = int(os.environ["RANK"])
    for path in map(Path, arguments):
        with attempt():
            run_all(codec.read(path, Plan), path, rank)
    end_group()


if __name__ == "__main__":
    main(sys.argv[1:])
