"""Runs of DPO in one process: where the reference comes from, what a resumed run reads, how a stalled run ends."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from attempt_runs import losses_of, metrics_of, run_attempt, session_of
from msgspec.structs import replace
from pair_factory import NUM_EVAL_PAIRS, pair_plan, write_pairs

from shardwise.trainer.runtime.data.batches import MicroBatch, eval_micro_batches
from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.loop.objectives import as_it_is, build_objectives, evaluate, plain_base
from shardwise.trainer.runtime.loop.session import Session
from shardwise.trainer.runtime.loss import LossOutput
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.runtime.run.state import RunState
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.sections import LoraJob, LrSchedule
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.strategy import LossHead, Method

CPU = torch.device("cpu")
LORA = LoraJob(rank=4, alpha=8.0)
DORA = LoraJob(rank=4, alpha=8.0, dora=True, dropout=0.3)
CONSTANT = {"schedule": LrSchedule.CONSTANT}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "rows")


def run(run_dir: Path, plan: Plan, *, number: int = 1, wants_stop: bool = False) -> RunState:
    """Runs an attempt in this process; its ending is checked to be a finish, or a stop where one was wanted."""
    ending, state = run_attempt(run_dir, plan, number=number, wants_stop=lambda _: wants_stop)
    assert ending is (Ending.STOPPED if wants_stop else Ending.FINISHED)
    return state


def move_adapters(session: Session, by: Callable[[torch.Tensor], torch.Tensor | float]) -> None:
    with torch.no_grad():
        for parameter in session.model.parameters():
            if parameter.requires_grad:
                parameter.add_(by(parameter))


def held_out(cache_dir: Path) -> MicroBatch:
    (found,) = eval_micro_batches(
        TokenRows.open(cache_dir, "eval"), rank=0, num_ranks=1, micro_batch=NUM_EVAL_PAIRS, max_rows=NUM_EVAL_PAIRS
    )
    return found


def logps_of_base(plan: Plan, micro_batch: MicroBatch) -> torch.Tensor:
    """Log-probabilities of rows under the base model of the plan, from transformers' logits."""
    base = replace(plan, candidates=(replace(plan.chosen, method=Method.FULL),))
    model = build_model(base).eval()
    with torch.no_grad():
        shares = model(input_ids=micro_batch.input_ids).logits[:, :-1].log_softmax(-1)
    labels = micro_batch.labels[:, 1:]
    picked = shares.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (picked * (labels != IGNORED_LABEL)).double().sum(1)


@pytest.mark.parametrize("lora", [LORA, DORA], ids=["lora", "dora"])
def test_the_reference_of_adapters_is_the_model_without_them(tmp_path, cache_dir, lora):
    plan = pair_plan(cache_dir, method=Method.LORA, train={"lora": lora, "neftune_alpha": 5.0}, micro_batch=8)
    session = session_of(tmp_path, plan)
    torch.manual_seed(0)
    move_adapters(session, lambda parameter: torch.randn_like(parameter) * 0.1)
    micro_batch, expected = held_out(cache_dir), logps_of_base(plan, held_out(cache_dir))
    inputs = {"input_ids": micro_batch.input_ids, "labels": micro_batch.labels, "output": LossOutput.ROWS}
    before = session.model.eval()(**inputs).detach()
    session.model.train()
    torch.testing.assert_close(plain_base(session.model, micro_batch, CPU), expected, rtol=1e-6, atol=1e-5)
    assert session.model.training
    session.model.eval()
    assert torch.equal(session.model(**inputs).detach(), before), "the adapters are on again"
    assert (before - expected).abs().max() > 0.1, "they make a difference"
    session.model(**inputs).sum().backward()
    assert all(parameter.grad is not None for parameter in session.model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("method", [Method.LORA, Method.FULL])
def test_a_run_prefers_the_chosen_answers_and_reports_it(tmp_path, cache_dir, method):
    settings: dict[str, Any] = {"micro_batch": 8, "num_steps": 20, "eval_every_steps": 10, "lr": 5e-3}
    plan = pair_plan(cache_dir, method=method, train={"lora": LORA}, **settings)
    state = run(tmp_path, plan)
    lines = metrics_of(tmp_path)
    assert lines[0]["loss"] == pytest.approx(0.6931472, abs=1e-6), "the model is its own reference"
    assert lines[0]["reward_margin"] == pytest.approx(0.0, abs=1e-6)
    assert lines[-1]["loss"] < 0.6 and lines[-1]["reward_margin"] > 0.2 and lines[-1]["reward_accuracy"] >= 0.75
    assert lines[-1]["reward_margin"] == pytest.approx(
        lines[-1]["reward_chosen"] - lines[-1]["reward_rejected"], abs=1e-9
    )
    assert lines[-1]["tokens"] > 20 * 8 * 2 * 3, "tokens of both answers are counted, not pairs"
    last = state.evaluations[-1]
    assert [line["eval_loss"] for line in lines if "eval_loss" in line] == [each.loss for each in state.evaluations]
    assert lines[-1]["eval_reward_margin"] == last.reward_margin and last.accuracy is None
    assert lines[-1]["eval_reward_accuracy"] == last.reward_accuracy
    assert codec.decode(codec.encode(last), type(last), origin="here") == last
    assert (tmp_path / "reference.safetensors").exists() is (method is Method.FULL)


def test_the_held_out_figures_are_exact(tmp_path, cache_dir):
    plan = pair_plan(cache_dir, method=Method.LORA, train={"lora": LORA}, micro_batch=3, num_steps=4)
    session = session_of(tmp_path, plan)
    move_adapters(session, lambda _: 0.05)
    objectives = build_objectives(session, lambda: False)
    assert objectives is not None and session.eval_rows is not None
    found = evaluate(session.accelerator, session.model, session.eval_rows, plan, step=4, objective=objectives.score)
    batch = held_out(cache_dir)
    policy, base = as_it_is(session.model, batch, CPU), logps_of_base(plan, batch)
    chosen, rejected = 0.1 * (policy - base).view(2, -1)
    assert found.loss == pytest.approx(float(-torch.nn.functional.logsigmoid(chosen - rejected).mean()), abs=1e-6)
    assert found.reward_margin == pytest.approx(float((chosen - rejected).mean()), abs=1e-6)
    assert found.reward_accuracy == float((chosen > rejected).double().mean())
    is_target = batch.labels != IGNORED_LABEL
    assert found.num_tokens == is_target.sum()
    nll = -policy[:NUM_EVAL_PAIRS].sum() / is_target[:NUM_EVAL_PAIRS].sum()
    assert found.perplexity == pytest.approx(float(nll.exp()), rel=1e-6)


@pytest.fixture(scope="module")
def whole(cache_dir, tmp_path_factory) -> Callable[[Method], Path]:
    """The run of four steps, in micro batches of a whole step and with the chunked head; one for each method."""

    @cache
    def run_of(method: Method) -> Path:
        run_dir = tmp_path_factory.mktemp("whole")
        run(run_dir, course(cache_dir, method=method))
        return run_dir

    return run_of


def course(cache_dir: Path, **changes) -> Plan:
    settings = {"train": {"lora": LORA}, "num_steps": 4, "eval_every_steps": 2, "micro_batch": 8, "accumulation": 1}
    return pair_plan(cache_dir, **{"method": Method.LORA, "loss": LossHead.CHUNKED, **settings, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"micro_batch": 3, "accumulation": 3},
        {"method": Method.FULL, "micro_batch": 1, "accumulation": 8},
        {"loss": LossHead.EAGER},
        {"loss": LossHead.FUSED},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())),
)
def test_neither_the_head_nor_how_pairs_fall_on_micro_batches_changes_the_losses(tmp_path, cache_dir, whole, changes):
    run(tmp_path, course(cache_dir, **changes))
    expected = metrics_of(whole(changes.get("method", Method.LORA)))
    for line, of_whole in zip(metrics_of(tmp_path), expected, strict=True):
        for name in ("loss", "eval_loss"):
            assert line.get(name) == pytest.approx(of_whole.get(name), abs=1e-6)


@pytest.mark.parametrize("method", [Method.LORA, Method.FULL])
def test_a_run_that_was_resumed_has_the_losses_of_one_that_was_not(tmp_path, cache_dir, method):
    settings = {"method": method, "train": {"lora": LORA, **CONSTANT}, "micro_batch": 8, "lr": 5e-3}
    run(tmp_path / "straight", pair_plan(cache_dir, num_steps=6, **settings))
    run(tmp_path / "resumed", pair_plan(cache_dir, num_steps=3, **settings))
    onward = replace(pair_plan(cache_dir, num_steps=6, **settings), resume=True)
    state = run(tmp_path / "resumed", onward, number=2)
    assert state.resumed_from_step == 3
    assert losses_of(tmp_path / "resumed") == losses_of(tmp_path / "straight"), "bit by bit"


def test_a_head_without_sums_of_rows_is_refused_before_anything_runs(tmp_path, cache_dir):
    session = session_of(tmp_path, pair_plan(cache_dir, micro_batch=8))
    plan = replace(session.plan, candidates=(replace(session.plan.chosen, loss=LossHead.FUSED_LINEAR),))
    fields = {name: getattr(session, name) for name in Session.__slots__}
    with pytest.raises(InputError, match=r"fused_linear.*train\.objective: dpo"):
        build_objectives(Session(**fields | {"plan": plan}), lambda: False)


def foreign(run_dir: Path, plan: Plan) -> bytes:
    run(run_dir / "other", replace(plan, data=replace(plan.data, fingerprint="other"), resume=False))
    return (run_dir / "other" / "reference.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("content", "kind", "fact"),
    [
        (lambda *_: None, EnvironmentFaultError, "missing"),
        (lambda *_: b"", EnvironmentFaultError, ""),
        (lambda *_: b"\x08\0\0\0\0\0\0\0{}      ", InputError, ""),
        (lambda *_: b"no safetensors at all", InputError, ""),
        (foreign, InputError, "other data"),
    ],
    ids=["none", "empty", "without tensors", "damaged", "foreign"],
)
def test_a_resumed_run_without_its_own_reference_is_refused(tmp_path, cache_dir, content, kind, fact):
    settings: dict[str, Any] = {"micro_batch": 8, "train": CONSTANT}
    run(tmp_path, pair_plan(cache_dir, num_steps=3, **settings))
    plan = replace(pair_plan(cache_dir, num_steps=6, **settings), resume=True)
    path, found = tmp_path / "reference.safetensors", content(tmp_path, plan)
    path.unlink() if found is None else path.write_bytes(found)
    with pytest.raises(kind, match=rf"reference\.safetensors.*{fact}"):
        run(tmp_path, plan, number=2)


def test_another_attempt_from_the_start_reads_the_reference_of_the_first_and_a_trial_runs_none(tmp_path, cache_dir):
    plan = pair_plan(cache_dir, num_steps=2, micro_batch=8)
    run(tmp_path / "trial", replace(plan, is_trial=True))
    assert not (tmp_path / "trial" / "reference.safetensors").exists()
    run(tmp_path, plan)
    path = tmp_path / "reference.safetensors"
    before = path.stat().st_mtime_ns
    run(tmp_path, plan, number=2)
    assert path.stat().st_mtime_ns == before
    path.write_bytes(b"foreign")
    run(tmp_path, plan, number=3)
    assert path.stat().st_size > 100, "run anew"
    first, second, third = (losses_of(tmp_path)[start : start + 2] for start in (0, 2, 4))
    assert first == second == third


def test_a_stop_ends_the_run_of_the_reference_and_a_resume_runs_it_again(tmp_path, cache_dir):
    plan = pair_plan(cache_dir, num_steps=2, micro_batch=8)
    state = run(tmp_path / "stopped", plan, wants_stop=True)
    assert (state.step, state.checkpoint) == (0, "checkpoints/step-00000000")
    assert not (tmp_path / "stopped" / "reference.safetensors").exists()
    resumed = run(tmp_path / "stopped", replace(plan, resume=True), number=2)
    run(tmp_path / "straight", plan)
    assert resumed.resumed_from_step == 0
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "straight")
