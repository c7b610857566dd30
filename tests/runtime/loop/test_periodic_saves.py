"""Checkpoints of a run on its way: when they are due, saved during training, read back; and where none can be saved."""

import errno
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from attempt_runs import run_attempt, session_of
from msgspec.structs import replace
from rank_factory import rank_plan
from small_disk import file_size_limit, flip_bit

from shardwise.trainer.runtime.checkpoint import NonFiniteStateError, Ranks
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint, steps_in
from shardwise.trainer.runtime.checkpoint.load import checkpoint_digest
from shardwise.trainer.runtime.loop import saving
from shardwise.trainer.runtime.loop.saving import SaveTimer, save_state, settle_save
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.job.kinds import Every
from shardwise.trainer.spec.messages.rank_files import read_heartbeat, saving_choice
from shardwise.trainer.spec.plan import Plan, Schedule
from shardwise.trainer.spec.report import Ending, Evaluation

SHARD_BYTES = 1_288_768


def plan_of(cache_dir: Path, *, schedule: dict[str, object] | None = None, **checkpoint: Any) -> Plan:
    plan = rank_plan(cache_dir, num_steps=6, checkpoint_every_steps=2, micro_batch=8, accumulation=1)
    job = replace(plan.job, checkpoint=replace(plan.job.checkpoint, **({"keep": 9} | checkpoint)))
    return replace(plan, job=job, schedule=replace(plan.schedule, **(schedule or {})))


def digests(run_dir: Path) -> dict[int, str]:
    root = run_dir / "checkpoints"
    return {step: checkpoint_digest(open_checkpoint(root / f"step-{step:08d}")) for step in steps_in(root)}


def test_a_run_that_saves_in_the_background_has_the_same_checkpoints(cache_dir, tmp_path):
    plan = plan_of(cache_dir, is_async=True)
    assert saving_choice(plan.job, plan.hardware, plan.chosen).is_background
    _, state = run_attempt(tmp_path / "background", plan)
    assert state.checkpoint == "checkpoints/step-00000006" and state.incidents == []
    run_attempt(tmp_path / "waiting", plan_of(cache_dir, is_async=False))
    assert list(digests(tmp_path / "background")) == [2, 4, 6]
    assert digests(tmp_path / "background") == digests(tmp_path / "waiting")


def test_a_save_that_fails_in_the_background_is_an_incident_and_the_older_one_stays(session, tmp_path):
    save_at(session, 1)
    save_at(session, 2, in_background=True)
    (staged,) = (tmp_path / "checkpoints").glob(".tmp-*")
    session.in_flight.save._written.result()
    staged.rename(tmp_path / "taken-away")
    settle_save(session)
    (incident,) = session.state.incidents
    assert incident.startswith("no checkpoint at step 2: the checkpoint of step 2 was not saved: ")
    assert session.state.checkpoint == "checkpoints/step-00000001"
    assert steps_in(tmp_path / "checkpoints") == [1]


def test_a_disk_that_keeps_something_else_ends_the_run_after_one_step(cache_dir, tmp_path, monkeypatch):
    """A file system that changes a byte after the write."""

    def save_and_damage(session, occasion, *, in_background=False):
        save_state(session, occasion, in_background=in_background)
        flip_bit(session.paths.run_dir / str(session.state.checkpoint) / "shard-00000.safetensors", -3)

    monkeypatch.setattr(saving, "save_state", save_and_damage)
    state = RunState()
    with pytest.raises(EnvironmentFaultError, match=r"hashes to .*;\nthis checkpoint could not be resumed from"):
        run_attempt(tmp_path, plan_of(cache_dir, schedule={"rehearses_save": True}), state=state)
    assert state.step == 1


def test_every_nth_is_kept_for_good(cache_dir, tmp_path):
    run_attempt(tmp_path, plan_of(cache_dir, keep=1, keep_every=Every(steps=4), best=None))
    assert steps_in(tmp_path / "checkpoints") == [4, 6]


def test_the_best_of_those_that_were_saved_is_kept(cache_dir, tmp_path):
    """The loss falls all along, so the best that was saved is the newest: scored at 1 to 6, saved at 2, 4 and 6."""
    _, state = run_attempt(tmp_path, plan_of(cache_dir, keep=1, schedule={"eval_every_steps": 1}))
    assert [each.step for each in state.evaluations] == [1, 2, 3, 4, 5, 6]
    best = min((each for each in state.evaluations if each.step % 2 == 0), key=lambda each: each.loss).step
    assert steps_in(tmp_path / "checkpoints") == sorted({best, 6})


def test_a_failed_save_is_tried_again_at_the_next_steps(cache_dir, tmp_path):
    """No shard can be written up to step 5: saves of steps 2, 3 and 4 fail, that of step 5 succeeds."""
    with ExitStack() as full:
        full.enter_context(file_size_limit(SHARD_BYTES // 2))

        def free(state: RunState) -> bool:
            if state.step == 4:
                full.close()
            return False

        ending, state = run_attempt(tmp_path, plan_of(cache_dir), wants_stop=free)
    assert ending is Ending.FINISHED and state.unsaved is None
    first, more = state.incidents
    assert first.startswith("no checkpoint at step 2: ") and "no checkpoint at step 4: " in more
    assert steps_in(tmp_path / "checkpoints") == [5, 6]


def test_a_run_whose_end_cannot_be_saved_fails_with_its_export_and_without_its_checkpoint(cache_dir, tmp_path):
    state = RunState()
    with (
        file_size_limit(SHARD_BYTES // 2),
        pytest.raises(EnvironmentFaultError, match=r"no checkpoint at the end: .*;\nmake room and add --resume"),
    ):
        run_attempt(tmp_path, plan_of(cache_dir), state=state)
    assert (state.step, state.export, state.checkpoint) == (6, "export", None)
    assert (tmp_path / "export" / "model.safetensors").stat().st_size < SHARD_BYTES // 2
    heartbeat = read_heartbeat(tmp_path / "attempts" / "1", 0)
    assert heartbeat is not None and heartbeat.problem == state.unsaved


@pytest.fixture
def session(cache_dir, tmp_path):
    return session_of(tmp_path, plan_of(cache_dir, keep=1))


def save_at(session, step: int, **settings: bool) -> None:
    session.state.step = step
    save_state(session, f"step {step}", **settings)


def test_a_checkpoint_counts_though_an_older_one_could_not_be_removed(session, monkeypatch):
    save_at(session, 1)
    assert (session.state.checkpoint, session.state.incidents) == ("checkpoints/step-00000001", [])
    once = session.state.saved_bytes
    save_at(session, 1)
    assert session.state.saved_bytes == once > 0, "what is there already is not written again"
    rename = os.rename

    def refuse(source, target):
        if Path(source).name == "step-00000001":
            raise PermissionError(errno.EACCES, "Permission denied", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
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


def test_weights_that_took_a_gradient_without_numbers_are_neither_saved_nor_trained_on(cache_dir, tmp_path):
    """Within the backward pass the norm of the gradients is unknown, and the loss is still a number."""
    in_backward: dict[str, Any] = {"optimizer_in_backward": True, "clip": 0.0, "micro_batch": 8, "accumulation": 1}
    plan = rank_plan(cache_dir, checkpoint_every_steps=2, eval_every_steps=2, num_steps=40, lr=1e30, **in_backward)
    state = RunState()
    with pytest.raises(NonFiniteStateError, match=r"a lower train\.lr may keep the run finite"):
        run_attempt(tmp_path, plan, state=state)
    assert state.step == 2
    for evaluation in state.evaluations:
        codec.decode(codec.encode(evaluation), Evaluation, origin="a report that must be readable")


@pytest.mark.parametrize(
    ("settings", "step_s", "cost_s", "expected"),
    [
        ({"checkpoint_every_steps": 3}, 1.0, 0.0, [3, 6, 9, 12, 15, 18, 21]),
        ({"checkpoint_every_steps": 5, "checkpoint_every_s": 20.0}, 7.0, 1.0, [3, 5, 8, 10, 13, 15, 18, 20]),
        ({"checkpoint_every_steps": 4, "saving_max_share": 0.1}, 1.0, 0.1, [4, 8, 12, 16, 20]),
        ({"checkpoint_every_steps": 4, "saving_max_share": 0.1}, 1.0, 0.6, [4, 10, 16, 22]),
    ],
    ids=["steps alone", "both", "cheap", "put off"],
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
