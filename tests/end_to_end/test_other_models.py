"""A model that no closed form knows: described from what transformers builds, planned by a dry run, trained."""

import json

import pytest
from workplace_factory import TINY_CONFIG, Workplace

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report


def test_a_model_that_no_closed_form_knows_trains_within_what_its_dry_run_said(workplace: Workplace) -> None:
    config = {**TINY_CONFIG, "model_type": "helium", "num_key_value_heads": 4, "head_dim": 8}
    retained = {key: value for key, value in config.items() if key not in ("architectures", "tie_word_embeddings")}
    (workplace.folder / "other.json").write_text(json.dumps(retained))
    said = workplace.run("train", "job.yaml", "model.config=other.json", "train.steps=4").stdout
    assert "helium" in said
    report = codec.read(workplace.only_run() / "report.json", Report)
    assert report.ending is Ending.FINISHED
    assert report.verified is not None and report.verified.engine_class == "HeliumForCausalLM"
    predicted, measured = report.predicted.memory, report.measured.memory
    assert measured.peak_allocated_bytes == pytest.approx(predicted.peak_allocated_bytes, rel=0.05)
