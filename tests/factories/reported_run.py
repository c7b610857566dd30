"""Run directories with everything that a report shows: a plan, a report that measured it, and a line a step."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from planning_factory import plan_of
from report_factory import make_report
from run_factory import attempt_record, write_submission

from shardwise.trainer.planning.memory import grouped
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Figures, MemoryPoint, Report, predicted_figures

NUM_STEPS = 40


def tiny_plan(**changes: Any) -> Plan:
    plan = plan_of("tiny", "1xCPU")
    return replace(plan, schedule=replace(plan.schedule, num_steps=NUM_STEPS), **changes)


def measured_figures(plan: Plan) -> Figures:
    """What was predicted, but a tenth slower, with a timeline of one step."""
    predicted = predicted_figures(plan.chosen)
    memory, speed = predicted.memory, predicted.speed
    assert memory.peak_allocated_bytes is not None and speed.step_s is not None
    peak = memory.peak_allocated_bytes
    heights = (("forward", 0.5), ("forward", 0.8), ("backward", 1.0), ("backward", 0.4), ("", 0.3), ("optimizer", 0.3))
    timeline = tuple(
        MemoryPoint(at_s=0.1 * number, allocated_bytes=int(share * peak), phase=phase)
        for number, (phase, share) in enumerate(heights)
    )
    step_s = 1.1 * speed.step_s
    return replace(
        predicted,
        memory=replace(
            memory, parts=grouped(memory.parts), peaks={"forward": peak // 2, "backward": peak, "optimizer": peak // 3},
            timeline=timeline,
        ),
        speed=replace(speed, step_s=step_s, parts={"data": 0.01, "forward": step_s / 3, "backward": step_s / 2}),
    )  # fmt: skip


def report_for(plan: Plan, **changes: Any) -> Report:
    figures = {"predicted": predicted_figures(plan.chosen), "measured": measured_figures(plan)}
    num_steps = plan.schedule.num_steps
    steps = {"step": num_steps, "num_steps": num_steps, "history": (attempt_record(step=num_steps),)}
    return make_report(**{"plan": plan.chosen, **figures, **steps, **changes})


def step_rows(steps: Sequence[int] = range(1, NUM_STEPS + 1), **changes: Any) -> list[dict[str, Any]]:
    times = {"step_s": 2.0, "data_s": 0.02, "forward_s": 0.6, "backward_s": 1.0, "optimizer_s": 0.2}
    rows = []
    for step in steps:
        rates = dict.fromkeys(("tokens_per_s", "tokens_per_s_per_gpu"), 1000.0 + step)
        score = {"eval_loss": 5.1 - step / 50} if step % 10 == 0 else {}
        row = {"step": step, "attempt": 1, "loss": 5.0 - step / 50, **score, **times, **rates}
        rows.append({**row, "memory_peak_bytes": 240 * 2**20, **changes})
    return rows


def write_run(
    run_dir: Path, *, plan: Plan | None = None, report: Report | None = None,
    rows: Sequence[dict[str, Any]] | None = None, overrides: tuple[str, ...] = (), has_report: bool = True,
) -> Path:  # fmt: skip
    run_dir.mkdir(parents=True)
    plan = plan or tiny_plan()
    codec.write(run_dir / "plan.json", plan)
    if has_report:
        codec.write(run_dir / "report.json", report or report_for(plan))
    lines = step_rows() if rows is None else rows
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
    if overrides:
        write_point(run_dir, overrides)
    return run_dir


def write_point(run_dir: Path, overrides: tuple[str, ...]) -> None:
    """What `submit --sweep` leaves in the folder of a point."""
    write_submission(run_dir, script="s", overrides=overrides)
