"""Every difference between what was planned and what runs is named, with both values."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from attempt_runs import reset_accelerate
from rank_factory import rank_plan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.engines.accelerator import build_accelerator, verify_engine
from shardwise.trainer.runtime.engines.fsdp import meshes, ranks_of_copy
from shardwise.trainer.runtime.memory.compilation import FusedKernels
from shardwise.trainer.runtime.models.build import build_trainable
from shardwise.trainer.runtime.optimizers import build_optimizer
from shardwise.trainer.runtime.precision.mixed_precision import install_precision
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision


@contextmanager
def session(**engine: Any) -> Iterator[tuple]:
    """What one process builds for a plan, in the order in which a rank does."""
    plan = rank_plan(Path("nowhere"), accumulation=2, **engine)
    chosen = plan.chosen
    accelerator = build_accelerator(plan, ds_config=None)
    model, installed = build_trainable(plan)
    installed = install_precision(model, installed, chosen, DeviceKind.CPU)
    settings: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.1, "in_backward": chosen.optimizer_in_backward}
    optimizer = build_optimizer(chosen.strategy.optimizer, model, **settings)
    yield (*accelerator.prepare(model, optimizer), accelerator, installed, chosen)
    reset_accelerate()


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
    model, optimizer, accelerator, installed, chosen = built
    verified = verify_engine(accelerator, model, optimizer, installed, chosen)
    assert (verified.engine_class, verified.optimizer_class) == ("LlamaForCausalLM", "AdamW")
    assert (verified.precision, verified.loss, verified.attention, verified.accumulation) == (
        "fp32", "chunked", "sdpa", 2,
    )  # fmt: skip
    assert (verified.sharded_parameters, verified.partition_elements, verified.backend) == (0, None, None)


def difference(what: str, planned: object, found: object) -> str:
    """A line that names what differs, and both values in this order."""
    first, second = (rf"(?<!\w){re.escape(str(value))}(?!\w)" for value in (planned, found))
    return rf"(?m)^{what}: .*{first}.*{second}"


def test_fp32_products_are_rounded_where_the_plan_says_so(built):
    model, optimizer, accelerator, installed, chosen = built
    planned = changed(chosen, {"tf32": True})
    try:
        install_precision(model, installed, planned, DeviceKind.CPU)
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        verify_engine(accelerator, model, optimizer, installed, planned)
    finally:
        install_precision(model, installed, chosen, DeviceKind.CPU)
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


@pytest.mark.parametrize(
    ("change", "what", "planned", "found"),
    [
        ({"num_ranks": 2}, "ranks", "2", "1"),
        ({"sharding": Sharding.DDP}, "sharding", "ddp", "none"),
        ({"sharding": Sharding.FSDP}, "weights are sharded", "True", "False"),
        ({"sharding": Sharding.ZERO2}, "this rank owns a share of the state", "True", "False"),
        ({"precision": Precision.BF16_MIXED}, "precision", "bf16-mixed", "fp32"),
        ({"precision": Precision.BF16}, "precision", "bf16", "fp32"),
        ({"optimizer": Optimizer.SGD}, "optimizer", "SGD", "AdamW"),
        ({"optimizer": Optimizer.ADAMW_FUSED}, "fused optimizer", "True", "False"),
        ({"optimizer": Optimizer.DEEPSPEED_CPU_ADAM}, "decoupled weight decay", "True", "None"),
        ({"accumulation": 4}, "accumulation", "4", "2"),
        ({"attention": Attention.EAGER}, "attention", "eager", "sdpa"),
        ({"loss": LossHead.EAGER}, "loss head", "eager", "chunked"),
        ({"checkpointing": Checkpointing.FULL}, "blocks are recomputed", "True", "False"),
        ({"precision": Precision.FP16_MIXED}, "precision", "fp16-mixed", "fp32"),
        ({"precision": Precision.FP8}, "precision", "fp8", "fp32"),
        ({"offload": Offload.OPTIMIZER}, "offload", "optimizer", "none"),
        ({"offload": Offload.NVME_ALL}, "offload", "nvme_all", "none"),
        ({"method": Method.LORA}, "adapters", "True", "False"),
        ({"method": Method.LORA}, "the base is frozen", "True", "False"),
        ({"method": Method.QLORA}, "4-bit layers", "True", "False"),
        ({"optimizer": Optimizer.ADAMW_8BIT}, "optimizer", "AdamW8bit", "AdamW"),
        (
            {"optimizer": Optimizer.MUON}, "parameter groups", "('matrices', 'decay', 'no_decay')",
            "('decay', 'no_decay')",
        ),
        ({"optimizer_in_backward": True}, "the optimizer runs in the backward pass", "True", "False"),
        ({"activation_offload": True}, "activation offload", "True", "False"),
        ({"compile": True}, "compiled blocks", "True", "False"),
        ({"tf32": True}, "fp32 products in TF32", "True", "False"),
        ({"fused_kernels": True}, "fused kernels", "True", "False"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)  # fmt: skip
def test_each_difference_stops_the_run_with_both_values(built, change, what, planned, found):
    model, optimizer, accelerator, installed, chosen = built
    with pytest.raises(EnvironmentFaultError, match=difference(what, planned, found)):
        verify_engine(accelerator, model, optimizer, installed, changed(chosen, change))


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
    with session(**engine) as (model, optimizer, accelerator, installed, chosen):
        assert verify_engine(accelerator, model, optimizer, installed, chosen).precision == chosen.strategy.precision
        with pytest.raises(EnvironmentFaultError):
            verify_engine(accelerator, model, optimizer, installed, changed(chosen, PLAIN))


PLAIN: dict[str, object] = {
    "method": Method.FULL, "precision": Precision.FP32, "optimizer": Optimizer.ADAMW,
    "checkpointing": Checkpointing.NONE, "activation_offload": False, "optimizer_in_backward": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "what", "planned", "found"),
    [
        (lambda decayed, others: decayed.pop(), "parameters that are updated", 21, 20),
        (lambda decayed, others: others.append(decayed.pop()), "parameters without weight decay", 5, 6),
    ],
)
def test_parameters_that_the_optimizer_forgot_or_does_not_decay_are_seen(change, what, planned, found):
    with session() as (model, optimizer, accelerator, installed, chosen):
        change(*(group["params"] for group in optimizer.param_groups))
        with pytest.raises(EnvironmentFaultError, match=difference(what, planned, found)):
            verify_engine(accelerator, model, optimizer, installed, chosen)


def test_a_weight_of_the_base_that_is_trained_beside_the_adapters_is_seen():
    with session(method=Method.LORA) as (model, optimizer, accelerator, installed, chosen):
        model.get_input_embeddings().weight.requires_grad_(True)
        with pytest.raises(EnvironmentFaultError, match=difference("the base is frozen", True, False)):
            verify_engine(accelerator, model, optimizer, installed, chosen)


def test_autocast_of_another_type_than_planned_is_named():
    with session(precision=Precision.FP16_MIXED) as (model, optimizer, accelerator, installed, chosen):
        installed = dataclasses.replace(installed, autocast=torch.bfloat16)
        with pytest.raises(EnvironmentFaultError, match=difference("precision", "fp16-mixed", "bf16-mixed")):
            verify_engine(accelerator, model, optimizer, installed, chosen)


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
        assert running_engine(root).sharding_of(root) is sharding
        assert meshes(root) == {mesh}
        assert ranks_of_copy(root) == [copy]


def test_the_mesh_of_a_plan_has_machines_outside_and_their_ranks_inside(monkeypatch):
    """Three ranks on each of two machines, whatever Accelerate's YAML says."""
    launch = {
        "WORLD_SIZE": 6, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    yaml = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": 3}
    sets_itself = {"ACCELERATE_USE_FSDP": "true"}  # and would leave for the tests after this one
    for name, value in {**launch, **yaml, **sets_itself}.items():
        monkeypatch.setenv(name, str(value))
    with group_of(6):
        accelerator = build_accelerator(rank_plan(Path("nowhere"), Sharding.HSDP, num_ranks=6), ds_config=None)
        mesh = accelerator.torch_device_mesh
        assert mesh["dp_replicate", "dp_shard"].mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert accelerator.parallelism_config.fsdp_dim_names[0] == "dp_replicate"
        reset_accelerate()


def test_fused_kernels_are_those_that_the_model_runs():
    """A library may have given the modules their own forward again after the kernels were installed."""
    with session() as (model, optimizer, accelerator, installed, chosen):
        planned = changed(chosen, {"fused_kernels": True})
        without = dataclasses.replace(installed, fused=FusedKernels(problem="no GPU"))
        verify_engine(accelerator, model, optimizer, without, planned)
        replaced = dataclasses.replace(installed, fused=FusedKernels(num_norms=5, num_gates=2))
        with pytest.raises(EnvironmentFaultError, match=difference("fused kernels", "True", "False")):
            verify_engine(accelerator, model, optimizer, replaced, planned)
