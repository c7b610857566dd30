"""Piece `techniques`: cases differ in one thing, steps stand on those before, tables say what they are of."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from msgspec.structs import replace
from on_gpu import (
    gpu_techniques,
    techniques_attention,
    techniques_equal,
    techniques_fp8,
    techniques_gemm,
    techniques_gemm_child,
    techniques_ladder,
    techniques_memory,
    techniques_rows,
)
from on_gpu.case import Case, CaseResult, Outcome
from planning_factory import machine

from launch.plan_job import profile_data, read_inputs
from launch.unlimited_plan import plan_regardless, without_limits
from trainer.spec.plan import Plan
from trainer.spec.report import Figures, MemoryFigures, SpeedFigures
from trainer.spec.strategy import Attention, Method

CARD = "1xH200"
FACTORIES = Path(__file__).parents[1] / "factories"
FP8_LIBRARIES = ("torchao", "transformer_engine")
LIBRARIES = ("flash-attn", "torchao", "transformer-engine", "bitsandbytes", "liger-kernel")
FP8_CASES = [case for setup in techniques_fp8.SETUPS for case in techniques_fp8.cases_of(setup)]
MEMORY_CASES = [case for comparison in techniques_memory.COMPARISONS for case in comparison.cases]
CASES = [*FP8_CASES, *MEMORY_CASES, *techniques_attention.cases()]


def bench(tmp_path: Path, *, is_tiny: bool = False) -> SimpleNamespace:
    """What making steps needs of a bench: a machine and a place."""
    return SimpleNamespace(
        hardware=machine("1xCPU" if is_tiny else CARD), is_tiny=is_tiny, work=tmp_path, device_name="the device"
    )


def planned(case: Case, tmp_path: Path) -> Plan:
    """The plan of a case on a card of the catalogue, from the preset's config."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": [5] * case.seq_len}) + "\n")
    words = {
        "model.name": case.model,
        "data.train": str(rows),
        "data.format": "tokens",
        "data.eval": "none",
        "train.seq_len": case.seq_len,
        "train.tokens_per_step": case.seq_len * case.sequences_per_step,
        "train.steps": case.num_steps,
        "pin.micro_batch": case.micro_batch,
        **case.settings,
    }
    inputs = read_inputs(None, [f"{key}={value}" for key, value in words.items()], hardware_spec=CARD)
    job = replace(inputs.resolved.job, limits=without_limits(inputs.resolved.job.limits))
    resolved = replace(inputs.resolved, job=job)
    inputs = inputs._replace(resolved=resolved, hardware=machine(CARD, libraries=LIBRARIES))
    return plan_regardless(inputs, profile_data(inputs))


def row_of(case: Case, *, rate: float | None = 1000.0, is_tiny: bool = False, **more) -> dict:
    """A row of a case that ran, or ran out of memory where it has no rate."""
    outcome = Outcome.RAN if rate is not None else Outcome.OUT_OF_MEMORY
    speed = SpeedFigures(step_s=1.0, tokens_per_s_per_gpu=rate)
    measured = Figures(speed=speed, memory=MemoryFigures(peak_allocated_bytes=2 * 2**30, device_bytes=3 * 2**30))
    result = CaseResult(case=case, outcome=outcome, predicted=measured, measured=measured, **more)
    marks = {"device": "the device", "is_tiny": is_tiny, "bf16_peak_flops_per_s": None if is_tiny else 989.5e12}
    return {**msgspec.to_builtins(result), techniques_rows.MORE: marks}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_is_planned_on_the_card_as_it_was_given(case: Case, tmp_path: Path):
    chosen = planned(case, tmp_path).chosen
    pinned = {key.removeprefix("pin."): value for key, value in case.settings.items()}
    assert (chosen.method, chosen.micro_batch, chosen.accumulation) == (Method.FULL, case.micro_batch, 1)
    assert chosen.strategy.precision == pinned["precision"] and chosen.strategy.optimizer == pinned["optimizer"]
    assert (chosen.strategy.sharding, chosen.strategy.offload) == (pinned["sharding"], pinned["offload"])
    assert chosen.checkpointing == pinned["checkpointing"]
    assert chosen.activation_offload == (pinned["activation_offload"] == "true")
    assert chosen.compile == (pinned.get("compile") == "true")
    assert pinned.get("attention", chosen.attention) == chosen.attention
    assert pinned.get("fp8_recipe", chosen.fp8_recipe) == chosen.fp8_recipe


@pytest.mark.parametrize("case", FP8_CASES, ids=lambda case: case.name)
def test_fp8_and_what_it_is_held_to_fit_the_card(case: Case, tmp_path: Path):
    assert planned(case, tmp_path).chosen.memory.fits


def test_cases_of_a_comparison_differ_in_their_settings_alone():
    for setup in techniques_fp8.SETUPS:
        assert len({(case.model, case.seq_len, case.micro_batch) for case in techniques_fp8.cases_of(setup)}) == 1
    tokens = {case.seq_len * (case.micro_batch or 0) for case in techniques_attention.cases() if case.seq_len <= 8192}
    assert tokens == {techniques_attention.TOKENS}


def test_every_step_has_a_name_of_its_own(tmp_path: Path):
    names = [step.name for step in gpu_techniques.steps(bench(tmp_path), {})]
    assert len(set(names)) == len(names) and {case.name for case in CASES} <= set(names)


def test_no_step_is_expected_to_take_longer_than_a_call(tmp_path: Path):
    steps = gpu_techniques.steps(bench(tmp_path), {})
    assert all(step.expected_s < 300 for step in steps if step.expected_s != float("inf"))


def test_a_rung_stands_on_those_below_that_were_climbed(tmp_path: Path):
    case = techniques_ladder.CASES[0]
    done: dict[str, dict] = {}
    stood: dict[str, dict[str, str]] = {}
    for step in techniques_ladder.steps(bench(tmp_path), done):
        stood[step.name] = step.run.args[2].settings
        done[step.name] = {"is_climbed": not step.name.endswith("flash")}
    assert stood[f"ladder {case.model} full"] == {
        "pin.precision": "bf16-mixed", "pin.checkpointing": "full"
    }  # fmt: skip
    assert stood[f"ladder {case.model} chunked"]["pin.attention"] == "sdpa"


def test_a_rung_waits_for_the_one_below(tmp_path: Path):
    steps = [step for step in techniques_ladder.steps(bench(tmp_path), {}) if techniques_fp8.SMALL in step.name]
    assert [step.expected_s == float("inf") for step in steps] == [False, *[True] * (len(steps) - 1)]


def test_longer_rows_are_not_tried_with_a_kernel_that_ran_out_of_memory(tmp_path: Path):
    case = techniques_attention.case_of(Attention.EAGER, 4096)
    done = {case.name: row_of(case, rate=None)}
    names = [step.name for step in techniques_attention.steps(bench(tmp_path), done)]
    assert "attention eager 2048" in names and "attention sdpa 8192" in names
    assert not {"attention eager 8192", "attention eager 32768"} & set(names)
    assert "| 8,192 | eager |" in techniques_attention.tables(done)
    assert "not tried: out of memory at 4,096" in techniques_attention.tables(done)


def test_losses_of_kernels_are_compared_step_by_step():
    sdpa, eager = (techniques_attention.case_of(kernel, 512) for kernel in (Attention.SDPA, Attention.EAGER))
    rows = {sdpa.name: row_of(sdpa, losses=(5.0, 4.0)), eager.name: row_of(eager, losses=(5.0, 4.25))}
    line = next(line for line in techniques_attention.tables(rows).splitlines() if "| eager |" in line)
    assert " 0.25 " in line
    assert techniques_rows.largest_difference((1.0, 2.0), (1.0,)) is None


def test_methods_come_after_what_they_start_from_and_under_what_galore_took(tmp_path: Path):
    around = bench(tmp_path)
    names = [step.name for step in techniques_equal.steps(around, {})]
    assert names == [techniques_equal.BASE]
    done = {techniques_equal.BASE: {techniques_rows.MORE: {"weights": "equal/base/export"}}}
    galore = techniques_equal.case_of(around, Method.GALORE, "equal/base/export")
    done[galore.name] = row_of(galore)
    steps = list(techniques_equal.steps(around, done))
    assert [step.name for step in steps[2:]] == [f"equal memory {method}" for method in ("full", "lora", "qlora")]
    cases = [step.run.args[1] for step in steps[1:]]
    assert [case.vram_bytes for case in cases] == [None, *[3 * 2**30] * 3]
    assert {case.sequences_per_step for case in cases} == {techniques_equal.ROWS}


def test_shapes_are_those_of_the_model():
    assert techniques_gemm.shapes_of("llama-3.1-8b") == ((4096, 4096), (4096, 14336), (14336, 4096))
    assert techniques_gemm.shapes_of("llama-3.1-70b")[1] == (8192, 28672)


def test_mfu_counts_attention_that_is_not_causal_against_the_bf16_peak():
    per_token = 6 * 8_030_261_248 + 12 * 32 * 4096 * 4096
    assert techniques_fp8.flops_of("llama-3.1-8b", 4096) == pytest.approx(per_token)
    case = techniques_memory.large_recomputation().cases[0]
    rate = 0.5 * 989.5e12 / per_token
    assert techniques_fp8.mfu_of(row_of(case, rate=rate)) == pytest.approx(0.5)
    assert techniques_fp8.mfu_of(row_of(case, rate=rate), 989e12) == pytest.approx(0.5 * 989.5 / 989)
    assert techniques_fp8.mfu_of(row_of(case, rate=rate, is_tiny=True)) is None


@pytest.mark.parametrize(("fp8_rate", "is_met"), [(1279.0, False), (1281.0, True)])
def test_fp8_is_held_to_the_fastest_in_bf16(fp8_rate: float, is_met: bool):
    mixed, bf16, *fp8 = techniques_fp8.cases_of(techniques_fp8.SETUPS[0])
    rows = {mixed.name: row_of(mixed, rate=900.0), bf16.name: row_of(bf16, rate=1000.0)}
    rows[fp8[0].name] = row_of(fp8[0], rate=fp8_rate)
    goal = gpu_techniques.goals(rows)[0]
    assert goal.is_met is is_met and bf16.name in (goal.figure or "")


def test_what_keeps_everything_is_no_answer_to_the_goal_with_checkpointing():
    cases = {case.settings["pin.checkpointing"]: case for case in techniques_memory.large_recomputation().cases[:5]}
    per_token = techniques_fp8.flops_of("llama-3.1-8b", 4096)
    rows = {case.name: row_of(case, rate=0.55 * 989e12 / per_token) for case in cases.values()}
    rows[cases["none"].name] = row_of(cases["none"], rate=0.7 * 989e12 / per_token)
    goal = gpu_techniques.goals(rows)[1]
    assert goal.is_met is False and (goal.figure or "").startswith("55.0%")
    assert gpu_techniques.goals({})[1].is_met is None


def test_tables_say_that_they_are_of_a_rehearsal():
    rehearsed = gpu_techniques.tables({case.name: row_of(case, is_tiny=True) for case in CASES})["techniques"]
    measured = gpu_techniques.tables({case.name: row_of(case) for case in CASES})["techniques"]
    assert rehearsed.count("A rehearsal with tiny models") == 6 and "Measured on" not in rehearsed
    assert measured.count("Measured on the device.") == 6 and "rehearsal with" not in measured


def test_tables_of_nothing_say_so():
    assert gpu_techniques.tables({})["techniques"].count("Nothing is measured yet.") == 10


def test_a_step_that_raised_has_its_line():
    case = techniques_memory.offload().cases[1]
    table = techniques_memory.tables({case.name: {"error": "ValueError: no | such thing"}})
    assert "| ZeRO-2, optimizer |" in table and "ValueError: no \\| such thing |" in table


@pytest.fixture
def fp8_libraries(monkeypatch) -> Iterator[None]:
    """The stand-ins for both libraries, which run on a CPU."""
    for folder in ("fake_torchao", "fake_te"):
        monkeypatch.syspath_prepend(str(FACTORIES / folder))
    _forget()
    yield
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.split(".")[0] in FP8_LIBRARIES]:
        del sys.modules[name]


def test_fp8_layers_of_the_product_take_turns_with_bf16(fp8_libraries, monkeypatch):
    kinds = ("bf16", "torchao_tensorwise", "torchao_rowwise", "current")
    monkeypatch.setattr(techniques_gemm_child, "check_device", lambda *_: None)
    monkeypatch.setattr(techniques_gemm_child, "kinds", lambda: kinds)
    shape = techniques_gemm_child.time_shape(32, 16, 32, rounds=2, device=torch.device("cpu"))
    assert shape["refused"] == {} and tuple(shape["seconds"]) == kinds
    assert techniques_gemm.speedup(shape, "current") == shape["seconds"]["bf16"] / shape["seconds"]["current"]


def test_shapes_are_timed_here_and_what_crashes_is_an_error_beside_what_was_timed(tmp_path: Path, monkeypatch):
    around = bench(tmp_path, is_tiny=True)
    asked = {"shapes": [[32, 16], [32, -1]], "tokens": [8], "rounds": 2, "device": "cpu"}
    monkeypatch.setattr(techniques_gemm, "request_of", lambda *_: asked)
    row = techniques_gemm.gemm_row(around, "llama-3.2-1b")
    assert "negative dimension" in row["error"] and len(row["shapes"]) == 1
    shape = row["shapes"][0]
    assert shape["flops"] == 6 * 32 * 16 * 8 and shape["seconds"]["bf16"] > 0
    assert set(shape["refused"]) == set(techniques_gemm_child.kinds()) - {"bf16"}
    table = techniques_gemm.tables({"gemm llama-3.2-1b": row})
    assert "FP8 products need a GPU" in table and "negative dimension" in table
