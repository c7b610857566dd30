"""DPO in one process: its loss against TRL's, where the reference comes from, how runs are resumed and end."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attempt_runs import losses_of, metrics_of, run_attempt, session_of
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from optimizer_factory import tiny_llama
from pair_factory import NUM_EVAL_PAIRS, pair_plan, plain_logps, write_pairs
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

from shardwise.trainer.runtime.data.batches import MicroBatch, eval_micro_batches
from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.loop.objectives import (
    DpoLoss,
    as_it_is,
    build_objectives,
    evaluate,
    plain_base,
    turn_dropout_off,
)
from shardwise.trainer.runtime.loop.session import Session
from shardwise.trainer.runtime.loop.step import Terms
from shardwise.trainer.runtime.loss import LossOutput, install_loss_head
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
CONSTANT = {"schedule": LrSchedule.CONSTANT}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs") / "rows")


def run(run_dir: Path, plan: Plan, *, number: int = 1, wants_stop: bool = False) -> RunState:
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
    return plain_logps(
        build_model(replace(plan, candidates=(replace(plan.chosen, method=Method.FULL),))).eval(), micro_batch
    )


@pytest.mark.parametrize("lora", [LORA, replace(LORA, dora=True, dropout=0.3)], ids=["lora", "dora"])
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
    first, *_, line = lines = metrics_of(tmp_path)
    assert first["loss"] == pytest.approx(0.6931472, abs=1e-6), "the model is its own reference"
    assert first["reward_margin"] == pytest.approx(0.0, abs=1e-6)
    assert line["loss"] < 0.6 and line["reward_margin"] > 0.2 and line["reward_accuracy"] >= 0.75
    assert line["reward_margin"] == pytest.approx(line["reward_chosen"] - line["reward_rejected"], abs=1e-9)
    assert line["tokens"] > 20 * 8 * 2 * 3, "tokens of both answers are counted, not pairs"
    last = state.evaluations[-1]
    assert [each["eval_loss"] for each in lines if "eval_loss" in each] == [each.loss for each in state.evaluations]
    assert (line["eval_reward_margin"], last.accuracy) == (last.reward_margin, None)
    assert line["eval_reward_accuracy"] == last.reward_accuracy
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


def test_a_stop_ends_the_run_of_the_reference_and_a_resume_runs_it_again(tmp_path, cache_dir):
    plan = pair_plan(cache_dir, num_steps=2, micro_batch=8)
    state = run(tmp_path / "stopped", plan, wants_stop=True)
    assert (state.step, state.checkpoint) == (0, "checkpoints/step-00000000")
    assert not (tmp_path / "stopped" / "reference.safetensors").exists()
    resumed = run(tmp_path / "stopped", replace(plan, resume=True), number=2)
    run(tmp_path / "straight", plan)
    assert resumed.resumed_from_step == 0
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "straight")


BETA = 0.1


@pytest.fixture(scope="module")
def micro_batch(tmp_path_factory) -> MicroBatch:
    rows = TokenRows.open(write_pairs(tmp_path_factory.mktemp("pairs") / "rows"), "train")
    (found,) = eval_micro_batches(rows, rank=0, num_ranks=1, micro_batch=6, max_rows=6)
    assert found.num_pairs == 6 and found.input_ids.shape[0] == 12
    return found


def build(seed: int, head: LossHead | None = None) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    fields = {name: value for name, value in TINY_LLAMA.items() if name != "model_type"}
    model = LlamaForCausalLM(LlamaConfig(**fields, initializer_range=0.05, max_position_embeddings=64))
    if head is not None:
        install_loss_head(model, head, chunk_tokens=7)
    return model


def learn(micro_batch: MicroBatch, head: LossHead = LossHead.EAGER) -> tuple[nn.Module, Terms]:
    """A model after the backward of its pairs' mean, the reference being another model."""
    model, other = build(0, head), build(1, LossHead.EAGER)
    loss = DpoLoss(BETA, lambda _model, batch, device: as_it_is(other, batch, device))
    terms = loss(model, micro_batch, CPU)
    (terms.loss / terms.num_terms).backward()
    return model, terms


def figures_of(terms: Terms) -> dict[str, float]:
    names = DpoLoss(BETA, as_it_is).figures
    return {name: float(value) / terms.num_terms for name, value in zip(names, terms.figures, strict=True)}


@pytest.fixture(scope="module")
def trl_trainer(tmp_path_factory):
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), eos_token="b", pad_token="a"
    )
    config = DPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")), beta=BETA, bf16=False, gradient_checkpointing=False,
        report_to="none", use_cpu=True,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "a"}])
    return DPOTrainer(build(0), ref_model=build(1), args=config, train_dataset=rows, processing_class=tokenizer)


@pytest.mark.filterwarnings("ignore")  # TRL's and its libraries'
def test_loss_gradients_and_figures_are_those_of_trl(micro_batch, trl_trainer):
    is_learned = micro_batch.labels != IGNORED_LABEL
    inputs = {
        "input_ids": micro_batch.input_ids,
        "attention_mask": torch.ones_like(micro_batch.input_ids),  # causal: what is padded on the right is not seen
        "completion_mask": is_learned.long(),
    }
    trl_trainer.model.train()
    expected = trl_trainer._compute_loss(trl_trainer.model, inputs, return_outputs=False)
    expected.backward()
    model, terms = learn(micro_batch)
    assert float(terms.loss.detach()) / 6 == pytest.approx(float(expected.detach()), abs=1e-6)
    assert abs(float(expected.detach()) - math.log(2)) > 1e-3, "the models differ"
    gradients = dict(trl_trainer.model.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=0, atol=1e-6)
    theirs = {name: values[-1] for name, values in trl_trainer._metrics["train"].items()}
    ours = figures_of(terms)
    for name, their_name in {
        "reward_margin": "rewards/margins",
        "reward_accuracy": "rewards/accuracies",
        "reward_chosen": "rewards/chosen",
        "reward_rejected": "rewards/rejected",
        "logps_chosen": "logps/chosen",
        "logps_rejected": "logps/rejected",
    }.items():
        assert ours[name] == pytest.approx(theirs[their_name], rel=1e-5, abs=1e-6), name
    assert ours["tokens_chosen"] * 6 == is_learned[:6].sum()


def test_a_pair_that_is_no_pair_counts_for_nothing(micro_batch):
    """A dummy after each half: rows of padding that nothing is learned from."""

    def with_dummy(rows: torch.Tensor, value: int) -> torch.Tensor:
        dummy = torch.full((1, rows.shape[1]), value)
        return torch.cat([rows[:6], dummy, rows[6:], dummy])

    ids, labels = with_dummy(micro_batch.input_ids, 0), with_dummy(micro_batch.labels, IGNORED_LABEL)
    model, terms = learn(micro_batch._replace(input_ids=ids, labels=labels))
    expected, expected_terms = learn(micro_batch)
    assert terms.num_terms == 6
    torch.testing.assert_close(terms.loss, expected_terms.loss, rtol=0, atol=1e-6)
    assert figures_of(terms) == pytest.approx(figures_of(expected_terms), abs=1e-6)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)


def test_dropout_of_the_model_is_off_and_that_of_adapters_stays():
    """GPT-2's are modules, Llama's is a number of one."""
    from peft import LoraConfig, inject_adapter_in_model

    ids = torch.arange(16)[None]
    llama = tiny_llama(attention_dropout=0.5).train()
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=16)
    gpt2 = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    for model in (llama, gpt2):
        assert not torch.equal(model(ids).logits, model(ids).logits)
        turn_dropout_off(model)
        assert torch.equal(model(ids).logits, model(ids).logits)
    lora = LoraConfig(r=2, lora_dropout=0.5, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    inject_adapter_in_model(lora, gpt2)
    turn_dropout_off(gpt2)
    assert not torch.equal(gpt2(ids).logits, gpt2(ids).logits)


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
    losses = losses_of(tmp_path)
    assert losses == losses[:2] * 3
