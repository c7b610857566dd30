"""Silent faults of a training: each makes a run learn something else than its plan says, without an error.

A fault is a context: while it is open, a library or a part of the product does the wrong thing. Names say what.
"""

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
    """AdamW whose step is what `change` makes of it."""
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


def _setting(name: str, value: Any, *, of: str | None = None) -> Fault:
    """One setting of the groups is another while a step is taken, and afterwards what it was."""

    def change(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
        before = [group[name] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group[name] = value if of in (None, group["name"]) else group[name]
        update()
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group[name] = own

    return lambda: _updates(change)


def _built_with(**settings: Any) -> Fault:
    """The optimizer is built with other settings than the plan's."""
    own = torch.optim.AdamW.__init__

    def init(self: Any, params: Any, **given: Any) -> None:
        for group in params:
            group.update({name: value for name, value in settings.items() if name in group})
        own(self, params, **{**given, **{name: value for name, value in settings.items() if name in given}})

    return lambda: patch.object(torch.optim.AdamW, "__init__", init)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _stale() -> AbstractContextManager[object]:
    """Every step takes the gradient of the first one."""
    kept: list[Tensor | None] = []

    def change(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
        if not kept:
            kept.extend(None if each.grad is None else each.grad.clone() for each in _parameters(optimizer))
        for each, gradient in zip(_parameters(optimizer), kept, strict=True):
            each.grad = None if gradient is None else gradient.clone()
        update()

    return _updates(change)


def _no_step(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
    """Nothing is updated."""


def _sgd(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
    """The weights move along the gradient instead."""
    before = [each.detach().clone() for each in _parameters(optimizer)]
    update()
    with torch.no_grad():
        for each, old in zip(_parameters(optimizer), before, strict=True):
            if each.grad is not None:
                each.copy_(old - optimizer.param_groups[0]["lr"] * each.grad)


def _ascent(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
    """The weights move up instead of down."""
    before = [each.detach().clone() for each in _parameters(optimizer)]
    update()
    with torch.no_grad():
        for each, old in zip(_parameters(optimizer), before, strict=True):
            each.copy_(2 * old - each)


def _twice(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
    update()
    update()


def _forgets_moments(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
    optimizer.state.clear()
    update()


def _frozen(number: int) -> Fault:
    """One matrix gets no gradient."""

    def change(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
        _parameters(optimizer)[number].grad = None
        update()

    return lambda: _updates(change)


def _restored(number: int) -> Fault:
    """One matrix is put back after each update."""

    def change(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
        before = _parameters(optimizer)[number].detach().clone()
        update()
        with torch.no_grad():
            _parameters(optimizer)[number].copy_(before)

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
    """Micro batches of training are what `change` makes of them."""
    own = batches._micro_batch
    return lambda: patch.object(batches, "_micro_batch", lambda rows, examples: change(own(rows, examples)))


def _changed_rows(change: Callable[[list[int]], list[int]]) -> Fault:
    """The rows of a step are others."""
    own = cache.TokenRows.order

    def changed(self: cache.TokenRows, **given: Any) -> Any:
        made = own(self, **given)

        class Changed:
            def rows_of_step(self, at: int) -> list[int]:
                return change(made.rows_of_step(at))

        return Changed()

    return lambda: patch.object(cache.TokenRows, "order", changed)


def _other_order(**settings: int) -> Fault:
    own = cache.TokenRows.order
    return lambda: patch.object(cache.TokenRows, "order", lambda self, **given: own(self, **{**given, **settings}))


def _labelled_padding(batch: MicroBatch) -> MicroBatch:
    labels = torch.where(batch.labels == -100, batch.input_ids, batch.labels)
    return batch._replace(labels=labels)


def _shifted_labels(batch: MicroBatch) -> MicroBatch:
    return batch._replace(labels=batch.labels.roll(1, dims=1))


def _reversed_ids(batch: MicroBatch) -> MicroBatch:
    return batch._replace(input_ids=batch.input_ids.flip(1))


def _dropped_label(batch: MicroBatch) -> MicroBatch:
    labels = batch.labels.clone()
    labels[:, 1::2] = -100
    return batch._replace(labels=labels)


def _corrupt_ids(batch: MicroBatch) -> MicroBatch:
    ids = batch.input_ids.clone()
    ids[0, 0] = (ids[0, 0] + 1) % 97
    return batch._replace(input_ids=ids)


def _one_row(batch: MicroBatch) -> MicroBatch:
    """Every row of a micro batch is its first."""
    return batch._replace(
        input_ids=batch.input_ids[:1].expand_as(batch.input_ids).clone(),
        labels=batch.labels[:1].expand_as(batch.labels).clone(),
    )


def _scaled_loss(factor: float) -> Fault:
    own = step.forward
    return lambda: patch.object(step, "forward", lambda *args, **named: own(*args, **named) * factor)


def _wrong_place() -> AbstractContextManager[object]:
    """A run learns the rows of a later step."""
    own = course._place_of_rows
    return patch.object(course, "_place_of_rows", lambda of, at: own(of, at) + 3)


def _same_place() -> AbstractContextManager[object]:
    """Every step learns the rows of the first."""
    return patch.object(course, "_place_of_rows", lambda of, at: 0)


def _few_rows() -> AbstractContextManager[object]:
    """The order has the first half of the rows alone, each of them twice."""
    own = order.DataOrder._row

    def changed(self: Any, epoch: int, position: int) -> int:
        return own(self, epoch, position) // 2

    return patch.object(order.DataOrder, "_row", changed)


def _softened_logits() -> AbstractContextManager[object]:
    """The loss is of logits that were divided by a temperature."""
    own = loss.Head.logits
    return patch.object(loss.Head, "logits", lambda self, hidden: own(self, hidden) / 1.1)


def _dropped_micro_batch() -> AbstractContextManager[object]:
    """The first micro batch of a step is learned twice, and the last one never."""
    own = batches.step_micro_batches

    def changed(*args: Any, **named: Any) -> Any:
        found, terms = own(*args, **named)
        return [*found[:-1], found[0]], terms

    return patch.object(course, "step_micro_batches", changed)


def _no_momentum(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
    """The first moment is that of the last gradient alone."""
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    update()


def _never_chosen(number: int) -> Fault:
    """The router sends no token to one expert of each layer."""
    own: Any = MixtralTopKRouter.forward

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = own(self, hidden)[0]
        others = logits.index_fill(1, torch.tensor([number]), -torch.inf)
        scores, chosen = torch.topk(others.softmax(dim=-1), self.top_k, dim=-1)
        return logits, scores / scores.sum(dim=-1, keepdim=True), chosen

    return lambda: patch.object(MixtralTopKRouter, "forward", forward)


def _without_gradient(number: int) -> Fault:
    """The weights of one expert of each layer get no gradient."""

    def change(optimizer: torch.optim.Optimizer, update: Callable[[], object]) -> None:
        for each in _parameters(optimizer):
            if each.ndim == 3 and each.grad is not None:
                each.grad[number] = 0
        update()

    return lambda: _updates(change)


OF_EXPERTS: dict[str, Fault] = {  # of a mixture
    "dead expert": _never_chosen(1),
    "expert without gradient": _without_gradient(1),
}
FAULTS: dict[str, Fault] = {
    "learning rate times ten": _scaled_rate(10),
    "learning rate divided by ten": _scaled_rate(0.1),
    "learning rate times 1.5": _scaled_rate(1.5),
    "learning rate of the peak, no warmup": _setting("lr", 3e-3),
    "weight decay on all": _setting("weight_decay", 0.1, of="no_decay"),
    "no weight decay": _setting("weight_decay", 0.0, of="decay"),
    "weight decay times ten": _setting("weight_decay", 1.0, of="decay"),
    "optimizer built without decay": _built_with(weight_decay=0.0),
    "betas of torch": _built_with(betas=(0.9, 0.999)),
    "betas of no momentum": _setting("betas", (0.0, 0.95)),
    "betas while stepping": _setting("betas", (0.9, 0.999)),
    "epsilon": _setting("eps", 1e-2),
    "sgd in place of adamw": lambda: _updates(_sgd),
    "ascent": lambda: _updates(_ascent),
    "no update": lambda: _updates(_no_step),
    "two updates a step": lambda: _updates(_twice),
    "moments forgotten": lambda: _updates(_forgets_moments),
    "first moment forgotten": lambda: _updates(_no_momentum),
    "stale gradient": _stale,
    "matrix without gradient": _frozen(3),
    "matrix put back": _restored(3),
    "layer frozen": _detached_layer,
    "labels one too far": _loss_shift(2),
    "labels not shifted": _loss_shift(0),
    "labels shifted in the batch": _changed_batch(_shifted_labels),
    "padding is learned": _changed_batch(_labelled_padding),
    "half of the labels dropped": _changed_batch(_dropped_label),
    "ids reversed": _changed_batch(_reversed_ids),
    "one id wrong": _changed_batch(_corrupt_ids),
    "one row for all": _changed_batch(_one_row),
    "loss halved": _scaled_loss(0.5),
    "temperature in the loss": _softened_logits,
    "rows of another seed": _other_order(seed=1),
    "rows duplicated in a step": _changed_rows(lambda rows: [rows[0]] * len(rows)),
    "two rows swapped": _changed_rows(lambda rows: [*rows[-1:], *rows[1:-1], *rows[:1]]),
    "last row for the first": _changed_rows(lambda rows: [*rows[:-1], rows[0]]),
    "rows of a later step": _wrong_place,
    "same rows in every step": _same_place,
    "half of the rows twice": _few_rows,
    "micro batch dropped": _dropped_micro_batch,
}
