"""Silent faults that only several ranks can have, by the kind that `engine_worker` is given."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from shardwise.trainer.runtime.data import batches
from shardwise.trainer.runtime.loop import course

RANK, WORLD_SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


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
