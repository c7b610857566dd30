"""One rank, started as `accelerate launch` starts it: what it imports and writes, how it stops, resumes, and ends."""

import json
import shutil
import signal
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from lone_rank import ENDLESS, TIMEOUT_S, lines_of, losses_of, report_of, run_rank, start_rank, wait_for_step
from msgspec.structs import replace
from prepare_request_factory import extension_of
from rank_factory import NUM_EVAL_ROWS, rank_plan, write_attempt

from shardwise.trainer.runtime.data.cache import TokenLayout
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.report import Ending, Report

plan_with = partial(rank_plan, num_steps=6, eval_every_steps=4, checkpoint_every_steps=3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache_dir) -> Path:
    """plan.json of an attempt that ran to its end, on rows that are not packed because of the model."""
    plan = plan_with(cache_dir)
    plan = replace(plan, model_shape=replace(plan.model_shape, packing_obstacle="its layers keep a state"))
    plan_path = write_attempt(tmp_path_factory.mktemp("run"), plan)
    run_rank(plan_path, "--log-dir", str(plan_path.parent / "logs"))
    return plan_path


def test_a_finished_attempt_reports_what_was_measured(finished):
    report = report_of(finished)
    assert (report.ending, report.exit_code, report.step, report.num_steps) == (Ending.FINISHED, ExitCode.DONE, 6, 6)
    assert report.error is None and report.incidents == ("packing is off: its layers keep a state",)
    assert [evaluation.step for evaluation in report.evaluations] == [4, 6]
    assert report.evaluations[1].loss < report.evaluations[0].loss
    assert report.evaluations[0].num_tokens > NUM_EVAL_ROWS
    memory = report.measured.memory
    assert memory.peak_allocated_bytes is not None and sum(memory.parts.values()) == memory.peak_allocated_bytes
    num_parameters = 106_816
    assert 0 < memory.parts["gradients"] <= 4 * num_parameters, "as many as had arrived at the peak"
    assert 0 <= memory.parts["weights"] - 4 * num_parameters < 1024, "buffers beside the parameters"
    assert 0 <= memory.parts["optimizer_state"] - 8 * num_parameters < 1024, "one step counter a parameter"
    assert memory.steady_allocated_bytes == memory.parts["weights"] + memory.parts["optimizer_state"]
    assert report.measured.speed.step_s is not None and report.measured.speed.tokens_per_s_per_gpu is not None
    assert report.final_loss == losses_of(finished.parents[2])[6]
    assert report.checkpoint == "checkpoints/step-00000006" and report.export == "export"
    record = json.loads((finished.parent / "pids" / "rank-0.json").read_text())
    assert record["rank"] == 0 and record["pid"] > 1 and record["start_time"] > 0
    assert (finished.parent / "logs" / "rank-0.log").exists()
    assert json.loads((finished.parent / "status.json").read_text()) == {"phase": "finished", "step": 6}


def test_speed_counts_what_goes_through_the_model_and_learned_tokens_beside_it(tmp_path, cache_dir):
    masked = Path(shutil.copytree(cache_dir, tmp_path / "rows"))
    layout = codec.read(masked / "layout.json", TokenLayout)
    codec.write(masked / "layout.json", replace(layout, is_masked=True))
    is_learned = np.arange(layout.num_tokens) % 3 == 0
    for name in ("train", "eval"):
        is_learned[np.load(masked / f"{name}_rows.npy")[:, 0]] = False  # no token stands before these
    (masked / "learned.bin").write_bytes(np.packbits(is_learned, bitorder="little").tobytes())
    plan = plan_with(masked, num_steps=5, eval_every_steps=None, checkpoint_every_steps=None)
    plan_path = write_attempt(tmp_path / "run", plan)
    run_rank(plan_path)
    lines = [{"tokens": 0, "targets": 0}, *lines_of(plan_path.parents[2]).values()]
    for before, line in pairwise(lines):
        tokens, targets = line["tokens"] - before["tokens"], line["targets"] - before["targets"]
        assert tokens == pytest.approx(line["tokens_per_s"] * line["step_s"])
        assert targets == pytest.approx(line["targets_per_s"] * line["step_s"])
        assert targets / tokens < 0.45
    report = report_of(plan_path)
    assert (report.tokens, report.targets) == (lines[-1]["tokens"], lines[-1]["targets"])
    speed = report.measured.speed
    assert speed.targets_per_s_per_gpu / speed.tokens_per_s_per_gpu < 0.45


def test_a_finished_attempt_started_again_overwrites_nothing_and_has_the_same_losses(finished):
    run_dir = finished.parents[2]
    before = {
        path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file() and path.name != "output.txt"
    }
    output = run_rank(finished)
    (again,) = finished.parent.glob("again-*")
    assert str(again) in output
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert losses_of(again) == losses_of(run_dir), "bit by bit"
    assert codec.read(again / "report.json", Report).ending is Ending.FINISHED


def test_ctrl_c_is_left_to_the_supervisor(tmp_path, cache_dir):
    plan_path = write_attempt(tmp_path, plan_with(cache_dir, num_steps=ENDLESS, eval_every_steps=None))
    rank = start_rank(plan_path)
    wait_for_step(tmp_path, 1, rank)
    rank.send_signal(signal.SIGINT)
    wait_for_step(tmp_path, max(losses_of(tmp_path)) + 3, rank)
    rank.send_signal(signal.SIGUSR1)
    assert rank.wait(timeout=TIMEOUT_S) == 0
    report = report_of(plan_path)
    assert (report.ending, report.exit_code) == (Ending.PREEMPTED, ExitCode.REQUEUE)


def test_resuming_where_there_is_nothing_is_an_error_in_the_report(tmp_path, cache_dir):
    plan_path = write_attempt(tmp_path, replace(plan_with(cache_dir), resume=True))
    run_rank(plan_path, expected_code=1)
    report = report_of(plan_path)
    assert report.ending is Ending.FAILED and report.exit_code == ExitCode.ENVIRONMENT
    assert report.error is not None and f"--resume: {tmp_path}" in report.error


NOT_IMPORTED = (
    # engines, methods, optimizers and kernels that another plan names
    "deepspeed", "peft", "bitsandbytes", "trl", "galore_torch", "torchao", "transformer_engine", "liger_kernel",
    "kernels", "flash_attn", "shardwise.trainer.runtime.optimizers.eight_bit",
    # data is read from prepared rows
    "datasets", "pyarrow", "pandas", "shardwise.trainer.runtime.data.prepare",
    # the export and what checks it
    "onnx", "onnxruntime", "onnxscript",
    "shardwise.trainer.runtime.export.run", "shardwise.trainer.runtime.export.check",
    # metrics leave through another process
    "wandb", "tensorboard", "torch.utils.tensorboard",
    # what no training of text needs
    "scipy", "sklearn", "matplotlib", "torchvision", "torchaudio", "librosa",
    # starting and planning
    "launch", "slurm", "shardwise.trainer.planning", "shardwise.trainer.simulation", "torch.distributed.run",
)  # fmt: skip
AT_FIRST_STEP = """
import gc
import json
import os
import pathlib
import sys

def on_step(step, metrics):
    seen = {{"modules": sorted(sys.modules), "collects": gc.isenabled(), "frozen": gc.get_freeze_count()}}
    pathlib.Path({path!r}).write_text(json.dumps(seen))
    os._exit(0)
"""


def test_at_its_first_step_it_has_imported_nothing_that_its_plan_does_not_use(tmp_path, cache_dir):
    """And the garbage collector is on, and leaves out what the imports made."""
    extension = extension_of(tmp_path, AT_FIRST_STEP.format(path=str(tmp_path / "seen.json")), Hook.ON_STEP)
    plan_path = write_attempt(tmp_path / "run", replace(plan_with(cache_dir), extension=extension))
    run_rank(plan_path, python=str(Path(sys.prefix, "bin", "python")))
    seen = json.loads((tmp_path / "seen.json").read_text())
    modules = seen["modules"]
    assert "transformers.models.llama.modeling_llama" in modules
    assert [name for name in modules if any(f"{name}.".startswith(f"{other}.") for other in NOT_IMPORTED)] == []
    assert seen["collects"] and seen["frozen"] > 100 * len(modules)
