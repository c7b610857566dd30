"""Every architecture trains: both loss heads are transformers' loss, and recomputing blocks changes no gradient."""

from pathlib import Path

import pytest
import torch
from architecture_factory import TINY, VARIANTS
from rank_factory import rank_plan

from shardwise.trainer.runtime.loss import IGNORED, install_loss_head, shift
from shardwise.trainer.runtime.models.build import build_trainable
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead

_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_OTHERS = (
    "falcon 40b", "falcon rw", "phi with norms and groups", "stablelm with everything", "gemma3 with a capped head",
)  # fmt: skip
CONFIGS = {**TINY, **{name: VARIANTS[name] for name in _OTHERS}, "gpt2": {**TINY["gpt2"], **_NO_DROPOUT}}
CONFIGS["opt"] = {**TINY["opt"], "dropout": 0.0}
CONFIGS["gpt_bigcode"] = {**TINY["gpt_bigcode"], **_NO_DROPOUT}
EACH = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
IDS = torch.randint(0, 200, (2, 40), generator=torch.Generator().manual_seed(1))
LABELS = IDS.masked_fill(torch.arange(40) > 30, IGNORED)


def build(config: dict[str, object], loss: LossHead, checkpointing: Checkpointing = Checkpointing.NONE):
    attentions = read_model_shape(config).attentions
    model, installed = build_trainable(
        rank_plan(
            Path("nowhere"),
            model_config={**config, "initializer_range": 0.2},  # large enough for logits that a cap changes
            loss=loss,
            loss_chunk_tokens=17,
            checkpointing=checkpointing,
            attention=Attention.SDPA if Attention.SDPA in attentions else Attention.EAGER,
        )
    )
    noise = torch.Generator().manual_seed(2)
    for weight in model.parameters():
        if weight.ndim == 1:  # new biases are zero, and a bias left out would not show
            weight.data += 0.2 * torch.randn(weight.shape, generator=noise)
    return model, installed


def loss_and_gradients(model) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = model(input_ids=IDS, labels=LABELS)
    loss.backward()
    return loss.detach(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@EACH
def test_the_chunked_loss_is_the_eager_one_and_that_of_transformers(config):
    eager, installed = build(config, LossHead.EAGER)
    with torch.no_grad():
        theirs = installed.loss.own_forward(input_ids=IDS, labels=LABELS, use_cache=False).loss
    expected, expected_gradients = loss_and_gradients(eager)
    loss, gradients = loss_and_gradients(build(config, LossHead.CHUNKED)[0])
    torch.testing.assert_close(expected, theirs * (shift(LABELS) != IGNORED).sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        close = 1e-5 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-3, atol=close, msg=f"{name}: {{}}".format)


def test_a_loss_that_balances_experts_is_refused_rather_than_left_out():
    model, _ = build({**TINY["mixtral"]}, LossHead.EAGER)
    model.config.output_router_logits = True
    with pytest.raises(InputError, match="output_router_logits"):
        install_loss_head(model, LossHead.EAGER, chunk_tokens=None)
