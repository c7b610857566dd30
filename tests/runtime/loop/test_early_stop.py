"""A run that gains nothing more ends in order, with its best weights; a resumed one goes on counting."""

import math
from pathlib import Path

import pytest
import torch
from attempt_runs import losses_of, reset_accelerate, run_attempt
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from rank_factory import NUM_EVAL_ROWS, rank_plan, write_packed_rows
from safetensors.torch import load_file

from shardwise.trainer.runtime.data.batches import eval_micro_batches
from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.engines.accelerator import build_accelerator
from shardwise.trainer.runtime.loop.objectives import evaluate, evaluations_without_gain
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.job.sections import CheckpointJob, EvalJob
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Evaluation
from shardwise.trainer.spec.strategy import LossHead

PATIENCE = 3
NAN = float("nan")


def run(
    run_dir: Path, cache_dir: Path, *, number: int = 1, num_steps: int | None = None, last: int = 40,
    patience: int | None = PATIENCE, best: str | None = "eval_loss",
) -> tuple[Ending, RunState]:  # fmt: skip
    """At a rate of which the first steps of its warmup gain something, and the later ones undo it."""
    plan = rank_plan(cache_dir, num_steps=last, eval_every_steps=1, lr=0.15, micro_batch=8, accumulation=1)
    job = replace(plan.job, eval=EvalJob(early_stop=patience), checkpoint=CheckpointJob(best=best, keep=1))
    plan = replace(plan, job=job, resume=number > 1)
    return run_attempt(run_dir, plan, number=number, wants_stop=lambda state: state.step == num_steps)


def exported(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "export" / "model.safetensors")


def is_same_export(run_dir: Path, other_dir: Path) -> bool:
    return all(torch.equal(exported(run_dir)[name], value) for name, value in exported(other_dir).items())


@pytest.mark.parametrize(
    ("losses", "count"),
    [
        ([], 0), ([2.0], 0), ([2.0, 1.0], 0), ([2.0, 2.0], 1), ([2.0, 3.0, 2.5], 2), ([2.0, 3.0, 1.9], 0),
        ([1.0, 3.0, 2.0, 1.0], 3), ([2.0, NAN], 1), ([NAN, 2.0, 2.1], 1),
    ],
)  # fmt: skip
def test_only_a_lower_loss_is_a_gain(losses, count):
    found = [
        Evaluation(step=step, loss=loss, perplexity=1.0, num_tokens=1) for step, loss in enumerate(losses, start=1)
    ]
    assert evaluations_without_gain(found) == count


@pytest.fixture(scope="module")
def stalled(tmp_path_factory, cache_dir) -> tuple[Path, RunState]:
    run_dir = tmp_path_factory.mktemp("stalled")
    ending, state = run(run_dir, cache_dir)
    assert ending is Ending.FINISHED
    return run_dir, state


def test_a_run_ends_after_so_many_evaluations_without_a_lower_loss(stalled):
    _, state = stalled
    counts = [evaluations_without_gain(state.evaluations[:count]) for count in range(len(state.evaluations) + 1)]
    assert counts[-1] == PATIENCE and PATIENCE not in counts[:-1]
    assert PATIENCE < state.step < 40 and state.step == len(state.evaluations)
    (incident,) = state.incidents
    assert all(fact in incident for fact in (f"step {state.step} of 40", "eval.early_stop", f"step {state.best_step},"))


def test_the_export_is_of_the_best_step_and_its_checkpoint_stays(stalled, tmp_path, cache_dir):
    run_dir, state = stalled
    retained = sorted(path.name for path in (run_dir / "checkpoints").glob("step-*"))
    assert retained == [f"step-{step:08d}" for step in (state.best_step, state.step)], "the best, and the newest of one"
    assert state.checkpoint == f"checkpoints/step-{state.step:08d}"
    _, best = run(tmp_path, cache_dir, num_steps=state.best_step, patience=None)
    assert best.step == state.best_step and not (tmp_path / "export").exists()
    run(tmp_path, cache_dir, number=2, last=state.best_step, patience=None)
    assert is_same_export(tmp_path, run_dir)


def test_a_resumed_run_goes_on_counting(stalled, tmp_path, cache_dir):
    whole_dir, whole = stalled
    ending, state = run(tmp_path, cache_dir, num_steps=whole.step - 1)
    assert ending is Ending.STOPPED and evaluations_without_gain(state.evaluations) == PATIENCE - 1
    ending, resumed = run(tmp_path, cache_dir, number=2)
    assert ending is Ending.FINISHED and resumed.step == whole.step
    assert [done.loss for done in resumed.evaluations] == [done.loss for done in whole.evaluations]
    assert resumed.tokens_seen == whole.tokens_seen
    assert is_same_export(tmp_path, whole_dir)
    ending, again = run(tmp_path, cache_dir, number=3)
    assert (ending, again.step, again.resumed_from_step) == (Ending.FINISHED, whole.step, whole.step)


def test_the_best_is_kept_for_an_early_stop_also_where_the_job_keeps_no_best(tmp_path, cache_dir, stalled):
    _, state = run(tmp_path, cache_dir, best=None)
    assert is_same_export(tmp_path, stalled[0])
    assert f"export is of step {state.best_step}," in state.incidents[-1]


def test_where_no_checkpoint_can_be_saved_the_best_is_exported_and_the_run_fails(tmp_path, cache_dir, stalled):
    """A file stands where the folder of the checkpoints would be."""
    stopped, best_step = tmp_path / "stopped", stalled[1].best_step
    stopped.mkdir()
    (stopped / "checkpoints").write_text("in the way")
    with pytest.raises(EnvironmentFaultError, match="no checkpoint at the end"):
        run(stopped, cache_dir)
    assert (stopped / "checkpoints").is_file() and len(losses_of(stopped)) == stalled[1].step < 40
    run(tmp_path / "short", cache_dir, last=best_step, patience=None)
    assert losses_of(stopped)[:best_step] == losses_of(tmp_path / "short")
    start = build_model(rank_plan(cache_dir)).state_dict()
    assert is_same_export(stopped, tmp_path / "short")
    assert not any(torch.equal(start[name], value) for name, value in exported(stopped).items())


LIKELY = {**TINY_LLAMA, "tie_word_embeddings": True, "initializer_range": 0.2}  # a token is likely after itself


@pytest.fixture(scope="module")
def caches(tmp_path_factory, cache_dir) -> dict[str, Path]:
    return {"rows": cache_dir, "packed": write_packed_rows(tmp_path_factory.mktemp("data") / "packed")}


def by_hand(plan: Plan) -> tuple[float, int, int]:
    model = build_model(plan).eval()
    rows = TokenRows.open(Path(plan.data.cache_dir), "eval")
    loss, num_right, num_targets = 0.0, 0, 0
    for batch in eval_micro_batches(rows, rank=0, num_ranks=1, micro_batch=1):
        starts = [0] if batch.position_ids is None else (batch.position_ids[0] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], batch.input_ids.shape[1]], strict=True):
            with torch.no_grad():
                logits = model(input_ids=batch.input_ids[:, start:end]).logits[0, :-1]
            targets = batch.labels[0, start + 1 : end]
            loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            num_right += int((logits.argmax(-1) == targets).sum())
            num_targets += int((targets != IGNORED_LABEL).sum())
    return loss, num_right, num_targets


@pytest.mark.parametrize("head", [LossHead.EAGER, LossHead.CHUNKED, LossHead.FUSED])
@pytest.mark.parametrize(("cache", "micro_batch"), [("rows", 7), ("packed", 5)])
def test_loss_perplexity_and_accuracy_are_exact(caches, cache, micro_batch, head):
    plan = rank_plan(caches[cache], loss=head, micro_batch=micro_batch, model_config=LIKELY)
    loss, num_right, num_targets = by_hand(plan)
    reset_accelerate()
    accelerator, model = build_accelerator(plan, ds_config=None), build_model(plan)
    found = evaluate(accelerator, model, TokenRows.open(caches[cache], "eval"), plan, step=3)
    assert model.training, "as it was before"
    assert found.num_tokens == num_targets > NUM_EVAL_ROWS
    assert found.loss == pytest.approx(loss / num_targets, abs=1e-6)
    assert found.perplexity == pytest.approx(math.exp(loss / num_targets), rel=1e-6)
    assert found.accuracy == pytest.approx(num_right / num_targets, abs=1e-12)
    assert num_right > 0
