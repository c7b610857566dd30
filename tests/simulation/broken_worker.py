"""Dry runs with one precaution taken away each: prints a JSON object of the outcome of each."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional

from shardwise.trainer.runtime import loss
from shardwise.trainer.runtime.loop import step
from shardwise.trainer.simulation import dry_run, kernels
from shardwise.trainer.simulation.fake_device import replaced
from shardwise.trainer.spec.errors import ShardwiseError
from shardwise.trainer.spec.messages.worker_requests import SimulationRequest

REQUEST = SimulationRequest(
    model_config={
        "model_type": "llama", "vocab_size": 1024, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    seq_len=512,
)  # fmt: skip
_silu, _attention = functional.silu, functional.scaled_dot_product_attention
_add = step.Sums.add
_retained: list[step.Terms] = []


@contextmanager
def without(owner: object, **attributes: object) -> Iterator[None]:
    """Runs the block with the libraries' own `attributes` of `owner` where the dry run would put others."""

    class Undone(kernels.Kernels):
        @contextmanager
        def installed(self) -> Iterator[None]:
            with super().installed(), replaced(owner, **attributes):
                yield

    with replaced(dry_run, Kernels=Undone):
        yield


def keep_terms(self: Any, terms: step.Terms, **given: int) -> None:
    """The runtime's own, which moreover never lets go of what a forward made."""
    _retained.append(terms)
    _add(self, terms, **given)


BREAKS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "nothing": nullcontext, "masks": lambda: replaced(loss, known_rows=lambda _: nullcontext()),
    "sums": lambda: replaced(step.Sums, add=keep_terms), "silu": lambda: without(functional, silu=_silu),
    "attention": lambda: without(functional, scaled_dot_product_attention=_attention),
    "autocast": lambda: without(torch.cuda.amp.common, amp_definitely_not_available=lambda: True),
}  # fmt: skip


def reported(what: str) -> str:
    with BREAKS[what]():
        try:
            return "\n".join(dry_run.simulate(REQUEST).checks)
        except ShardwiseError as error:
            return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    json.dump({what: reported(what) for what in BREAKS}, sys.stdout)
