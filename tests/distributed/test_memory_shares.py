"""Each rank saves the memory of state that ranks share: bytes between steps and peak, against DDP and the prediction.

Bytes between steps are exact. The peak differs from run to run under every engine that shards, by up to 7 %: a
collective of gloo's lets go of its tensors when its thread gets there. For a model this small the closed form is up to
an eighth above what ran under ZeRO-1 and up to an eighth below under ZeRO-3, whose peak reaches DDP's in some runs.
"""

from collections.abc import Callable
from operator import itemgetter

import pytest
from attempt_runs import metrics_of
from rank_factory import ranks_of
from rank_scenarios import predicted_share, share_plan

from shardwise.trainer.spec.engines import Sharding

TORCH = (Sharding.DDP, Sharding.FSDP, Sharding.FSDP_GRAD_OP, Sharding.HSDP)
DEEPSPEED = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
FIGURES = ("memory_allocated_bytes", "memory_peak_bytes")


@pytest.fixture(scope="module")
def measured(run_dirs, cache_dir) -> Callable[[Sharding], tuple[int, int]]:
    runs = run_dirs(
        lambda sharding, _: share_plan(cache_dir, sharding, num_ranks=ranks_of(sharding)), (*TORCH, *DEEPSPEED)
    )
    return lambda sharding: itemgetter(*FIGURES)(metrics_of(runs(sharding))[-1])


def predicted(sharding: Sharding) -> tuple[int, int]:
    estimate = predicted_share(sharding, num_ranks=ranks_of(sharding), ranks_per_node=2)
    return estimate.steady_allocated_bytes, estimate.peak_allocated_bytes


@pytest.mark.parametrize("sharding", (*TORCH, *DEEPSPEED))
def test_a_rank_holds_its_share(sharding, measured):
    assert predicted(sharding)[0] == pytest.approx(measured(sharding)[0], rel=0.005)


@pytest.mark.long
@pytest.mark.parametrize("sharding", (*TORCH, *DEEPSPEED))
def test_a_rank_peaks_about_where_predicted(sharding, measured):
    least = 0.85 if sharding in (Sharding.ZERO3, Sharding.HSDP) else 0.9
    assert least < predicted(sharding)[1] / measured(sharding)[1] < 1.15


@pytest.mark.parametrize("sharding", (Sharding.FSDP, Sharding.FSDP_GRAD_OP, *DEEPSPEED))
def test_between_steps_sharding_saves_what_was_predicted(sharding, measured):
    (whole, whole_peak), (share, peak) = measured(Sharding.DDP), measured(sharding)
    assert whole - share > 0.3 * whole
    assert predicted(Sharding.DDP)[0] - predicted(sharding)[0] == pytest.approx(whole - share, rel=0.01)
    assert peak < whole_peak or sharding is Sharding.ZERO3
