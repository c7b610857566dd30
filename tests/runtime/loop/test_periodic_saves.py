"""The checkpoints of a run on its way: the first read back, the later ones beside the training, none lost."""

from collections.abc import Iterator
from dataclasses import replace as with_field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from msgspec.structs import replace
from rank_factory import rank_plan, write_attempt, write_rows

from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint, steps_in
from shardwise.trainer.runtime.checkpoint.verify import checkpoint_digest
from shardwise.trainer.runtime.loop import saving
from shardwise.trainer.runtime.loop.course import train
from shardwise.trainer.runtime.loop.saving import poll_save, save_state, settle_save
from shardwise.trainer.runtime.loop.session import Session, build_session
from shardwise.trainer.runtime.run.report_writer import ReportWriter, run_paths
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.job.kinds import Every
from shardwise.trainer.spec.messages.saving import saving_choice
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows")


@pytest.fixture(autouse=True)
def no_accelerate_state() -> Iterator[None]:
    """Accelerate's state is global."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def plan_of(cache_dir: Path, *, schedule: dict[str, object] | None = None, **checkpoint: Any) -> Plan:
    plan = rank_plan(cache_dir, num_steps=6, checkpoint_every_steps=2, micro_batch=8, accumulation=1)
    job = replace(plan.job, checkpoint=replace(plan.job.checkpoint, **({"keep": 9} | checkpoint)))
    return replace(plan, job=job, schedule=replace(plan.schedule, **(schedule or {})))


def run(plan: Plan, run_dir: Path) -> RunState:
    paths, state = run_paths(write_attempt(run_dir, plan), started_at=datetime.now(UTC)), RunState()
    assert train(plan, paths, ReportWriter(paths, rank=0), state, lambda: False) is Ending.FINISHED
    return state


def digests(run_dir: Path) -> dict[int, str]:
    root = run_dir / "checkpoints"
    return {step: checkpoint_digest(open_checkpoint(root / f"step-{step:08d}")) for step in steps_in(root)}


def start(plan: Plan, run_dir: Path) -> Session:
    paths = run_paths(write_attempt(run_dir, plan), started_at=datetime.now(UTC))
    return build_session(plan, paths, ReportWriter(paths, rank=0), RunState())


def test_a_run_that_saves_in_the_background_leaves_the_same_checkpoints(cache_dir: Path, tmp_path: Path) -> None:
    plan = plan_of(cache_dir, is_async=True)
    assert saving_choice(plan, plan.chosen).is_background
    state = run(plan, tmp_path / "background")
    assert state.checkpoint == "checkpoints/step-00000006" and state.incidents == []
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    run(plan_of(cache_dir, is_async=False), tmp_path / "waiting")
    assert list(digests(tmp_path / "background")) == [2, 4, 6]
    assert digests(tmp_path / "background") == digests(tmp_path / "waiting")


def test_what_is_on_its_way_is_committed_before_the_next_and_of_its_own_step(cache_dir: Path, tmp_path: Path) -> None:
    session = start(plan_of(cache_dir), tmp_path)
    state, weight = session.state, next(session.model.parameters())
    for step in (1, 2):
        state.step = step
        weight.data.fill_(float(step))
        save_state(session, f"step {step}", in_background=True)
        assert state.checkpoint == (None if step == 1 else "checkpoints/step-00000001")
    weight.data.fill_(3.0)
    settle_save(session)
    assert state.checkpoint == "checkpoints/step-00000002"
    assert not poll_save(session), "nothing is on its way"
    assert len(set(digests(tmp_path).values())) == 2
    state.step = 2
    assert digests(tmp_path)[2] == _digest_after(session, tmp_path / "again", value=2.0)


def _digest_after(session: Session, run_dir: Path, *, value: float) -> str:
    with torch.no_grad():
        next(session.model.parameters()).fill_(value)
    session = with_field(session, paths=replace(session.paths, run_dir=run_dir))
    save_state(session, "the same again")
    return digests(run_dir)[session.state.step]


def test_a_save_that_fails_in_the_background_is_an_incident_and_the_older_one_stays(
    cache_dir: Path, tmp_path: Path
) -> None:
    session = start(plan_of(cache_dir), tmp_path)
    session.state.step = 1
    save_state(session, "step 1")
    session.state.step = 2
    save_state(session, "step 2", in_background=True)
    (staged,) = (path for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith(".tmp-"))
    session.in_flight.save._written.result()
    staged.rename(tmp_path / "taken-away")
    settle_save(session)
    (incident,) = session.state.incidents
    assert incident.startswith("no checkpoint at step 2: the checkpoint of step 2 was not saved: ")
    assert session.state.checkpoint == "checkpoints/step-00000001"
    assert steps_in(tmp_path / "checkpoints") == [1]


def test_the_first_step_is_saved_and_read_back(cache_dir: Path, tmp_path: Path) -> None:
    state = run(plan_of(cache_dir, schedule={"rehearses_save": True, "checkpoint_every_steps": None}), tmp_path)
    assert list(digests(tmp_path)) == [1, 6]
    assert state.incidents == []


def test_a_disk_that_keeps_something_else_ends_the_run_after_one_step(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system that changes a byte behind the back of who wrote it."""

    honest = save_state

    def save_and_damage(session: Session, occasion: str, *, in_background: bool = False) -> None:
        honest(session, occasion, in_background=in_background)
        shard = session.paths.run_dir / str(session.state.checkpoint) / "shard-00000.safetensors"
        content = bytearray(shard.read_bytes())
        content[-3] ^= 64
        shard.write_bytes(content)

    monkeypatch.setattr(saving, "save_state", save_and_damage)
    plan = plan_of(cache_dir, schedule={"rehearses_save": True})
    paths, state = run_paths(write_attempt(tmp_path, plan), started_at=datetime.now(UTC)), RunState()
    with pytest.raises(EnvironmentFaultError, match=r"hashes to .*;\nthis checkpoint could not be resumed from"):
        train(plan, paths, ReportWriter(paths, rank=0), state, lambda: False)
    assert state.step == 1


def test_every_nth_is_kept_for_good(cache_dir: Path, tmp_path: Path) -> None:
    run(plan_of(cache_dir, keep=1, keep_every=Every(steps=4), best=None), tmp_path)
    assert steps_in(tmp_path / "checkpoints") == [4, 6]


def test_the_best_of_those_that_were_saved_is_kept(cache_dir: Path, tmp_path: Path) -> None:
    """The loss falls all along, so the best that was saved is the newest: scored at 1 to 6, saved at 2, 4 and 6."""
    plan = plan_of(cache_dir, keep=1, schedule={"eval_every_steps": 1})
    state = run(plan, tmp_path)
    assert [each.step for each in state.evaluations] == [1, 2, 3, 4, 5, 6]
    best = min((each for each in state.evaluations if each.step % 2 == 0), key=lambda each: each.loss).step
    assert steps_in(tmp_path / "checkpoints") == sorted({best, 6})
