"""One rank of the precision tests: the engine worker, noting gradients, one of which it may spoil.

    torchrun ... precision_worker.py PLAN.json [PLAN.json ...]

Next to each plan it writes `seen-RANK.json`: the largest gradient of the embeddings' output in each backward, and the
counts of the stand-in for Transformer Engine. If the run directory has a file `overflows`, one element of the first
gradient becomes infinite, on rank 1 alone: a gradient of one row of the embeddings, which under FSDP2 is rank 0's.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import engine_worker
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook


@contextmanager
def noting(path: Path, rank: int) -> Iterator[None]:
    gradients: list[float] = []
    overflows = rank == 1 and (path.parents[2] / "overflows").exists()

    def on_gradient(grad: torch.Tensor) -> torch.Tensor:
        gradients.append(grad.abs().max().item())
        if overflows and len(gradients) == 1:
            grad = grad.clone()
            grad[0, 0, 0] = torch.inf
        return grad

    def on_forward(module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(module, nn.Embedding) and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(on_gradient)

    hook = register_module_forward_hook(on_forward)
    yield
    hook.remove()
    path.with_name(f"seen-{rank}.json").write_text(json.dumps({"gradients": gradients, "te": counted()}))


def counted() -> dict[str, int]:
    """Counts of the stand-in since the last attempt; empty if it was not used."""
    te = sys.modules.get("transformer_engine.pytorch")
    if te is None:
        return {}
    counts = dict(te.COUNTS)
    te.COUNTS.clear()
    return counts


if __name__ == "__main__":
    engine_worker.main(sys.argv[1:], around=noting)
