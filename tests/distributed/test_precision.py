"""fp16 and FP8 on two ranks: what really multiplied in which type, what was scaled, and that the ranks agree."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from attempt_runs import engaged_of, losses_of, metrics_of
from rank_factory import NUM_STEPS, rank_plan, ranks_of
from safetensors.torch import load_file

from shardwise.trainer.runtime.precision.mixed_precision import INIT_SCALE
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, Fp8Recipe, Precision

FAKE_TE = Path(__file__).parents[1] / "factories" / "fake_te"
FP16, BF16, FP8 = Precision.FP16_MIXED, Precision.BF16_MIXED, Precision.FP8
FULL = Checkpointing.FULL
TOLERANCE = 2e-2
NUM_LINEARS = 14  # two blocks of seven
EVAL_FORWARDS = 3  # 24 rows over two ranks of four, or four of two


class Case(NamedTuple):
    """One attempt of two ranks, of four under hybrid sharding."""

    sharding: Sharding
    precision: Precision
    accumulation: int = 1
    overflows: bool = False
    optimizer: Optimizer = Optimizer.ADAMW
    recipe: Fp8Recipe | None = None
    checkpointing: Checkpointing = Checkpointing.NONE
    rounds_sums: bool = False

    @property
    def num_ranks(self) -> int:
        return ranks_of(self.sharding)

    @property
    def train_forwards(self) -> int:
        return NUM_STEPS * self.accumulation


FP32_CASE, BF16_CASE = Case(Sharding.DDP, Precision.FP32), Case(Sharding.DDP, BF16)
SUMMED = Case(Sharding.FSDP, BF16)
ROUNDED, ADDED = (Case(Sharding.FSDP, BF16, accumulation=number, rounds_sums=True) for number in (1, 2))
FP16_CASES = [Case(Sharding.DDP, FP16, accumulation=2), Case(Sharding.FSDP, FP16)]
OVERFLOWS = [
    Case(Sharding.DDP, FP16, overflows=True),
    Case(Sharding.FSDP, FP16, overflows=True),
    Case(Sharding.FSDP, FP16, overflows=True, optimizer=Optimizer.ADAMW_FUSED),
]
ZERO_CASE, ZERO_OVERFLOW = Case(Sharding.ZERO3, FP16), Case(Sharding.ZERO2, FP16, overflows=True)
FP8_CASES = [
    Case(Sharding.DDP, FP8, recipe=Fp8Recipe.MXFP8),
    Case(Sharding.FSDP, FP8, accumulation=2, recipe=Fp8Recipe.CURRENT, checkpointing=FULL),
    Case(Sharding.ZERO2, FP8, recipe=Fp8Recipe.DELAYED),
    Case(Sharding.ZERO3, FP8, recipe=Fp8Recipe.CURRENT, checkpointing=FULL),
]
HYBRID_OVERFLOW = Case(Sharding.HSDP, FP16, overflows=True)
HYBRID_FP8 = Case(Sharding.HSDP, FP8, recipe=Fp8Recipe.CURRENT, checkpointing=FULL)
CASES = [FP32_CASE, BF16_CASE, SUMMED, ROUNDED, ADDED, *FP16_CASES, *OVERFLOWS, ZERO_CASE, ZERO_OVERFLOW, *FP8_CASES]
RECIPE_CLASSES = {
    Fp8Recipe.MXFP8: "MXFP8BlockScaling", Fp8Recipe.CURRENT: "Float8CurrentScaling",
    Fp8Recipe.DELAYED: "DelayedScaling",
}  # fmt: skip


def plan_of(case: Case, cache_dir: Path, run_dir: Path) -> Plan:
    if case.overflows:
        run_dir.mkdir()
        (run_dir / "overflows").touch()
    return rank_plan(
        cache_dir, case.sharding, num_steps=NUM_STEPS, precision=case.precision,
        micro_batch=8 // (case.num_ranks * case.accumulation), accumulation=case.accumulation,
        checkpointing=case.checkpointing, optimizer=case.optimizer, fp8_recipe=case.recipe,
        reduce_every_micro_batch=case.rounds_sums, bf16_reduction=case.rounds_sums,
        clip=0.0 if case in (SUMMED, ROUNDED, ADDED) else 1.0,  # a clipped gradient is another number
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(run_dirs, cache_dir) -> Iterator[Callable[[Case], Path]]:
    """Ranks find the stand-in where Transformer Engine would be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE_TE), os.environ.get("PYTHONPATH", "")]))
        yield run_dirs(
            lambda case, run_dir: plan_of(case, cache_dir, run_dir), CASES, (HYBRID_OVERFLOW, HYBRID_FP8), kind=":note"
        )


def each(cases):
    """Four ranks take long on two cores."""
    long = {Sharding.HSDP: pytest.mark.long}
    named = [pytest.param(case, id="-".join(map(str, case)), marks=long.get(case.sharding, ())) for case in cases]
    return pytest.mark.parametrize("case", named)


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "export" / "model.safetensors")


@each([*FP16_CASES, ZERO_CASE, *FP8_CASES, HYBRID_FP8])
def test_every_step_follows_plain_pytorch_in_fp32(case, runs, reference):
    losses = losses_of(runs(case))
    assert losses == pytest.approx(reference.losses, abs=TOLERANCE)
    assert losses != pytest.approx(reference.losses, abs=1e-6), "sixteen bits round"
    assert weights_of(runs(case)).keys() == reference.weights.keys(), "exported as in the plain model"
    assert {engaged_of(runs(case), rank).precision for rank in range(case.num_ranks)} == {case.precision}


def test_fsdp_adds_gradients_of_16_bit_products_in_fp32(runs, notes_of):
    """Sums over the ranks have bits that bf16 has no place for; DeepSpeed rounds its sums to the weights' type."""
    for rank in (0, 1):
        assert notes_of(runs(SUMMED), rank)["in_16_bit"][0] < 0.9


def test_sums_over_the_ranks_are_rounded_where_the_job_allows_it_and_those_of_micro_batches_are_not(runs, notes_of):
    for rank in (0, 1):
        assert notes_of(runs(ROUNDED), rank)["in_16_bit"][0] == 1.0
        assert notes_of(runs(ADDED), rank)["in_16_bit"][0] < 0.9
    for case in (ROUNDED, ADDED):
        assert losses_of(runs(case)) == pytest.approx(losses_of(runs(SUMMED)), abs=TOLERANCE)


@each([*FP16_CASES, ZERO_CASE])
def test_the_gradients_of_fp16_carry_the_scale(case, runs, notes_of):
    """Under DeepSpeed there is no autocast: the engine's own copy is fp16."""
    lines, is_zero = metrics_of(runs(case)), case == ZERO_CASE
    assert [(line["loss_scale"], bool(line.get("skipped"))) for line in lines] == [(INIT_SCALE, False)] * NUM_STEPS
    for rank in (0, 1):
        facts = engaged_of(runs(case), rank).facts
        assert (facts.get("autocast"), facts["loss scale"]) == (None if is_zero else "float16", "65536")
        assert is_zero or facts["skipped steps"] == "0"
        if case == FP16_CASES[1]:  # in another, the micro batches are others
            largest, unscaled = (notes_of(runs(each), rank)["gradients"][0] for each in (case, FP32_CASE))
            assert largest == pytest.approx(INIT_SCALE * unscaled, rel=2e-2)


@each([*OVERFLOWS, ZERO_OVERFLOW, HYBRID_OVERFLOW])
def test_an_overflow_on_one_rank_skips_the_step_on_all(case, runs):
    """The element that is infinite on rank 1 is, summed up, in rank 0's half of the embeddings under FSDP2.

    Under hybrid sharding it is in that of rank 2 as well.
    """
    lines = metrics_of(runs(case))
    assert [bool(line.get("skipped")) for line in lines] == [True] + [False] * (NUM_STEPS - 1)
    assert lines[0].get("grad_norm") is None and lines[1]["grad_norm"] > 0
    assert [line["loss_scale"] for line in lines] == [INIT_SCALE] + [INIT_SCALE / 2] * (NUM_STEPS - 1)
    for rank in range(case.num_ranks):
        facts = engaged_of(runs(case), rank).facts
        assert (facts["loss scale"], facts["skipped steps"]) == ("32768", "1")
    assert lines[0]["loss"] == pytest.approx(losses_of(runs(FP32_CASE))[0], abs=TOLERANCE)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5, "it trains on"
    assert [line["loss"] for line in lines] == pytest.approx(losses_of(runs(OVERFLOWS[0])), abs=TOLERANCE)
    assert all(torch.isfinite(weight).all() for weight in weights_of(runs(case)).values())


@each([*FP8_CASES, HYBRID_FP8])
def test_every_forward_multiplies_in_fp8_recomputation_too_and_the_report_counts_it(case, runs, notes_of):
    recomputed = case.train_forwards if case.checkpointing is FULL else 0
    for rank in range(case.num_ranks):
        counts = notes_of(runs(case), rank)["te"]
        assert counts.pop("fp8 products with gradients") == NUM_LINEARS * (case.train_forwards + recomputed)
        assert counts.pop("fp8 products without") == NUM_LINEARS * EVAL_FORWARDS * case.accumulation
        opened = counts.pop("autocast")
        assert counts.pop(f"recipe {RECIPE_CLASSES[case.recipe]}") == opened
        forwards = case.train_forwards + EVAL_FORWARDS * case.accumulation
        assert opened == forwards + NUM_LINEARS * recomputed, "one a forward; a recomputed layer opens its own"
        counts.pop("16 bit products without", None)  # the sample before and after, where rank 0 draws one
        assert counts == {}
    facts = engaged_of(runs(case)).facts
    assert str(case.recipe) in facts["fp8 recipe"] and RECIPE_CLASSES[case.recipe] in facts["fp8 recipe"]
    assert ("experimental" in facts["fp8 recipe"]) is (case.recipe is Fp8Recipe.MXFP8)
    assert facts["fp8 layers"] == str(NUM_LINEARS)
    assert facts["fp8 layers left in 16 bit"].startswith("1 ") and "lm_head" in facts["fp8 layers left in 16 bit"]
    forwards = case.accumulation * (2 if case.checkpointing is FULL else 1)
    assert facts["fp8 products"].split()[0] == str(NUM_LINEARS * forwards), "of the first step"


def test_converted_layers_have_the_weights_of_the_model_and_checkpoints_nothing_else(runs):
    """The stand-in multiplies as bf16 does, so any other weight would show in every loss."""
    fp8, bf16 = runs(FP8_CASES[0]), runs(BF16_CASE)
    assert losses_of(fp8) == losses_of(bf16)
    expected = weights_of(bf16)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights_of(fp8).items())
    for run_dir in (fp8, bf16):
        manifest = json.loads(next(run_dir.glob("checkpoints/*/MANIFEST.json")).read_text())
        assert set(manifest["parameters"]) == set(expected)
