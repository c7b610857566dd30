"""Silent faults that only several ranks can have end the run on every rank before step 5, with the same lines."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_factory import rank_plan, write_rows

from shardwise.trainer.spec.engines import Sharding

NUM_RANKS, NUM_STEPS = 2, 5
OF_ROWS, OF_GRADIENT = "rows of a rank are not those", "the mean of what the ranks computed"
CASES = {
    ("rows", Sharding.DDP): OF_ROWS,
    ("rows", Sharding.FSDP): OF_ROWS,
    ("alone", Sharding.DDP): f"is not {OF_GRADIENT}",
    ("twice", Sharding.DDP): f"is 0.5 times {OF_GRADIENT}",
    ("twice", Sharding.FSDP): f"is 0.5 times {OF_GRADIENT}",
    ("shard", Sharding.FSDP): f"is not {OF_GRADIENT}",
    ("shard", Sharding.ZERO1): f"is not {OF_GRADIENT}",
    ("shard", Sharding.ZERO2): f"is not {OF_GRADIENT}",
    ("shard", Sharding.ZERO3): f"is not {OF_GRADIENT}",
}
QUICK = ("shard", Sharding.FSDP)
PARAMETERS = [
    pytest.param(each, marks=() if each == QUICK else (pytest.mark.long, pytest.mark.products)) for each in CASES
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, run_dirs) -> Callable[[tuple[str, Sharding]], Path]:
    """Every row has the same number of targets, so that ranks with the rows of another go on."""
    rows = write_rows(tmp_path_factory.mktemp("even") / "rows", shortest=48, num_rows=200, is_grouped=False)
    return run_dirs(
        lambda case, _: rank_plan(rows, case[1], num_steps=NUM_STEPS, micro_batch=2, clip=100.0),
        tuple(CASES), kind=lambda case: f":{case[0]}",
    )  # fmt: skip


@pytest.mark.parametrize("case", PARAMETERS)
def test_a_fault_of_several_ranks_is_named_before_step_5(case, runs):
    folder = runs(case) / "attempts" / "1"
    ended = [json.loads((folder / f"ended-{rank}.json").read_text()) for rank in range(NUM_RANKS)]
    assert ended[0] == ended[1]
    assert ended[0]["step"] <= 4 and any(CASES[case] in line for line in ended[0]["lines"]), ended[0]
    assert CASES[case] in ended[0]["error"]
