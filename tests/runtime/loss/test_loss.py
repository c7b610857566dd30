"""The loss heads against transformers' own loss, and what they keep alive."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from pasted_pip import requirements_in
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.trainer.runtime import loss as losses
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.strategy import LossHead

VOCAB, WIDTH, HIDDEN = 96, 20, 32


class Capped(LlamaForCausalLM):
    """A Llama whose forward caps its logits where its config has a cap."""

    def forward(self, input_ids: Any = None, labels: Any = None, **named: Any) -> Any:
        output = super().forward(input_ids=input_ids, **named)
        softcap = self.config.final_logit_softcapping
        if softcap is not None:
            output.logits = torch.tanh(output.logits / softcap) * softcap
        if labels is not None:
            output.loss = self.loss_function(logits=output.logits, labels=labels, vocab_size=VOCAB)
        return output


def build(
    head: LossHead | None = None, chunk_tokens: int | None = None, *, is_tied: bool = False,
    dtype: torch.dtype = torch.float32, softcap: float | None = None, has_bias: bool = False, is_pinned: bool = True,
) -> LlamaForCausalLM:  # fmt: skip
    """A Llama with that head, or as transformers has it; caps and biases are Gemma 2's and Phi-2's."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=is_tied, initializer_range=0.3,
    )  # fmt: skip
    model = nn.Module.to(Capped(config), dtype)
    model.config.final_logit_softcapping = softcap
    if has_bias:
        torch.manual_seed(2)
        model.lm_head = nn.Linear(HIDDEN, VOCAB)
    if head is not None:
        losses.install_loss_head(model, head, chunk_tokens=chunk_tokens, is_pinned=is_pinned)
    return model


# Three rows: one full, one padded, one without any target.
IDS = torch.randint(0, VOCAB, (3, WIDTH), generator=torch.Generator().manual_seed(1))
LABELS = IDS.clone()
LABELS[1, 7:] = losses.IGNORED
LABELS[2] = losses.IGNORED
WEIGHTS = {
    losses.LossOutput.SUM: torch.tensor(0.37),
    losses.LossOutput.ROWS: torch.tensor([-0.5, 1.75, 0.25], dtype=torch.float64),
}


def with_gradients(model: LlamaForCausalLM, found: torch.Tensor, output: losses.LossOutput) -> dict[str, torch.Tensor]:
    (found * WEIGHTS[output]).sum().backward()
    return {"output": found.detach(), **{name: each.grad for name, each in model.named_parameters()}}


def outputs_of(model: LlamaForCausalLM, output: losses.LossOutput = losses.LossOutput.SUM) -> dict[str, torch.Tensor]:
    return with_gradients(model, model(input_ids=IDS, labels=LABELS, output=output), output)


def outputs_of_transformers(model: LlamaForCausalLM, output: losses.LossOutput) -> dict[str, torch.Tensor]:
    targets = losses.shift(LABELS)
    if output is losses.LossOutput.SUM:
        found = model(input_ids=IDS, labels=LABELS, use_cache=False).loss * (targets != losses.IGNORED).sum()
    else:
        logits = model(input_ids=IDS, use_cache=False).logits.float()
        shares = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        found = (shares * (targets != losses.IGNORED)).sum(-1).double()
    return with_gradients(model, found, output)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found["output"], expected["output"], rtol=1e-6, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


HEADS = [
    (LossHead.EAGER, None),
    *[(LossHead.CHUNKED, size) for size in (1, 7, 20, 60, 1000, None)],
    *[(LossHead.FUSED, size) for size in (1, 7, 256)],
]
FEW_HEADS = [(LossHead.EAGER, None), (LossHead.CHUNKED, 7), (LossHead.CHUNKED, 1000), (LossHead.FUSED, 7)]


@pytest.fixture
def slice_of(monkeypatch):
    return lambda size: size and monkeypatch.setattr(losses, "FUSED_SLICE_TOKENS", size)


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("output", WEIGHTS)
@pytest.mark.parametrize(("head", "chunk_tokens"), HEADS)
def test_every_head_returns_the_loss_and_the_log_probabilities_of_rows(head, chunk_tokens, output, is_tied, slice_of):
    slice_of(chunk_tokens if head is LossHead.FUSED else None)
    expected = outputs_of_transformers(build(is_tied=is_tied), output)
    found = outputs_of(build(head, chunk_tokens, is_tied=is_tied), output)
    assert_same(found, expected)
    assert output is losses.LossOutput.SUM or found["output"][2] == 0, "the third row has no target"


def assert_near_in_16_bit(found: dict[str, torch.Tensor]) -> None:
    expected = outputs_of(build(LossHead.EAGER))
    torch.testing.assert_close(found["output"], expected["output"], rtol=2e-2, atol=0)
    error = found["lm_head.weight"].float() - expected["lm_head.weight"]
    assert error.norm() < 0.05 * expected["lm_head.weight"].norm()


@pytest.mark.parametrize("head", [LossHead.CHUNKED, LossHead.FUSED])
def test_under_autocast_the_loss_is_fp32_and_the_gradients_are_those_of_fp32_weights(head):
    model = build(head, 7)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=IDS, labels=LABELS)
    found = with_gradients(model, loss, losses.LossOutput.SUM)
    assert found["output"].dtype is found["lm_head.weight"].dtype is torch.float32
    assert_near_in_16_bit(found)


@pytest.mark.parametrize("output", WEIGHTS)
@pytest.mark.parametrize("softcap", [None, 0.7, 30.0])
@pytest.mark.parametrize(("head", "size"), [(LossHead.CHUNKED, 7), (LossHead.FUSED, 7), (LossHead.FUSED, 256)])
def test_heads_know_caps_and_biases(slice_of, head, size, softcap, output):
    slice_of(size)
    expected = outputs_of(build(LossHead.EAGER, softcap=softcap, has_bias=True), output)
    found = outputs_of(build(head, size, softcap=softcap, has_bias=True), output)
    assert "lm_head.bias" in found
    assert_same(found, expected)


def test_fused_linear_names_the_missing_package(monkeypatch, tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match=r"GPU.*pin\.loss=fused"):
            build(LossHead.FUSED_LINEAR)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(InputError, match="liger-kernel") as caught:
        build(LossHead.FUSED_LINEAR)
    assert set(requirements_in(str(caught.value), tmp_path)) == {"liger-kernel"}


class LigerFusedLinearCrossEntropyLoss(nn.Module):
    """Stands in for Liger's, with its parameters that are used, on a machine without a GPU."""

    made: ClassVar[list["LigerFusedLinearCrossEntropyLoss"]] = []

    def __init__(self, ignore_index=-100, reduction="mean", softcap=None, accum_dtype=None) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        self.softcap, self.accum_dtype = softcap, accum_dtype
        self.made.append(self)

    def forward(self, lin_weight, _input, target, bias=None):
        assert (_input.ndim, target.ndim) == (2, 1)
        logits = nn.functional.linear(_input, lin_weight, bias).float()
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return nn.functional.cross_entropy(logits, target, **self.settings)


@pytest.fixture
def liger(monkeypatch):
    """Liger installed and a GPU available, as far as the loss head can see."""
    package, part = ModuleType("liger_kernel"), ModuleType("liger_kernel.transformers")
    module: Any = ModuleType("liger_kernel.transformers.fused_linear_cross_entropy")
    module.LigerFusedLinearCrossEntropyLoss = LigerFusedLinearCrossEntropyLoss
    package.__spec__ = ModuleSpec("liger_kernel", None)
    for found in (package, part, module):
        monkeypatch.setitem(sys.modules, found.__name__, found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CC", "true")


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize("fails", ["at once", "in the first forward"])
def test_a_head_of_liger_that_is_not_pinned_runs_in_slices_where_its_kernels_do_not_compile(monkeypatch, fails):
    errors: Any = ModuleType("triton.errors")
    errors.TritonError = type("TritonError", (Exception,), {})
    monkeypatch.setitem(sys.modules, "triton", ModuleType("triton"))
    monkeypatch.setitem(sys.modules, "triton.errors", errors)

    def fail(*_: Any) -> None:
        raise errors.TritonError("out of resource: shared memory")

    if fails == "at once":
        monkeypatch.setenv("CC", "no-such-cc")
    else:
        monkeypatch.setattr(LigerFusedLinearCrossEntropyLoss, "forward", fail)
        with pytest.raises(errors.TritonError):
            outputs_of(build(LossHead.FUSED_LINEAR))
    model = build(LossHead.FUSED_LINEAR, is_pinned=False)
    assert_same(outputs_of(model), outputs_of(build(LossHead.EAGER)))
    head: Any = model.forward
    assert ("no C compiler" if fails == "at once" else "shared memory") in head.__func__.__self__.problem


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_liger_is_handed_what_the_head_is(softcap):
    expected = outputs_of(build(LossHead.EAGER, softcap=softcap, has_bias=True))
    assert_same(outputs_of(build(LossHead.FUSED_LINEAR, softcap=softcap, has_bias=True)), expected)
    assert LigerFusedLinearCrossEntropyLoss.made[-1].accum_dtype is torch.float32


@pytest.mark.parametrize("head", [LossHead.CHUNKED, LossHead.FUSED])
def test_rows_of_very_different_weights_keep_their_gradients_in_fp16(head):
    """The softmax's smallest shares times 2**-10 are below what fp16 holds, those of the second row are not."""
    weights = torch.tensor([2.0**-10, 2.0**10, 1.0], dtype=torch.float64)
    found = []
    for dtype in (torch.float32, torch.float16):
        torch.manual_seed(4)
        linear = nn.Linear(HIDDEN, VOCAB, bias=False).to(dtype)
        hidden = torch.randn(3 * WIDTH, HIDDEN).to(dtype).requires_grad_()
        targets = torch.randint(0, VOCAB, (3 * WIDTH,))
        if head is LossHead.FUSED:
            rows = losses.FusedLoss.apply(linear(hidden), targets, None, WIDTH)
        else:
            rows = losses.ChunkedLoss.apply(hidden, linear.weight, None, None, targets, 7, WIDTH)
        (rows * weights).sum().backward()
        found.append(linear.weight.grad.float())
    error = found[1] - found[0]
    assert error.isfinite().all() and error.norm() < 1e-2 * found[0].norm()


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize(("head", "chunk_tokens"), FEW_HEADS)
def test_a_score_counts_the_targets_that_are_the_most_likely_token(head, chunk_tokens, softcap, slice_of):
    slice_of(chunk_tokens if head is LossHead.FUSED else None)
    with torch.no_grad():
        likely = build(softcap=softcap)(input_ids=IDS, use_cache=False).logits.argmax(-1)
    labels = LABELS.clone()
    labels[0, 3:9] = likely[0, 2:8]  # six right ones at the least, with any other token
    expected = ((likely == losses.shift(labels)) & (losses.shift(labels) != losses.IGNORED)).sum()
    model = build(head, chunk_tokens, softcap=softcap)
    score = model(input_ids=IDS, labels=labels, output=losses.LossOutput.SCORE)
    assert not score.requires_grad
    assert score[1] == expected >= 6
    torch.testing.assert_close(score[0], model(input_ids=IDS, labels=labels).detach().double(), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("liger")
def test_liger_has_a_score_and_no_rows():
    models = [build(LossHead.FUSED_LINEAR), build(LossHead.EAGER)]
    scores = [model(input_ids=IDS, labels=LABELS, output=losses.LossOutput.SCORE) for model in models]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-6, atol=0)
    with pytest.raises(InputError, match=r"DPO.*pin\.loss=chunked"):
        models[0](input_ids=IDS, labels=LABELS, output=losses.LossOutput.ROWS)


def test_the_chunked_head_adds_the_gradient_of_the_head_in_fp32_under_bf16():
    found = outputs_of(build(LossHead.CHUNKED, 3, dtype=torch.bfloat16))
    assert found["lm_head.weight"].dtype is torch.bfloat16
    assert_near_in_16_bit(found)


@pytest.mark.usefixtures("liger")
@pytest.mark.parametrize(("compiler", "package"), [("no-such-cc", "gcc"), ("false", "python3")])
def test_ligers_kernels_need_a_c_compiler_and_pythons_headers(monkeypatch, compiler, package):
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(EnvironmentFaultError, match=rf"pin\.loss(.|\n)*apt install {package}"):
        build(LossHead.FUSED_LINEAR)
