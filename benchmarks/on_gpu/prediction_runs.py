"""Runs a case for its row: planned as anyone's job is, but with no earlier run to learn from.

A machine that has trained corrects its predictions by what its runs came to. Here the formulas are put to the test, so
that the folder of such records is an empty one.
"""

import copy
import time
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from on_gpu.bench import LEAST_ROWS, Bench, job_of
from on_gpu.case import Case, CaseResult, Outcome
from on_gpu.models import model_config
from on_gpu.pieces import Row
from on_gpu.prediction_peaks import ROWS_NAME, Peak, portable_hardware
from on_gpu.prediction_rows import CASE, CaseRow, case_rows, without_paths
from trainer.planning.device import device_of
from trainer.spec.errors import ShardwiseError
from trainer.spec.model_shape import read_model_shape
from trainer.spec.plan import Plan

START_S = 35.0  # of a run: processes, libraries, the end
DRAW_BYTES_PER_S, LOAD_BYTES_PER_S = 0.3e9, 1e9
TIMED_FLOPS_PER_S = 2e14  # far below any step's own rate, for the time that is left for it


def run_case(bench: Bench, case: Case, *, kind: str = CASE, environment: Mapping[str, str] | None = None) -> CaseRow:
    """Plans a case and runs it, with `environment` beside the benchmark's own."""
    started, mine = time.monotonic(), dict(environment or {})
    there = with_environment(bench, mine)
    row = CaseRow(
        kind=kind,
        outcome=Outcome.REFUSED,
        result=CaseResult(case=case, outcome=Outcome.REFUSED),
        is_rehearsal=bench.is_tiny,
        device=bench.device_name,
        versions=bench.versions,
        environment=mine,
    )
    try:
        plan = there.plan_of(case)
    except ShardwiseError as error:
        reason = " ".join(str(error).replace("command line: ", "").split())
        return replace(row, result=replace(row.result, reason=without_paths(reason, bench.work, Path.home())))
    result = there.run_planned(case, plan, plan.chosen, started=started)
    result = replace(result, reason=without_paths(result.reason, bench.work, Path.home()))
    return replace(row, outcome=result.outcome, result=result, **_made_from(bench, case, plan))


def with_environment(bench: Bench, more: Mapping[str, str]) -> Bench:
    """The same bench without records of earlier runs, and with more in its environment."""
    other = copy.copy(bench)
    other.environment = {**bench.environment, **more, "XDG_STATE_HOME": str(bench.work / "no-earlier-runs")}
    return other


def expected_s(bench: Bench, case: Case) -> float:
    """Seconds that a case takes at most on a card, its weights drawn first where they are not there yet."""
    shape = read_model_shape(model_config(case.model, is_tiny=bench.is_tiny))
    is_there = (bench.work / "models" / case.model / "model.safetensors").is_file()
    weights = 2 * shape.num_parameters
    flops = 8 * shape.num_parameters * case.seq_len * case.sequences_per_step * case.num_steps
    load_s = weights / LOAD_BYTES_PER_S + (0.0 if is_there else weights / DRAW_BYTES_PER_S)
    return START_S + load_s + flops / TIMED_FLOPS_PER_S


def peaks_of(rows: Mapping[str, Row]) -> tuple[Peak, ...]:
    """What was measured of every case that ran, or ran out of memory, and what it says of the device alone."""
    return tuple(
        Peak(
            name=row.name,
            outcome=row.outcome,
            job=row.job,
            num_rows=row.num_rows,
            model_config=row.model_config,
            hardware=row.hardware,
            versions=row.versions,
            measured=row.result.measured.memory,
        )
        for row in case_rows(rows)
        if row.outcome in (Outcome.RAN, Outcome.OUT_OF_MEMORY) and row.hardware is not None and not row.is_of_one_memory
    )


def _made_from(bench: Bench, case: Case, plan: Plan) -> dict[str, object]:
    """What the prediction was made from, without a path of this machine."""
    return {
        "job": job_of(case, model=case.model, rows=ROWS_NAME, seq_len=bench.seq_len_of(case)),
        "model_config": plan.model_config if bench.is_tiny else None,
        "num_rows": max(LEAST_ROWS, case.sequences_per_step),
        "hardware": portable_hardware(plan.hardware),
        "events": plan.chosen.memory.events,
        "peak_event": plan.chosen.memory.peak_event,
        "context_bytes": device_of(plan.hardware).context_bytes,
    }
