"""The cost of comparing the first steps with the plan: milliseconds beside the steps themselves, on one CPU.

The same small model is trained with `train.check_first_steps` on and off. A row is a step: its own seconds, and those
that the comparison took around it, read from the wall clock of the run. From step 5 on nothing is left of it: the
target is below 1 % of a step there.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS, ROUNDS = 8, 5
TARGET_SHARE = 0.01


def bench_first_steps() -> list[dict[str, object]]:
    """One row for each of the first steps, and one for those after them."""
    for imported in (ROOT / "tests" / "factories", ROOT):
        if str(imported) not in sys.path:
            sys.path.insert(0, str(imported))
    with tempfile.TemporaryDirectory() as folder:
        rounds = [_seconds(Path(folder, str(number))) for number in range(ROUNDS)]
    rows = []
    for step in range(NUM_STEPS):
        own, check = (median(each[step][part] for each in rounds) for part in (0, 1))
        verdict = "" if step < 4 else "met" if check < TARGET_SHARE * own else "MISSED"
        rows.append({"step": step + 1, "step_ms": _ms(own), "check_ms": _ms(check), "verdict": verdict})
    return rows


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def _seconds(run_dir: Path) -> list[tuple[float, float]]:
    """(seconds of a step, seconds of its comparison) of every step of one run."""
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
        optimizer=Optimizer.ADAMW_FUSED,
    )  # fmt: skip
    session = session_of(run_dir, plan)
    state = session.state
    checks, chosen, seed, seconds = FirstSteps(session, TokenLoss()), plan.chosen, plan.job.train.seed, []
    for step in range(1, NUM_STEPS + 1):
        begin = time.perf_counter()
        checks.before_step()
        read = time.perf_counter()
        micro_batches, num_terms = step_micro_batches(
            session.train_rows, step=step - 1, seed=seed, sequences_per_step=plan.schedule.sequences_per_step, rank=0,
            num_ranks=1, micro_batch=chosen.micro_batch, accumulation=chosen.accumulation,
        )  # fmt: skip
        result = run_step(
            session.accelerator, session.model, session.optimizer, micro_batches, num_terms=num_terms, step=step,
            seed=seed, lr=learning_rate(plan.schedule, plan.job.train, step), clip=plan.job.train.clip,
            clock=Clock(session.accelerator.device),
        )  # fmt: skip
        state.step, done = step, time.perf_counter()
        checks.after_step(StepRows(session.train_rows, step - 1, seed), micro_batches, result)
        checks.end_if_certain()
        seconds.append((done - read, read - begin + time.perf_counter() - done))
    return seconds
