"""What becomes of a run whose checkpoint cannot be saved: it goes on, or it ends where going on is pointless."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from rank_factory import rank_plan, write_attempt, write_rows

from shardwise.trainer.runtime.checkpoint import NonFiniteStateError
from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer
from shardwise.trainer.runtime.loop.course import train
from shardwise.trainer.runtime.loop.saving import export_model, save_state
from shardwise.trainer.runtime.loop.session import Session, build_session
from shardwise.trainer.runtime.run.report_writer import ReportWriter, run_paths
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.job.sections import GaloreJob
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Evaluation
from shardwise.trainer.spec.strategy import Method, Optimizer

NOBODY = 65534


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows")


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A folder that everybody may write in, whoever runs the tests."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@pytest.fixture(autouse=True)
def no_accelerate_state() -> Iterator[None]:
    """Accelerate's state is global."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def keeping(plan: Plan, num_checkpoints: int) -> Plan:
    checkpoint = msgspec.structs.replace(plan.job.checkpoint, keep=num_checkpoints)
    return msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, checkpoint=checkpoint))


@pytest.fixture
def start(cache_dir, run_dir) -> Callable[..., Session]:
    def build(**changes: Any) -> Session:
        plan = msgspec.structs.replace(keeping(rank_plan(cache_dir), 1), **changes)
        paths = run_paths(write_attempt(run_dir, plan), started_at=datetime.now(UTC))
        return build_session(plan, paths, ReportWriter(paths, rank=0), RunState())

    return build


@contextmanager
def somebody_else() -> Iterator[None]:
    """Permission bits mean nothing to root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    folder.chmod(0o555)
    try:
        with somebody_else():
            yield
    finally:
        for path in (folder, *folder.parent.rglob(".tmp-*")):
            if path.is_dir():
                path.chmod(0o777)


def save_at(session: Session, step: int) -> None:
    session.state.step = step
    save_state(session, f"step {step}")


def test_a_checkpoint_that_was_saved_is_the_newest(start):
    session = start()
    save_at(session, 1)
    assert session.state.checkpoint == "checkpoints/step-00000001"
    assert session.state.incidents == []


def test_where_nothing_can_be_written_the_run_goes_on_from_the_checkpoint_before(start, run_dir):
    session = start()
    save_at(session, 1)
    (run_dir / "attempts" / "1").chmod(0o777)
    (run_dir / "attempts" / "1" / "status.json").chmod(0o666)
    with read_only(run_dir / "checkpoints"):
        save_at(session, 2)
    assert session.state.checkpoint == "checkpoints/step-00000001"
    (incident,) = session.state.incidents
    assert incident.startswith("no checkpoint at step 2: the checkpoint of step 2 was not saved: ")


def test_a_checkpoint_counts_though_an_older_one_could_not_be_removed(start, run_dir):
    session = start()
    save_at(session, 1)
    for path in (run_dir / "attempts" / "1", run_dir / "checkpoints"):
        path.chmod(0o777)
    (run_dir / "checkpoints" / ".lock").chmod(0o666)
    with read_only(run_dir / "checkpoints" / "step-00000001"):
        save_at(session, 2)
    assert session.state.checkpoint == "checkpoints/step-00000002"
    (incident,) = session.state.incidents
    assert "step 2 is saved, but an older checkpoint could not be removed" in incident
    assert not incident.startswith("no checkpoint")


@pytest.mark.parametrize("saved_before", [True, False])
def test_weights_that_are_not_finite_end_the_run(start, saved_before):
    session = start()
    if saved_before:
        save_at(session, 1)
    with torch.no_grad():
        next(session.model.parameters()).fill_(float("nan"))
    words = "the last checkpoint is checkpoints/step-00000001" if saved_before else "there is no earlier checkpoint"
    with pytest.raises(NonFiniteStateError, match=rf"holds NaN or infinity, so nothing was saved; {words}; ") as error:
        save_at(session, 2)
    assert "\n" not in str(error.value)
    assert session.state.checkpoint == ("checkpoints/step-00000001" if saved_before else None)
    assert session.state.incidents == []


def test_weights_that_took_a_gradient_without_numbers_are_neither_saved_nor_trained_on(cache_dir, run_dir):
    """Within the backward pass nothing asks for the norm of the gradients, and the loss is still a number."""
    in_backward: dict[str, Any] = {"optimizer_in_backward": True, "clip": 0.0, "micro_batch": 8, "accumulation": 1}
    plan = rank_plan(cache_dir, checkpoint_every_steps=2, eval_every_steps=2, num_steps=40, **in_backward)
    plan = msgspec.structs.replace(plan, schedule=msgspec.structs.replace(plan.schedule, lr=1e30))
    paths, state = run_paths(write_attempt(run_dir, plan), started_at=datetime.now(UTC)), RunState()
    with pytest.raises(NonFiniteStateError, match=r"a lower train\.lr may keep the run finite"):
        train(plan, paths, ReportWriter(paths, rank=0), state, lambda: False)
    assert state.step == 2
    for evaluation in state.evaluations:
        codec.decode(codec.encode(evaluation), Evaluation, origin="a report that must be readable")


def has_reached(state: RunState, step: int) -> bool:
    return state.step >= step


OTHERS: tuple[dict[str, Any], ...] = (
    *(
        {"optimizer": each}
        for each in (
            Optimizer.SGD, Optimizer.PAGED_ADAMW, Optimizer.ADAMW_8BIT, Optimizer.LION, Optimizer.LION_8BIT,
            Optimizer.ADAFACTOR, Optimizer.MUON, Optimizer.LOMO, Optimizer.ADALOMO,
        )
    ),
    {"method": Method.GALORE, "train": {"galore": GaloreJob(rank=8)}},
    {"method": Method.GALORE, "train": {"galore": GaloreJob(rank=8, layerwise=True)}},
)  # fmt: skip


@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_a_run_of_any_optimizer_goes_on_from_its_checkpoint(settings, cache_dir, run_dir):
    """The losses of two runs of two and of four steps are those of one run of four."""
    losses: dict[str, list[float]] = {"once": [], "twice": []}
    for name, last in (("once", 4), ("twice", 2), ("twice", 4)):
        plan = rank_plan(cache_dir, num_steps=4, checkpoint_every_steps=2, micro_batch=8, accumulation=1, **settings)
        plan = msgspec.structs.replace(plan, resume=bool(losses[name]))
        attempt = write_attempt(run_dir / f"{name}-{last}", plan)
        paths, state = run_paths(attempt, started_at=datetime.now(UTC)), RunState()
        if losses[name]:
            paths = msgspec.structs.replace(paths, resume_dir=run_dir / "twice-2")
        train(plan, paths, ReportWriter(paths, rank=0), state, partial(has_reached, state, last))
        assert state.incidents == [] and state.checkpoint == f"checkpoints/step-{last:08d}"
        lines = (paths.run_dir / "metrics.jsonl").read_text().splitlines()
        losses[name] += [line["loss"] for line in map(msgspec.json.decode, lines)]
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    assert len(losses["once"]) == 4 and losses["once"] == losses["twice"]


def test_an_exported_tokenizer_with_other_ids_is_an_incident_of_the_run(start, tmp_path):
    source = tmp_path / "tokenizer"
    write_trained_tokenizer(train_tokenizer(iter(["a lazy dog"]), vocab_size=270), source)
    settings = msgspec.json.decode((source / "tokenizer_config.json").read_bytes())
    (source / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings | {"extra_special_tokens": ["lazy"]}))
    session = start(tokenizer_path=str(source))
    export_model(session)
    (incident,) = session.state.incidents
    assert incident.startswith("the exported tokenizer does not give the same ids as the one trained with: ")
    assert session.state.export == "export"
