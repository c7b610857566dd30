"""When a checkpoint is due, and what becomes of a run whose checkpoint cannot be saved: it continues, or it ends."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attempt_runs import run_attempt, session_of
from msgspec.structs import replace
from rank_factory import rank_plan

from shardwise.trainer.runtime.checkpoint import NonFiniteStateError, Ranks
from shardwise.trainer.runtime.loop.saving import SaveTimer, save_state
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Schedule
from shardwise.trainer.spec.report import Evaluation

NOBODY = 65534


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A folder that any user may write in."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.fixture
def session(cache_dir, run_dir):
    plan = rank_plan(cache_dir)
    job = replace(plan.job, checkpoint=replace(plan.job.checkpoint, keep=1))
    return session_of(run_dir, replace(plan, job=job))


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """As another user, because permission bits mean nothing to root."""
    is_root = os.geteuid() == 0
    folder.chmod(0o555)
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        for path in (folder, *folder.parent.rglob(".tmp-*")):
            if path.is_dir():
                path.chmod(0o777)


def save_at(session, step: int) -> None:
    session.state.step = step
    save_state(session, f"step {step}")


def test_where_nothing_can_be_written_the_run_continues_from_the_checkpoint_before(session, run_dir):
    save_at(session, 1)
    assert (session.state.checkpoint, session.state.incidents) == ("checkpoints/step-00000001", [])
    (run_dir / "attempts" / "1").chmod(0o777)
    (run_dir / "attempts" / "1" / "status.json").chmod(0o666)
    with read_only(run_dir / "checkpoints"):
        save_at(session, 2)
    assert session.state.checkpoint == "checkpoints/step-00000001"
    (incident,) = session.state.incidents
    assert incident.startswith("no checkpoint at step 2: ")


def test_a_checkpoint_counts_though_an_older_one_could_not_be_removed(session, run_dir):
    save_at(session, 1)
    for path in (run_dir / "attempts" / "1", run_dir / "checkpoints"):
        path.chmod(0o777)
    (run_dir / "checkpoints" / ".lock").chmod(0o666)
    with read_only(run_dir / "checkpoints" / "step-00000001"):
        save_at(session, 2)
    assert session.state.checkpoint == "checkpoints/step-00000002"
    (incident,) = session.state.incidents
    assert incident.startswith("at step 2: ")


@pytest.mark.parametrize("saved_before", [True, False])
def test_weights_that_are_not_finite_end_the_run(session, saved_before):
    if saved_before:
        save_at(session, 1)
    before = session.state.checkpoint
    with torch.no_grad():
        next(session.model.parameters()).fill_(float("nan"))
    last = f"the last checkpoint is {before}" if saved_before else "there is no earlier checkpoint"
    with pytest.raises(NonFiniteStateError, match=rf"holds NaN or infinity, so nothing was saved; {last}; "):
        save_at(session, 2)
    assert (session.state.checkpoint, session.state.incidents) == (before, [])


def test_weights_that_took_a_gradient_without_numbers_are_neither_saved_nor_trained_on(cache_dir, run_dir):
    """Within the backward pass the norm of the gradients is unknown, and the loss is still a number."""
    in_backward: dict[str, Any] = {"optimizer_in_backward": True, "clip": 0.0, "micro_batch": 8, "accumulation": 1}
    plan = rank_plan(cache_dir, checkpoint_every_steps=2, eval_every_steps=2, num_steps=40, lr=1e30, **in_backward)
    state = RunState()
    with pytest.raises(NonFiniteStateError, match=r"a lower train\.lr may keep the run finite"):
        run_attempt(run_dir, plan, state=state)
    assert state.step == 2
    for evaluation in state.evaluations:
        codec.decode(codec.encode(evaluation), Evaluation, origin="a report that must be readable")


@pytest.mark.parametrize(
    ("settings", "step_s", "cost_s", "expected"),
    [
        pytest.param({"checkpoint_every_steps": 3}, 1.0, 0.0, [3, 6, 9, 12, 15, 18, 21], id="steps alone"),
        pytest.param(
            {"checkpoint_every_steps": 5, "checkpoint_every_s": 20.0},
            7.0,
            1.0,
            [3, 5, 8, 10, 13, 15, 18, 20],
            id="both",
        ),
        pytest.param({"checkpoint_every_steps": 4, "saving_max_share": 0.1}, 1.0, 0.1, [4, 8, 12, 16, 20], id="cheap"),
        pytest.param({"checkpoint_every_steps": 4, "saving_max_share": 0.1}, 1.0, 0.6, [4, 10, 16, 22], id="put off"),
    ],
)
def test_a_checkpoint_is_due_by_steps_by_the_clock_and_by_what_the_last_one_cost(settings, step_s, cost_s, expected):
    clock = [0.0]
    schedule = Schedule(
        num_steps=100, sequences_per_step=1, tokens_per_step=8, warmup_steps=0, lr=1.0, lr_source="",
        eval_every_steps=None, **({"checkpoint_every_steps": None} | settings),
    )  # fmt: skip
    timer = SaveTimer(schedule, Ranks.alone(), clock=lambda: clock[0])
    due = []
    for step in range(1, 23):
        clock[0] += step_s
        if timer.is_due(step):
            due.append(step)
            timer.saved(cost_s / 2)
            timer.went_on_costing(cost_s / 2)
    assert due == expected
