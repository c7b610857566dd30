"""What two ranks share, each saves: bytes between steps and the peak of a step, against DDP's and the prediction.

Bytes between steps are exact. The peak of the same plan differs from run to run under every engine that shards, by up
to 7 %, in steps of one weight: a collective of gloo's lets go of its tensors when its thread gets there. It is shown to
be lower than DDP's, and in test-long to be about where it is predicted. For a model this small the closed form is up to
an eighth above what ran under ZeRO-1 and up to an eighth below under ZeRO-3, whose peak reaches DDP's in some runs.

ZeRO-3's flat partitions and buffers belong to no parameter: they are read off the engine.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
from attempt_runs import metrics_of
from rank_scenarios import predicted_share, share_plan

from shardwise.trainer.spec.engines import Sharding

TORCH = (Sharding.DDP, Sharding.FSDP, Sharding.FSDP_GRAD_OP)
DEEPSPEED = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)


class Bytes(NamedTuple):
    """Of one rank."""

    peak: int
    steady: int


@pytest.fixture(scope="module")
def measured(run_dirs, cache_dir) -> Callable[[Sharding], Bytes]:
    runs = run_dirs(lambda sharding, _: share_plan(cache_dir, sharding, num_ranks=2), (*TORCH, *DEEPSPEED))

    def read(sharding: Sharding) -> Bytes:
        line = metrics_of(runs(sharding))[-1]
        return Bytes(line["memory_peak_bytes"], line["memory_allocated_bytes"])

    return read


def predicted(sharding: Sharding) -> Bytes:
    estimate = predicted_share(sharding, num_ranks=2, ranks_per_node=2)
    return Bytes(estimate.peak_allocated_bytes, estimate.steady_allocated_bytes)


@pytest.mark.parametrize("sharding", (*TORCH, *DEEPSPEED))
def test_a_rank_holds_its_share(sharding, measured):
    assert predicted(sharding).steady == pytest.approx(measured(sharding).steady, rel=0.005)


@pytest.mark.long
@pytest.mark.parametrize("sharding", (*TORCH, *DEEPSPEED))
def test_a_rank_peaks_about_where_predicted(sharding, measured):
    least = 0.85 if sharding is Sharding.ZERO3 else 0.9
    assert least < predicted(sharding).peak / measured(sharding).peak < 1.15


@pytest.mark.parametrize("sharding", (Sharding.FSDP, Sharding.FSDP_GRAD_OP, *DEEPSPEED))
def test_between_steps_sharding_saves_what_was_predicted(sharding, measured):
    saving = measured(Sharding.DDP).steady - measured(sharding).steady
    assert saving > 0.3 * measured(Sharding.DDP).steady
    assert predicted(Sharding.DDP).steady - predicted(sharding).steady == pytest.approx(saving, rel=0.01)
    if sharding is not Sharding.ZERO3:
        assert measured(sharding).peak < measured(Sharding.DDP).peak
