"""The cost of comparing the first steps with the plan: a step with and without, in milliseconds, on one CPU.

The same small model is trained with `train.check_first_steps` on and off, alternating in one run. A row is a step,
with what comes around it in the loop of a run. From step 5 on nothing is left of the comparison: the target is that
such a step is less than 1 % longer, which is about what two series of the same steps differ by (`off_again_ms`).
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS, ROUNDS = 24, 7
NUM_CHECKED = 4
TARGET_SHARE = 0.01


def bench_first_steps() -> list[dict[str, object]]:
    """One row for each of the first steps, and one for those after them."""
    for imported in (ROOT / "tests" / "factories", ROOT):
        if str(imported) not in sys.path:
            sys.path.insert(0, str(imported))
    found: dict[str, list[list[float]]] = {"on": [], "off": [], "off_again": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(ROUNDS + 1):
            for name, seconds in found.items():
                seconds.append(_seconds(Path(folder, f"{name}-{number}"), is_on=name == "on"))
    found = {name: seconds[1:] for name, seconds in found.items()}  # the first of each warms up
    rows = []
    steps = {str(step + 1): slice(step, step + 1) for step in range(NUM_CHECKED)}
    for name, steps_of_row in (steps | {f"{NUM_CHECKED + 1} to {NUM_STEPS}": slice(NUM_CHECKED, NUM_STEPS)}).items():
        on, off, again = (median(each for seconds in found[case] for each in seconds[steps_of_row]) for case in found)
        is_met = on - off < TARGET_SHARE * off
        verdict = "" if name in steps else "met" if is_met else "MISSED"
        rows.append(
            {"step": name, "on_ms": _ms(on), "off_ms": _ms(off), "off_again_ms": _ms(again), "verdict": verdict}
        )
    return rows


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _seconds(run_dir: Path, *, is_on: bool) -> list[float]:
    """Seconds of every step of one run, and of its comparison."""
    from attempt_runs import session_of
    from engine_plan_factory import TINY_LLAMA
    from rank_factory import rank_plan, write_rows

    from shardwise.trainer.runtime.data.batches import step_micro_batches
    from shardwise.trainer.runtime.data.stream.rows import StepRows
    from shardwise.trainer.runtime.loop.first_steps import FirstSteps
    from shardwise.trainer.runtime.loop.step import TokenLoss, run_step
    from shardwise.trainer.runtime.run.clock import Clock
    from shardwise.trainer.spec.optimizers import Optimizer
    from shardwise.trainer.spec.plan import learning_rate

    config = {**TINY_LLAMA, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "vocab_size": 4096}
    plan = rank_plan(
        write_rows(run_dir / "rows"), num_steps=NUM_STEPS, micro_batch=8, accumulation=1, model_config=config,
        optimizer=Optimizer.ADAMW_FUSED, train={"check_first_steps": is_on},
    )  # fmt: skip
    session = session_of(run_dir, plan)
    state = session.state
    checks, chosen, seed, seconds = FirstSteps(session, TokenLoss()), plan.chosen, plan.job.train.seed, []
    for step in range(1, NUM_STEPS + 1):
        begin = time.perf_counter()
        checks.before_step()
        micro_batches, num_terms = step_micro_batches(
            session.train_rows, step=step - 1, seed=seed, sequences_per_step=plan.schedule.sequences_per_step, rank=0,
            num_ranks=1, micro_batch=chosen.micro_batch, accumulation=chosen.accumulation,
        )  # fmt: skip
        result = run_step(
            session.accelerator, session.model, session.optimizer, micro_batches, num_terms=num_terms, step=step,
            seed=seed, lr=learning_rate(plan.schedule, plan.job.train, step), clip=plan.job.train.clip,
            clock=Clock(session.accelerator.device),
        )  # fmt: skip
        state.step = step
        checks.after_step(StepRows(session.train_rows, step - 1, seed), micro_batches, result)
        checks.end_if_certain()
        seconds.append(time.perf_counter() - begin)
    return seconds
