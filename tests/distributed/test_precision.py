"""fp16 and FP8 on two ranks: what really multiplied in which type, what was scaled, and that the ranks agree.

FP8 runs on a stand-in for Transformer Engine (tests/factories/fake_te), which multiplies in bf16 and counts. That shows
the wiring on every engine; that a GPU multiplies in FP8 is for the tests that have one.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from attempt_runs import engaged_of, metrics_of
from rank_factory import NUM_STEPS, rank_plan
from safetensors.torch import load_file

from shardwise.trainer.runtime.precision.mixed_precision import INIT_SCALE
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Verified
from shardwise.trainer.spec.strategy import Checkpointing, Fp8Recipe, Precision

WORKER = Path(__file__).with_name("precision_worker.py")
FAKE_TE = Path(__file__).parents[1] / "factories" / "fake_te"
FP16, BF16, FP8 = Precision.FP16_MIXED, Precision.BF16_MIXED, Precision.FP8
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

    @property
    def name(self) -> str:
        parts = (self.sharding, self.precision, self.accumulation, self.optimizer, self.recipe, self.checkpointing)
        return "-".join(map(str, parts)) + ("-overflow" if self.overflows else "")

    @property
    def num_ranks(self) -> int:
        return 4 if self.sharding is Sharding.HSDP else 2

    @property
    def train_forwards(self) -> int:
        return NUM_STEPS * self.accumulation


FP16_CASES = [Case(Sharding.DDP, FP16, accumulation=2), Case(Sharding.FSDP, FP16), Case(Sharding.FSDP_GRAD_OP, FP16)]
OVERFLOWS = [
    Case(Sharding.DDP, FP16, overflows=True),
    Case(Sharding.FSDP, FP16, overflows=True),
    Case(Sharding.FSDP, FP16, overflows=True, optimizer=Optimizer.ADAMW_FUSED),
]
FP32_CASE = Case(Sharding.DDP, Precision.FP32)
BF16_CASE = Case(Sharding.DDP, BF16)
FP8_CASES = [
    Case(Sharding.DDP, FP8, recipe=Fp8Recipe.MXFP8),
    Case(Sharding.DDP, FP8, accumulation=2, recipe=Fp8Recipe.CURRENT, checkpointing=Checkpointing.FULL),
    Case(Sharding.FSDP, FP8, recipe=Fp8Recipe.CURRENT, checkpointing=Checkpointing.FULL),
    Case(Sharding.ZERO2, FP8, recipe=Fp8Recipe.DELAYED),
    Case(Sharding.ZERO3, FP8, recipe=Fp8Recipe.CURRENT, checkpointing=Checkpointing.FULL),
]
HYBRID_OVERFLOW = Case(Sharding.HSDP, FP16, overflows=True)
HYBRID_FP8 = Case(Sharding.HSDP, FP8, recipe=Fp8Recipe.CURRENT, checkpointing=Checkpointing.FULL)
HYBRID = (HYBRID_OVERFLOW, HYBRID_FP8)
ZERO_CASES = [Case(Sharding.ZERO2, FP16), Case(Sharding.ZERO3, FP16)]
ZERO_OVERFLOWS = [case._replace(overflows=True) for case in ZERO_CASES]
RECIPE_CLASSES = {
    Fp8Recipe.MXFP8: "MXFP8BlockScaling",
    Fp8Recipe.CURRENT: "Float8CurrentScaling",
    Fp8Recipe.DELAYED: "DelayedScaling",
}


class Run(NamedTuple):
    """What an attempt left behind."""

    folder: Path

    @property
    def lines(self) -> list[dict]:
        return metrics_of(self.folder)

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "export" / "model.safetensors")

    def verified(self, rank: int) -> Verified:
        return engaged_of(self.folder, rank)

    def seen(self, rank: int) -> dict:
        return json.loads((self.folder / "attempts" / "1" / f"seen-{rank}.json").read_text())


def plan_of(case: Case, cache_dir: Path, run_dir: Path) -> Plan:
    if case.overflows:
        run_dir.mkdir()
        (run_dir / "overflows").touch()
    return rank_plan(
        cache_dir,
        case.sharding,
        num_ranks=case.num_ranks,
        num_steps=NUM_STEPS,
        precision=case.precision,
        micro_batch=8 // (case.num_ranks * case.accumulation),
        accumulation=case.accumulation,
        checkpointing=case.checkpointing,
        optimizer=case.optimizer,
        fp8_recipe=case.recipe,
    )


@pytest.fixture(scope="module")
def run_of(run_dirs, cache_dir) -> Iterator[Callable[[Case], Run]]:
    """Ranks find the stand-in where Transformer Engine would be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE_TE), os.environ.get("PYTHONPATH", "")]))
        cases = [FP32_CASE, BF16_CASE, *FP16_CASES, *OVERFLOWS, *ZERO_CASES, *ZERO_OVERFLOWS, *FP8_CASES, *HYBRID]
        run_dir_of = run_dirs(lambda case, run_dir: plan_of(case, cache_dir, run_dir), cases, worker=WORKER)
        yield lambda case: Run(run_dir_of(case))


@pytest.fixture
def run(case: Case, run_of: Callable[[Case], Run]) -> Run:
    return run_of(case)


def each(cases):
    """Four ranks take long on two cores."""
    marks = {case: [pytest.mark.long] if case.sharding is Sharding.HSDP else [] for case in cases}
    return pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks[case]) for case in cases])


@each([*FP16_CASES, *ZERO_CASES, *FP8_CASES, HYBRID_FP8])
def test_every_step_follows_plain_pytorch_in_fp32(case, run, reference):
    assert run.losses == pytest.approx(reference.losses, abs=TOLERANCE)
    assert run.losses != pytest.approx(reference.losses, abs=1e-6), "sixteen bits round"
    assert run.weights.keys() == reference.weights.keys(), "what is exported is named as in the plain model"
    assert {run.verified(rank).precision for rank in range(case.num_ranks)} == {case.precision}


@each(FP16_CASES)
def test_the_gradients_of_fp16_carry_the_scale(case, run, run_of):
    plain = run_of(FP32_CASE)
    assert [line["loss_scale"] for line in run.lines] == [INIT_SCALE] * NUM_STEPS
    for rank in (0, 1):
        facts = run.verified(rank).facts
        assert (facts["autocast"], facts["loss scale"], facts["skipped steps"]) == ("float16", "65536", "0")
        if case.accumulation == 1:  # else the micro batches are others
            largest, unscaled = run.seen(rank)["gradients"][0], plain.seen(rank)["gradients"][0]
            assert largest == pytest.approx(INIT_SCALE * unscaled, rel=2e-2)


@each(ZERO_CASES)
def test_deepspeed_scales_the_loss_and_the_scale_is_logged(case, run):
    assert [line["loss_scale"] for line in run.lines] == [INIT_SCALE] * NUM_STEPS
    assert not any(line.get("skipped") for line in run.lines)
    assert run.verified(0).facts["loss scale"] == "65536"
    assert "autocast" not in run.verified(0).facts, "the engine's own copy is fp16"


@each(ZERO_OVERFLOWS)
def test_steps_that_deepspeed_skips_are_logged(case, run):
    assert [bool(line.get("skipped")) for line in run.lines] == [True] + [False] * (NUM_STEPS - 1)
    assert run.lines[0].get("grad_norm") is None and run.lines[1]["grad_norm"] > 0
    assert {run.verified(rank).facts["skipped steps"] for rank in (0, 1)} == {"1"}
    assert run.losses[-1] < run.losses[0] - 0.5, "it trains on"


@each([*OVERFLOWS, HYBRID_OVERFLOW])
def test_an_overflow_on_one_rank_skips_the_step_on_all(case, run, run_of):
    """The element that is infinite on rank 1 is, summed up, in rank 0's half of the embeddings under FSDP2.

    Under hybrid sharding it is in that of rank 2 as well.
    """
    assert [bool(line.get("skipped")) for line in run.lines] == [True] + [False] * (NUM_STEPS - 1)
    assert [line["loss_scale"] for line in run.lines] == [INIT_SCALE] + [INIT_SCALE / 2] * (NUM_STEPS - 1)
    assert run.lines[0].get("grad_norm") is None and run.lines[1]["grad_norm"] > 0
    for rank in range(case.num_ranks):
        facts = run.verified(rank).facts
        assert (facts["loss scale"], facts["skipped steps"]) == ("32768", "1")
    plain = run_of(FP32_CASE)
    assert run.losses[0] == pytest.approx(plain.losses[0], abs=TOLERANCE)
    assert run.losses[-1] < run.losses[0] - 0.5, "it trains on"
    assert all(torch.isfinite(weight).all() for weight in run.weights.values())


def test_a_skipped_step_is_skipped_alike_by_every_engine(run_of):
    losses = [run_of(case).losses for case in OVERFLOWS]
    assert losses[1] == pytest.approx(losses[0], abs=TOLERANCE)
    assert losses[2] == pytest.approx(losses[0], abs=TOLERANCE)


@each([*FP8_CASES, HYBRID_FP8])
def test_every_forward_multiplies_in_fp8_recomputation_too(case, run):
    recomputed = case.train_forwards if case.checkpointing is Checkpointing.FULL else 0
    for rank in range(case.num_ranks):
        counts = run.seen(rank)["te"]
        assert counts.pop("fp8 products with gradients") == NUM_LINEARS * (case.train_forwards + recomputed)
        assert counts.pop("fp8 products without") == NUM_LINEARS * EVAL_FORWARDS * case.accumulation
        opened = counts.pop("autocast")
        assert counts.pop(f"recipe {RECIPE_CLASSES[case.recipe]}") == opened
        forwards = case.train_forwards + EVAL_FORWARDS * case.accumulation
        assert opened == forwards + NUM_LINEARS * recomputed, "one a forward; a recomputed layer opens its own"
        counts.pop("16 bit products without", None)  # the sample before and after, where rank 0 draws one
        assert counts == {}


@each([*FP8_CASES, HYBRID_FP8])
def test_the_report_lists_converted_layers_and_products(case, run):
    facts = run.verified(0).facts
    assert str(case.recipe) in facts["fp8 recipe"] and RECIPE_CLASSES[case.recipe] in facts["fp8 recipe"]
    assert ("experimental" in facts["fp8 recipe"]) is (case.recipe is Fp8Recipe.MXFP8)
    assert facts["fp8 layers"] == str(NUM_LINEARS)
    assert facts["fp8 layers left in 16 bit"].startswith("1 ") and "lm_head" in facts["fp8 layers left in 16 bit"]
    forwards = case.accumulation * (2 if case.checkpointing is Checkpointing.FULL else 1)
    assert facts["fp8 products"].split()[0] == str(NUM_LINEARS * forwards), "of the first step"


def test_converted_layers_have_the_weights_of_the_model(run_of):
    """The stand-in multiplies as bf16 does, so any other weight would show in every loss."""
    fp8, bf16 = run_of(FP8_CASES[0]), run_of(BF16_CASE)
    assert fp8.losses == bf16.losses
    assert all(torch.equal(weight, bf16.weights[name]) for name, weight in fp8.weights.items())


def test_nothing_of_fp8_is_in_a_checkpoint(run_of):
    for case in (FP8_CASES[0], BF16_CASE):
        manifest = json.loads(next(run_of(case).folder.glob("checkpoints/*/MANIFEST.json")).read_text())
        assert set(manifest["parameters"]) == set(run_of(BF16_CASE).weights)


def test_w21_accelerates_fp16_is_fp32_on_a_cpu():
    program = """
import torch, accelerate
accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16")
model = accelerator.prepare(torch.nn.Linear(2, 2))
seen = []
model.register_forward_hook(lambda _module, _inputs, out: seen.append(torch.is_autocast_enabled("cpu")))
model(torch.ones(1, 2))
print("scaler:", accelerator.scaler, "autocast:", seen)
"""
    assert "scaler: None autocast: [False]" in run_python(program)


@pytest.mark.cold
def test_w22_accelerates_fp8_is_off_or_partial(tmp_path):
    program = """
import inspect, torch, accelerate
from accelerate.utils.transformer_engine import convert_model
import transformer_engine.pytorch as te
accelerate.Accelerator(cpu=True)
model = torch.nn.Sequential(*(torch.nn.Linear(size, size, bias=False) for size in (16, 15, 32)))
with torch.no_grad():
    convert_model(model)
print("converted:", [isinstance(layer, te.Linear) for layer in model])
engines = accelerate.Accelerator._prepare_fsdp2, accelerate.Accelerator._prepare_deepspeed
print("autocast:", ["apply_fp8_autowrap" in inspect.getsource(prepare) for prepare in engines])
print("recipe:", "te_recipe_handler" in inspect.getsource(engines[1]))
"""
    metadata = tmp_path / "transformer_engine-2.20.2.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n")
    printed = run_python(program, PYTHONPATH=os.pathsep.join([str(FAKE_TE), str(tmp_path)]), FAKE_TE_DEVICE="cpu")
    assert printed.splitlines()[-3:] == ["converted: [True, False, False]", "autocast: [False, True]", "recipe: False"]


def run_python(program: str, **environment: str) -> str:
    """What a program prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
