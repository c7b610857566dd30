"""What two ranks share, each saves: bytes between steps and the peak of a step, against DDP's and the prediction.

Bytes between steps are exact. The peak of the same plan differs from run to run under every engine that shards, by up
to 7 %, in steps of one weight: a collective of gloo's lets go of its tensors when its thread gets there. It is shown to
be lower than DDP's, and in test-long to be about where it is predicted. For a model this small the closed form is up to
an eighth above what ran under ZeRO-1 and up to an eighth below under ZeRO-3, whose peak reaches DDP's in some runs.

ZeRO-3's flat partitions and buffers belong to no parameter: they are read off the engine.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from estimate_factory import config, configuration, cpu, shape_of
from msgspec.structs import replace
from rank_factory import SEQ_LEN, rank_plan, write_attempt

from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.planning.search.configurations import smallest_buckets
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Buckets, Plan
from shardwise.trainer.spec.strategy import LossHead, Precision

FIELDS = config(4096, 192, 512, 4, 6, 2, is_tied=True, head_dim=32)
SHAPE = shape_of(FIELDS)
TORCH = (Sharding.DDP, Sharding.FSDP, Sharding.FSDP_GRAD_OP)
DEEPSPEED = (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3)
CHUNK_TOKENS = 40


class Bytes(NamedTuple):
    """Of one rank."""

    peak: int
    steady: int


def buckets_of(plan: Plan) -> Buckets | None:
    return smallest_buckets(SHAPE, plan.chosen.strategy)


def plan_of(sharding: Sharding, cache_dir: Path) -> Plan:
    """Four steps, of which the third is measured, each after an evaluation, whose forward gathers for no backward."""
    plan = rank_plan(
        cache_dir, sharding, num_ranks=2, num_steps=4, sequences_per_step=2, micro_batch=1, accumulation=1,
        eval_every_steps=1, model_config=FIELDS, loss=LossHead.CHUNKED, loss_chunk_tokens=CHUNK_TOKENS,
    )  # fmt: skip
    chosen = replace(
        plan.chosen,
        strategy=replace(plan.chosen.strategy, optimizer=Optimizer.ADAMW_FUSED),
        buckets=buckets_of(plan),
    )
    return replace(plan, model_shape=SHAPE, candidates=(chosen,))


@pytest.fixture(scope="module")
def measured(tmp_path_factory, cache_dir, run_ranks) -> Callable[[Sharding], Bytes]:
    folders = {sharding: tmp_path_factory.mktemp("shares") / sharding.value for sharding in (*TORCH, *DEEPSPEED)}
    for shardings in (TORCH, DEEPSPEED):
        run_ranks([write_attempt(folders[each], plan_of(each, cache_dir)) for each in shardings], 2)

    def read(sharding: Sharding) -> Bytes:
        line = json.loads((folders[sharding] / "metrics.jsonl").read_text().splitlines()[-1])
        return Bytes(line["memory_peak_bytes"], line["memory_allocated_bytes"])

    return read


def predicted(sharding: Sharding) -> Bytes:
    chosen = configuration(
        sharding, precision=Precision.FP32, optimizer=Optimizer.ADAMW_FUSED, num_ranks=2, ranks_per_node=2,
        seq_len=SEQ_LEN, loss=LossHead.CHUNKED, loss_chunk_tokens=CHUNK_TOKENS,
    )  # fmt: skip
    chosen = replace(chosen, buckets=smallest_buckets(SHAPE, chosen.strategy))
    estimate = estimate_memory(SHAPE, chosen, cpu(2))
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
