"""One rank, started as `accelerate launch` starts it: what it writes, how it stops, resumes, and how it ends."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rank_factory import NUM_EVAL_ROWS, rank_plan, write_attempt, write_rows
from spoilt_rows import spoil

from shardwise.trainer.runtime.data.cache import TokenLayout
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Report, RollBack
from shardwise.trainer.spec.strategy import LossHead

TIMEOUT_S = 300
POLL_S = 0.02
ENDLESS = 100_000  # steps: more than a rank can run before it is stopped, however slow the machine


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows")


def start(plan_path: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    """A rank in the background; what it prints goes to output.txt beside plan.json."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"OMP_NUM_THREADS": "1"}
    argv = [sys.executable, "-m", "shardwise.trainer", str(plan_path), *arguments]
    with plan_path.with_name("output.txt").open("wb") as output:
        return subprocess.Popen(argv, env=environment, stdout=output, stderr=output)


def run(plan_path: Path, *arguments: str, expected_code: int = 0) -> str:
    """What a rank prints; asserts the code of its process."""
    code = start(plan_path, *arguments).wait(timeout=TIMEOUT_S)
    output = plan_path.with_name("output.txt").read_text()
    assert code == expected_code, output
    return output


def report_of(plan_path: Path) -> Report:
    return codec.read(plan_path.with_name("report.json"), Report)


def losses_of(run_dir: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def wait_for_step(run_dir: Path, step: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not (run_dir / "metrics.jsonl").exists() or step not in losses_of(run_dir):
        assert process.poll() is None, "the rank ended before this step"
        assert time.monotonic() < deadline, "the rank made no progress"
        time.sleep(POLL_S)


def stop_after_step(plan_path: Path, step: int) -> Report:
    """Runs a rank until it has done this step, and has it stop as Slurm does before a preemption."""
    rank = start(plan_path)
    wait_for_step(plan_path.parents[2], step, rank)
    rank.send_signal(signal.SIGUSR1)
    assert rank.wait(timeout=TIMEOUT_S) == 0
    report = report_of(plan_path)
    assert report.ending is Ending.PREEMPTED
    return report


def plan_with(cache_dir: Path, **changes: Any) -> Plan:
    return rank_plan(cache_dir, **{"num_steps": 6, "eval_every_steps": 4, "checkpoint_every_steps": 3} | changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache_dir) -> Path:
    """plan.json of an attempt that ran to its end."""
    plan_path = write_attempt(tmp_path_factory.mktemp("run"), plan_with(cache_dir))
    run(plan_path, "--log-dir", str(plan_path.parent / "logs"))
    return plan_path


def test_a_finished_attempt_reports_what_was_measured(finished):
    report = report_of(finished)
    assert (report.ending, report.exit_code, report.step, report.num_steps) == (Ending.FINISHED, ExitCode.DONE, 6, 6)
    assert report.error is None and report.incidents == ()
    assert [evaluation.step for evaluation in report.evaluations] == [4, 6]
    assert report.evaluations[1].loss < report.evaluations[0].loss
    assert report.evaluations[0].num_tokens > NUM_EVAL_ROWS
    memory = report.measured.memory
    assert memory.peak_allocated_bytes is not None and sum(memory.parts.values()) == memory.peak_allocated_bytes
    assert report.measured.speed.step_s is not None and report.measured.speed.tokens_per_s_per_gpu is not None
    assert report.final_loss == losses_of(finished.parents[2])[6]
    assert report.checkpoint == "checkpoints/step-00000006" and report.export == "export"


def test_speed_counts_what_goes_through_the_model_and_learned_tokens_beside_it(tmp_path, cache_dir):
    masked = Path(shutil.copytree(cache_dir, tmp_path / "rows"))
    layout = codec.read(masked / "layout.json", TokenLayout)
    codec.write(masked / "layout.json", msgspec.structs.replace(layout, is_masked=True))
    is_learned = np.arange(layout.num_tokens) % 3 == 0
    for name in ("train", "eval"):
        is_learned[np.load(masked / f"{name}_rows.npy")[:, 0]] = False  # no token stands before these
    (masked / "learned.bin").write_bytes(np.packbits(is_learned, bitorder="little").tobytes())
    plan = plan_with(masked, num_steps=5, eval_every_steps=None, checkpoint_every_steps=None)
    plan_path = write_attempt(tmp_path / "run", plan)
    run(plan_path)
    lines = [json.loads(line) for line in (plan_path.parents[2] / "metrics.jsonl").read_text().splitlines()]
    before = {"tokens": 0, "targets": 0}
    for line in lines:
        tokens, targets = line["tokens"] - before["tokens"], line["targets"] - before["targets"]
        assert tokens == pytest.approx(line["tokens_per_s"] * line["step_s"])
        assert targets == pytest.approx(line["targets_per_s"] * line["step_s"])
        assert targets / tokens < 0.45
        before = line
    report = report_of(plan_path)
    assert (report.tokens, report.targets) == (before["tokens"], before["targets"])
    speed = report.measured.speed
    assert speed.targets_per_s_per_gpu / speed.tokens_per_s_per_gpu < 0.45


def test_a_return_to_a_checkpoint_is_in_the_report(tmp_path, cache_dir):
    """Weights that a NaN has reached within the backward pass are those of the last checkpoint again."""
    plan = plan_with(
        cache_dir, optimizer_in_backward=True, micro_batch=8, accumulation=1, clip=0.0, loss=LossHead.EAGER
    )
    plan_path = write_attempt(tmp_path / "run", spoil(plan, tmp_path / "extension", [5]))
    run(plan_path)
    assert report_of(plan_path).roll_backs == (RollBack(from_step=5, to_step=3),)


def test_the_parts_that_can_be_counted_are_exact(finished):
    num_parameters, memory = 106_816, report_of(finished).measured.memory
    assert 0 < memory.parts["gradients"] <= 4 * num_parameters, "as many as had arrived at the peak"
    assert 0 <= memory.parts["weights"] - 4 * num_parameters < 1024, "buffers beside the parameters"
    assert 0 <= memory.parts["optimizer_state"] - 8 * num_parameters < 1024, "one step counter a parameter"
    assert memory.steady_allocated_bytes == memory.parts["weights"] + memory.parts["optimizer_state"]


def test_the_rank_registers_itself_and_logs_where_it_was_told(finished):
    record = json.loads((finished.parent / "pids" / "rank-0.json").read_text())
    assert record["rank"] == 0 and record["pid"] > 1 and record["start_time"] > 0
    assert (finished.parent / "logs" / "rank-0.log").exists()
    assert json.loads((finished.parent / "status.json").read_text()) == {"phase": "finished", "step": 6}


def test_the_export_loads_without_shardwise(finished):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(finished.parents[2] / "export")
    assert model.num_parameters() == 106_816
    assert model.config.use_cache is True


def test_a_finished_attempt_started_again_overwrites_nothing_and_has_the_same_losses(finished):
    run_dir = finished.parents[2]
    before = {
        path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.is_file() and path.name != "output.txt"
    }
    output = run(finished)
    (again,) = finished.parent.glob("again-*")
    assert str(again) in output
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert losses_of(again) == losses_of(run_dir), "bit by bit"
    assert codec.read(again / "report.json", Report).ending is Ending.FINISHED


def test_a_run_that_was_stopped_and_resumed_has_the_losses_of_one_that_was_not(tmp_path, cache_dir):
    plan = plan_with(cache_dir, num_steps=ENDLESS, checkpoint_every_steps=None, eval_every_steps=None)
    stopped = write_attempt(tmp_path / "stopped", plan)
    report = stop_after_step(stopped, 3)
    assert report.exit_code == ExitCode.REQUEUE and report.step >= 3
    assert report.checkpoint == f"checkpoints/step-{report.step:08d}"
    resumed = write_attempt(tmp_path / "stopped", msgspec.structs.replace(plan, resume=True), number=2)
    last = report.step + 6
    assert stop_after_step(resumed, last).resumed_from_step == report.step
    stop_after_step(write_attempt(tmp_path / "whole", plan), last)
    found, expected = losses_of(tmp_path / "stopped"), losses_of(tmp_path / "whole")
    steps = range(1, last + 1)
    assert [found[step] for step in steps] == [expected[step] for step in steps], "bit by bit"


def test_ctrl_c_is_left_to_the_supervisor(tmp_path, cache_dir):
    plan_path = write_attempt(tmp_path, plan_with(cache_dir, num_steps=ENDLESS, eval_every_steps=None))
    rank = start(plan_path)
    wait_for_step(tmp_path, 1, rank)
    rank.send_signal(signal.SIGINT)
    wait_for_step(tmp_path, max(losses_of(tmp_path)) + 3, rank)
    rank.send_signal(signal.SIGUSR1)
    assert rank.wait(timeout=TIMEOUT_S) == 0
    assert report_of(plan_path).ending is Ending.PREEMPTED


def test_out_of_memory_is_an_orderly_end(tmp_path, cache_dir):
    plan = plan_with(cache_dir, micro_batch=512, sequences_per_step=1024, loss=LossHead.EAGER)
    capped = msgspec.structs.replace(plan.hardware, vram_cap_bytes=24 * 2**20)
    plan_path = write_attempt(tmp_path, msgspec.structs.replace(plan, hardware=capped))
    run(plan_path, expected_code=0)
    report = report_of(plan_path)
    assert report.ending is Ending.OUT_OF_MEMORY and report.exit_code == ExitCode.OUT_OF_MEMORY
    assert report.verified is not None, "the model itself did fit"
    assert report.error is not None and "\n" not in report.error


def test_resuming_where_there_is_nothing_is_an_error_in_the_report(tmp_path, cache_dir):
    plan_path = write_attempt(tmp_path, msgspec.structs.replace(plan_with(cache_dir), resume=True))
    run(plan_path, expected_code=1)
    report = report_of(plan_path)
    assert report.ending is Ending.FAILED and report.exit_code == ExitCode.ENVIRONMENT
    assert report.error is not None and f"--resume: {tmp_path}" in report.error


def test_a_rank_of_another_world_size_than_planned_refuses_to_train(tmp_path, cache_dir):
    plan_path = write_attempt(tmp_path, plan_with(cache_dir, sharding=Sharding.DDP, num_ranks=2))
    run(plan_path, expected_code=1)
    report = report_of(plan_path)
    assert report.ending is Ending.FAILED
    assert report.error is not None and re.match(r"ranks\b.*\b2\b.*\b1\b", report.error)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_rank_ends_when_its_parent_is_killed(tmp_path, cache_dir):
    plan_path = write_attempt(tmp_path, plan_with(cache_dir, num_steps=ENDLESS, eval_every_steps=None))
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-m', 'shardwise.trainer', {str(plan_path)!r}])"
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_for_step(tmp_path, 1, launcher)
    pid = json.loads((plan_path.parent / "pids" / "rank-0.json").read_text())["pid"]
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + TIMEOUT_S
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the rank outlived its launcher"
        time.sleep(POLL_S)
