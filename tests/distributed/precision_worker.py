"""One rank of the precision tests: trains attempts one after another, notes gradients, and may spoil one.

    torchrun ... precision_worker.py PLAN.json[:overflow] [PLAN.json ...]

Beside each plan it leaves `seen-RANK.json`: the largest gradient that reached the embeddings' output in each backward,
and what the stand-in for Transformer Engine counted. With `:overflow`, one element of the first of them becomes
infinite, on rank 1 alone: a gradient of one row of the embeddings, which under FSDP2 is rank 0's.
"""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from shardwise.trainer.runtime.loop.course import train
from shardwise.trainer.runtime.run.state import ReportWriter, RunState, run_paths
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan


class Seen:
    """What came by while one attempt trained."""

    def __init__(self, *, spoils: bool) -> None:
        self.gradients: list[float] = []
        self.spoils = spoils

    def on_forward(self, module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(module, nn.Embedding) and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(self.on_gradient)

    def on_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        self.gradients.append(grad.abs().max().item())
        if self.spoils and len(self.gradients) == 1:
            grad = grad.clone()
            grad[0, 0, 0] = torch.inf
        return grad


def main(arguments: list[str]) -> None:
    rank = int(os.environ["RANK"])
    environment = dict(os.environ)
    for argument in arguments:
        name, _, spoiled = argument.partition(":")
        path, seen = Path(name), Seen(spoils=bool(spoiled) and rank == 1)
        paths, state = run_paths(path, started_at=datetime.now(UTC)), RunState()
        hook = register_module_forward_hook(seen.on_forward)
        train(codec.read(path, Plan), paths, ReportWriter(paths, rank=rank), state, lambda: False)
        hook.remove()
        assert state.verified is not None
        codec.write(path.with_name(f"engaged-{rank}.json"), state.verified)
        answer = {"gradients": seen.gradients, "te": counted()}
        path.with_name(f"seen-{rank}.json").write_text(json.dumps(answer))
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(environment)
    dist.barrier()
    dist.destroy_process_group()


def counted() -> dict[str, int]:
    """What the stand-in counted since the last time; nothing where it was not used."""
    te = sys.modules.get("transformer_engine.pytorch")
    if te is None:
        return {}
    counts = dict(te.COUNTS)
    te.COUNTS.clear()
    return counts


if __name__ == "__main__":
    main(sys.argv[1:])
