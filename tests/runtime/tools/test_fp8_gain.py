"""Whether FP8 pays is timed on the model's own matrix shapes, and on a GPU only."""

import sys
from pathlib import Path

import torch
from engine_plan_factory import TINY_LLAMA, engine_plan
from msgspec.structs import replace
from planning_factory import fp8_gain_of

from shardwise.trainer.runtime.precision.fp8 import timed_facts
from shardwise.trainer.runtime.run.process import run_request
from shardwise.trainer.runtime.tools.fp8_gain import linear_shapes, measure_gain, time_shapes
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.messages.worker_requests import Fp8GainRequest
from shardwise.trainer.spec.plan import Fp8Gain, ShapeTimes
from shardwise.trainer.spec.strategy import Fp8Recipe, Precision

FAKE_TE = Path(__file__).parents[2] / "factories" / "fake_te"


def test_the_shapes_are_those_of_the_layers_that_would_be_converted():
    """Two blocks: q and o, k and v, gate and up, down."""
    assert linear_shapes(TINY_LLAMA, Fp8Recipe.CURRENT) == {(64, 64): 4, (64, 32): 4, (64, 128): 4, (128, 64): 2}
    assert linear_shapes({**TINY_LLAMA, "hidden_size": 56, "head_dim": 14}, Fp8Recipe.CURRENT) == {}


def test_each_shape_runs_in_both_types(monkeypatch):
    monkeypatch.syspath_prepend(str(FAKE_TE))
    import transformer_engine.pytorch as te

    te.COUNTS.clear()
    shapes = linear_shapes(TINY_LLAMA, Fp8Recipe.CURRENT)
    times = time_shapes(shapes, Fp8Recipe.CURRENT, torch.device("cpu"), tokens=32, budget_s=0.0)
    assert {(each.in_features, each.out_features): each.count for each in times} == shapes
    assert all(each.bf16_s > 0 and each.fp8_s > 0 for each in times)
    assert te.COUNTS["fp8 products with gradients"] == 4 * len(shapes), "one to warm up, three timed"
    assert not any(name.startswith("16 bit") for name in te.COUNTS)
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)


def test_the_gain_counts_each_shape_as_often_as_the_model_has_it():
    shapes = (
        ShapeTimes(in_features=64, out_features=64, count=3, bf16_s=2.0, fp8_s=1.0),
        ShapeTimes(in_features=64, out_features=32, count=1, bf16_s=1.0, fp8_s=2.0),
    )
    gain = Fp8Gain(recipe=Fp8Recipe.CURRENT, tokens=32, shapes=shapes)
    assert gain.speedup == 7 / 5 and gain.pays
    assert not Fp8Gain(recipe=Fp8Recipe.CURRENT, tokens=32, shapes=shapes[1:]).pays
    nothing = Fp8Gain(recipe=Fp8Recipe.CURRENT, tokens=32, problem="no device")
    assert nothing.speedup is None and not nothing.pays


def test_without_a_gpu_the_result_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path, out = tmp_path / "request.json", tmp_path / "answer.json"
    codec.write(path, Fp8GainRequest(model_config=TINY_LLAMA, tokens=4096))
    assert run_request([str(path), str(out)], Fp8GainRequest, measure_gain) == 0
    result = codec.read(out, Fp8Gain)
    assert (result.recipe, result.tokens, result.shapes) == (Fp8Recipe.CURRENT, 4096, ())
    assert result.problem is not None and "CUDA" in result.problem


def test_the_report_of_a_run_in_fp8_has_what_was_timed_before_it():
    gain = fp8_gain_of(1.31)
    run = replace(engine_plan(Sharding.NONE, precision=Precision.FP8), fp8_gain=gain)
    assert "1.31x" in timed_facts(run)["fp8 gain"]
    assert timed_facts(replace(run, fp8_gain=None)) == {}
    assert timed_facts(replace(engine_plan(Sharding.NONE, precision=Precision.BF16_MIXED), fp8_gain=gain)) == {}
