"""Recomputing or moving activations changes no gradient under any engine, and is observed on every rank."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from attempt_runs import engaged_of
from engine_plan_factory import TINY_LLAMA
from rank_factory import rank_plan

from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.strategy import Checkpointing, LossHead

NUM_BLOCKS, NUM_STEPS = 4, 2
MODEL = {**TINY_LLAMA, "num_hidden_layers": NUM_BLOCKS, "attention_dropout": 0.3}
NONE, FULL, EVERY_N = Checkpointing.NONE, Checkpointing.FULL, Checkpointing.EVERY_N
ATTENTION, SELECTIVE = Checkpointing.ATTENTION, Checkpointing.SELECTIVE


class Case(NamedTuple):
    """One attempt of two ranks, of four under hybrid sharding."""

    sharding: Sharding
    checkpointing: Checkpointing = NONE
    moves: bool = False
    compiles: bool | None = None  # None: attention drops, which compiled blocks draw otherwise


REFERENCE = Case(Sharding.NONE)
CASES = (
    Case(Sharding.DDP, ATTENTION, moves=True), Case(Sharding.FSDP, FULL), Case(Sharding.FSDP, moves=True),
    Case(Sharding.ZERO1, EVERY_N, moves=True), Case(Sharding.ZERO3, SELECTIVE), Case(Sharding.ZERO3, moves=True),
)  # fmt: skip
PLAIN = tuple(Case(sharding) for sharding in dict.fromkeys(case.sharding for case in CASES))  # everything is kept
COMPILED = (
    Case(Sharding.DDP, SELECTIVE, compiles=True),
    Case(Sharding.FSDP, FULL, compiles=True), Case(Sharding.FSDP, moves=True, compiles=True),
    Case(Sharding.FSDP_GRAD_OP, compiles=True), Case(Sharding.HSDP, FULL, compiles=True),
    Case(Sharding.ZERO1, FULL, compiles=True), Case(Sharding.ZERO2, compiles=True),
)  # fmt: skip
FACTS = {
    FULL: "recomputed: 4 of 4 blocks",
    EVERY_N: "recomputed: 2 of 4 blocks",
    ATTENTION: "attention recomputed in 4 of 4 blocks",
    SELECTIVE: "recomputed: 4 of 4 blocks, but for 4 of 7 matrix products and 1 attention output in each",
}


def plan_of(case: Case, cache_dir: Path):
    return rank_plan(
        cache_dir, case.sharding, num_steps=NUM_STEPS, loss=LossHead.CHUNKED,
        micro_batch=1 if case.sharding is Sharding.HSDP else 2, accumulation=4 if case == REFERENCE else 2,
        model_config=MODEL if case.compiles is None else {**MODEL, "attention_dropout": 0.0},
        checkpointing=case.checkpointing, checkpoint_every_n=2 if case.checkpointing is EVERY_N else None,
        activation_offload=case.moves, compile=bool(case.compiles),
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(run_dirs, cache_dir) -> Callable[[Case], Path]:
    eager = tuple(case._replace(compiles=False) for case in COMPILED)
    return run_dirs(lambda case, _: plan_of(case, cache_dir), (REFERENCE, *PLAIN, *CASES), (*COMPILED, *eager))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:3])))
def test_steps_with_dropout_end_where_they_do_when_everything_is_kept(case, runs, read_course):
    course = read_course(runs(case))
    assert len(course.losses) == NUM_STEPS
    course.check(read_course(runs(Case(case.sharding))), tolerance=1e-6, of_weights=1e-6)
    for rank in (0, 1):
        facts = engaged_of(runs(case), rank).facts
        assert facts.get("checkpointing") == FACTS.get(case.checkpointing)
        assert ("of 3 blocks" in facts.get("activation_offload", "")) is case.moves


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: str(case.sharding))
def test_steps_with_dropout_are_those_of_one_process(case, runs, read_course):
    course, expected = read_course(runs(case)), read_course(runs(REFERENCE))
    assert course.losses == pytest.approx(expected.losses, abs=1e-5)
    assert course.grad_norms == pytest.approx(expected.grad_norms, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: "-".join(map(str, case[:3])))
def test_compiled_blocks_train_alike_under_every_engine(case, runs, read_course):
    """Against eager blocks of the same engine; widths vary, so two graphs serve all blocks."""
    course, expected = read_course(runs(case)), read_course(runs(case._replace(compiles=False)))
    assert course.losses == pytest.approx(expected.losses, abs=1e-5)
    assert engaged_of(runs(case), 1).facts["compile"].startswith(f"{NUM_BLOCKS} of {NUM_BLOCKS} blocks, as ")
