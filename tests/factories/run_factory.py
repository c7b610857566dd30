"""Run directories as a run leaves them: plan, attempts, metrics, report, submission; each as far as a test asks."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine_plan_factory import engine_plan
from msgspec.structs import replace
from report_factory import make_report

from shardwise.launch.rundir.lock import LOCK
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.messages.rank_files import Heartbeat, encode_heartbeat, heartbeat_path
from shardwise.trainer.spec.messages.submission import FILE_NAME, JOBS_FILE, SCRIPT_NAME, Submission
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import AttemptRecord, Ending, Report


def run_plan(num_steps: int = 100) -> Plan:
    plan = engine_plan(Sharding.NONE)
    return replace(plan, schedule=replace(plan.schedule, num_steps=num_steps))


def write_submission(run_dir: Path, *job_ids: str, **changes: Any) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    plain = {"hardware": run_plan().hardware, "submitted": "2026-11-22T17:30:00Z", "job_ids": job_ids}
    plain |= {"script": str(run_dir.absolute() / SCRIPT_NAME)}
    codec.write(run_dir / FILE_NAME, Submission(**{**plain, **changes}))


def write_start(run_dir: Path, job_id: str) -> None:
    with (run_dir / JOBS_FILE).open("a") as stream:
        stream.write(f"2026-11-22T17:31:00Z {job_id} 0 n[1-2]\n")


def write_attempt(run_dir: Path, number: int = 1, *, steps: Sequence[int] = (), num_steps: int = 100) -> Path:
    """An attempt that did these steps, a step each two seconds, and still runs as far as its files tell."""
    folder = run_dir / "attempts" / str(number)
    (folder / "logs").mkdir(parents=True)
    (folder / "logs" / "rank-0.log").write_text("".join(f"rank 0 did step {step}\n" for step in steps))
    codec.write(folder / "plan.json", run_plan(num_steps))
    if not (run_dir / "plan.json").exists():
        codec.write(run_dir / "plan.json", run_plan(num_steps))
    last = steps[-1] if steps else 0
    (folder / "status.json").write_text(json.dumps({"phase": "training", "step": last}))
    heartbeat_path(folder, 0).parent.mkdir()
    heartbeat_path(folder, 0).write_bytes(encode_heartbeat(Heartbeat(step=last, count=1, phase="forward")))
    append_steps(run_dir, steps, attempt=number)
    return folder


def metrics_row(step: int, attempt: int = 1) -> dict[str, Any]:
    return {
        "step": step, "attempt": attempt, "loss": 5.0 - step / 100, "lr": 3e-4, "step_s": 2.0, "tokens_per_s": 1234.0,
        "memory_peak_bytes": 7 * 2**20,
    }  # fmt: skip


def append_steps(run_dir: Path, steps: Sequence[int], *, attempt: int = 1, **fields: Any) -> None:
    with (run_dir / "metrics.jsonl").open("a") as stream:
        stream.writelines(json.dumps({**metrics_row(step, attempt), **fields}) + "\n" for step in steps)


def attempt_record(number: int = 1, *, step: int = 10, **changes: Any) -> AttemptRecord:
    plain = {
        "number": number, "strategy": "none/fp32/adamw", "num_ranks": 1, "micro_batch": 4, "accumulation": 2,
        "resumed_from_step": None, "step": step, "ending": Ending.FINISHED, "duration_s": 12.0,
        "predicted_peak_bytes": 30 * 2**20,
    }  # fmt: skip
    return AttemptRecord(**{**plain, **changes})


def write_report(run_dir: Path, ending: Ending, *, attempt: int = 1, step: int = 10, **changes: Any) -> Report:
    history = tuple(attempt_record(number, step=step, ending=ending) for number in range(1, attempt + 1))
    report = make_report(ending=ending, step=step, num_steps=100, history=history, attempts=attempt, **changes)
    codec.write(run_dir / "report.json", report)
    return report


def write_holder(run_dir: Path, pid: int, host: str | None = None) -> None:
    (run_dir / LOCK).write_text(f"{pid}\n" if host is None else f"{pid} {host}\n")


def write_checkpoint(run_dir: Path, step: int) -> None:
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "MANIFEST.json").write_text("{}")


def age(path: Path, seconds: float) -> None:
    changed = path.stat().st_mtime - seconds
    os.utime(path, (changed, changed))
