"""What becomes of a run whose checkpoint cannot be saved: it continues, or it ends where continuing is pointless."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from attempt_runs import losses_of, run_attempt, session_of
from msgspec.structs import replace
from rank_factory import rank_plan

from shardwise.trainer.runtime.checkpoint import NonFiniteStateError
from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer
from shardwise.trainer.runtime.loop.saving import export_model, save_state
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.job.sections import GaloreJob
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.report import Evaluation
from shardwise.trainer.spec.strategy import Method

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
    "settings",
    [
        {"optimizer": Optimizer.PAGED_ADAMW},
        {"optimizer": Optimizer.LION_8BIT},
        {"optimizer": Optimizer.MUON},
        {"optimizer": Optimizer.ADALOMO},
        {"method": Method.GALORE, "train": {"galore": GaloreJob(rank=8, layerwise=True)}},
    ],
    ids=str,
)
def test_a_run_of_another_optimizer_continues_from_its_checkpoint(settings, cache_dir, run_dir):
    """The losses of two attempts of two steps are those of one of four."""
    plan = rank_plan(cache_dir, num_steps=4, checkpoint_every_steps=2, micro_batch=8, accumulation=1, **settings)
    run_attempt(run_dir / "once", plan)
    run_attempt(run_dir / "twice", plan, wants_stop=lambda state: state.step == 2)
    _, state = run_attempt(run_dir / "twice", replace(plan, resume=True), number=2)
    assert (state.incidents, state.resumed_from_step) == ([], 2)
    assert len(losses_of(run_dir / "once")) == 4 and losses_of(run_dir / "once") == losses_of(run_dir / "twice")


def test_an_exported_tokenizer_with_other_ids_is_an_incident_of_the_run(cache_dir, run_dir, tmp_path):
    source = tmp_path / "tokenizer"
    write_trained_tokenizer(train_tokenizer(iter(["a lazy dog"]), vocab_size=270), source)
    settings = msgspec.json.decode((source / "tokenizer_config.json").read_bytes())
    (source / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings | {"extra_special_tokens": ["lazy"]}))
    session = session_of(run_dir, replace(rank_plan(cache_dir), tokenizer_path=str(source)))
    export_model(session)
    (incident,) = session.state.incidents
    assert incident.startswith("the exported tokenizer does not give the same ids ")
    assert session.state.export == "export"
