"""The GPU runs before a GPU is asked for anything: every case plans, is allowed and can be started."""

import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from gpu_factory import (
    ENGINES_OF_ONE,
    GPU_CASES,
    LLAMA,
    SAVINGS,
    GpuCase,
    case_named,
    gpu_plan,
    run_on_gpu,
    setting_of_case,
    write_full_rows,
)
from planning_factory import context_for, job_of, machine

from shardwise.launch.engine.launcher import launch_command, launch_environment, prepare_attempt
from shardwise.trainer.planning.rules.rule import obstacle_to, refuse
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.strategy import Precision

LIBRARIES = ("transformer_engine", "torchao", "flash_attn", "liger_kernel", "triton", "bitsandbytes")
CARDS = {(10, 0): "1xB200", (9, 0): "1xH200", (8, 9): "1xL40S", (8, 0): "1xA100-SXM4-40GB", (7, 0): "1xV100-16GB"}


def card(case: GpuCase):
    return machine(CARDS[case.capability], libraries=LIBRARIES)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_full_rows(tmp_path_factory.mktemp("data") / "rows")


def test_every_optimizer_and_recipe_and_every_engine_with_packed_rows_has_a_case_on_a_gpu():
    assert len({case.name for case in GPU_CASES}) == len(GPU_CASES)
    assert {case.sharding for case in GPU_CASES if case.is_packed} >= {Sharding.NONE, *ENGINES_OF_ONE}
    plain = {Optimizer.ADAMW, Optimizer.SGD}  # nothing about them is of a GPU
    found = {Optimizer(case.settings.get("optimizer", Optimizer.ADAMW_FUSED)) for case in GPU_CASES}
    assert found == set(Optimizer) - plain | {Optimizer.ADAMW}
    assert {case.precision for case in GPU_CASES} == set(Precision)


@pytest.mark.parametrize("case", GPU_CASES, ids=[case.name for case in GPU_CASES])
def test_no_rule_forbids_a_case_its_peak_is_predicted_and_it_can_be_started(case, rows, tmp_path):
    plan = gpu_plan(case, rows, card(case))
    row = plan.chosen.strategy
    pin = {axis: getattr(row, axis) for axis in ("sharding", "offload", "optimizer", "precision")}
    job = job_of(allow=tuple(Allowance), pin=pin, seq_len=512, tokens_per_step=2048, **case.train)
    context = context_for("8b", card(case), method=plan.chosen.method, job=job)
    refusal = refuse(context, row)
    assert refusal is None or refusal.rule == "one_rank_has_no_peer", "pointless on one card, but it runs"
    assert obstacle_to(context, setting_of_case(plan)) is None
    memory = plan.chosen.memory
    assert sum(memory.parts.values()) == memory.peak_allocated_bytes
    assert 50 * 2**20 < memory.peak_allocated_bytes < 12 * 2**30
    # Everything that its ranks read is written, and the plan survives its file.
    attempt_dir = prepare_attempt(plan, plan.chosen, run_dir=tmp_path, resume=False)
    assert codec.read(attempt_dir / "plan.json", Plan).chosen == plan.chosen
    settings = yaml.safe_load((attempt_dir / "accelerate.yaml").read_text())
    assert settings["num_processes"] == 1 and settings["use_cpu"] is False
    if case.sharding.uses_deepspeed:
        config = json.loads((attempt_dir / "ds_config.json").read_text())
        assert "auto" not in json.dumps(config)
        offloaded = config["zero_optimization"].get("offload_optimizer", {}).get("device", "none")
        assert (offloaded == "cpu") is (plan.chosen.strategy.offload is not Offload.NONE)
    argv = launch_command(attempt_dir, log_dir=None, python=sys.executable)
    assert argv[-2:] == ["shardwise.trainer", str(attempt_dir / "plan.json")]
    environment = launch_environment(os.environ, plan, extensions_dir=tmp_path, cores=8)
    assert environment["DS_ACCELERATOR"] == "cuda"


@pytest.mark.parametrize(("name", "base"), SAVINGS)
def test_a_technique_is_predicted_to_save_enough_to_be_seen(name: str, base: str, rows: Path) -> None:
    """At least 5 % of the peak: more than twice what the tests on a GPU allow beside a tenth of the saving."""
    peaks = [
        gpu_plan(case, rows, machine("1xH200")).chosen.memory.peak_allocated_bytes
        for case in (case_named(name), case_named(base))
    ]
    assert peaks[0] < 0.95 * peaks[1]


def test_the_same_functions_start_and_read_a_run_on_a_cpu(tmp_path: Path) -> None:
    """A tiny model on packed rows through the launcher, the rank and its report, as the tests on a GPU do."""
    write_full_rows(tmp_path / "rows", are_packed=True)
    config = {**LLAMA, "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    case = GpuCase("cpu", {"precision": Precision.FP32, "optimizer": Optimizer.ADAMW}, is_packed=True)
    run = run_on_gpu(gpu_plan(case, tmp_path / "rows", machine("1xCPU"), config=config), tmp_path / "run")
    assert run.report.ending is Ending.FINISHED
    assert run.losses[-1] < run.losses[0]
    assert run.report.verified is not None and "documents" in run.report.verified.facts
    measured = run.report.measured.memory.peak_allocated_bytes
    assert run.plan.chosen.memory.peak_allocated_bytes == pytest.approx(measured, rel=0.1)
