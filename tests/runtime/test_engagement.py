"""Every difference between what was planned and what runs is named, with both values."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from rank_factory import rank_plan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.runtime.accelerator import build_accelerator
from trainer.runtime.engagement import check_engagement, sharding_of
from trainer.runtime.engine_state import meshes, ranks_of_copy
from trainer.runtime.mixed_precision import install_precision
from trainer.runtime.model import build_model
from trainer.runtime.optimizers import build_optimizer
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.hardware import DeviceKind
from trainer.spec.plan import Candidate
from trainer.spec.strategy import (
    Attention,
    Checkpointing,
    LossHead,
    Method,
    Offload,
    Optimizer,
    Precision,
    Sharding,
)


@contextmanager
def session(**engine: Any) -> Iterator[tuple]:
    """What one process builds for a plan, in the order in which a rank does."""
    plan = rank_plan(Path("nowhere"), accumulation=2, **engine)
    chosen = plan.chosen
    accelerator = build_accelerator(plan, ds_config=None)
    model = build_model(plan)
    install_precision(model, chosen, DeviceKind.CPU)
    optimizer = build_optimizer(
        chosen.strategy.optimizer, model, lr=1.0, weight_decay=0.1, in_backward=chosen.optimizer_in_backward
    )
    yield (*accelerator.prepare(model, optimizer), accelerator, chosen)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(scope="module")
def built() -> Iterator[tuple]:
    """A model that runs in one process: no engine, fp32, foreach AdamW, sdpa, the chunked head, accumulation 2."""
    with session() as everything:
        yield everything


def changed(chosen: Candidate, change: dict[str, object]) -> Candidate:
    strategy = {name: value for name, value in change.items() if name in chosen.strategy.__struct_fields__}
    candidate = {name: value for name, value in change.items() if name not in strategy}
    return msgspec.structs.replace(chosen, strategy=msgspec.structs.replace(chosen.strategy, **strategy), **candidate)


def test_what_runs_as_planned_is_reported(built):
    model, optimizer, accelerator, chosen = built
    engaged = check_engagement(accelerator, model, optimizer, chosen)
    assert (engaged.engine_class, engaged.optimizer_class) == ("LlamaForCausalLM", "AdamW")
    assert (engaged.precision, engaged.loss, engaged.attention, engaged.accumulation) == ("fp32", "chunked", "sdpa", 2)
    assert (engaged.sharded_parameters, engaged.partition_elements, engaged.backend) == (0, None, None)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"num_ranks": 2}, "ranks: the plan says 2, 1 runs"),
        ({"sharding": Sharding.DDP}, "sharding: the plan says ddp, none runs"),
        ({"sharding": Sharding.FSDP}, "weights are sharded: the plan says True, False runs"),
        ({"sharding": Sharding.ZERO2}, "this rank owns a share of the state: the plan says True, False runs"),
        ({"precision": Precision.BF16_MIXED}, "precision: the plan says bf16-mixed, fp32 runs"),
        ({"precision": Precision.BF16}, "precision: the plan says bf16, fp32 runs"),
        ({"optimizer": Optimizer.SGD}, "optimizer: the plan says SGD, AdamW runs"),
        ({"optimizer": Optimizer.ADAMW_FUSED}, "fused optimizer: the plan says True, False runs"),
        ({"optimizer": Optimizer.DEEPSPEED_CPU_ADAM}, "decoupled weight decay: the plan says True, None runs"),
        ({"accumulation": 4}, "accumulation: the plan says 4, 2 runs"),
        ({"attention": Attention.EAGER}, "attention: the plan says eager, sdpa runs"),
        ({"loss": LossHead.EAGER}, "loss head: the plan says eager, chunked runs"),
        *(
            ({"checkpointing": each}, "blocks are recomputed: the plan says True, False runs")
            for each in Checkpointing
            if each is not Checkpointing.NONE
        ),
        ({"precision": Precision.FP16_MIXED}, "precision: the plan says fp16-mixed, fp32 runs"),
        ({"precision": Precision.FP8}, "precision: the plan says fp8, fp32 runs"),
        ({"offload": Offload.OPTIMIZER}, "offload: the plan says optimizer, none runs"),
        ({"offload": Offload.NVME_ALL}, "offload: the plan says nvme_all, none runs"),
        ({"method": Method.LORA}, "adapters: the plan says True, False runs"),
        ({"method": Method.LORA}, "the base is frozen: the plan says True, False runs"),
        ({"method": Method.QLORA}, "4-bit layers: the plan says True, False runs"),
        ({"optimizer": Optimizer.ADAMW_8BIT}, "optimizer: the plan says AdamW8bit, AdamW runs"),
        (
            {"optimizer": Optimizer.MUON},
            "parameter groups: the plan says ('matrices', 'decay', 'no_decay'), ('decay', 'no_decay') runs",
        ),
        ({"optimizer_in_backward": True}, "the optimizer runs in the backward pass: the plan says True, False runs"),
        ({"activation_offload": True}, "activation offload: the plan says True, False runs"),
        ({"compile": True}, "compiled blocks: the plan says True, False runs"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_each_difference_stops_the_run_with_both_values(built, change, line):
    model, optimizer, accelerator, chosen = built
    with pytest.raises(EnvironmentFaultError) as raised:
        check_engagement(accelerator, model, optimizer, changed(chosen, change))
    assert line in str(raised.value).splitlines()


@pytest.mark.parametrize(
    "engine",
    [
        {"method": Method.LORA},
        {"method": Method.LORA, "precision": Precision.BF16_MIXED},
        {"method": Method.QLORA, "precision": Precision.BF16_MIXED},
        {"precision": Precision.FP16_MIXED},
        {"precision": Precision.BF16},
        {"activation_offload": True, "checkpointing": Checkpointing.FULL},
        {"checkpointing": Checkpointing.EVERY_N, "checkpoint_every_n": 2},
        {"checkpointing": Checkpointing.ATTENTION},
        {"checkpointing": Checkpointing.SELECTIVE},
        {"optimizer": Optimizer.MUON},
        {"optimizer": Optimizer.ADAMW_8BIT},
        {"optimizer": Optimizer.LOMO},
        {"optimizer_in_backward": True},
    ],
    ids=lambda engine: "-".join(map(str, engine.values())),
)
def test_what_a_plan_switches_on_is_seen_and_stops_a_plan_that_does_not(engine):
    with session(**engine) as (model, optimizer, accelerator, chosen):
        assert check_engagement(accelerator, model, optimizer, chosen).precision == chosen.strategy.precision
        with pytest.raises(EnvironmentFaultError):
            check_engagement(accelerator, model, optimizer, changed(chosen, PLAIN))


PLAIN: dict[str, object] = {
    "method": Method.FULL,
    "precision": Precision.FP32,
    "optimizer": Optimizer.ADAMW,
    "checkpointing": Checkpointing.NONE,
    "activation_offload": False,
    "optimizer_in_backward": False,
}


def test_a_parameter_that_the_optimizer_forgot_is_missed():
    with session() as (model, optimizer, accelerator, chosen):
        optimizer.param_groups[0]["params"].pop()
        with pytest.raises(EnvironmentFaultError, match="parameters that are updated: the plan says 21, 20 runs"):
            check_engagement(accelerator, model, optimizer, chosen)


def test_matrices_among_what_is_not_decayed_are_seen():
    with session() as (model, optimizer, accelerator, chosen):
        decayed, others = (group["params"] for group in optimizer.param_groups)
        others.append(decayed.pop())
        with pytest.raises(EnvironmentFaultError, match="parameters without weight decay: the plan says 5, 6 runs"):
            check_engagement(accelerator, model, optimizer, chosen)


def test_autocast_of_another_type_than_planned_is_named():
    with session(precision=Precision.FP16_MIXED) as (model, optimizer, accelerator, chosen):
        model.shardwise_autocast = torch.bfloat16
        with pytest.raises(EnvironmentFaultError, match="precision: the plan says fp16-mixed, bf16-mixed runs"):
            check_engagement(accelerator, model, optimizer, chosen)


@contextmanager
def group_of(num_ranks: int) -> Iterator[None]:
    """A process group of which only this rank exists."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("ranks", "sharding", "mesh", "copy"),
    [
        ([0, 1, 2, 3], Sharding.FSDP, ((4,), (Shard(0),)), (0, 1, 2, 3)),
        ([[0, 1], [2, 3]], Sharding.HSDP, ((2, 2), (Replicate(), Shard(0))), (0, 1)),
        ([[0, 2], [1, 3]], Sharding.HSDP, ((2, 2), (Replicate(), Shard(0))), (0, 2)),
    ],
)
def test_the_ranks_of_a_copy_are_read_off_its_shards(ranks, sharding, mesh, copy):
    """The last would send every gather between machines."""
    block, root = torch.nn.Linear(8, 8), torch.nn.Sequential()
    root.append(block)
    with group_of(4):
        device_mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("copies", "shards")[-torch.tensor(ranks).ndim :])
        for module in (block, root):
            fully_shard(module, mesh=device_mesh, reshard_after_forward=True)
        assert sharding_of(root) is sharding
        assert meshes(root) == {mesh}
        assert ranks_of_copy(root) == [copy]


def test_the_mesh_of_a_plan_has_machines_outside_and_their_ranks_inside(monkeypatch):
    """Three ranks on each of two machines, whatever Accelerate's YAML says."""
    launch = {
        "WORLD_SIZE": 6,
        "RANK": 0,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
        "OMP_NUM_THREADS": 1,
    }
    yaml = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": 3}
    for name, value in {**launch, **yaml}.items():
        monkeypatch.setenv(name, str(value))
    with group_of(6):
        accelerator = build_accelerator(rank_plan(Path("nowhere"), Sharding.HSDP, num_ranks=6), ds_config=None)
        mesh = accelerator.torch_device_mesh
        assert mesh["dp_replicate", "dp_shard"].mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert accelerator.parallelism_config.fsdp_dim_names[0] == "dp_replicate"
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
