"""One rank of runs that have a silent fault which only several ranks can have.

    rank_launch.py NUM_RANKS faulty_worker.py PLAN.json:FAULT [...]

Next to each plan it writes `ended-RANK.json`: the last step, the lines on the first steps, and the error.
"""

import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator
from rank_process import attempt, end_group
from torch.nn.parallel import DistributedDataParallel

from shardwise.trainer.runtime.data import batches
from shardwise.trainer.runtime.loop import course
from shardwise.trainer.runtime.run.state import IncidentKind, ReportWriter, RunState, run_paths
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.plan import Plan

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def rows_of_first_rank() -> AbstractContextManager[object]:
    """Every rank learns the rows of the first."""
    own = batches.step_micro_batches
    return patch.object(course, "step_micro_batches", lambda *args, **named: own(*args, **{**named, "rank": 0}))


def gradient_not_averaged() -> AbstractContextManager[object]:
    """Every rank updates its copy of the weights with the gradient of its own rows."""
    own: Any = DistributedDataParallel.forward

    def forward(self: DistributedDataParallel, *args: Any, **named: Any) -> object:
        with self.no_sync():
            return own(self, *args, **named)

    return patch.object(DistributedDataParallel, "forward", forward)


def gradient_averaged_twice() -> AbstractContextManager[object]:
    """The mean over the ranks is divided by their number once more."""
    own: Any = Accelerator.clip_grad_norm_

    def clip(self: Accelerator, parameters: Any, *args: Any) -> Any:
        listed = list(parameters)
        for each in listed:
            if each.grad is not None:
                each.grad /= WORLD_SIZE
        return own(self, listed, *args)

    return patch.object(Accelerator, "clip_grad_norm_", clip)


def gradient_of_next_rank() -> AbstractContextManager[object]:
    """Every rank updates its shard with the gradient of the shard of the rank after it."""
    own: Any = torch.optim.AdamW.step

    def step(self: torch.optim.Optimizer, *args: Any) -> None:
        for each in (each for group in self.param_groups for each in group["params"]):
            if each.grad is not None:
                of_rank = getattr(each.grad, "to_local", lambda each=each: each.grad)()
                every = [torch.empty_like(of_rank) for _ in range(WORLD_SIZE)]
                dist.all_gather(every, of_rank.contiguous())
                of_rank.copy_(every[(RANK + 1) % WORLD_SIZE])
        own(self, *args)

    return patch.object(torch.optim.AdamW, "step", step)


FAULTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "rows": rows_of_first_rank,
    "alone": gradient_not_averaged,
    "twice": gradient_averaged_twice,
    "shard": gradient_of_next_rank,
}


def main(arguments: list[str]) -> None:
    for argument in arguments:
        name, _, fault = argument.partition(":")
        path, state, error = Path(name), RunState(), ""
        paths = run_paths(path, started_at=datetime.now(UTC))
        with attempt(), FAULTS[fault]():
            try:
                course.train(codec.read(path, Plan), paths, ReportWriter(paths, rank=RANK), state, lambda: False)
            except EnvironmentFaultError as raised:
                error = str(raised)
        ended = {"step": state.step, "lines": state.log.texts_of(IncidentKind.FIRST_STEPS), "error": error}
        path.with_name(f"ended-{RANK}.json").write_text(json.dumps(ended))
    end_group()


if __name__ == "__main__":
    main(sys.argv[1:])
