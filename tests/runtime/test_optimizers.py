"""Groups, classes and unwrapping of the optimizers."""

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn

from trainer.runtime.optimizers import BETAS, build_optimizer, parameter_groups, set_learning_rate, unwrapped
from trainer.spec.errors import InputError
from trainer.spec.strategy import Optimizer


def model() -> nn.Module:
    built = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.LayerNorm(4))
    built[0].weight.requires_grad_(False)
    return built


def test_matrices_decay_and_everything_else_does_not():
    decay, no_decay = parameter_groups(model(), weight_decay=0.1)
    assert (decay["name"], decay["weight_decay"], [p.shape for p in decay["params"]]) == ("decay", 0.1, [(4, 4)])
    assert (no_decay["name"], no_decay["weight_decay"]) == ("no_decay", 0.0)
    assert [tuple(p.shape) for p in no_decay["params"]] == [(4,), (4,), (4,)]


@pytest.mark.parametrize(
    ("optimizer", "kind", "settings"),
    [
        (Optimizer.ADAMW, torch.optim.AdamW, {"foreach": True, "fused": None, "betas": BETAS}),
        (Optimizer.ADAMW_FUSED, torch.optim.AdamW, {"fused": True, "betas": BETAS}),
        (Optimizer.SGD, torch.optim.SGD, {"momentum": 0}),
    ],
)
def test_each_name_is_its_implementation(optimizer, kind, settings):
    built = build_optimizer(optimizer, model(), lr=0.5, weight_decay=0.1)
    assert type(built) is kind
    assert {name: built.defaults[name] for name in settings} == settings
    assert len(built.param_groups) == 2


def test_an_optimizer_that_is_not_there_says_when_it_comes():
    with pytest.raises(InputError, match=r"adamw_8bit comes with shardwise 0\.3; there are adamw, adamw_fused"):
        build_optimizer(Optimizer.ADAMW_8BIT, model(), lr=1.0, weight_decay=0.0)


def test_the_learning_rate_reaches_every_group():
    built = build_optimizer(Optimizer.ADAMW, model(), lr=0.5, weight_decay=0.1)
    set_learning_rate(built, 0.25)
    assert [group["lr"] for group in built.param_groups] == [0.25, 0.25]


def test_wrappers_are_looked_through():
    class ZeroOptimizer:
        def __init__(self, inner):
            self.optimizer = inner

    built = build_optimizer(Optimizer.SGD, model(), lr=0.5, weight_decay=0.1)
    assert unwrapped(built) is built
    assert unwrapped(ZeroOptimizer(ZeroOptimizer(built))) is built
    assert issubclass(AcceleratedOptimizer, torch.optim.Optimizer), "why the class alone does not tell"
