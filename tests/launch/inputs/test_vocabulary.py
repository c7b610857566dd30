"""Tokens that are new to a model need a method that trains its embeddings."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from planning_factory import job_of, plan_of
from safetensors import safe_open

from launch.inputs.model_files import ModelFiles, kept_plan_with_new_rows, refuse_frozen_rows
from trainer.spec.errors import InputError
from trainer.spec.plan import Plan
from trainer.spec.strategy import Method


def files(new_rows: int) -> ModelFiles:
    return ModelFiles(
        config={}, config_origin="config.json", model_path="model", tokenizer_path="model", new_rows=new_rows
    )


def plan(method: Method) -> Plan:
    return plan_of("tiny", "1xRTX-4090", job=job_of(method=method, seq_len=512, tokens_per_step=2048))


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
def test_adapters_are_refused_for_tokens_of_a_template_that_the_model_does_not_know(method):
    with pytest.raises(InputError) as caught:
        refuse_frozen_rows(plan(method), files(48), "chatml")
    facts = ("data.chat_template: chatml", f" {method} ", "train.method=full", "data.chat_template=plain")
    assert [fact for fact in facts if fact not in str(caught.value)] == []


@pytest.mark.parametrize("template", [None, "plain", "mine.jinja"])
def test_for_tokens_of_the_tokenizer_another_tokenizer_would_do(template):
    with pytest.raises(InputError) as caught:
        refuse_frozen_rows(plan(Method.LORA), files(48), template)
    assert [
        fact for fact in ("model.tokenizer: ", " lora ", "train.method=full") if fact not in str(caught.value)
    ] == []


def test_what_trains_embeddings_or_has_no_new_tokens_is_not_refused():
    refuse_frozen_rows(plan(Method.FULL), files(48), "chatml")
    refuse_frozen_rows(plan(Method.GALORE), files(48), "chatml")
    refuse_frozen_rows(plan(Method.LORA), files(0), "chatml")


def test_a_kept_plan_gets_the_rows_it_counts(tmp_path: Path) -> None:
    kept = plan(Method.FULL)
    folder, said = tmp_path / "model", list[str]()
    held = write_weights(folder, vocab_size=kept.model_config["vocab_size"] - 40)
    kept = replace(kept, model_path=str(folder))
    grown = kept_plan_with_new_rows(kept, cache=tmp_path / "cache", on_progress=said.append)
    assert grown.model_path is not None and Path(grown.model_path).is_relative_to(tmp_path / "cache")
    with safe_open(Path(grown.model_path) / "model.safetensors", framework="np") as weights:
        rows = weights.get_tensor("model.embed_tokens.weight")
    assert len(rows) == kept.model_config["vocab_size"] == held + 40
    assert len(said) == 1
    same = replace(kept, model_path=grown.model_path)
    assert kept_plan_with_new_rows(same, cache=tmp_path / "cache", on_progress=said.append) is same


def test_a_kept_plan_of_adapters_is_refused_too(tmp_path: Path) -> None:
    kept = plan(Method.LORA)
    write_weights(tmp_path / "model", vocab_size=kept.model_config["vocab_size"] - 40)
    kept = replace(kept, model_path=str(tmp_path / "model"))
    with pytest.raises(InputError, match=" lora "):
        kept_plan_with_new_rows(kept, cache=tmp_path / "cache", on_progress=lambda line: None)


def write_weights(folder: Path, *, vocab_size: int) -> int:
    """A tiny model's folder; its rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return vocab_size
