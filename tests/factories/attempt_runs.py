"""Attempts that run in this process: their ending, their state and the lines of their metrics."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, GradientState
from rank_factory import write_attempt

from shardwise.trainer.runtime.loop.course import train
from shardwise.trainer.runtime.loop.session import Session, build_session
from shardwise.trainer.runtime.run.state import ReportWriter, RunState, run_paths
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Verified


def reset_accelerate() -> None:
    """Forgets the state of Accelerate, which is global, so that another plan can be built in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def session_of(run_dir: Path, plan: Plan) -> Session:
    reset_accelerate()
    paths = run_paths(write_attempt(run_dir, plan), started_at=datetime.now(UTC))
    return build_session(plan, paths, ReportWriter(paths, rank=0), RunState())


def run_attempt(
    run_dir: Path, plan: Plan, *, number: int = 1, wants_stop: Callable[[RunState], bool] = lambda state: False,
    state: RunState | None = None,
) -> tuple[Ending, RunState]:  # fmt: skip
    reset_accelerate()
    paths = run_paths(write_attempt(run_dir, plan, number=number), started_at=datetime.now(UTC))
    state = state or RunState()
    try:
        return train(plan, paths, ReportWriter(paths, rank=0), state, lambda: wants_stop(state)), state
    finally:
        reset_accelerate()


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses_of(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics_of(run_dir)]


def engaged_of(run_dir: Path, rank: int = 0) -> Verified:
    return codec.read(run_dir / "attempts" / "1" / f"engaged-{rank}.json", Verified)
