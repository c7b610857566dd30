"""One rank of the tests of the order: the engine worker, noting every row that the model is trained on.

    torchrun ... order_worker.py PLAN.json [PLAN.json ...]

Beside each plan stands `forwards-RANK.jsonl`, a line for each forward that a backward follows: its rows, each with
its ids up to the last label. What is noted is what reaches the model, behind the engine's wrapper.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine_worker


@contextmanager
def _noting(path: Path, rank: int) -> Iterator[None]:
    import torch
    from torch.nn.modules.module import register_module_forward_hook
    from transformers import PreTrainedModel

    with path.with_name(f"forwards-{rank}.jsonl").open("w") as file:

        def note(module: Any, _inputs: Any, inputs: dict[str, Any], _output: Any) -> None:
            if isinstance(module, PreTrainedModel) and "labels" in inputs and torch.is_grad_enabled():
                file.write(json.dumps(_rows(inputs["input_ids"], inputs["labels"])) + "\n")

        hook = register_module_forward_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


def _rows(ids: Any, labels: Any) -> list[list[int]]:
    ends = [int((row >= 0).nonzero()[-1]) + 1 if (row >= 0).any() else 0 for row in labels]
    return [row[:end].tolist() for row, end in zip(ids, ends, strict=True)]


if __name__ == "__main__":
    engine_worker.main(sys.argv[1:], around=_noting)
