"""Compiled slices of the loss head: they compute what plain torch does, as two graphs for rows of any length."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attempt_runs import run_attempt
from msgspec.structs import replace
from planning_factory import machine, plan_of
from rank_factory import rank_plan, write_rows
from torch import Tensor

from shardwise.trainer.planning.planner import check_job
from shardwise.trainer.runtime.loss import IGNORED, ChunkedLoss
from shardwise.trainer.runtime.memory.compiled_head import CompiledSlices
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.strategy import LossHead

SLICE, HIDDEN, VOCAB = 8, 24, 50

# torch's compiler reads names of its own that torch has renamed since.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture
def only_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are traced and run, but not compiled to machine code: g++ takes long."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


def run(
    body: CompiledSlices | None, num_tokens: int, *, row_tokens: int | None = None, softcap: float | None = None,
    dtype: torch.dtype = torch.float32, has_bias: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Losses and gradients of hidden states, weight and bias; every third token is not learned."""
    generator = torch.Generator().manual_seed(num_tokens)
    sizes = [(num_tokens, HIDDEN), (VOCAB, HIDDEN), (VOCAB,)]
    leaves = [torch.randn(*size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    targets = torch.randint(0, VOCAB, (num_tokens,), generator=generator)
    targets[::3] = IGNORED
    hidden, weight, bias = leaves
    losses = ChunkedLoss.apply(hidden, weight, bias if has_bias else None, softcap, targets, SLICE, row_tokens, body)
    (losses * torch.arange(1, losses.numel() + 1).view(losses.shape) * 0.3).sum().backward()
    return [losses.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def check(body: CompiledSlices, num_tokens: int, *, tolerance: float = 1e-6, **case: Any) -> None:
    found, expected = run(body, num_tokens, **case), run(None, num_tokens, **case)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype and float((ours - theirs).norm() / theirs.norm()) < tolerance


@pytest.mark.usefixtures("only_traced")
@pytest.mark.parametrize(
    "case", [{}, {"softcap": 5.0, "has_bias": True}, {"row_tokens": 1}, {"dtype": torch.bfloat16, "tolerance": 4e-3}]
)
def test_rows_of_any_length_have_the_losses_and_gradients_of_plain_torch_in_two_graphs(case: dict[str, Any]) -> None:
    body = CompiledSlices(SLICE)
    with pytest.raises(EnvironmentFaultError, match=r"pin\.compiled_head: no slice"):
        body.check_ran()
    lengths = (2 * SLICE, 3, 2 * SLICE + 5, SLICE)
    for num_tokens in lengths:
        check(body, num_tokens, **case)
    num_slices = sum(-(-length // SLICE) for length in lengths)
    text = f"2 graphs without a break, {num_slices} slices forwards, {num_slices} backwards of {SLICE} tokens"
    body.check_ran()
    assert body.facts() == {"compiled head": text}


@pytest.mark.long
def test_compiled_to_machine_code_they_are_the_same() -> None:
    torch._dynamo.reset()
    body = CompiledSlices(SLICE)
    for num_tokens in (2 * SLICE, 2 * SLICE + 5):
        check(body, num_tokens)


@pytest.mark.usefixtures("only_traced")
def test_a_run_reports_the_graphs_of_its_head_and_learns_what_it_learned(tmp_path: Path) -> None:
    plan = rank_plan(write_rows(tmp_path / "rows"), num_steps=3, loss=LossHead.CHUNKED)
    compiled = replace(plan, candidates=(replace(plan.chosen, compiled_head=True, loss_chunk_tokens=SLICE),))
    (_, plain), (_, state) = (run_attempt(tmp_path / name, each) for name, each in (("a", plan), ("b", compiled)))
    assert state.verified is not None and plain.verified is not None
    assert state.verified.facts["compiled head"].startswith("2 graphs without a break")
    assert "compiled head" not in plain.verified.facts
    assert state.final_loss == pytest.approx(plain.final_loss, rel=1e-5)


def test_without_a_compiler_it_is_refused_and_nothing_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(EnvironmentFaultError, match=r"pin\.compiled_head: .*no-such-compiler"):
        CompiledSlices(SLICE)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(EnvironmentFaultError, match=r"TORCHDYNAMO_DISABLE.*pin\.compiled_head=false"):
        CompiledSlices(SLICE)


def test_a_job_that_pins_it_gets_slices_and_no_other_head() -> None:
    hardware = machine("1xH100-SXM5-80GB")
    plan = plan_of("1b", hardware, pin={"compiled_head": True})
    assert {(each.loss, each.compiled_head) for each in plan.candidates} == {(LossHead.CHUNKED, True)}
    assert any("its slices are compiled: the job file pins it" in reason for reason in plan.chosen.reasons)
    with pytest.raises(InputError, match="compiled_head compiles the slices of loss: chunked"):
        plan_of("1b", hardware, pin={"compiled_head": True, "loss": LossHead.FUSED})
    with pytest.raises(InputError, match="compiled_head and the loss of extensions"):
        check_job(plan.job, plan.model_shape, plan.data, (Hook.LOSS,))
