"""Three steps of a run that are not to be taken, on ranks of any engine (`engine_worker` with `:spikes`).

    step 3    a gradient of the last rank is NaN, in its first micro batch; every loss is a number
    step 4    the loss of the last rank is NaN
    step 5    nothing is wrong, and the step is refused

Beside the plan each rank leaves `steps-RANK.json`: each step's result, and the digests of this rank's weights, moments
and step counts before and after it.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import torch
from faults_of_ranks import RANK, WORLD_SIZE
from torch import nn

from shardwise.trainer.runtime.checkpoint import state_digest
from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.loop import course
from shardwise.trainer.runtime.loop.step import StepResult, Terms, TokenLoss, run_step
from shardwise.trainer.spec.plan import Plan

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


@contextmanager
def spoilt_steps(plan: Plan, path: Path) -> Iterator[None]:
    answers: list[dict[str, Any]] = []

    def spoilt_step(accelerator: Any, model: Any, optimizer: Any, *args: Any, step: int, **named: Any) -> StepResult:
        def digest() -> str:
            return state_digest(model, optimizer, sharding=plan.chosen.strategy.sharding)

        before = digest()
        if step in (BAD_GRADIENT, BAD_LOSS) and RANK == WORLD_SIZE - 1:
            named["objective"] = Spoilt(step, [])
        if step == REFUSED:
            named["judge"] = lambda *_, **__: "refused"
        result = run_step(accelerator, model, optimizer, *args, step=step, **named)
        loss = result.loss if math.isfinite(result.loss) else None
        answers.append({**msgspec.to_builtins(result), "loss": loss, "digests": [before, digest()]})
        return result

    with patch.object(course, "run_step", spoilt_step):
        yield
    path.with_name(f"steps-{RANK}.json").write_text(json.dumps(answers))
