"""After the first steps a run names the layers and experts whose adapters have had no gradient."""

from typing import Any

import pytest
import torch
import zoo
from torch import nn

from shardwise.trainer.runtime.loop.adapter_check import Adapter, adapters_of, have_learned, without_gradient
from shardwise.trainer.runtime.models.methods import add_adapters, trained_parameters
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.strategy import Precision

CPU = torch.device("cpu")


def trained(model: Any, *, num_steps: int = 2) -> nn.Module:
    """The model after some steps on a few tokens."""
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


def test_a_model_that_learns_everywhere_has_no_line():
    model = zoo.model_of("mixtral")
    add_adapters(model, LoraJob(rank=2), Precision.FP32)
    adapters = adapters_of(trained(model, num_steps=1))
    flags = have_learned(model, adapters, CPU)
    assert all(flags) and len(flags) > len(adapters)
    assert without_gradient(adapters, flags, num_steps=5) == []
