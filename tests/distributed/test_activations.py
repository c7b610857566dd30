"""What is kept, recomputed or moved changes no gradient under any engine, and each is seen to happen on every rank.

Attention drops a third of its probabilities: a mask that were another in the recomputation would show at once.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from attempt_runs import engaged_of
from engine_plan_factory import TINY_LLAMA
from rank_factory import rank_plan, write_attempt

from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.strategy import Checkpointing, LossHead

NUM_BLOCKS = 4
NUM_STEPS = 2
MODEL = {**TINY_LLAMA, "num_hidden_layers": NUM_BLOCKS, "attention_dropout": 0.3}


class Case(NamedTuple):
    """One attempt of two ranks, of four under hybrid sharding."""

    sharding: Sharding
    checkpointing: Checkpointing = Checkpointing.NONE
    moves: bool = False
    compiles: bool = False

    @property
    def num_ranks(self) -> int:
        return 4 if self.sharding is Sharding.HSDP else 2

    @property
    def name(self) -> str:
        extras = ("-offload" if self.moves else "") + ("-compiled" if self.compiles else "")
        return f"{self.sharding}-{self.checkpointing}{extras}"


def cases_of(sharding: Sharding, *retained: Checkpointing, moved: Sequence[Checkpointing] = ()) -> list[Case]:
    """Everything kept, and what is compared with it."""
    points = [(Checkpointing.NONE, False), *((each, False) for each in retained), *((each, True) for each in moved)]
    return [Case(sharding, *point) for point in points]


NONE, FULL, EVERY_N = Checkpointing.NONE, Checkpointing.FULL, Checkpointing.EVERY_N
ATTENTION, SELECTIVE = Checkpointing.ATTENTION, Checkpointing.SELECTIVE
TORCH_CASES = [
    *cases_of(Sharding.DDP, moved=[ATTENTION]),
    *cases_of(Sharding.FSDP, FULL, EVERY_N, ATTENTION, SELECTIVE, moved=[NONE]),
]
DEEPSPEED_CASES = [
    *cases_of(Sharding.ZERO1, moved=[EVERY_N]),
    *cases_of(Sharding.ZERO3, FULL, SELECTIVE, moved=[ATTENTION]),
]
COMPILED_TORCH = [
    Case(Sharding.DDP, SELECTIVE, compiles=True),
    Case(Sharding.FSDP, FULL, compiles=True),
    Case(Sharding.FSDP, NONE, moves=True, compiles=True),
    Case(Sharding.FSDP_GRAD_OP, NONE, compiles=True),
]
COMPILED_DEEPSPEED = [Case(Sharding.ZERO1, FULL, compiles=True), Case(Sharding.ZERO2, NONE, compiles=True)]
COMPILED_HYBRID = [Case(Sharding.HSDP, FULL, compiles=True)]
FACTS = {
    Checkpointing.FULL: "recomputed: 4 of 4 blocks",
    Checkpointing.EVERY_N: "recomputed: 2 of 4 blocks",
    Checkpointing.ATTENTION: "attention recomputed in 4 of 4 blocks",
    Checkpointing.SELECTIVE: "recomputed: 4 of 4 blocks, but for 4 of 7 matrix products and 1 attention output in each",
}


def plan_of(case: Case, cache_dir: Path):
    return rank_plan(
        cache_dir,
        case.sharding,
        num_ranks=case.num_ranks,
        num_steps=NUM_STEPS,
        accumulation=2,
        micro_batch=4 // case.num_ranks,
        model_config={**MODEL, "attention_dropout": 0.0} if case.compiles else MODEL,
        checkpointing=case.checkpointing,
        checkpoint_every_n=2 if case.checkpointing is Checkpointing.EVERY_N else None,
        activation_offload=case.moves,
        compile=case.compiles,
        loss=LossHead.CHUNKED,
    )


@pytest.fixture(scope="module")
def runs(run_dirs, cache_dir) -> Callable[[Case], Path]:
    return run_dirs(lambda case, _: plan_of(case, cache_dir), TORCH_CASES + DEEPSPEED_CASES)


EACH = pytest.mark.parametrize("case", TORCH_CASES + DEEPSPEED_CASES, ids=lambda case: case.name)


@EACH
def test_steps_with_dropout_end_where_they_do_when_everything_is_kept(case, runs, read_course):
    course, expected = read_course(runs(case)), read_course(runs(Case(case.sharding)))
    assert len(course.losses) == NUM_STEPS
    assert course.losses == pytest.approx(expected.losses, abs=1e-6)
    assert course.grad_norms == pytest.approx(expected.grad_norms, abs=1e-6)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(course.weights[name], weight, rtol=0, atol=1e-6, msg=f"{name}: {{}}".format)


@EACH
def test_every_rank_saw_what_was_recomputed_and_moved(case, runs):
    for rank in (0, 1):
        verified = engaged_of(runs(case), rank)
        assert verified.facts.get("checkpointing") == FACTS.get(case.checkpointing)
        moved = verified.facts.get("activation_offload", "")
        assert ("of 3 blocks" in moved) is case.moves


@pytest.mark.long
@pytest.mark.parametrize(
    "cases", [COMPILED_TORCH, COMPILED_DEEPSPEED, COMPILED_HYBRID], ids=["torch", "deepspeed", "hybrid"]
)
def test_compiled_blocks_train_alike_under_every_engine(cases, tmp_path, cache_dir, run_ranks, read_course):
    """Against eager blocks of the same engine; widths vary, so two graphs serve all blocks."""
    eager = [case._replace(compiles=False) for case in cases]
    run_dirs = {case: tmp_path / case.name for case in (*cases, *eager)}
    plans = [write_attempt(run_dirs[case], plan_of(case._replace(compiles=True), cache_dir)) for case in cases]
    plans += [write_attempt(run_dirs[case], without_compile(case, cache_dir)) for case in eager]
    run_ranks(plans, cases[0].num_ranks)
    for case, plain in zip(cases, eager, strict=True):
        course, expected = read_course(run_dirs[case]), read_course(run_dirs[plain])
        assert course.losses == pytest.approx(expected.losses, abs=1e-5), case.name
        verified = engaged_of(run_dirs[case], 1)
        assert verified.facts["compile"].startswith(f"{NUM_BLOCKS} of {NUM_BLOCKS} blocks, as "), case.name


def without_compile(case: Case, cache_dir: Path):
    plan = plan_of(case._replace(compiles=True), cache_dir)
    chosen = msgspec.structs.replace(plan.chosen, compile=False)
    return msgspec.structs.replace(plan, candidates=(chosen,))
