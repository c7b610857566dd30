"""Six engines train alike, and each is the one that was asked for.

A right loss proves nothing about the engine, and the right engine nothing about the loss: both are asserted.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch
from attempt_runs import engaged_of
from rank_factory import NUM_STEPS, rank_plan
from safetensors.torch import load_file

from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, LossHead

TOLERANCE = 1e-5
NUM_ELEMENTS = 106_816  # parameters of the tiny Llama
NUM_PARAMETERS = 21


class Case(NamedTuple):
    """One attempt of two ranks."""

    sharding: Sharding
    accumulation: int
    micro_batch: int
    checkpointing: Checkpointing = Checkpointing.NONE
    loss: LossHead = LossHead.CHUNKED
    offload: Offload = Offload.NONE

    @property
    def name(self) -> str:
        return f"{self.sharding}+{self.offload}-{self.accumulation}x{self.micro_batch}-{self.checkpointing}-{self.loss}"


def padded(sharding: Sharding) -> Case:
    """Three rows a micro batch leave dummy rows in the last one."""
    return Case(sharding, accumulation=2, micro_batch=3, checkpointing=Checkpointing.FULL)


def whole(sharding: Sharding) -> Case:
    return Case(sharding, accumulation=1, micro_batch=4)


def eager(sharding: Sharding) -> Case:
    return Case(sharding, accumulation=2, micro_batch=2, loss=LossHead.EAGER)


EXPORTED = [whole(Sharding.DDP), whole(Sharding.FSDP), whole(Sharding.ZERO3)]
TORCH_CASES = [
    *EXPORTED[:2], padded(Sharding.DDP), eager(Sharding.FSDP), padded(Sharding.FSDP_GRAD_OP)
]  # fmt: skip
DEEPSPEED_CASES = [
    padded(Sharding.ZERO1), eager(Sharding.ZERO2), EXPORTED[2], padded(Sharding.ZERO3),
    Case(Sharding.ZERO2, accumulation=2, micro_batch=2, offload=Offload.OPTIMIZER),
]  # fmt: skip
ENGINE_CLASSES = {
    Sharding.DDP: "DistributedDataParallel",
    Sharding.FSDP: "FSDPLlamaForCausalLM",
    Sharding.FSDP_GRAD_OP: "FSDPLlamaForCausalLM",
    Sharding.ZERO1: "DeepSpeedEngine",
    Sharding.ZERO2: "DeepSpeedEngine",
    Sharding.ZERO3: "DeepSpeedEngine",
}


def plan_of(case: Case, cache_dir: Path) -> Plan:
    return rank_plan(
        cache_dir,
        case.sharding,
        case.offload,
        num_ranks=2,
        num_steps=NUM_STEPS,
        accumulation=case.accumulation,
        micro_batch=case.micro_batch,
        checkpointing=case.checkpointing,
        loss=case.loss,
    )


@pytest.fixture(scope="module")
def runs(run_dirs, cache_dir) -> Callable[[Case], Path]:
    return run_dirs(lambda case, _: plan_of(case, cache_dir), TORCH_CASES + DEEPSPEED_CASES)


@pytest.fixture
def run_dir(case: Case, runs: Callable[[Case], Path]) -> Path:
    return runs(case)


def each(cases: Sequence[Case]):
    return pytest.mark.parametrize("case", cases, ids=[case.name for case in cases])


@each(TORCH_CASES + DEEPSPEED_CASES)
def test_every_step_equals_that_of_a_single_process_of_plain_pytorch(case, run_dir, reference, read_course):
    course = read_course(run_dir)
    assert len(course.losses) == NUM_STEPS
    assert reference.losses[-1] < reference.losses[0] - 0.5, "the reference learns, so that a difference would show"
    assert course.losses == pytest.approx(reference.losses, abs=TOLERANCE)
    assert course.grad_norms == pytest.approx(reference.grad_norms, abs=TOLERANCE)
    assert course.weights.keys() == reference.weights.keys()
    for name, expected in reference.weights.items():
        torch.testing.assert_close(course.weights[name], expected, rtol=0, atol=1e-4, msg=f"{name}: {{}}".format)


@each(TORCH_CASES + DEEPSPEED_CASES)
def test_the_engine_of_the_plan_is_the_one_that_ran(case, run_dir):
    ranks = [engaged_of(run_dir, rank) for rank in (0, 1)]
    for verified in ranks:
        assert verified.world_size == 2 and verified.backend == "gloo"
        assert verified.engine_class == ENGINE_CLASSES[case.sharding]
        assert verified.optimizer_class == ("AdamW" if case.offload is Offload.NONE else "DeepSpeedCPUAdam")
        assert verified.accumulation == case.accumulation
        assert verified.loss == case.loss
        assert verified.precision == "fp32"
        assert verified.checkpointed_blocks == (2 if case.checkpointing is Checkpointing.FULL else 0)
        assert verified.sharded_parameters == (NUM_PARAMETERS if case.sharding.shards_weights else 0)
    owned = [verified.partition_elements for verified in ranks]
    if case.sharding.shards_optimizer:
        assert all(elements is not None and elements < 0.51 * NUM_ELEMENTS for elements in owned)
        assert NUM_ELEMENTS <= sum(owned) < 1.01 * NUM_ELEMENTS, "together the model once, but for padding"
    else:
        assert owned == [None, None]


@each(EXPORTED)
def test_the_export_of_a_sharded_engine_names_the_plain_model(case, run_dir):
    config = msgspec.json.decode((run_dir / "export" / "config.json").read_bytes())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "lm_head.weight" in load_file(run_dir / "export" / "model.safetensors")
