"""After an early stop ranks that hold parts of the weights go back to the best ones, each reading its own ranges."""

import pytest
from rank_scenarios import check_best_export, early_stop_plan

from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.strategy import Precision

CASES = (
    (Sharding.FSDP, Precision.FP32),
    (Sharding.ZERO2, Precision.BF16_MIXED),
    (Sharding.ZERO3, Precision.BF16_MIXED),
)


@pytest.fixture(scope="module")
def runs(run_dirs, cache_dir):
    return run_dirs(
        lambda case, _: early_stop_plan(cache_dir, case[0], num_ranks=2, precision=case[1], micro_batch=4), CASES
    )


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_the_export_is_of_the_best_step(case, runs):
    check_best_export(runs(case))
