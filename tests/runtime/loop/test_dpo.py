"""The loss of pairs: against TRL's trainer, and what dummies, heads and dropout may not change."""

import math

import pytest
import torch
from engine_plan_factory import TINY_LLAMA
from optimizer_factory import tiny_llama
from pair_factory import write_pairs
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, LlamaForCausalLM

from shardwise.trainer.runtime.data.batches import MicroBatch, eval_micro_batches
from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.loop.objectives import DpoLoss, as_it_is, turn_dropout_off
from shardwise.trainer.runtime.loop.step import Terms
from shardwise.trainer.runtime.loss import install_loss_head
from shardwise.trainer.spec.strategy import LossHead

CPU = torch.device("cpu")
BETA = 0.1


@pytest.fixture(scope="module")
def micro_batch(tmp_path_factory) -> MicroBatch:
    """Six pairs of different lengths."""
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
    """TRL's trainer of the same models; its own data is never used."""
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


@pytest.mark.parametrize("head", [LossHead.CHUNKED, LossHead.FUSED])
def test_every_head_learns_the_same_of_pairs(micro_batch, head):
    expected, expected_terms = learn(micro_batch)
    model, terms = learn(micro_batch, head)
    torch.testing.assert_close(terms.loss, expected_terms.loss, rtol=0, atol=1e-6)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)


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
