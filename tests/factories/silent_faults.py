"""Silent faults of a training: each makes a run learn something else than its plan says, without an error."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from shardwise.trainer.runtime import loss
from shardwise.trainer.runtime.data import batches, cache
from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.loop import course, session, step
from shardwise.trainer.spec.data import order

Fault = Callable[[], AbstractContextManager[object]]


@contextmanager
def _updates(change: Callable[[torch.optim.Optimizer, Callable[[], object]], object]) -> Iterator[None]:
    own: Any = torch.optim.AdamW.step

    def changed(self: torch.optim.Optimizer, *_: object, **__: object) -> None:
        change(self, lambda: own(self))

    with patch.object(torch.optim.AdamW, "step", changed):
        yield


def _scaled_rate(factor: float) -> Fault:
    def change(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= factor
        update()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    return lambda: _updates(change)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _no_step(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
    """Nothing is updated."""


def _frozen(number: int) -> Fault:
    def change(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
        _parameters(optimizer)[number].grad = None
        update()

    return lambda: _updates(change)


def _detached_layer() -> AbstractContextManager[object]:
    """The weights of one layer are frozen after the engine was verified."""
    own = session.build_session

    def build(*args: Any) -> Any:
        built = own(*args)
        for name, parameter in built.model.named_parameters():
            if ".layers.0." in name:
                parameter.requires_grad_(False)
        return built

    return patch.object(course, "build_session", build)


def _loss_shift(by: int) -> Fault:
    return lambda: patch.object(
        loss, "shift", lambda labels: torch.nn.functional.pad(labels[:, by:], (0, by), value=-100)
    )


def _changed_batch(change: Callable[[MicroBatch], MicroBatch]) -> Fault:
    own = batches._micro_batch
    return lambda: patch.object(batches, "_micro_batch", lambda rows, examples: change(own(rows, examples)))


def _other_order(**settings: int) -> Fault:
    own = cache.TokenRows.order
    return lambda: patch.object(cache.TokenRows, "order", lambda self, **given: own(self, **{**given, **settings}))


def _labelled_padding(batch: MicroBatch) -> MicroBatch:
    labels = torch.where(batch.labels == -100, batch.input_ids, batch.labels)
    return batch._replace(labels=labels)


def _scaled_loss(factor: float) -> Fault:
    own = step.forward
    return lambda: patch.object(step, "forward", lambda *args, **named: own(*args, **named) * factor)


def _same_place() -> AbstractContextManager[object]:
    return patch.object(course, "_place_of_rows", lambda of, at: 0)


def _few_rows() -> AbstractContextManager[object]:
    """The order has the first half of the rows alone, each of them twice."""
    own = order.DataOrder._row

    def changed(self: Any, epoch: int, position: int) -> int:
        return own(self, epoch, position) // 2

    return patch.object(order.DataOrder, "_row", changed)


def _dropped_micro_batch() -> AbstractContextManager[object]:
    """The first micro batch of a step is learned twice, and the last one never."""
    own = batches.step_micro_batches

    def changed(*args: Any, **named: Any) -> Any:
        found, terms = own(*args, **named)
        return [*found[:-1], found[0]], terms

    return patch.object(course, "step_micro_batches", changed)


def dead_expert() -> AbstractContextManager[object]:
    """The router sends no token to expert 1 of any layer."""
    own: Any = MixtralTopKRouter.forward

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = own(self, hidden)[0]
        others = logits.index_fill(1, torch.tensor([1]), -torch.inf)
        scores, chosen = torch.topk(others.softmax(dim=-1), self.top_k, dim=-1)
        return logits, scores / scores.sum(dim=-1, keepdim=True), chosen

    return patch.object(MixtralTopKRouter, "forward", forward)


FAULTS: dict[str, Fault] = {
    "learning rate times ten": _scaled_rate(10),
    "no update": lambda: _updates(_no_step),
    "matrix without gradient": _frozen(3),
    "layer frozen": _detached_layer,
    "labels one too far": _loss_shift(2),
    "labels not shifted": _loss_shift(0),
    "padding is learned": _changed_batch(_labelled_padding),
    "loss halved": _scaled_loss(0.5),
    "rows of another seed": _other_order(seed=1),
    "same rows in every step": _same_place,
    "half of the rows twice": _few_rows,
    "micro batch dropped": _dropped_micro_batch,
}
