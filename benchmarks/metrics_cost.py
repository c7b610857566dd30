"""The cost of measuring: seconds per step of clocks, counters, log line, heartbeat and status.

A rank is built as in training, then each part runs alone many times: the clock around the phases of a step with
one micro batch, the line of metrics.jsonl with all its counters, the heartbeat and the status, which is written
twice a second. Their sum is compared with a step of 50 ms, which is short for training. The target is below 1 %.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
STEP_S = 0.05
TARGET_SHARE = 0.01
ROUNDS, REPETITIONS = 9, 200


def bench_metrics() -> list[dict[str, object]]:
    """One row per part, and the sum."""
    for imported in (ROOT / "tests" / "factories", ROOT):
        if str(imported) not in sys.path:
            sys.path.insert(0, str(imported))
    with tempfile.TemporaryDirectory() as folder:
        pieces = _pieces(Path(folder))
        seconds = {name: _median_seconds(work) for name, work in pieces}
    rows = [_row(name, each, verdict="") for name, each in seconds.items()]
    total = sum(seconds.values())
    return [*rows, _row("together", total, verdict="met" if total / STEP_S < TARGET_SHARE else "MISSED")]


def _row(name: str, seconds: float, *, verdict: str) -> dict[str, object]:
    return {
        "piece": name,
        "us_a_step": round(seconds * 1e6, 1),
        "share_of_a_50_ms_step": f"{seconds / STEP_S:.2%}",
        "verdict": verdict,
    }


def _median_seconds(work: Callable[[], object]) -> float:
    rounds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(REPETITIONS):
            work()
        rounds.append((time.perf_counter() - begin) / REPETITIONS)
    return median(rounds)


def _pieces(folder: Path) -> Sequence[tuple[str, Callable[[], object]]]:
    """The measurements of a rank in every step."""
    from gpu_factory import GpuCase, gpu_plan, write_full_rows
    from planning_factory import machine

    from shardwise.launch.engine.launcher import prepare_attempt
    from shardwise.trainer.runtime.data.batches import padding_share, step_micro_batches
    from shardwise.trainer.runtime.loop.metrics import PHASES, DoneStep, MetricsFile, StepObserver
    from shardwise.trainer.runtime.loop.session import build_session
    from shardwise.trainer.runtime.loop.step import StepResult
    from shardwise.trainer.runtime.run.clock import CardWatch, Clock
    from shardwise.trainer.runtime.run.state import STATUS_INTERVAL_S, ReportWriter, RunState, run_paths
    from shardwise.trainer.spec import codec
    from shardwise.trainer.spec.optimizers import Optimizer
    from shardwise.trainer.spec.strategy import Precision

    write_full_rows(folder / "rows")
    settings = {"precision": Precision.FP32, "optimizer": Optimizer.ADAMW_FUSED, "micro_batch": 2}
    plan = gpu_plan(GpuCase("metrics", settings), folder / "rows", machine("1xCPU"))
    codec.write(folder / "plan.json", plan)
    attempt_dir = prepare_attempt(plan, plan.chosen, run_dir=folder, resume=False)
    paths, state = run_paths(attempt_dir / "plan.json", started_at=datetime.now(UTC)), RunState()
    writer = ReportWriter(paths, rank=0)
    session = build_session(plan, paths, writer, state)
    watch = CardWatch(session.accelerator.device)
    watch.watching().__enter__()
    observer, metrics = StepObserver(session, watch), MetricsFile(folder / "metrics.jsonl", is_writer=True)
    chosen = plan.chosen
    micro_batches, _ = step_micro_batches(
        session.train_rows, step=0, seed=0, sequences_per_step=plan.schedule.sequences_per_step, rank=0, num_ranks=1,
        micro_batch=chosen.micro_batch, accumulation=chosen.accumulation,
    )  # fmt: skip
    result = StepResult(loss=1.0, num_targets=1000, num_tokens=1000, grad_norm=1.0)

    def take_phases() -> Clock:
        clock = Clock(session.accelerator.device, on_phase=lambda phase: writer.beat(phase, step=1))
        for phase in PHASES:
            with clock.measure(phase):
                pass
        return clock

    done = DoneStep(result, take_phases(), 1e-3, STEP_S, 0.0, (), 0.5)

    def write_line() -> None:
        metrics.append(observer.line(done, None))

    steps_a_status = round(STATUS_INTERVAL_S / STEP_S)
    steps = count()

    def write_status() -> None:  # an unchanged status is written once per interval; here, after as many steps
        writer.write_status(f"training {next(steps) // steps_a_status % 2}", step=1)

    return (
        ("clock and heartbeats", take_phases),
        ("share of padding", lambda: padding_share(micro_batches)),
        ("parts of the step", lambda: observer.parts(done.clock)),
        ("line of metrics.jsonl", write_line),
        ("status.json", write_status),
    )
