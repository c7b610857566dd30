"""Models with code of their own, which no closed form knows: described, trained within that, and exported."""

import json
from pathlib import Path

import pytest
from custom_model import MARKER, write_custom_model

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Report

RUNS = {"configuration_tiny.py", "modeling_tiny.py", "tiny_layers.py"}


def test_a_folder_with_code_of_its_own_trains_once_the_job_names_it_and_its_export_has_the_code(workplace):
    write_custom_model(workplace.folder / "tiny", has_weights=False)
    workplace.environment[MARKER] = str(workplace.folder / "marker")
    workplace.write_job(model={"config": "tiny"}, train={"steps": 2}, data={"eval": "none"})
    refused = workplace.run("train", "job.yaml", check=False)
    assert refused.returncode == 2
    assert "model.trust_remote_code=tiny" in refused.stderr.strip().splitlines()[-1]  # after a line of progress
    assert not (workplace.folder / "marker").exists()

    said = workplace.run("train", "job.yaml", "model.trust_remote_code=tiny").stdout
    assert all(name in said for name in RUNS)
    run_dir = workplace.only_run()
    plan = codec.read(run_dir / "plan.json", Plan)
    assert plan.model_code is not None and Path(plan.model_code.folder).is_relative_to(run_dir)
    assert {path.name for path in Path(plan.model_code.folder).iterdir()} == RUNS
    assert plan.model_code.description in plan.all_warnings
    report = codec.read(run_dir / "report.json", Report)
    assert report.ending is Ending.FINISHED
    assert report.verified is not None and report.verified.engine_class == "TinyForCausalLM"
    # The dry run takes documents of one length, the step that was measured those that came.
    measured, predicted = (each.memory.peak_allocated_bytes for each in (report.measured, report.predicted))
    assert measured == pytest.approx(predicted, rel=0.03)
    assert {path.name for path in (run_dir / "export").glob("*.py")} == RUNS

    workplace.run("export", run_dir.rename(workplace.folder / "moved"), "out")
    auto_map = json.loads((workplace.folder / "out" / "config.json").read_text())["auto_map"]
    assert auto_map["AutoModelForCausalLM"] == "modeling_tiny.TinyForCausalLM"
    assert {path.name for path in (workplace.folder / "out").glob("*.py")} == RUNS
