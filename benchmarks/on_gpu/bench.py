"""Runs cases: each is planned as a user's job is, and runs a few steps in processes of its own, fit or not.

The prediction is made first and only from the plan; what is measured never reaches it. On a machine without a GPU every
case is rehearsed in a tiny form of its model, so that all of it runs before a card is asked for anything.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from launch import folders
from launch.console import Console
from launch.plan_job import PlanInputs, read_inputs, read_machine, recorded_versions
from launch.prepare_data import prepare_data
from launch.report_steps import Step as StepLine
from launch.report_steps import last_of_each, read_steps
from launch.short_run import ShortRun, run_short, short_plan
from launch.supervisor import StopRequest
from launch.unlimited_plan import plan_regardless, without_limits
from on_gpu.case import Case, CaseResult, Outcome
from on_gpu.models import model_config, model_folder
from trainer.spec.data_profile import DataProfile
from trainer.spec.errors import ShardwiseError
from trainer.spec.plan import Candidate, Plan
from trainer.spec.report import predicted_figures

LEAST_ROWS = 32
TINY_SEQ_LEN = 64  # what a rehearsal cuts 4,096 tokens to, and shorter rows in proportion
LEAST_SEQ_LEN = 16


def job_of(case: Case, *, model: str, rows: str, seq_len: int) -> dict[str, str]:
    """The job of a case on a model and rows of token ids, each of `seq_len` of them."""
    words = {
        "model.name": model,
        "data.train": rows,
        "data.format": "tokens",
        "data.eval": "none",
        "train.seq_len": str(seq_len),
        "train.tokens_per_step": str(seq_len * case.sequences_per_step),
        "train.steps": str(case.num_steps),
        "checkpoint.every": "100000 steps",
    }
    if case.micro_batch is not None:
        words["pin.micro_batch"] = str(case.micro_batch)
    return words | case.settings


class Bench:
    """The machine, and a work folder for models, rows and runs; `is_tiny`, or no GPU, rehearses."""

    def __init__(
        self,
        work: Path,
        *,
        is_tiny: bool,
        console: Console,
        stop: StopRequest,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.work, self.console, self.stop, self.environment = work, console, stop, environment
        self.hardware = read_machine(None)
        self.is_tiny = is_tiny or not self.hardware.gpus
        self.versions = recorded_versions()
        self.cache = folders.cache_home(environment)

    @property
    def device_name(self) -> str:
        """`NVIDIA H200`, or the CPU's name."""
        host = self.hardware.host
        return self.hardware.gpus[0].name if self.hardware.gpus else (host.cpu_name or "CPU")

    def seq_len_of(self, case: Case) -> int:
        """Of a rehearsal, short rows that are still of different lengths."""
        if not self.is_tiny:
            return case.seq_len
        return max(LEAST_SEQ_LEN, min(case.seq_len, case.seq_len * TINY_SEQ_LEN // 4096))

    def model_of(self, preset: str) -> Path:
        """The folder of a model with drawn weights."""
        return model_folder(preset, self.work / "models", is_tiny=self.is_tiny)

    def rows_of(self, preset: str, seq_len: int, num_rows: int = LEAST_ROWS) -> Path:
        """A file of full rows of token ids, drawn evenly from the model's vocabulary."""
        vocab = int(model_config(preset, is_tiny=self.is_tiny)["vocab_size"])
        path = self.work / "rows" / f"{vocab}-{seq_len}-{num_rows}.jsonl"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn = np.random.default_rng(0).integers(3, vocab, size=(num_rows, seq_len))
            partial = path.with_suffix(".partial")
            partial.write_text("".join(json.dumps({"input_ids": row.tolist()}) + "\n" for row in drawn))
            partial.rename(path)
        return path

    def job_words(self, case: Case) -> list[str]:
        """The job of a case as key=value, what anyone could type."""
        seq_len = self.seq_len_of(case)
        rows = self.rows_of(case.model, seq_len, max(LEAST_ROWS, case.sequences_per_step))
        words = job_of(case, model=str(self.model_of(case.model)), rows=str(rows), seq_len=seq_len)
        return [f"{key}={value}" for key, value in words.items()]

    def inputs_of(self, case: Case) -> tuple[PlanInputs, DataProfile]:
        """What the plan of a case is made from; a ShardwiseError where the job cannot be read here."""
        inputs = read_inputs(None, self.job_words(case), vram_cap_bytes=case.vram_bytes, environment=self.environment)
        job = inputs.resolved.job
        job = replace(job, limits=without_limits(job.limits))
        inputs = inputs._replace(resolved=replace(inputs.resolved, job=job))
        return inputs, prepare_data(inputs.request, on_progress=lambda _: None)

    def plan_of(self, case: Case) -> Plan:
        """The plan of a case, whether it fits or not; a ShardwiseError where there is no such thing here."""
        inputs, data = self.inputs_of(case)
        return plan_regardless(inputs, data, environment=self.environment)

    def run(self, case: Case) -> CaseResult:
        """Plans a case and runs it."""
        started = time.monotonic()
        try:
            plan = self.plan_of(case)
        except ShardwiseError as error:
            return CaseResult(case=case, outcome=Outcome.REFUSED, reason=" ".join(str(error).split()))
        return self.run_planned(case, plan, plan.chosen, started=started)

    def run_planned(self, case: Case, plan: Plan, candidate: Candidate, *, started: float | None = None) -> CaseResult:
        """Runs one candidate of a plan."""
        started = time.monotonic() if started is None else started
        with self.run_folder() as run_dir:
            run = run_short(
                short_plan(plan, candidate, num_steps=case.num_steps),
                run_dir,
                cache=self.cache,
                console=self.console,
                stop=self.stop,
                environment=self.environment,
            )
            steps = tuple(last_of_each(read_steps(run_dir / "metrics.jsonl")))
        return _result_of(case, candidate, run, steps, time.monotonic() - started)

    def run_folder(self) -> "_RunFolder":
        """A fresh folder for one run, gone afterwards."""
        return _RunFolder(self.work / "run")


class _RunFolder:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> Path:
        shutil.rmtree(self._path, ignore_errors=True)
        self._path.mkdir(parents=True)
        return self._path

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._path, ignore_errors=True)


def _result_of(
    case: Case, candidate: Candidate, run: ShortRun, steps: Sequence[StepLine], seconds: float
) -> CaseResult:
    memory = candidate.memory
    planned = {
        "strategy": candidate.strategy.name,
        "micro_batch": candidate.micro_batch,
        "accumulation": candidate.accumulation,
        "predicted": predicted_figures(candidate),
        "need_bytes": memory.need_bytes,
        "usable_bytes": memory.usable_bytes,
        "wall_s": seconds,
    }
    if run.report is None:
        return CaseResult(case=case, outcome=Outcome.FAILED, reason=run.problem, **planned)
    measured = replace(run.report.measured, memory=replace(run.report.measured.memory, timeline=()))
    return CaseResult(
        case=case,
        outcome=Outcome.OUT_OF_MEMORY if run.ran_out_of_memory else Outcome.RAN,
        reason=run.report.error,
        measured=measured,
        facts=run.report.engaged.facts if run.report.engaged is not None else {},
        losses=tuple(step.loss for step in steps if step.loss is not None),
        step_s=tuple(step.step_s for step in steps if step.step_s is not None),
        **planned,
    )


def by_name(cases: Sequence[Case]) -> Iterator[tuple[str, Case]]:
    """Each case under its name; AssertionError where two share one."""
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), "every case has a name of its own"
    yield from zip(names, cases, strict=True)
