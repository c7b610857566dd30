"""Piece `path`: where the time of shardwise's own step goes, beside what the device was measured to reach.

A case is profiled by the product's own command, `shardwise profile`; its trace is split into groups, and each group
stands beside its floor: FLOPs at the rate of a product of that shape, bytes at the rate of a copy.
"""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from on_gpu import path_table
from on_gpu.bench import Bench
from on_gpu.case import Case
from on_gpu.path_floors import Ceilings, StepWork, floors, product_shapes
from on_gpu.path_trace import Group, read_trace
from on_gpu.peers_configs import job_file
from on_gpu.pieces import Piece, Row, Step
from trainer.planning.device import device_of
from trainer.planning.speed import flops_per_token
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.model_shape import ModelShape, read_model_shape
from trainer.spec.report import Report
from trainer.spec.strategy import Method, Precision

ROOT = Path(__file__).resolve().parents[2]
CEILINGS_SCRIPT = Path(__file__).with_name("path_ceilings.py")
TIMEOUT_S = 480.0
NUM_STEPS, TINY_STEPS = 10, 5
_COMMON = {"pin.precision": "bf16", "pin.optimizer": "adamw_fused", "pin.sharding": "none", "train.method": "full"}


CASES = (
    Case(
        name="1B, all parameters",
        model="llama-3.2-1b",
        settings=_COMMON | {"pin.checkpointing": "none"},
        seq_len=2048,
        micro_batch=8,
        num_steps=NUM_STEPS,
    ),
    Case(
        name="8B, all parameters, checkpointing",
        model="llama-3.1-8b",
        settings=_COMMON | {"pin.checkpointing": "full"},
        seq_len=4096,
        micro_batch=4,
        num_steps=NUM_STEPS,
    ),
)
EXPECTED_S = {"llama-3.2-1b": 120.0, "llama-3.1-8b": 240.0}  # of a profile; the weights may have to be drawn first


def steps(bench: Bench, done: Mapping[str, Row]) -> Iterator[Step]:
    """For each case its profile, and after it the ceilings that it stands beside; none where it could not run."""
    for case in CASES:
        yield Step(_profile_name(case), partial(run_profile, bench, case), expected_s=EXPECTED_S[case.model])
        profile = done.get(_profile_name(case))
        if profile is None or "work" in profile:
            expected_s = math.inf if profile is None else 60.0
            yield Step(_ceilings_name(case), partial(run_ceilings, bench, case, profile or {}), expected_s=expected_s)


def run_ceilings(bench: Bench, case: Case, profile: Row) -> Row:
    """The device's ceilings at the shapes of a case that was profiled, and the floors that follow."""
    step, shape = msgspec.convert(profile["work"], StepWork), _shape(bench, case)
    wanted = {
        "device": "cuda" if bench.hardware.gpus else "cpu",
        "dtype": "bfloat16",
        "shapes": [msgspec.to_builtins(each) for each in product_shapes(shape, step.tokens)],
        "attention": [step.micro_batch, shape.num_heads, step.seq_len, shape.head_dim],
        "budget_s": 0.05 if bench.is_tiny else 0.5,
    }
    with bench.run_folder() as folder:
        asked, answer = folder / "wanted.json", folder / "ceilings.json"
        asked.write_text(json.dumps(wanted))
        _run([sys.executable, str(CEILINGS_SCRIPT), str(asked), str(answer)], bench)
        ceilings = codec.read(answer, Ceilings)
    found = floors(shape, step, ceilings)
    return {
        "outcome": "measured",
        "is_rehearsal": bench.is_tiny,
        "rates": msgspec.to_builtins(ceilings),
        "floors": {str(group): seconds for group, seconds in found.items()},
    }


def run_profile(bench: Bench, case: Case) -> Row:
    """A profiled step of a case, by group."""
    seq_len = bench.seq_len_of(case)
    num_steps = TINY_STEPS if bench.is_tiny else case.num_steps
    words = dict(word.split("=", 1) for word in bench.job_words(case))
    with bench.run_folder() as folder:
        (folder / "job.yaml").write_text(job_file({name: _typed(value) for name, value in words.items()}))
        command = [sys.executable, "-m", "launch.cli", "profile", str(folder / "job.yaml")]
        command += ["--out", str(folder / "run"), "--steps", str(num_steps), "--json"]
        told = json.loads(_run(command, bench))
        report = codec.read(folder / "run" / "report.json", Report)
        trace = read_trace(folder / "run" / "profile" / "trace.json.gz")
    step_s = statistics.median(told["steps_s"])
    whole_s = step_s if trace.is_device else float(told["profile"]["step_s"])
    seconds = trace.seconds | {
        str(Group.COMMUNICATION): trace.exposed_communication_s,
        str(Group.IDLE): max(0.0, whole_s - trace.busy_s),
    }
    return {
        "outcome": "profiled",
        "case": case.name,
        "model": case.model,
        "job": words,
        "settings": _settings(case, report),
        "seq_len": seq_len,
        "micro_batch": case.micro_batch,
        "accumulation": case.accumulation,
        "device": bench.device_name,
        "is_rehearsal": bench.is_tiny,
        "is_device": trace.is_device,
        "command": f"shardwise profile job.yaml --steps {num_steps}",
        "step_s": step_s,
        "whole_s": whole_s,  # what the groups are parts of
        "steps_s": told["steps_s"],
        "seconds": seconds,
        "top": trace.top,
        "num_waits": trace.num_waits,
        "num_started": trace.num_started,
        "work": msgspec.to_builtins(_step_work(case, seq_len, told["memory"]["parts"])),
        "peak_bytes": told["memory"]["peak_allocated_bytes"],
        "ceilings": _ceilings_name(case),
        "versions": bench.versions,
        **_speed(bench, case, step_s=step_s, seq_len=seq_len),
    }


def _step_work(case: Case, seq_len: int, held_bytes: Mapping[str, int]) -> StepWork:
    return StepWork(
        seq_len=seq_len,
        micro_batch=case.micro_batch or 1,
        accumulation=case.accumulation,
        checkpointing=case.settings["pin.checkpointing"],
        element_bytes=2,
        weight_bytes=held_bytes["weights"],
        # All weights are trained, in one type. What was counted are, on a CPU, those that were there at the peak.
        gradient_bytes=held_bytes["weights"],
        state_bytes=held_bytes["optimizer_state"],
    )


def _settings(case: Case, report: Report) -> dict[str, str]:
    """What was pinned, and what the planner chose beside it, as it was seen to run."""
    pinned = {name.rpartition(".")[2]: value for name, value in case.settings.items()}
    seen = report.engaged
    chosen = {} if seen is None else {"attention": seen.attention, "loss": seen.loss}
    return pinned | chosen | {"compile": str(report.plan.compile).lower()}


def _speed(bench: Bench, case: Case, *, step_s: float, seq_len: int) -> dict[str, Any]:
    """Tokens a second, and the share of the stated peak by the count that all tables use."""
    rate = case.sequences_per_step * seq_len / step_s
    peak = device_of(bench.hardware).peak_flops_per_s.get(Precision.BF16) if bench.hardware.gpus else None
    flops = flops_per_token(_shape(bench, case), seq_len, Method.FULL)
    return {
        "tokens_per_s": rate,
        "flops_per_token": flops,
        "peak_flops_per_s": peak,
        "mfu": None if peak is None else rate * flops / peak,
    }


def _shape(bench: Bench, case: Case) -> ModelShape:
    return read_model_shape(json.loads((bench.model_of(case.model) / "config.json").read_text()))


def _run(command: Sequence[str], bench: Bench) -> str:
    """What a process of ours prints; EnvironmentFaultError with its last line where it fails, or takes too long."""
    environment = dict(bench.environment)
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:  # its ranks die with it
        raise EnvironmentFaultError(f"not done within {TIMEOUT_S:.0f} s") from None
    if ended.returncode != 0:
        told = ended.stderr if ended.stderr.strip() else ended.stdout
        said = [line for line in told.splitlines() if line.strip()]
        raise EnvironmentFaultError(" ".join((said or ["it said nothing"])[-1].split()))
    return ended.stdout


def _typed(value: str) -> Any:  # noqa: ANN401  # what a job file holds
    """A word of the command line as YAML has it."""
    return int(value) if value.isdigit() else value


def _profile_name(case: Case) -> str:
    return f"{case.name}: profile"


def _ceilings_name(case: Case) -> str:
    return f"{case.name}: ceilings"


PIECE = Piece(
    name="path",
    about="where the time of our own step goes, beside the device's ceilings",
    steps=steps,
    tables=path_table.tables,
    goals=path_table.goals,
)
