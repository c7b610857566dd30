"""State off the device trains alike, and lies where the plan says: in host RAM, or in files on a disk."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from attempt_runs import engaged_of, losses_of
from operator_cache import NO_LIBAIO, folder_with_operators, lacks_libaio
from rank_factory import LOCKABLE_BYTES, SWAPPED_LLAMA, offload_plan, rank_plan, write_attempt

from shardwise.launch.engine.offload import offload_buffers
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.plan import Buckets, Plan
from shardwise.trainer.spec.strategy import Precision
from shardwise.trainer.spec.units import format_bytes

TOLERANCE, NUM_STEPS = 1e-5, 4
Case = tuple[Sharding, Offload]
CASES: tuple[Case, ...] = (
    (Sharding.ZERO2, Offload.OPTIMIZER),
    (Sharding.ZERO3, Offload.OPTIMIZER),
    (Sharding.ZERO3, Offload.OPTIMIZER_PARAMS),
    (Sharding.ZERO3, Offload.NVME_OPTIMIZER),
    (Sharding.ZERO3, Offload.NVME_ALL),
)
NVME = [case for case in CASES if case[1].uses_nvme]
PURE: tuple[Case, ...] = ((Sharding.ZERO2, Offload.NONE), (Sharding.ZERO3, Offload.NONE))
REFERENCE: Case = (Sharding.DDP, Offload.NONE)
each = {cases: pytest.mark.parametrize("case", cases, ids="+".join) for cases in (CASES, tuple(NVME), PURE)}


def plan_of(case: Case, cache_dir: Path, run_dir: Path) -> Plan:
    settings: dict[str, Any] = {"num_steps": NUM_STEPS, "micro_batch": 2, "accumulation": 2}
    if case in PURE:
        return rank_plan(cache_dir, *case, precision=Precision.BF16, **settings)
    return offload_plan(cache_dir, *case, nvme=run_dir / "nvme", model_config=SWAPPED_LLAMA, **settings)


@pytest.fixture(scope="module")
def runs(run_dirs, cache_dir) -> Callable[[Case], Path]:
    return run_dirs(lambda case, run_dir: plan_of(case, cache_dir, run_dir), (REFERENCE, *CASES, *PURE))


@each[CASES]
def test_every_step_equals_that_of_ddp(case, runs, read_course):
    expected, course = read_course(runs(REFERENCE)), read_course(runs(case))
    assert len(course.losses) == NUM_STEPS
    assert expected.losses[-1] < expected.losses[0] - 0.5
    assert course.losses == pytest.approx(expected.losses, abs=TOLERANCE)
    # torch adds up the squares of half a million elements in fp32 one after the other, DeepSpeed in fp64.
    assert course.grad_norms == pytest.approx(expected.grad_norms, rel=1e-3)
    torch.testing.assert_close(course.weights, expected.weights, rtol=0, atol=1e-4)


@each[CASES]
def test_state_is_off_the_device_as_deepspeed_was_told(case, runs, cache_dir):
    place = f"float32 on {'nvme' if case[1].uses_nvme else 'cpu'}"
    for rank in (0, 1):
        seen = engaged_of(runs(case), rank)
        assert (seen.engine_class, seen.optimizer_class) == ("DeepSpeedEngine", "DeepSpeedCPUAdam")
        assert place in seen.facts["master weights"]
        assert not case[1].moves_parameters or place in seen.facts["weights"]
    config = json.loads((runs(case) / "attempts" / "1" / "ds_config.json").read_text())["zero_optimization"]
    assert config["offload_optimizer"]["pin_memory"] is False
    if case[0] is Sharding.ZERO3:
        sizes = offload_buffers(plan_of(case, cache_dir, runs(case)))
        assert config["sub_group_size"] == sizes.sub_group_elements
        assert sizes.locked_bytes <= LOCKABLE_BYTES


@each[PURE]
def test_pure_bf16_under_zero_has_no_fp32_copy_and_trains_nearly_as_well(case, runs, reference):
    """The keys `bf16_master_weights_and_grads` and `bf16_optimizer_states`: partitions and both moments are bf16."""
    for rank in (0, 1):
        seen = engaged_of(runs(case), rank)
        assert (seen.precision, seen.engine_class, seen.optimizer_class) == ("bf16", "DeepSpeedEngine", "AdamW")
        half = format_bytes(2 * seen.partition_elements)
        assert seen.facts["master weights"] == f"bfloat16 on cpu {half}"
        both = format_bytes(2 * 2 * seen.partition_elements)
        assert seen.facts["place of optimizer state"] == f"bfloat16 on cpu {both}"
    losses = losses_of(runs(case))
    assert losses == pytest.approx(reference.losses[:NUM_STEPS], abs=2e-2)
    assert losses != pytest.approx(reference.losses[:NUM_STEPS], abs=1e-4), "fp32 would be as close as that"


def prepare_nvme() -> None:
    if lacks_libaio():
        pytest.skip(NO_LIBAIO)
    folder_with_operators("async_io")


def test_ranks_stop_where_deepspeed_does_something_else(tmp_path, cache_dir, run_ranks):
    """Each line names what differs, the plan's value and the one that runs."""
    prepare_nvme()
    plan = plan_of(NVME[-1], cache_dir, tmp_path)
    sizes = dict.fromkeys(("reduce_elements", "allgather_elements", "prefetch_elements"), 2**18)
    buckets = Buckets(**sizes, live_parameters=2**20, persistence_elements=640)
    chosen = msgspec.structs.replace(plan.chosen, buckets=buckets)
    path = write_attempt(tmp_path / "run", msgspec.structs.replace(plan, candidates=(chosen,)))
    config = json.loads(path.with_name("ds_config.json").read_text())
    config["zero_optimization"] |= {"offload_param": {"device": "none"}, "reduce_bucket_size": 2**17}
    path.with_name("ds_config.json").write_text(json.dumps(config))
    with pytest.raises(AssertionError) as raised:
        run_ranks([path], 2)
    for what in ("offload:.*nvme_all.*nvme_optimizer", "weights on NVMe:.*2.*0", "reduce elements:.*262144.*131072"):
        assert re.search(what, str(raised.value)), what


READS_TWICE = """
import sys
sys.path.insert(0, sys.argv.pop(1))
from shardwise.trainer.runtime.engines import zero
zero.read_each_weight_once = lambda: None
import engine_worker
engine_worker.main(sys.argv[1:])
"""


def test_w34_deepspeed_requests_two_buffers_for_a_weight_that_is_used_twice(tmp_path, cache_dir, start_ranks):
    prepare_nvme()
    (tmp_path / "canary.py").write_text(READS_TWICE)
    plan = write_attempt(tmp_path / "run", plan_of(NVME[-1], cache_dir, tmp_path))
    with pytest.raises(AssertionError, match="already assigned swap buffer"):
        start_ranks([str(tmp_path / "canary.py"), str(Path(__file__).parent), str(plan)], 2)
