"""Updates inside the backward pass: the same numbers, no two gradients alive, LOMO and AdaLomo as published."""

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from optimizer_factory import assert_same_weights, random_loss, tiny_llama, train_steps
from report_factory import make_candidate
from torch import nn
from transformers.optimization import Adafactor

from shardwise.trainer.runtime.memory.recomputation import apply_checkpointing
from shardwise.trainer.runtime.optimizers import (
    build_optimizer,
    check_in_backward,
    optimizer_facts,
    parameter_groups,
    set_learning_rate,
    updates_in_backward,
)
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Checkpointing, Method, Precision

INSIDE = (Optimizer.LOMO, Optimizer.ADALOMO)
ANY_TIME = [kind for kind in Optimizer if kind not in (*INSIDE, Optimizer.DEEPSPEED_CPU_ADAM)]


@pytest.mark.parametrize("kind", ANY_TIME)
def test_the_weights_are_those_of_an_update_after_the_backward_pass(kind):
    """Under recomputation, and with a table that is used at both ends of the model."""
    after, inside = (tiny_llama(tie_word_embeddings=True) for _ in range(2))
    for llama in (after, inside):
        apply_checkpointing(llama.train(), Checkpointing.FULL)
    plain = build_optimizer(kind, after, lr=1e-3, weight_decay=0.1)
    hooked = build_optimizer(kind, inside, lr=1e-3, weight_decay=0.1, in_backward=True)
    assert (updates_in_backward(plain), updates_in_backward(hooked)) == (False, True)
    train_steps(after, plain, range(3), lr=1e-3)
    train_steps(inside, hooked, range(3), lr=1e-3)
    assert_same_weights(inside, after)


@pytest.mark.parametrize("kind", [*INSIDE, Optimizer.ADAMW, Optimizer.ADAMW_8BIT])
def test_no_two_gradients_are_ever_alive(kind):
    llama, alive = tiny_llama(), []

    def count(_: torch.Tensor) -> None:
        alive.append(sum(parameter.grad is not None for parameter in llama.parameters()))

    for parameter in llama.parameters():
        parameter.register_post_accumulate_grad_hook(count)  # before ours, so that it sees what ours is given
    build_optimizer(kind, llama, lr=1e-3, weight_decay=0.1, in_backward=True)
    random_loss(llama, step=0).backward()
    assert alive == [1] * 21


@pytest.mark.parametrize("kind", INSIDE)
def test_lomo_updates_inside_backward_without_being_asked(kind):
    llama = tiny_llama()
    built = build_optimizer(kind, llama, lr=1e-3, weight_decay=0.1)
    assert updates_in_backward(built)
    train_steps(llama, built, range(2), lr=1e-3)
    assert all(parameter.grad is None for parameter in llama.parameters())
    facts = optimizer_facts(built)
    assert facts["updates"].startswith("inside the backward pass, by hooks on 21 parameters, 42 so far")
    assert (facts["optimizer_state"] == "none") == (kind is Optimizer.LOMO)


def test_lomo_is_sgd_and_adalomo_is_adafactor_inside_the_backward_pass():
    """AdaLomo's paper has a factored second moment, a bounded update, a step relative to the weight."""
    sgd, factored, lomo, adalomo = (tiny_llama() for _ in range(4))
    groups = parameter_groups(factored, weight_decay=0.1)
    for llama, optimizer, lr in (
        (sgd, torch.optim.SGD(sgd.parameters(), lr=0.1), 0.1),
        (lomo, build_optimizer(Optimizer.LOMO, lomo, lr=0.1, weight_decay=0.0), 0.1),
        (factored, Adafactor(groups, lr=1e-2, scale_parameter=True, relative_step=False), 1e-2),
        (adalomo, build_optimizer(Optimizer.ADALOMO, adalomo, lr=1e-2, weight_decay=0.1), 1e-2),
    ):
        train_steps(llama, optimizer, range(5), lr=lr)
    assert_same_weights(lomo, sgd)
    assert_same_weights(adalomo, factored, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", INSIDE)
def test_weights_in_16_bit_are_rounded_once(kind):
    exact = nn.ParameterList([nn.Parameter(torch.linspace(-1, 2, 24).reshape(4, 6).bfloat16().float())])
    rounded = nn.ParameterList([nn.Parameter(exact[0].detach().bfloat16())])
    for each in (exact, rounded):
        built = build_optimizer(kind, each, lr=1e-2, weight_decay=0.5)
        each[0].grad = torch.ones_like(each[0])
        built.step()
    assert rounded[0].dtype is torch.bfloat16
    assert torch.equal(rounded[0], exact[0].bfloat16())


def test_parameters_that_an_engine_puts_in_get_hooks_before_the_next_step():
    old, new = nn.Linear(4, 4), nn.Linear(4, 4)
    built = build_optimizer(Optimizer.SGD, old, lr=0.1, weight_decay=0.0, in_backward=True)
    for group in built.param_groups:  # as Accelerate does for FSDP2
        group["params"] = [p for p in new.parameters() if (p.ndim >= 2) == (group["name"] == "decay")]
    set_learning_rate(built, 0.1)
    before = new.weight.detach().clone()
    new(torch.ones(1, 4)).sum().backward()
    assert torch.allclose(new.weight, before - 0.1) and new.weight.grad is None
    old(torch.ones(1, 4)).sum().backward()
    assert old.weight.grad is not None, "the hooks of parameters that are gone are gone too"


def candidate(*, accumulation: int = 1, method: Method = Method.FULL, in_backward: bool = False, **strategy: Any):
    made = make_candidate(accumulation=accumulation, method=method, optimizer_in_backward=in_backward)
    return replace(made, strategy=replace(made.strategy, **strategy))


def test_what_cannot_run_inside_backward_is_refused_in_words():
    check_in_backward(candidate(accumulation=4))
    check_in_backward(candidate(optimizer=Optimizer.LOMO))
    check_in_backward(candidate(in_backward=True, sharding=Sharding.FSDP))
    with pytest.raises(InputError, match=r"lomo does not accumulate gradients over 4 micro batches.*micro_batch: 16"):
        check_in_backward(candidate(optimizer=Optimizer.LOMO, accumulation=4))
    with pytest.raises(InputError, match=r"pin.optimizer_in_backward uses gradients before ddp"):
        check_in_backward(candidate(in_backward=True, sharding=Sharding.DDP))
    with pytest.raises(InputError, match=r"optimizer adalomo uses gradients before zero2"):
        check_in_backward(candidate(optimizer=Optimizer.ADALOMO, sharding=Sharding.ZERO2))
    with pytest.raises(InputError, match=r"layerwise .* before fp16's loss scale"):
        check_in_backward(candidate(method=Method.GALORE, precision=Precision.FP16_MIXED), is_layerwise=True)
    with pytest.raises(InputError, match="not inside it"):
        build_optimizer(Optimizer.DEEPSPEED_CPU_ADAM, nn.Linear(2, 2), lr=1.0, weight_decay=0.0, in_backward=True)
