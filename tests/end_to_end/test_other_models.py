"""Models that no closed form knows: described from what transformers builds, planned by a dry run, trained."""

import json

import pytest
from workplace_factory import Workplace

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report

COMMON = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
}


def write_config(workplace: Workplace, model_type: str, **fields: object) -> None:
    (workplace.folder / "other.json").write_text(json.dumps({"model_type": model_type, **COMMON, **fields}))


def test_a_model_that_no_closed_form_knows_trains_within_what_its_dry_run_said(workplace: Workplace) -> None:
    write_config(workplace, "helium", head_dim=8)
    said = workplace.run("train", "job.yaml", "model.config=other.json", "train.steps=4").stdout
    assert "helium" in said
    report = codec.read(workplace.only_run() / "report.json", Report)
    assert report.ending is Ending.FINISHED
    assert report.verified is not None and report.verified.engine_class == "HeliumForCausalLM"
    predicted, measured = report.predicted.memory, report.measured.memory
    assert measured.peak_allocated_bytes == pytest.approx(predicted.peak_allocated_bytes, rel=0.05)


def test_one_whose_loss_is_more_than_a_cross_entropy_is_refused_before_anything_is_prepared(
    workplace: Workplace,
) -> None:
    write_config(workplace, "olmoe", num_experts=4, output_router_logits=True)  # adds a loss of its router
    answer = workplace.run("train", "job.yaml", "model.config=other.json", check=False)
    assert answer.returncode == 2
    assert "output_router_logits is true, which adds a loss" in answer.stderr
    assert not (workplace.folder / "runs").exists()
