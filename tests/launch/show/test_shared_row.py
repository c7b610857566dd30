"""`shardwise report --share`: a row of figures for the ledger, and nothing of the run's own text."""

import io
import json
import os
import re
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from planning_factory import plan_of
from planted_texts import leaves, planted
from reported_run import report_for, tiny_plan, write_run

from shardwise.launch.commands.report import run_report
from shardwise.launch.inputs.model_files import preset_names
from shardwise.launch.options import ReportOptions
from shardwise.launch.show.recorded_run import recorded_runs
from shardwise.launch.show.shared_row import shared_row
from shardwise.launch.terminal import Console
from shardwise.trainer.planning.tables.gpu_specs import GPU_SPECS
from shardwise.trainer.spec import engines, optimizers, strategy
from shardwise.trainer.spec.errors import ExitCode, InputError
from shardwise.trainer.spec.model.readers import supported_model_types
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Figures
from shardwise.trainer.spec.strategy import Method

SECRET = "/home/alice/secret-7f3a"
JUNE = 1_780_000_000  # 2026-05-28


def share(*run_dirs: Path, path: Path) -> list[dict[str, Any]]:
    options = ReportOptions(run_dirs=run_dirs, share=path)
    assert run_report(options, Console(io.StringIO())) is ExitCode.DONE
    return [json.loads(line) for line in path.read_text().splitlines()]


def allowed() -> set[str]:
    enums = [
        member.value
        for module in (engines, optimizers, strategy)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Enum)
        for member in kind
    ]
    return {*enums, *GPU_SPECS, *supported_model_types(), *preset_names(), "cpu"}


def strings(content: Any) -> list[str]:
    return [value for _, value in leaves(content) if isinstance(value, str)]


@pytest.mark.parametrize("plan", [tiny_plan(), plan_of("1b", "8xH100-SXM5-80GB", method=Method.LORA)])
def test_no_text_of_a_run_directory_outside_the_allow_list_is_in_a_row(tmp_path: Path, plan: Plan) -> None:
    numbers = count()

    def hidden(_old: str | None) -> str:
        return f"{SECRET}-{next(numbers)}"

    report = report_for(plan, versions={"torch": "2.13.0+alice", "alice-private": "1.0", "peft": SECRET})
    run_dir = write_run(tmp_path / "secret-7f3a-name", plan=plan, report=report)
    contents = {"plan.json": planted(plan, hidden), "report.json": planted(report, hidden)}
    for name, content in contents.items():
        assert json.dumps(content).count(SECRET) > (40 if name == "plan.json" else 5)
        (run_dir / name).write_text(json.dumps(content))
    for name in ("environment.json", "job.yaml"):
        (run_dir / name).write_text(f"WANDB_API_KEY: {SECRET}")
    (row,) = share(run_dir, path=tmp_path / "rows.jsonl")
    text = json.dumps(row)
    assert "secret" not in text and "alice" not in text and os.uname().nodename not in text
    of_row = {key: value for key, value in row.items() if key not in ("month", "versions")}
    assert set(strings(of_row)) <= allowed()
    assert all(re.fullmatch(r"[\d.]+((a|b|rc|\.dev|\.post)\d+)?", version) for version in row["versions"].values())


def test_a_row_has_the_figures_of_both_sides_the_settings_and_the_month(tmp_path: Path) -> None:
    plan = plan_of("1b", "8xH100-SXM5-80GB", method=Method.LORA)
    run_dir = write_run(tmp_path / "run", plan=plan, report=report_for(plan, versions={"torch": "2.13.0+cu130"}))
    os.utime(run_dir / "report.json", (JUNE, JUNE))
    (row,) = share(run_dir, path=tmp_path / "rows.jsonl")
    chosen = plan.chosen
    assert row["month"] == "2026-05" and row["versions"] == {"torch": "2.13.0"}
    assert row["hardware"]["device"] == "H100-SXM5-80GB" and row["hardware"]["devices_per_node"] == 8
    assert row["model"]["model_type"] == "llama" and row["model"]["num_parameters"] == plan.model_shape.num_parameters
    assert row["settings"]["sharding"] == chosen.strategy.sharding and row["settings"]["lora_rank"] == 16
    assert row["settings"]["bf16_reduction"] == chosen.bf16_reduction
    for side in ("predicted", "measured"):
        assert row[side]["peak_allocated_gib"] == pytest.approx(chosen.memory.peak_allocated_bytes / 2**30, abs=1e-4)
    assert row["measured"]["step_s"] == pytest.approx(1.1 * chosen.speed.step_s, abs=1e-4)


def test_rows_are_appended_and_a_run_that_measured_nothing_or_did_not_finish_has_none(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"format": 1}')  # without a newline
    first, second = (write_run(tmp_path / name) for name in "ab")
    rows = share(first, second, path=path)
    assert rows[0] == {"format": 1} and len(rows) == 3 and rows[1] == rows[2]
    assert len(share(first, path=path)) == 4
    plan = tiny_plan()
    path.unlink()
    unmeasured = write_run(tmp_path / "unmeasured", report=report_for(plan, measured=Figures()))
    stopped = write_run(tmp_path / "stopped", report=report_for(plan, ending=Ending.STOPPED))
    running = write_run(tmp_path / "running", has_report=False)
    for run_dir in (unmeasured, stopped, running):
        with pytest.raises(InputError, match="--share needs"):
            shared_row(recorded_runs((run_dir,))[0])
        with pytest.raises(InputError):
            share(run_dir, path=path)
    assert not path.exists()
    with pytest.raises(InputError, match="in a folder that exists"):
        share(write_run(tmp_path / "d"), path=tmp_path / "no" / "rows.jsonl")
