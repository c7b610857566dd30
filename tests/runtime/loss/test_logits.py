"""The rule of a model's logits follows from its own forward; without one the loss is made from its own logits."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from architecture_factory import TINY
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from zoo import NUM_IDS, config_of, model_of

from shardwise.trainer.runtime.loss import IGNORED, LogitsRule, LossOutput, install_loss_head, logits_rule, shift
from shardwise.trainer.simulation.documents import RowFindings, measure_rows
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.strategy import LossHead

IDS = torch.randint(3, NUM_IDS, (3, 20), generator=torch.Generator().manual_seed(1))
LABELS = IDS.clone()
LABELS[0, :5], LABELS[1, 9:], LABELS[2] = IGNORED, IGNORED, IGNORED


def with_fields(name: str, **fields: Any) -> PreTrainedModel:
    config = type(config_of(name)).from_dict({**config_of(name).to_dict(), **fields})
    return model_of(name, config=config)


RULES: dict[str, tuple[dict[str, Any], LogitsRule | None]] = {
    "granite": ({"logits_scaling": 6.0}, LogitsRule(1 / 6, None)),
    "falcon_h1": ({"lm_head_multiplier": 0.25}, LogitsRule(0.25, None)),
    "hyperclovax": ({"logits_scaling": 3.0}, LogitsRule(3.0, None)),
    "minicpm3": ({"dim_model_base": 16}, LogitsRule(0.25, None)),  # of its 64; divided before the head
    "gemma2": ({}, LogitsRule(1.0, 30.0)),
    "recurrent_gemma": ({"logits_soft_cap": 5.0}, LogitsRule(1.0, 5.0)),
    "mpt": ({"logit_scale": 7.0}, LogitsRule(1.0, None)),  # a field that nothing reads
    "gptj": ({}, LogitsRule(1.0, None)),  # its head has a bias
    "bert": ({}, None),
    "modernbert-decoder": ({}, None),
}


@pytest.mark.parametrize("name", RULES)
def test_the_rule_of_logits_is_that_of_the_model_and_every_head_follows_it(name):
    fields, rule = RULES[name]
    model = with_fields(name, **fields)
    found = logits_rule(model)
    assert (found is None) == (rule is None)
    if found is not None and rule is not None:
        assert found.scale == pytest.approx(rule.scale, rel=1e-6) and found.softcap == pytest.approx(rule.softcap)
    check_heads(partial(with_fields, name, **fields), has_rule=rule is not None)


@pytest.mark.parametrize("name", sorted(TINY.keys() - RULES.keys()))
def test_every_head_of_a_type_has_the_loss_and_the_gradients_of_its_logits(name):
    check_heads(partial(model_of, name), has_rule=True)


def check_heads(make: Callable[[], PreTrainedModel], *, has_rule: bool) -> None:
    """Loss and gradients are those of cross-entropy of the logits that the model has without a head of ours."""
    plain = make()
    expected = plain(input_ids=IDS, use_cache=False).logits
    total = token_losses(expected).sum()
    total.backward()
    gradients = {name: weight.grad for name, weight in plain.named_parameters() if weight.grad is not None}
    for head in (LossHead.EAGER, LossHead.CHUNKED, LossHead.FUSED)[: 3 if has_rule else 1]:
        model = make()
        install_loss_head(model, head, chunk_tokens=7)
        torch.testing.assert_close(outputs(model, LossOutput.LOGITS), expected, rtol=1e-5, atol=1e-5)
        loss = outputs(model, LossOutput.SUM)
        torch.testing.assert_close(loss, total, rtol=1e-5, atol=0)
        loss.backward()
        for name, gradient in gradients.items():
            close = 1e-5 * max(1.0, float(gradient.abs().max()))
            found = model.get_parameter(name).grad
            torch.testing.assert_close(found, gradient, rtol=1e-3, atol=close, msg=f"{head}, {name}: {{}}".format)


def outputs(model: PreTrainedModel, output: LossOutput) -> Tensor:
    found = model(input_ids=IDS, labels=LABELS, output=output)
    assert isinstance(found, Tensor)
    return found


def token_losses(logits: Tensor) -> Tensor:
    targets = shift(LABELS)
    losses = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return losses.masked_fill(targets == IGNORED, 0.0)


def test_every_output_and_its_gradient_follow_from_logits_of_the_models_own():
    model = model_of("bert")
    expected = model(input_ids=IDS, use_cache=False).logits
    losses, targets = token_losses(expected), shift(LABELS)
    weights = torch.tensor([0.5, -2.0, 3.0])
    (losses.sum(-1) * weights).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad()
    install_loss_head(model, LossHead.EAGER, chunk_tokens=None)
    rows = outputs(model, LossOutput.ROWS)
    (rows * weights).sum().neg().backward()
    torch.testing.assert_close(rows, -losses.sum(-1).double(), rtol=1e-6, atol=1e-12)
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(outputs(model, LossOutput.TOKENS), losses.double(), rtol=1e-5, atol=1e-6)
    num_likely = int(((expected.argmax(-1) == targets) & (targets != IGNORED)).sum())
    score = outputs(model, LossOutput.SCORE)
    assert float(score[0]) == pytest.approx(float(losses.detach().sum()), rel=1e-6) and int(score[1]) == num_likely


def llama() -> LlamaConfig:
    config = config_of("llama")
    assert isinstance(config, LlamaConfig)
    return config


def test_a_weight_that_is_zero_at_first_does_not_look_like_a_plain_head():
    class Shifted(LlamaForCausalLM):
        def forward(self, *args: Any, **named: Any) -> Any:
            output = super().forward(*args, **named)
            output.logits = output.logits + self.shift
            return output

    model = Shifted(llama())
    model.shift = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
    assert logits_rule(model) is None


class WithPenalty(LlamaForCausalLM):
    """A model with a further part of its loss, in training alone."""

    def forward(self, *args: Any, **named: Any) -> Any:
        output = super().forward(*args, output_hidden_states=True, **named)
        if output.loss is not None and self.training:
            output.loss = output.loss + 1e-3 * output.hidden_states[-2].square().mean()
        return output


def test_a_further_part_of_a_models_own_loss_is_found():
    config = llama()
    with torch.device("meta"):
        plain, penalised = LlamaForCausalLM(config), WithPenalty(config)
    assert measure_rows(plain) == RowFindings()
    assert measure_rows(penalised).loss_fault == "its own loss is more than the cross-entropy of its logits"


@pytest.mark.parametrize(
    ("name", "fields", "fact"),
    [
        (
            "bert",
            {"is_decoder": False},
            "a token sees those after it; a decoder has is_decoder=true in its config.json",
        ),
        ("xlnet", {"attn_type": "bi"}, 'a token sees those after it; a decoder has attn_type="uni" in its config.json'),
        (
            "big_bird",
            {"attention_type": "block_sparse", "block_size": 64, "num_random_blocks": 3},
            "a token sees those after it; a decoder has attention_type=",
        ),
        ("cpmant", {}, "a token sees those after it"),
        ("prophetnet", {}, "its own loss is more than the cross-entropy of its logits"),
        ("reformer", {}, "a row of 96 tokens cannot be trained ("),
    ],
)
def test_a_model_that_is_not_trained_has_a_reason_and_the_remedy_of_its_config(name, fields, fact):
    config = CONFIG_MAPPING[config_of(name).model_type].from_dict({**config_of(name).to_dict(), **fields})
    fault = measure_rows(on_meta(config)).loss_fault
    assert fault is not None and fault.startswith(fact)
    if fields:
        assert measure_rows(on_meta(config_of(name))).loss_fault is None


@pytest.mark.parametrize("sizes", [(2, 128, 1), (1, 4, 16), (4, 16, 16)])
def test_a_small_model_with_mamba_heads_of_any_size_is_measured(sizes):
    sizes = dict(zip(("mamba_expand", "mamba_n_heads", "mamba_d_head"), sizes, strict=True))
    layers = {"layer_types": ["full_attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 64}
    config = type(config_of("granitemoehybrid")).from_dict(
        {**config_of("granitemoehybrid").to_dict(), **sizes, **layers, "hidden_size": 64}
    )
    assert measure_rows(on_meta(config)) == RowFindings()


def on_meta(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert isinstance(model, PreTrainedModel)
    return model


def test_a_loss_that_balances_experts_is_refused_rather_than_left_out():
    model = with_fields("mixtral", output_router_logits=True)
    with pytest.raises(InputError, match="output_router_logits"):
        install_loss_head(model, LossHead.EAGER, chunk_tokens=None)


def test_a_head_that_multiplies_hidden_states_is_refused_for_logits_of_the_models_own():
    with pytest.raises(
        InputError, match=r"^pin\.loss: BertLMHeadModel computes logits of its own; use pin\.loss=eager$"
    ):
        install_loss_head(model_of("bert"), LossHead.CHUNKED, chunk_tokens=None)
