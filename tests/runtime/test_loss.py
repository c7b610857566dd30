"""The loss heads against transformers' own loss, and what they keep alive."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.runtime.loss import IGNORED, install_loss_head, shift
from trainer.spec.errors import InputError
from trainer.spec.strategy import LossHead

VOCAB, WIDTH, HIDDEN = 96, 20, 32


def build(*, is_tied: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=is_tied, initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(dtype)


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Three rows: one full, one padded, one without any target."""
    ids = torch.randint(0, VOCAB, (3, WIDTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, 7:] = IGNORED
    labels[2] = IGNORED
    return ids, labels


def loss_and_gradients(model: LlamaForCausalLM, head: LossHead, chunk_tokens: int | None = None):
    ids, labels = rows()
    install_loss_head(model, head, chunk_tokens=chunk_tokens)
    loss = model(input_ids=ids, labels=labels)
    (loss * 0.37).backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def transformers_loss_and_gradients(model: LlamaForCausalLM):
    ids, labels = rows()
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss * (shift(labels) != IGNORED).sum()
    (loss * 0.37).backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


HEADS = [(LossHead.EAGER, None), *[(LossHead.CHUNKED, size) for size in (1, 7, 20, 60, 1000, None)]]


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("head", "chunk_tokens"), HEADS)
def test_every_head_is_the_sum_of_transformers_token_losses(head, chunk_tokens, is_tied):
    expected, expected_gradients = transformers_loss_and_gradients(build(is_tied=is_tied))
    loss, gradients = loss_and_gradients(build(is_tied=is_tied), head, chunk_tokens)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_the_chunked_head_adds_the_gradient_of_the_head_in_fp32_under_bf16():
    expected, expected_gradients = loss_and_gradients(build(), LossHead.EAGER)
    loss, gradients = loss_and_gradients(build(dtype=torch.bfloat16), LossHead.CHUNKED, 3)
    assert gradients["lm_head.weight"].dtype is torch.bfloat16
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    error = gradients["lm_head.weight"].float() - expected_gradients["lm_head.weight"]
    assert error.norm() < 0.05 * expected_gradients["lm_head.weight"].norm()


def test_under_autocast_the_loss_is_fp32_and_the_gradients_are_those_of_fp32_weights():
    model = build()
    ids, labels = rows()
    install_loss_head(model, LossHead.CHUNKED, chunk_tokens=7)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=labels)
    loss.backward()
    assert loss.dtype is torch.float32
    assert model.lm_head.weight.grad is not None and model.lm_head.weight.grad.dtype is torch.float32


class LargestOutput(TorchDispatchMode):
    """Notes the most elements that any operator put out with the vocabulary as its last dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.num_logits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        is_weight = isinstance(out, torch.Tensor) and out.shape == (HIDDEN, VOCAB)  # the head's, transposed
        if isinstance(out, torch.Tensor) and out.ndim and out.shape[-1] == VOCAB and not is_weight:
            self.num_logits = max(self.num_logits, out.numel())
        return out


@pytest.mark.parametrize(("head", "num_logits"), [(LossHead.EAGER, 3 * WIDTH * VOCAB), (LossHead.CHUNKED, 7 * VOCAB)])
def test_only_one_slice_of_logits_is_ever_made(head, num_logits):
    with LargestOutput() as largest:
        loss_and_gradients(build(), head, 7)
    assert largest.num_logits == num_logits


def test_without_labels_the_model_still_answers_logits():
    model = build()
    ids, _ = rows()
    expected = model(input_ids=ids).logits
    install_loss_head(model, LossHead.CHUNKED, chunk_tokens=7)
    assert torch.equal(model(input_ids=ids).logits, expected)
    assert model.generate(input_ids=ids[:1], max_new_tokens=2, do_sample=False, pad_token_id=0).shape == (1, WIDTH + 2)


def test_labels_are_shifted_by_one_and_the_last_position_learns_nothing():
    assert shift(torch.tensor([[1, 2, 3], [4, 5, IGNORED]])).tolist() == [[2, 3, IGNORED], [5, IGNORED, IGNORED]]


@pytest.mark.parametrize("head", [LossHead.FUSED, LossHead.FUSED_LINEAR])
def test_heads_that_are_not_there_say_when_they_come(head):
    with pytest.raises(InputError, match=f"{head} comes with shardwise 0.3"):
        install_loss_head(build(), head, chunk_tokens=None)
