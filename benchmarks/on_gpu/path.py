"""Piece `path`: where the time of shardwise's own step goes, beside what the device was measured to reach.

A case is profiled by the product's own command, `shardwise profile`; its trace is split into groups, and each group
stands beside its floor: FLOPs at the rate of a product of that shape, bytes at the rate of a copy.
"""

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
from trainer.spec.strategy import Method, Precision
from trainer.spec.value import Value

ROOT = Path(__file__).resolve().parents[2]
CEILINGS_SCRIPT = Path(__file__).with_name("path_ceilings.py")
TIMEOUT_S = 480.0
NUM_STEPS, TINY_STEPS = 10, 5
_COMMON = {"pin.precision": "bf16", "pin.optimizer": "adamw_fused", "pin.sharding": "none", "train.method": "full"}


class PathCase(Value, frozen=True, kw_only=True):
    """A case, and the share of the peak that is asked for."""

    case: Case
    wanted_mfu: float | None = None

    @property
    def checkpointing(self) -> str:
        return self.case.settings["pin.checkpointing"]


CASES = (
    PathCase(
        case=Case(
            name="1B, all parameters",
            model="llama-3.2-1b",
            settings=_COMMON | {"pin.checkpointing": "none"},
            seq_len=2048,
            micro_batch=8,
            num_steps=NUM_STEPS,
        )
    ),
    PathCase(
        case=Case(
            name="8B, all parameters, checkpointing",
            model="llama-3.1-8b",
            settings=_COMMON | {"pin.checkpointing": "full"},
            seq_len=4096,
            micro_batch=4,
            num_steps=NUM_STEPS,
        ),
        wanted_mfu=path_table.WANTED_MFU,
    ),
)


def steps(bench: Bench, _done: Mapping[str, Row]) -> Iterator[Step]:
    """For each case its ceilings, then its profile."""
    yield from steps_of(bench, CASES)


def steps_of(bench: Bench, cases: Sequence[PathCase]) -> Iterator[Step]:
    for each in cases:
        yield Step(_profile_name(each), lambda each=each: run_profile(bench, each), expected_s=150.0)
        yield Step(_ceilings_name(each), lambda each=each: run_ceilings(bench, each), expected_s=60.0)


def run_ceilings(bench: Bench, path_case: PathCase) -> Row:
    """The device's ceilings at the shapes of a case, and the floors that follow."""
    work = json.loads((_kept(bench, path_case) / "step.json").read_text())
    step, shape = msgspec.convert(work["step"], StepWork), _shape(bench, path_case.case)
    wanted = {
        "device": "cuda" if bench.hardware.gpus else "cpu",
        "dtype": "bfloat16",
        "shapes": [msgspec.to_builtins(each) for each in product_shapes(shape, step.tokens)],
        "attention": [step.micro_batch, shape.num_heads, step.seq_len, shape.head_dim],
        "budget_s": 0.05 if bench.is_tiny else 0.5,
    }
    with tempfile.TemporaryDirectory(dir=bench.work) as name:
        asked, answer = Path(name) / "wanted.json", Path(name) / "ceilings.json"
        asked.write_text(json.dumps(wanted))
        _run([sys.executable, str(CEILINGS_SCRIPT), str(asked), str(answer)], bench)
        ceilings = codec.read(answer, Ceilings)
    found = floors(shape, step, ceilings)
    return {
        "outcome": "measured",
        "rates": msgspec.to_builtins(ceilings),
        "floors": {str(group): seconds for group, seconds in found.items()},
    }


def run_profile(bench: Bench, path_case: PathCase) -> Row:
    """A profiled step of a case, by group."""
    case = path_case.case
    seq_len = bench.seq_len_of(case)
    num_steps = TINY_STEPS if bench.is_tiny else case.num_steps
    folder = _kept(bench, path_case)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = dict(word.split("=", 1) for word in bench.job_words(case))
    (folder / "job.yaml").write_text(job_file({name: _typed(value) for name, value in words.items()}))
    command = [sys.executable, "-m", "launch.cli", "profile", str(folder / "job.yaml")]
    command += ["--out", str(folder / "run"), "--steps", str(num_steps), "--json"]
    told = json.loads(_run(command, bench))
    trace = read_trace(folder / "run" / "profile" / "trace.json.gz")
    step_s = statistics.median(told["steps_s"])
    profiled_s = float(told["profile"]["step_s"])
    work = StepWork(
        seq_len=seq_len,
        micro_batch=case.micro_batch or 1,
        accumulation=case.accumulation,
        checkpointing=path_case.checkpointing,
        element_bytes=2,
        weight_bytes=told["memory"]["parts"]["weights"],
        gradient_bytes=told["memory"]["parts"]["gradients"],
        state_bytes=told["memory"]["parts"]["optimizer_state"],
    )
    shutil.rmtree(folder / "run", ignore_errors=True)
    (folder / "step.json").write_text(json.dumps({"step": msgspec.to_builtins(work)}))
    whole_s = step_s if trace.is_device else profiled_s
    seconds = trace.seconds | {
        str(Group.COMMUNICATION): trace.exposed_communication_s,
        str(Group.IDLE): max(0.0, whole_s - trace.busy_s),
    }
    return {
        "outcome": "profiled",
        "case": case.name,
        "model": case.model,
        "settings": {name.rpartition(".")[2]: value for name, value in case.settings.items()},
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
        "peak_bytes": told["memory"]["peak_allocated_bytes"],
        "wanted_mfu": path_case.wanted_mfu,
        "ceilings": _ceilings_name(path_case),
        "versions": bench.versions,
        **_speed(bench, path_case, step_s=step_s, seq_len=seq_len),
    }


def _speed(bench: Bench, path_case: PathCase, *, step_s: float, seq_len: int) -> dict[str, Any]:
    """Tokens a second, and the share of the stated peak by the count that all tables use."""
    rate = path_case.case.sequences_per_step * seq_len / step_s
    peak = device_of(bench.hardware).peak_flops_per_s.get(Precision.BF16) if bench.hardware.gpus else None
    flops = flops_per_token(_shape(bench, path_case.case), seq_len, Method.FULL)
    return {
        "tokens_per_s": rate,
        "flops_per_token": flops,
        "peak_flops_per_s": peak,
        "mfu": None if peak is None else rate * flops / peak,
    }


def _shape(bench: Bench, case: Case) -> ModelShape:
    return read_model_shape(json.loads((bench.model_of(case.model) / "config.json").read_text()))


def _kept(bench: Bench, path_case: PathCase) -> Path:
    """The folder of a case."""
    return bench.work / "path" / ("tiny-" if bench.is_tiny else "") / path_case.case.model


def _run(command: Sequence[str], bench: Bench) -> str:
    """What a process of ours prints; EnvironmentFaultError with its last line where it fails."""
    ended = subprocess.run(
        command, cwd=ROOT, env=dict(bench.environment), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if ended.returncode != 0:
        said = [line for line in (ended.stderr + ended.stdout).splitlines() if line.strip()]
        raise EnvironmentFaultError(" ".join((said or ["it said nothing"])[-1].split()))
    return ended.stdout


def _typed(value: str) -> Any:  # noqa: ANN401  # what a job file holds
    """A word of the command line as YAML has it."""
    return int(value) if value.isdigit() else value


def _profile_name(path_case: PathCase) -> str:
    return f"{path_case.case.name}: profile"


def _ceilings_name(path_case: PathCase) -> str:
    return f"{path_case.case.name}: ceilings"


PIECE = Piece(
    name="path",
    about="where the time of our own step goes, beside the device's ceilings",
    steps=steps,
    tables=path_table.tables,
    goals=path_table.goals,
)
