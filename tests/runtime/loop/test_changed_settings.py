"""A run that is resumed with another setting trains by it from the next step on; what is done stays as it was."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from attempt_runs import metrics_of, run_attempt
from msgspec.structs import replace
from plain_training import train_plainly
from rank_factory import LR, rank_plan, write_rows
from safetensors.torch import load_file

from shardwise.trainer.spec.job.sections import LrSchedule
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.strategy import LossHead

STOP_AFTER, NUM_STEPS = 4, 8


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    rows = write_rows(tmp_path_factory.mktemp("data") / "rows", shortest=16, is_grouped=False)
    return rank_plan(rows, num_steps=NUM_STEPS, micro_batch=4, accumulation=2, loss=LossHead.EAGER)


@pytest.fixture(scope="module")
def stopped(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped") / "run"
    ending, _ = run_attempt(folder, plan, wants_stop=lambda state: state.step >= STOP_AFTER)
    assert ending is Ending.STOPPED
    return folder


@pytest.fixture(scope="module")
def unchanged(plan: Plan) -> dict[str, torch.Tensor]:
    return train_plainly(plan).weights


# Each as a change of the schedule, and of the job's `train`.
CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "lr": ({"lr": LR / 4}, {}),
    "schedule": ({}, {"schedule": LrSchedule.LINEAR}),
    "warmup": ({"warmup_steps": 6}, {}),
    "clip": ({}, {"clip": 0.05}),
    "weight_decay": ({}, {"weight_decay": 2.0}),
    "steps": ({"num_steps": 10}, {}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_holds_from_the_next_step_on(name, plan, stopped, unchanged, tmp_path):
    schedule, train = CHANGES[name]
    job = replace(plan.job, train=replace(plan.job.train, **train))
    changed = replace(plan, schedule=replace(plan.schedule, **schedule), job=job)
    shutil.copytree(stopped, tmp_path / "run")
    ending, _ = run_attempt(tmp_path / "run", replace(changed, resume=True), number=2)
    assert ending is Ending.FINISHED
    steps = {step: step for step in range(1, changed.schedule.num_steps + 1)}
    expected = train_plainly(plan, steps, later=(STOP_AFTER, changed))
    losses = {line["step"]: line["loss"] for line in metrics_of(tmp_path / "run")}
    assert losses == pytest.approx(expected.losses, abs=1e-5)
    found = load_file(tmp_path / "run" / "export" / "model.safetensors")
    for weight_name, weight in expected.weights.items():
        torch.testing.assert_close(found[weight_name], weight, rtol=0, atol=1e-5, msg=f"{weight_name}: {{}}".format)
    assert any(not torch.allclose(found[each], weight, rtol=0, atol=5e-5) for each, weight in unchanged.items())
