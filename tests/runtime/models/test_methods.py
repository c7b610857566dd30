"""What each method makes of a model: what is trained, in which type, what is recomputed, and what the report says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from rank_factory import rank_plan
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.runtime.models.methods import method_facts, quantised_layers
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, Method, Precision

NUM_BASE = 106_816
LORA = LoraJob(rank=4, alpha=8.0)


def plan_of(method: Method, *, folder: Path | None = None, lora: LoraJob = LORA, **engine: Any) -> Plan:
    plan = rank_plan(Path("nowhere"), method=method, train={"lora": lora}, **engine)
    return replace(plan, model_path=None if folder is None else str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Weights that were not initialized with the plan's seed."""
    torch.manual_seed(123)
    config = AutoConfig.for_model(**{**TINY_LLAMA, "max_position_embeddings": 48})
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path_factory.mktemp("base"))
    return tmp_path_factory.getbasetemp() / "base0"


def adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_under_full_and_galore_every_weight_is_trained():
    for method in (Method.FULL, Method.GALORE):
        model = build_model(plan_of(method))
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert method_facts(model) == {"trained parameters": "106,816 of 106,816 (100 %)"}


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
def test_adapters_are_the_same_whatever_lies_beneath_them(method, folder):
    initialized, loaded = build_model(plan_of(method)), build_model(plan_of(method, folder=folder))
    ours, theirs = adapters(initialized), adapters(loaded)
    assert ours.keys() == theirs.keys() and len(ours) == 28
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    first, second = (next(model.get_input_embeddings().parameters()) for model in (initialized, loaded))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
@pytest.mark.parametrize(
    ("precision", "base", "trained"),
    [
        (Precision.FP32, torch.float32, torch.float32),
        (Precision.BF16_MIXED, torch.bfloat16, torch.float32),
        (Precision.FP16_MIXED, torch.float16, torch.float32),
        (Precision.BF16, torch.bfloat16, torch.bfloat16),
    ],
)
def test_embeddings_head_and_norms_stay_in_the_computing_type(method, precision, base, trained, folder):
    """What is called preparation for k-bit training elsewhere would make them fp32."""
    for path in (None, folder):
        model = build_model(plan_of(method, folder=path, precision=precision))
        packed = {id(layer.weight) for layer in quantised_layers(model)}
        frozen = [p for p in model.parameters() if not p.requires_grad and id(p) not in packed]
        assert {parameter.dtype for parameter in frozen} == {base}
        assert {parameter.dtype for parameter in adapters(model).values()} == {trained}
        assert model.model.rotary_emb.inv_freq.dtype == torch.float32
        assert model.get_output_embeddings().weight.dtype == base
        assert bool(packed) is (method is Method.QLORA)


def forwards_of_a_block(model: PreTrainedModel) -> int:
    """How often the first linear layer of a block runs in one forward and backward."""
    calls = []
    model.model.layers[0].self_attn.q_proj.base_layer.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.arange(32).reshape(2, 16)
    model(input_ids=ids, labels=ids).backward()
    return len(calls)


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
@pytest.mark.parametrize("dora", [False, True])
def test_checkpointing_stays_on_and_changes_no_gradient(method, dora):
    """A frozen embedding makes an input without gradient, for which reentrant checkpointing would skip the block."""
    gradients = []
    for checkpointing, expected in ((Checkpointing.NONE, 1), (Checkpointing.FULL, 2)):
        lora = LoraJob(rank=4, alpha=8.0, dora=dora, dropout=0.1)
        model = build_model(plan_of(method, lora=lora, checkpointing=checkpointing))
        torch.manual_seed(1)
        assert forwards_of_a_block(model) == expected
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert all(gradients[0][name] is not None for name in gradients[0])
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_the_report_says_what_is_trained_on_what():
    facts = method_facts(build_model(plan_of(Method.QLORA, precision=Precision.BF16_MIXED)))
    assert facts == {
        "trained parameters": f"8,192 of {NUM_BASE + 8192:,} (7.12 %)",
        "adapters": "float32, on 14 layers",
        "base": "bfloat16",
        "4-bit layers": "14 of nf4, scales quantised too, stored as uint8, computed in bfloat16",
    }
    assert "4-bit layers" not in method_facts(build_model(plan_of(Method.LORA)))


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
def test_a_model_with_adapters_still_generates(method):
    model: Any = build_model(plan_of(method))
    model.eval()
    ids = torch.arange(8).reshape(1, 8)
    generated = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False, pad_token_id=0
    )
    assert generated.shape == (1, 12)
    logits = model(input_ids=ids).logits
    assert int(generated[0, 8]) == int(logits[0, -1].argmax())


def test_one_of_noise_and_adapters_does_not_hide_the_other():
    plan = plan_of(Method.LORA)
    job = replace(plan.job, train=replace(plan.job.train, neftune_alpha=3.0))
    facts = method_facts(build_model(replace(plan, job=job)))
    assert facts["embedding noise"] == "NEFTune, alpha 3, added in 0 forwards"
    assert facts["adapters"] == "float32, on 14 layers"
