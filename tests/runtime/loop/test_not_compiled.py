"""A compilation that failed is remembered: from the run's report to the plans of the same machine and versions."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from attempt_runs import run_attempt
from msgspec.structs import replace
from planning_factory import machine, plan_of
from rank_factory import rank_plan
from report_factory import calibration_of, make_report
from torch import nn

from shardwise.launch.plan.calibration_store import append_calibration, read_calibration, record_of_run
from shardwise.trainer.spec.plan import CalibrationRecord, Plan
from shardwise.trainer.spec.report import Report, Verified
from shardwise.trainer.spec.strategy import LossHead

NOW = datetime(2030, 1, 2, tzinfo=UTC)


def eager_run(tmp_path: Path, cache_dir: Path) -> Verified:
    plan = rank_plan(cache_dir, num_steps=3)
    plan = replace(plan, candidates=(replace(plan.chosen, compile=True),))
    _, state = run_attempt(tmp_path / "run", plan)
    assert sum("not compiled" in text for text in state.log.texts) == 1
    assert state.verified is not None
    return state.verified


def test_a_failed_compilation_is_in_the_report_of_its_run(tmp_path, cache_dir, monkeypatch):
    """A variable that disables the compiler is no failure."""
    from torch._dynamo.exc import Unsupported

    def fail(*_: Any, **__: Any) -> None:
        raise Unsupported("data-dependent branch", "data_dependent")

    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: setattr(module, "_compiled_call_impl", fail))
    assert "data-dependent branch" in (eager_run(tmp_path / "failed", cache_dir).not_compiled or "")
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert eager_run(tmp_path / "disabled", cache_dir).not_compiled is None


def test_a_loss_head_and_blocks_without_ligers_kernels_are_two_incidents(tmp_path, cache_dir, monkeypatch):
    monkeypatch.setattr("shardwise.trainer.runtime.loss.liger_loss", lambda softcap: nn.Identity())  # Liger needs a GPU
    monkeypatch.setenv("CC", "no-compiler")
    plan = rank_plan(cache_dir, num_steps=2, loss=LossHead.FUSED_LINEAR)
    plan = replace(plan, candidates=(replace(plan.chosen, fused_kernels=True),))
    _, state = run_attempt(tmp_path / "run", plan)
    facts = ("blocks run as plain torch", "the loss is computed in slices")
    assert [sum(fact in text for text in state.log.texts) for fact in facts] == [1, 1]


def plan_with(*records: CalibrationRecord, transformers: str = "5.17.0", **job: Any) -> Plan:
    hardware = machine("1xA100-SXM4-80GB")
    return plan_of("1b", hardware, calibration=calibration_of(*records), transformers=transformers, **job)


def record_with(home: Path, plan: Plan, not_compiled: str | None) -> CalibrationRecord:
    """The record of a run of a plan, after the store has been written and read."""
    report: Report = make_report()
    report = replace(report, plan=plan.chosen, verified=replace(report.verified, not_compiled=not_compiled))
    record = record_of_run(report, plan, now=NOW)
    append_calibration(home, record, on_line=print)
    (found,) = read_calibration(home, plan.hardware, torch="none").records[-1:]
    return found


def test_later_plans_of_the_same_versions_are_eager_and_say_why(tmp_path):
    first = plan_with()
    assert first.chosen.compile
    failed = record_with(tmp_path, first, "Unsupported: data-dependent branch")
    again = plan_with(failed)
    assert not any(candidate.compile for candidate in again.candidates)
    assert any("data-dependent branch" in note for note in again.notes)
    assert plan_with(failed, transformers="5.18.0").chosen.compile
    pinned = plan_with(failed, pin={"compile": True})
    assert pinned.chosen.compile
    compiled = record_with(tmp_path, pinned, None)
    assert plan_with(failed, compiled).chosen.compile, "it compiled since"
    assert record_with(tmp_path, first, None).predicted_step_s == pytest.approx(first.chosen.speed.step_s)
    assert failed.predicted_step_s > first.chosen.speed.step_s, "the prediction of an eager step"
