"""Silent faults of a training: each makes a run learn something else than its plan says, without an error.

A fault is a context: while it is open, a library or a part of the product does the wrong thing. Names say what.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import AdamW, Optimizer
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from shardwise.trainer.runtime import loss
from shardwise.trainer.runtime.data import batches
from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.data.cache import TokenRows
from shardwise.trainer.runtime.loop import course, step
from shardwise.trainer.spec.data.order import DataOrder

Fault = Callable[[], AbstractContextManager[object]]


def _instead(owner: Any, name: str, make: Callable[[Any], Any]) -> Fault:
    """The function `name` of a module or class is `make(function)`."""
    return lambda: patch.object(owner, name, make(getattr(owner, name)))


def _update(change: Callable[[Optimizer, Callable[[], object]], object]) -> Fault:
    """A step of AdamW is `change(optimizer, update)`, where `update` takes its own step."""
    return _instead(AdamW, "step", lambda own: lambda self, *_, **__: change(self, lambda: own(self)) and None)


def _prepared(prepare: Callable[[Optimizer], object]) -> Fault:
    """`prepare` is applied to the optimizer before each update."""
    return _update(lambda optimizer, update: (prepare(optimizer), update()))


def _setting(name: str, value: Callable[[Any], Any], *, of: str | None = None) -> Fault:
    """One setting of the groups is `value(setting)` while a step is taken, and afterwards what it was."""

    def change(optimizer: Optimizer, update: Callable[[], object]) -> None:
        groups = [group for group in optimizer.param_groups if of in (None, group["name"])]
        before = [group[name] for group in groups]
        for group in groups:
            group[name] = value(group[name])
        update()
        for group, own in zip(groups, before, strict=True):
            group[name] = own

    return _update(change)


def _built_with(**settings: Any) -> Fault:
    """The optimizer is built with other settings than the plan's."""

    def make(own: Any) -> Any:
        def init(self: Any, params: Any, **given: Any) -> None:
            for group in params:
                group.update({name: value for name, value in settings.items() if name in group})
            own(self, params, **{**given, **{name: value for name, value in settings.items() if name in given}})

        return init

    return _instead(AdamW, "__init__", make)


def _parameters(optimizer: Optimizer) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _moved(move: Callable[[Any, Tensor, float], Tensor], *, of: slice = slice(None)) -> Fault:
    """Weights with a gradient are `move(weight, weight before, learning rate)` after each update."""

    def change(optimizer: Optimizer, update: Callable[[], object]) -> None:
        weights = [each for each in _parameters(optimizer)[of] if each.grad is not None]
        before = [each.detach().clone() for each in weights]
        update()
        with torch.no_grad():
            for each, old in zip(weights, before, strict=True):
                each.copy_(move(each, old, optimizer.param_groups[0]["lr"]))

    return _update(change)


def _stale() -> AbstractContextManager[object]:
    """Every step takes the gradient of the first one."""
    first: list[Tensor | None] = []

    def prepare(optimizer: Optimizer) -> None:
        weights = _parameters(optimizer)
        first.extend(None if each.grad is None else each.grad.clone() for each in weights[len(first) :])
        for each, gradient in zip(weights, first, strict=True):
            each.grad = None if gradient is None else gradient.clone()

    return _prepared(prepare)()


def _without_gradient(optimizer: Optimizer) -> None:
    """The weights of one expert of each layer get no gradient."""
    for each in _parameters(optimizer):
        if each.ndim == 3 and each.grad is not None:
            each.grad[1] = 0


def _detached_layer(build: Any) -> Any:
    """The weights of one layer are frozen after the engine was verified."""

    def changed(*args: Any) -> Any:
        built = build(*args)
        for name, parameter in built.model.named_parameters():
            if ".layers.0." in name:
                parameter.requires_grad_(False)
        return built

    return changed


def _loss_shift(by: int) -> Fault:
    return _instead(loss, "shift", lambda _: lambda labels: pad(labels[:, by:], (0, by), value=-100))


def _batch(change: Callable[[MicroBatch], dict[str, Any]]) -> Fault:
    """Fields of the micro batches of training are what `change` returns."""

    def changed(batch: MicroBatch) -> MicroBatch:
        return batch._replace(**change(batch))

    return _instead(batches, "_micro_batch", lambda own: lambda rows, examples: changed(own(rows, examples)))


def _rows(change: Callable[[list[int]], list[int]]) -> Fault:
    """The rows of a step are `change(rows)`."""

    def changed(order: Any) -> Any:
        return SimpleNamespace(rows_of_step=lambda at: change(order.rows_of_step(at)))

    return _instead(TokenRows, "order", lambda own: lambda self, **given: changed(own(self, **given)))


def _dropped_label(batch: MicroBatch) -> dict[str, Any]:
    labels = batch.labels.clone()
    labels[:, 1::2] = -100
    return {"labels": labels}


def _corrupt_ids(batch: MicroBatch) -> dict[str, Any]:
    ids = batch.input_ids.clone()
    ids[0, 0] = (ids[0, 0] + 1) % 97
    return {"input_ids": ids}


def _one_row(batch: MicroBatch) -> dict[str, Any]:
    """Every row of a micro batch is its first."""
    pairs = (("input_ids", batch.input_ids), ("labels", batch.labels))
    return {name: each[:1].expand_as(each).clone() for name, each in pairs}


def _dropped_micro_batch(own: Any) -> Any:
    """The first micro batch of a step is learned twice, and the last one never."""

    def changed(*args: Any, **named: Any) -> Any:
        found, terms = own(*args, **named)
        return [*found[:-1], found[0]], terms

    return changed


def _never_chosen(own: Any) -> Any:
    """The router sends no token to one expert of each layer."""

    def forward(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = own(self, hidden)[0]
        others = logits.index_fill(1, torch.tensor([1]), -torch.inf)
        scores, chosen = torch.topk(others.softmax(dim=-1), self.top_k, dim=-1)
        return logits, scores / scores.sum(dim=-1, keepdim=True), chosen

    return forward


OF_EXPERTS: dict[str, Fault] = {  # of a mixture
    "dead expert": _instead(MixtralTopKRouter, "forward", _never_chosen),
    "expert without gradient": _prepared(_without_gradient),
}
FAULTS: dict[str, Fault] = {
    "learning rate times ten": _setting("lr", lambda rate: rate * 10),
    "learning rate divided by ten": _setting("lr", lambda rate: rate * 0.1),
    "learning rate times 1.5": _setting("lr", lambda rate: rate * 1.5),
    "learning rate of the peak, no warmup": _setting("lr", lambda _: 3e-3),
    "weight decay on all": _setting("weight_decay", lambda _: 0.1, of="no_decay"),
    "no weight decay": _setting("weight_decay", lambda _: 0.0, of="decay"),
    "weight decay times ten": _setting("weight_decay", lambda _: 1.0, of="decay"),
    "optimizer built without decay": _built_with(weight_decay=0.0),
    "betas of torch": _built_with(betas=(0.9, 0.999)),
    "betas of no momentum": _setting("betas", lambda _: (0.0, 0.95)),
    "betas while stepping": _setting("betas", lambda _: (0.9, 0.999)),
    "epsilon": _setting("eps", lambda _: 1e-2),
    "sgd in place of adamw": _moved(lambda weight, before, rate: before - rate * weight.grad),
    "ascent": _moved(lambda weight, before, _: 2 * before - weight),
    "no update": _update(lambda optimizer, update: None),
    "two updates a step": _update(lambda optimizer, update: (update(), update())),
    "moments forgotten": _prepared(lambda optimizer: optimizer.state.clear()),
    "first moment forgotten": _prepared(
        lambda optimizer: [state["exp_avg"].zero_() for state in optimizer.state.values()]
    ),
    "stale gradient": _stale,
    "matrix without gradient": _prepared(lambda optimizer: setattr(_parameters(optimizer)[3], "grad", None)),
    "matrix put back": _moved(lambda _, before, __: before, of=slice(3, 4)),
    "layer frozen": _instead(course, "build_session", _detached_layer),
    "labels one too far": _loss_shift(2),
    "labels not shifted": _loss_shift(0),
    "labels shifted in the batch": _batch(lambda batch: {"labels": batch.labels.roll(1, dims=1)}),
    "padding is learned": _batch(
        lambda batch: {"labels": torch.where(batch.labels == -100, batch.input_ids, batch.labels)}
    ),
    "half of the labels dropped": _batch(_dropped_label),
    "ids reversed": _batch(lambda batch: {"input_ids": batch.input_ids.flip(1)}),
    "one id wrong": _batch(_corrupt_ids),
    "one row for all": _batch(_one_row),
    "loss halved": _instead(step, "forward", lambda own: lambda *args, **named: own(*args, **named) * 0.5),
    "temperature in the loss": _instead(loss.Head, "logits", lambda own: lambda self, hidden: own(self, hidden) / 1.1),
    "rows of another seed": _instead(
        TokenRows, "order", lambda own: lambda self, **given: own(self, **{**given, "seed": 1})
    ),
    "rows duplicated in a step": _rows(lambda rows: [rows[0]] * len(rows)),
    "two rows swapped": _rows(lambda rows: [*rows[-1:], *rows[1:-1], *rows[:1]]),
    "last row for the first": _rows(lambda rows: [*rows[:-1], rows[0]]),
    "rows of a later step": _instead(course, "_place_of_rows", lambda own: lambda of, at: own(of, at) + 3),
    "same rows in every step": _instead(course, "_place_of_rows", lambda _: lambda of, at: 0),
    "half of the rows twice": _instead(
        DataOrder, "_row", lambda own: lambda self, epoch, position: own(self, epoch, position) // 2
    ),
    "micro batch dropped": _instead(course, "step_micro_batches", _dropped_micro_batch),
}
