"""Two ranks compute the global batch of every step of two epochs, whatever their micro batch: seen at the model."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace
from pair_factory import pair_plan, write_pairs
from rank_factory import SEED, rank_plan, train_rows, write_packed_rows, write_rows

from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method

SEQUENCES_PER_STEP, NUM_EPOCHS, NUM_RANKS = 6, 2, 2
ACCUMULATION = {"packed": 1, "grouped": 3, "pairs": 1}  # micro batches of four, of which two are dummies, or of one


@pytest.fixture(scope="module")
def plans(tmp_path_factory) -> dict[str, Plan]:
    folder = tmp_path_factory.mktemp("rows")

    def plan_of(name: str, cache_dir: Path, make: Callable[..., Plan] = rank_plan, **settings: object) -> Plan:
        accumulation = ACCUMULATION[name]
        plan = make(
            cache_dir, Sharding.DDP, num_ranks=NUM_RANKS, micro_batch=1 if accumulation > 1 else 4,
            accumulation=accumulation, sequences_per_step=SEQUENCES_PER_STEP,
            num_steps=-(-NUM_EPOCHS * len(TokenRows.open(cache_dir, "train")) // SEQUENCES_PER_STEP), **settings,
        )  # fmt: skip
        return replace(plan, data=replace(plan.data, is_packed=name == "packed"))

    lora = {"method": Method.LORA, "train": {"lora": LoraJob(rank=4)}}
    return {
        "packed": plan_of("packed", write_packed_rows(folder / "packed", num_rows=70)),
        "grouped": plan_of("grouped", write_rows(folder / "grouped", num_rows=70)),
        "pairs": plan_of("pairs", write_pairs(folder / "pairs"), pair_plan, **lora),
    }


def rows_of_step(rows: TokenRows, step: int) -> Counter[tuple[int, ...]]:
    examples = rows.order(seed=SEED, sequences_per_step=SEQUENCES_PER_STEP).rows_of_step(step)
    return Counter(_learned(rows, number) for example in examples for number in rows.rows_of(example))


def _learned(rows: TokenRows, number: int) -> tuple[int, ...]:
    end = int((rows.labels(number) != IGNORED_LABEL).nonzero()[0][-1]) + 1
    return tuple(rows.row(number)[:end].tolist())


@pytest.fixture(scope="module")
def runs(plans, run_dirs) -> Callable[[str], Path]:
    return run_dirs(lambda name, _: plans[name], tuple(ACCUMULATION), kind=":note")


@pytest.mark.parametrize("name", ACCUMULATION)
def test_what_the_ranks_compute_is_the_global_batch_of_every_step(name, plans, runs, notes_of):
    rows, accumulation, ranks = train_rows(plans[name]), ACCUMULATION[name], []
    for rank in range(NUM_RANKS):
        forwards = notes_of(runs(name), rank)["rows"]
        assert len(forwards) % accumulation == 0
        starts = range(0, len(forwards), accumulation)
        steps = (forwards[first : first + accumulation] for first in starts)
        ranks.append([[tuple(row) for forward in step for row in forward if row] for step in steps])
    assert len(ranks[0]) == -(-NUM_EPOCHS * len(rows) // SEQUENCES_PER_STEP)
    for step, of_ranks in enumerate(zip(*ranks, strict=True)):
        assert Counter(row for computed in of_ranks for row in computed) == rows_of_step(rows, step)
        assert all(of_ranks), "no rank is idle"
