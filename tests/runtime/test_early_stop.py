"""A run that gains nothing more ends in order, with its best weights; a resumed one goes on counting."""

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from msgspec.structs import replace
from rank_factory import rank_plan, write_attempt, write_rows
from safetensors.torch import load_file

from trainer.runtime.evaluation import evaluations_without_gain
from trainer.runtime.loop import train
from trainer.runtime.model import build_model
from trainer.runtime.report_writer import ReportWriter, run_paths
from trainer.runtime.state import RunState
from trainer.spec.job import CheckpointJob, EvalJob
from trainer.spec.plan import Plan
from trainer.spec.report import Ending, Evaluation

PATIENCE = 3
NAN = float("nan")


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows")


@pytest.fixture(autouse=True)
def no_accelerate_state() -> Iterator[None]:
    """Accelerate's state is global."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def stopping(plan: Plan, *, patience: int | None = PATIENCE, best: str | None = "eval_loss", keep: int = 1) -> Plan:
    job = replace(plan.job, eval=EvalJob(early_stop=patience), checkpoint=CheckpointJob(best=best, keep=keep))
    return replace(plan, job=job)


def diverging(cache_dir: Path, *, num_steps: int = 40) -> Plan:
    """A rate of which the first steps of its warmup gain something, and the later ones undo it."""
    return rank_plan(cache_dir, num_steps=num_steps, eval_every_steps=1, lr=0.15, micro_batch=8, accumulation=1)


def run(run_dir: Path, plan: Plan, *, number: int = 1, num_steps: int | None = None) -> tuple[Ending, RunState]:
    """Runs an attempt in this process; stops it after so many steps."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    paths = run_paths(write_attempt(run_dir, plan, number=number), started_at=datetime.now(UTC))
    state = RunState()
    ending = train(plan, paths, ReportWriter(paths, rank=0), state, lambda: state.step == num_steps)
    return ending, state


def exported(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "export" / "model.safetensors")


def evaluations(losses: Sequence[float]) -> list[Evaluation]:
    return [Evaluation(step=step, loss=loss, perplexity=1.0, num_tokens=1) for step, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("losses", "count"),
    [
        ([], 0),
        ([2.0], 0),
        ([2.0, 1.0], 0),
        ([2.0, 2.0], 1),
        ([2.0, 3.0, 2.5], 2),
        ([2.0, 3.0, 1.9], 0),
        ([1.0, 3.0, 2.0, 1.0], 3),
        ([2.0, NAN], 1),
        ([NAN, 2.0, 2.1], 1),
    ],
)
def test_only_a_lower_loss_is_a_gain(losses, count):
    assert evaluations_without_gain(evaluations(losses)) == count


@pytest.fixture(scope="module")
def stalled(tmp_path_factory, cache_dir) -> tuple[Path, RunState]:
    run_dir = tmp_path_factory.mktemp("stalled")
    ending, state = run(run_dir, stopping(diverging(cache_dir)))
    assert ending is Ending.FINISHED
    return run_dir, state


def test_a_run_ends_after_so_many_evaluations_without_a_lower_loss(stalled):
    _, state = stalled
    counts = [evaluations_without_gain(state.evaluations[:count]) for count in range(len(state.evaluations) + 1)]
    assert counts[-1] == PATIENCE and PATIENCE not in counts[:-1]
    assert PATIENCE < state.step < 40 and state.step == len(state.evaluations)
    assert state.incidents == [
        f"early stop at step {state.step} of 40: 3 evaluations without a lower held-out loss (eval.early_stop); "
        f"the export is of step {state.best_step}, the best"
    ]


def test_the_export_is_of_the_best_step_and_its_checkpoint_stays(stalled, tmp_path, cache_dir):
    run_dir, state = stalled
    kept = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert kept == [f"step-{step:08d}" for step in (state.best_step, state.step)], "the best, and the newest of one"
    assert state.checkpoint == f"checkpoints/step-{state.step:08d}"
    _, best = run(tmp_path, diverging(cache_dir, num_steps=40), num_steps=state.best_step)
    assert best.step == state.best_step and not (tmp_path / "export").exists()
    onward = replace(diverging(cache_dir, num_steps=state.best_step), resume=True)
    run(tmp_path, onward, number=2)
    assert all(torch.equal(exported(tmp_path)[name], value) for name, value in exported(run_dir).items())


def test_a_resumed_run_goes_on_counting(stalled, tmp_path, cache_dir):
    whole_dir, whole = stalled
    ending, state = run(tmp_path, stopping(diverging(cache_dir)), num_steps=whole.step - 1)
    assert ending is Ending.STOPPED and evaluations_without_gain(state.evaluations) == PATIENCE - 1
    ending, resumed = run(tmp_path, replace(stopping(diverging(cache_dir)), resume=True), number=2)
    assert ending is Ending.FINISHED and resumed.step == whole.step
    assert [done.loss for done in resumed.evaluations] == [done.loss for done in whole.evaluations]
    assert resumed.tokens_seen == whole.tokens_seen
    assert all(torch.equal(exported(tmp_path)[name], value) for name, value in exported(whole_dir).items())
    ending, again = run(tmp_path, replace(stopping(diverging(cache_dir)), resume=True), number=3)
    assert (ending, again.step, again.resumed_from_step) == (Ending.FINISHED, whole.step, whole.step), (
        "not one step more"
    )


def test_a_run_that_gains_takes_all_its_steps_and_exports_the_last(tmp_path, cache_dir):
    plan = rank_plan(cache_dir, num_steps=6, eval_every_steps=1, micro_batch=8, accumulation=1)
    _, state = run(tmp_path / "stopping", stopping(plan, patience=2))
    assert (state.step, state.incidents) == (6, [])
    run(tmp_path / "plain", plan)
    assert all(
        torch.equal(exported(tmp_path / "plain")[name], value)
        for name, value in exported(tmp_path / "stopping").items()
    )


def test_the_best_is_kept_for_an_early_stop_also_where_the_job_keeps_no_best(tmp_path, cache_dir, stalled):
    _, state = run(tmp_path, stopping(diverging(cache_dir), best=None))
    assert all(torch.equal(exported(tmp_path)[name], value) for name, value in exported(stalled[0]).items())
    assert state.incidents[-1].endswith(f"the export is of step {state.best_step}, the best")


def test_where_no_checkpoint_can_be_saved_the_best_is_exported_as_it_comes(tmp_path, cache_dir):
    """A file stands where the folder of the checkpoints would be."""
    plan, stopped = diverging(cache_dir), tmp_path / "stopped"
    stopped.mkdir()
    (stopped / "checkpoints").write_text("in the way")
    ending, state = run(stopped, stopping(plan))
    assert ending is Ending.FINISHED and (stopped / "checkpoints").is_file()
    assert state.best_step is not None and state.best_step < state.step < 40
    assert all(line.startswith("no checkpoint at ") for line in state.incidents[:-1]) and len(state.incidents) > 1
    assert state.incidents[-1].endswith(f"is of step {state.best_step}, the best")
    short = replace(plan, schedule=replace(plan.schedule, num_steps=state.best_step))
    run(tmp_path / "short", short)
    lines = (stopped / "metrics.jsonl").read_text().splitlines()[: state.best_step]
    same = (tmp_path / "short" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == [json.loads(line)["loss"] for line in same]
    start = build_model(plan).state_dict()
    for name, value in exported(tmp_path / "short").items():
        assert torch.equal(exported(stopped)[name], value)
        assert not torch.equal(start[name], value)
