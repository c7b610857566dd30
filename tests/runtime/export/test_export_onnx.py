"""ONNX graphs: run by onnxruntime at other shapes than they were traced with, they give the model's logits."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from export_factory import EXPERTS, LORA, TINY_GPT2, export, run_of, save_run, write_base
from pasted_pip import requirements_in
from transformers import AutoModelForCausalLM

from shardwise.trainer.runtime.export.check import check_onnx_installed, relative_difference
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.messages.worker_requests import ExportFormat, WeightType
from shardwise.trainer.spec.strategy import Method

ONE_BLOCK = {**TINY_LLAMA, "num_hidden_layers": 1}  # tracing takes as long as there are blocks


def onnx_session(path: Path):
    import onnxruntime  # not where these tests are collected: it takes a while

    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("config", "method"),
    [
        pytest.param(ONE_BLOCK, Method.QLORA, id="llama merged"),
        pytest.param({**EXPERTS, "num_hidden_layers": 1}, Method.FULL, id="mixtral"),
        pytest.param(TINY_GPT2, Method.FULL, id="gpt2", marks=pytest.mark.long),
    ],
)
def test_a_graph_gives_the_logits_of_the_model(config, method, tmp_path):
    plan = run_of(write_base(tmp_path / "base", config), method, lora=LORA, config=config)
    run_dir = save_run(tmp_path / "run", plan)
    merge = method is Method.QLORA
    done = export(run_dir, tmp_path / "graph", format=ExportFormat.ONNX, merge=merge)
    export(run_dir, tmp_path / "model", merge=merge)
    names = {path.name for path in (tmp_path / "graph").iterdir()}
    assert names >= {"model.onnx", "config.json", "generation_config.json", "README.md"}
    assert not any(name.endswith(".safetensors") for name in names)
    assert "onnxruntime" in done.checks[-1]
    session = onnx_session(tmp_path / "graph" / "model.onnx")
    assert [(each.name, each.shape, each.type) for each in session.get_inputs()] == [
        ("input_ids", ["batch", "sequence"], "tensor(int64)"),
        ("attention_mask", ["batch", "sequence"], "tensor(int64)"),
    ]
    assert [(each.name, each.type) for each in session.get_outputs()] == [("logits", "tensor(float)")]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    for batch, length in ((1, 1), (2, 7), (5, 31)):
        ids = np.random.default_rng(length).integers(0, 256, (batch, length))
        mask = np.ones_like(ids)
        (found,) = session.run(["logits"], {"input_ids": ids, "attention_mask": mask})
        with torch.no_grad():
            expected = model(input_ids=torch.from_numpy(ids)).logits
        assert found.shape == (batch, length, 256)
        assert relative_difference(expected, torch.from_numpy(found)) < 1e-5


@pytest.mark.long
@pytest.mark.products
def test_a_graph_in_fp16_is_within_the_rounding_of_its_type(tmp_path):
    plan = run_of(write_base(tmp_path / "base", ONE_BLOCK), Method.FULL, config=ONE_BLOCK)
    run_dir = save_run(tmp_path / "run", plan)
    done = export(run_dir, tmp_path / "graph", format=ExportFormat.ONNX, dtype=WeightType.FP16)
    for name, check in zip(("rounding", "transformers", "onnxruntime"), done.checks, strict=True):
        assert name in check
    session = onnx_session(tmp_path / "graph" / "model.onnx")
    assert session.get_outputs()[0].type == "tensor(float16)"


def test_a_missing_package_is_named_with_the_line_that_installs_it(monkeypatch, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxscript" else found(name))
    with pytest.raises(EnvironmentFaultError, match="onnxscript ") as caught:
        check_onnx_installed()
    assert set(requirements_in(str(caught.value), tmp_path)) == {"onnx", "onnxscript", "onnxruntime"}
