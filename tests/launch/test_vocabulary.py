"""Tokens that are new to a model need a method that trains its embeddings."""

import pytest
from planning_factory import job_of, plan_of

from launch.model_files import ModelFiles
from launch.vocabulary import refuse_frozen_rows
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
    assert str(caught.value) == (
        f"data.chat_template: chatml brings tokens that are new to the model, and {method} leaves its embeddings as "
        "they are;\ntake train.method=full, or a template of plain text such as data.chat_template=plain"
    )


@pytest.mark.parametrize("template", [None, "plain", "mine.jinja"])
def test_for_tokens_of_the_tokenizer_another_tokenizer_would_do(template):
    with pytest.raises(InputError) as caught:
        refuse_frozen_rows(plan(Method.LORA), files(48), template)
    assert str(caught.value) == (
        "model.tokenizer: it brings tokens that are new to the model, and lora leaves its embeddings as they are;\n"
        "take train.method=full, or a tokenizer without tokens of its own"
    )


def test_what_trains_embeddings_or_has_no_new_tokens_is_not_refused():
    refuse_frozen_rows(plan(Method.FULL), files(48), "chatml")
    refuse_frozen_rows(plan(Method.GALORE), files(48), "chatml")
    refuse_frozen_rows(plan(Method.LORA), files(0), "chatml")
