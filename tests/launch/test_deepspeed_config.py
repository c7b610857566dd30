"""What the holes of a DeepSpeed file are filled with."""

import json

import pytest
from engine_plan_factory import engine_plan

from launch.deepspeed_config import deepspeed_config, fill, read_base
from trainer.spec.errors import EnvironmentFaultError, InputError
from trainer.spec.job import Job, Limits, NvmeLimit, TrainJob
from trainer.spec.plan import Buckets
from trainer.spec.strategy import Offload, Precision, Sharding

BUCKETS = Buckets(
    reduce_elements=10, allgather_elements=20, prefetch_elements=30, live_parameters=40, persistence_elements=50
)


def test_the_batch_is_the_product_of_micro_batch_accumulation_and_ranks():
    config = deepspeed_config(engine_plan(Sharding.ZERO2, num_ranks=4, micro_batch=3, accumulation=5))
    assert config["train_micro_batch_size_per_gpu"] == 3
    assert config["gradient_accumulation_steps"] == 5
    assert config["train_batch_size"] == 60


def test_clipping_is_the_jobs():
    job = Job(train=TrainJob(clip=0.25))
    assert deepspeed_config(engine_plan(Sharding.ZERO1, job=job))["gradient_clipping"] == 0.25


@pytest.mark.parametrize(
    ("precision", "bf16", "fp16", "pure"),
    [
        (Precision.FP32, False, False, False),
        (Precision.FP16_MIXED, False, True, False),
        (Precision.BF16_MIXED, True, False, False),
        (Precision.BF16, True, False, True),
        (Precision.FP8, True, False, False),
    ],
)
def test_precision_decides_the_16_bit_sections(precision: Precision, bf16: bool, fp16: bool, pure: bool):
    config = deepspeed_config(engine_plan(Sharding.ZERO3, precision=precision))
    assert config["fp16"]["enabled"] is fp16
    assert config["bf16"] == {
        "enabled": bf16,
        "bf16_master_weights_and_grads": pure,
        "bf16_optimizer_states": pure,
    }


def test_planned_buckets_are_taken_as_they_are():
    zero = deepspeed_config(engine_plan(Sharding.ZERO3, buckets=BUCKETS))["zero_optimization"]
    assert zero["reduce_bucket_size"] == 10
    assert zero["stage3_prefetch_bucket_size"] == 30
    assert zero["stage3_max_live_parameters"] == zero["stage3_max_reuse_distance"] == 40
    assert zero["stage3_param_persistence_threshold"] == 50


def test_without_planned_buckets_they_follow_the_hidden_size():
    zero = deepspeed_config(engine_plan(Sharding.ZERO3))["zero_optimization"]
    assert zero["reduce_bucket_size"] == 64 * 64
    assert zero["stage3_prefetch_bucket_size"] == 3686
    assert zero["stage3_param_persistence_threshold"] == 640
    assert zero["stage3_max_live_parameters"] == 1_000_000_000


@pytest.mark.parametrize("argument", ["/scratch", None])
def test_state_on_nvme_goes_where_the_caller_or_else_the_job_says(argument: str | None):
    job = Job(limits=Limits(nvme=NvmeLimit(path="/from-job")))
    plan = engine_plan(Sharding.ZERO3, Offload.NVME_ALL, job=job)
    zero = deepspeed_config(plan, nvme_path=argument)["zero_optimization"]
    assert zero["offload_optimizer"]["nvme_path"] == zero["offload_param"]["nvme_path"] == (argument or "/from-job")


def test_nvme_without_a_path_names_the_setting():
    with pytest.raises(InputError, match=r"limits\.nvme\.path"):
        deepspeed_config(engine_plan(Sharding.ZERO3, Offload.NVME_ALL))


@pytest.mark.parametrize(("num_ranks", "elements"), [(1, 16384), (3, 5462)])
def test_an_nvme_buffer_holds_the_largest_piece_of_a_weight(num_ranks: int, elements: int):
    plan = engine_plan(Sharding.ZERO3, Offload.NVME_ALL, num_ranks=num_ranks)  # embedding: 256 x 64
    zero = deepspeed_config(plan, nvme_path="/nvme")["zero_optimization"]
    assert zero["offload_param"]["buffer_size"] == elements


def test_filling_leaves_the_base_as_it_was():
    text = read_base("ds_configs/zero3.json")
    base = json.loads(text)
    fill(base, engine_plan(Sharding.ZERO3), nvme_path=None)
    assert base == json.loads(text)


def test_a_hole_that_nothing_fills_is_an_error():
    with pytest.raises(ValueError, match=r"zero_optimization\.sub_group_size"):
        fill({"zero_optimization": {"sub_group_size": "auto"}}, engine_plan(Sharding.ZERO3), nvme_path=None)


def test_a_strategy_of_another_engine_is_refused():
    with pytest.raises(ValueError, match="not a DeepSpeed strategy"):
        deepspeed_config(engine_plan(Sharding.FSDP))


def test_a_missing_file_is_an_incomplete_installation():
    with pytest.raises(EnvironmentFaultError, match="install shardwise again"):
        read_base("ds_configs/zero9.json")
