"""Adapters without a gradient are named after the first steps; the loss that balances experts is transformers' own."""

from typing import Any

import pytest
import torch
import zoo
from msgspec.structs import replace
from planning_factory import data_of, job_of, shape_of
from torch import Tensor, nn

from shardwise.trainer.planning.planner import check_job
from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.loop.adapter_check import Adapter, adapters_of, have_learned, without_gradient
from shardwise.trainer.runtime.loop.step import BalancedTokenLoss
from shardwise.trainer.runtime.loss import IGNORED, install_loss_head
from shardwise.trainer.runtime.models.methods import add_adapters, trained_parameters
from shardwise.trainer.runtime.models.router_loss import RouterLoss
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import DataFormat, LoraJob
from shardwise.trainer.spec.strategy import LossHead, Precision

CPU = torch.device("cpu")


def trained(model: Any, *, num_steps: int = 2) -> nn.Module:
    optimizer = torch.optim.AdamW(trained_parameters(model), lr=1e-3, weight_decay=0.1)
    ids = torch.randint(3, 200, (1, 32), generator=torch.Generator().manual_seed(0))
    for _ in range(num_steps):
        model(input_ids=ids, use_cache=False).logits.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def test_experts_without_a_token_are_named_by_layer_and_number():
    model = zoo.model_of("qwen3_moe", noise=0.0)
    add_adapters(model, LoraJob(rank=2), Precision.FP32)
    for layer, idle in ((0, (1,)), (1, (0, 2))):
        gate: Any = model.get_submodule(f"model.layers.{layer}.mlp.gate")
        with torch.no_grad():  # equal scores: the first in order is chosen
            gate.weight.zero_()
        gate.forward = _without(gate, idle)
    adapters = adapters_of(trained(model))
    flags = have_learned(model, adapters, CPU)
    (line,) = without_gradient(adapters, flags, num_steps=2)
    assert line == (
        "no token in 2 steps, so no gradient for the adapters of layer 0: experts 1, 3 of 4; layer 1: experts 0, 2 of 4"
    )


def _without(gate: Any, idle: tuple[int, ...]):
    """The router's forward with tokens for the other experts alone."""
    others = [expert for expert in range(4) if expert not in idle][:2]

    def forward(hidden: torch.Tensor):
        tokens = hidden.reshape(-1, hidden.shape[-1])
        logits = nn.functional.linear(tokens, gate.weight)
        chosen = torch.tensor(others).expand(len(tokens), 2)
        return logits, torch.full((len(tokens), 2), 0.5), chosen

    return forward


def test_a_layer_whose_adapter_is_never_called_is_named():
    model = zoo.model_of("llama")
    add_adapters(model, LoraJob(rank=2), Precision.FP32)
    layer: Any = model.get_submodule("model.layers.1.self_attn.o_proj")
    layer.forward = layer.base_layer.forward
    adapters = adapters_of(trained(model))
    (line,) = without_gradient(adapters, have_learned(model, adapters, CPU), num_steps=1)
    assert line == "no gradient in 1 step for the adapters of model.layers.1.self_attn.o_proj: they do not learn"


@pytest.mark.parametrize("num_layers", [8, 11])
def test_no_more_than_eight_layers_are_listed(num_layers):
    weight = nn.Parameter(torch.zeros(()))
    paths = [f"m.layers.{layer}.mlp.experts.{expert}.up" for layer in range(num_layers) for expert in range(3)]
    adapters = [Adapter(path, 1, weight) for path in paths]
    lines = without_gradient(adapters, [False, True, True] * num_layers, num_steps=5)
    assert lines[0].count("layer ") == 8
    assert lines[0].endswith("; and 3 more layers") is (num_layers == 11)


COEFFICIENT = 0.05
IDS = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def padded() -> MicroBatch:
    """Two rows of 24 and of 15 tokens; the second row is padded."""
    labels = IDS.clone()
    labels[1, 15:] = IGNORED
    labels[:, 0] = IGNORED
    return MicroBatch(IDS, labels, int((labels != IGNORED).sum()), num_tokens=39, row_lengths=(24, 15))


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "granitemoehybrid"])
def test_a_padded_micro_batch_has_the_loss_and_the_gradients_of_transformers(model_type):
    model: Any = zoo.model_of(model_type)
    batch = padded()
    mask = torch.ones_like(IDS)
    mask[1, 15:] = 0
    model.router_aux_loss_coef = COEFFICIENT
    theirs = model(input_ids=IDS, attention_mask=mask, labels=batch.labels, output_router_logits=True, use_cache=False)
    (theirs.loss * batch.num_targets).backward()
    expected = gradients(model)
    install_loss_head(model, LossHead.CHUNKED, chunk_tokens=16)
    objective = BalancedTokenLoss(RouterLoss(model), COEFFICIENT)
    terms = objective(model, batch, CPU)
    assert terms.added is not None
    (terms.loss + terms.added).backward()
    assert torch.allclose(terms.figures[0] / batch.num_targets, theirs.aux_loss.detach(), rtol=1e-5)
    assert torch.allclose((terms.loss + terms.added) / batch.num_targets, theirs.loss, rtol=1e-5)
    ours = gradients(model)
    assert ours.keys() == expected.keys()
    worst = max(float((ours[name] - expected[name]).norm() / (expected[name].norm() + 1e-6)) for name in ours)
    assert worst < 1e-3


def test_a_packed_row_counts_each_token_once_as_if_its_documents_stood_alone():
    model: Any = zoo.model_of("qwen3_moe")
    install_loss_head(model, LossHead.CHUNKED, chunk_tokens=16)
    routers = RouterLoss(model)
    positions = torch.cat([torch.arange(9), torch.arange(15)]).repeat(2, 1)
    routers.begin()
    model(input_ids=IDS, labels=IDS, position_ids=positions, document_bounds=(0, 9, 24, 33, 48))
    together = routers.end(None)
    logits: list[list[Tensor]] = []
    for document in (IDS[:1, :9], IDS[:1, 9:], IDS[1:, :9], IDS[1:, 9:]):
        routers.begin()
        model(input_ids=document, labels=document)
        logits.append(list(routers._logits or ()))
        routers.end(None)
    routers.begin()
    assert routers._logits is not None
    routers._logits += [torch.cat(layer) for layer in zip(*logits, strict=True)]
    assert torch.allclose(together, routers.end(None), rtol=1e-5)


def test_a_plan_refuses_the_setting_where_nothing_can_be_added():
    job = job_of()
    job = replace(job, train=replace(job.train, router_aux_loss=0.01))
    shape = replace(shape_of("tiny"), max_positions=None)
    with pytest.raises(InputError, match="llama has no experts; remove it"):
        check_job(job, shape, data_of(), ())
    with pytest.raises(InputError, match="balance their experts by a bias"):
        check_job(job, replace(shape, num_experts=8), data_of(), ())
    balanced = replace(shape, num_experts=8, has_router_loss=True)
    check_job(job, balanced, data_of(), ())
    with pytest.raises(InputError, match="dpo exclude each other"):
        check_job(job, balanced, data_of(format=DataFormat.PREFERENCE), ())


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_a_model_without_such_a_loss_is_refused(model_type):
    with pytest.raises(InputError, match=f"transformers has no such loss for {model_type}"):
        RouterLoss(zoo.model_of(model_type))
