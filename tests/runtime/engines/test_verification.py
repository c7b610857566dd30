"""Every difference between what was planned and what runs is named, with both values."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters
from architecture_factory import TINY
from attempt_runs import reset_accelerate
from export_factory import write_base
from msgspec.structs import replace
from rank_factory import rank_plan
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.engines.accelerator import build_accelerator, verify_engine
from shardwise.trainer.runtime.engines.fsdp import meshes, prefetches_two_blocks, ranks_of_copy
from shardwise.trainer.runtime.engines.sharded_loading import load_onto
from shardwise.trainer.runtime.memory.compilation import FusedKernels
from shardwise.trainer.runtime.models.build import build_meta_model, build_model, build_trainable
from shardwise.trainer.runtime.optimizers import build_optimizer
from shardwise.trainer.runtime.precision.mixed_precision import install_precision
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.report import Verified
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision


@contextmanager
def session(**engine: Any) -> Iterator[tuple[Callable[..., Verified], Any, Any]]:
    """What one process builds for a plan, in the order in which a rank does: its verification, model and optimizer.

    It is verified by the plan, of which fields may be changed, as may be what was installed.
    """
    reset_accelerate()
    plan = rank_plan(Path("nowhere"), accumulation=2, **engine)
    chosen = plan.chosen
    accelerator = build_accelerator(plan, ds_config=None)
    model, installed = build_trainable(plan)
    installed = install_precision(model, installed, chosen, DeviceKind.CPU)
    settings: dict[str, Any] = {"lr": 1.0, "weight_decay": 0.1, "in_backward": chosen.optimizer_in_backward}
    model, optimizer = accelerator.prepare(model, build_optimizer(chosen.strategy.optimizer, model, **settings))

    def verify(change: Mapping[str, Any] | None = None, **built: Any) -> Verified:
        changed = change or {}
        strategy = {name: value for name, value in changed.items() if name in chosen.strategy.__struct_fields__}
        others = {name: value for name, value in changed.items() if name not in strategy}
        planned = replace(chosen, strategy=replace(chosen.strategy, **strategy), **others)
        return verify_engine(accelerator, model, optimizer, dataclasses.replace(installed, **built), planned)

    yield verify, model, optimizer
    reset_accelerate()


@pytest.fixture(scope="module")
def verify() -> Iterator[Callable[..., Verified]]:
    """Of a model that runs in one process: no engine, fp32, foreach AdamW, sdpa, the chunked head, accumulation 2."""
    with session() as (verify, *_):
        yield verify


def test_what_runs_as_planned_is_reported(verify):
    verified = verify()
    assert (verified.engine_class, verified.optimizer_class) == ("LlamaForCausalLM", "AdamW")
    assert (verified.precision, verified.loss, verified.attention, verified.accumulation) == (
        "fp32", "chunked", "sdpa", 2,
    )  # fmt: skip
    assert (verified.sharded_parameters, verified.partition_elements, verified.backend) == (0, None, None)


def differs(what: str, planned: object, found: object) -> AbstractContextManager[object]:
    first, second = (rf"(?<!\w){re.escape(str(value))}(?!\w)" for value in (planned, found))
    return pytest.raises(EnvironmentFaultError, match=rf"(?m)^{what}: .*{first}.*{second}")


DECAY = "('decay', 'no_decay')"


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
        ({"optimizer": Optimizer.MUON}, "parameter groups", "('matrices', 'decay', 'no_decay')", DECAY),
        ({"optimizer_in_backward": True}, "the optimizer runs in the backward pass", "True", "False"),
        ({"activation_offload": True}, "activation offload", "True", "False"),
        ({"embedding_on_host": True}, "embedding table in host RAM", "True", "False"),
        ({"compile": True}, "compiled blocks", "True", "False"),
        ({"tf32": True}, "fp32 products in TF32", "True", "False"),
        ({"fused_kernels": True}, "fused kernels", "True", "False"),
        ({"fused_adapters": True}, "fused adapters", "True", "False"),
        ({"compiled_head": True}, "compiled loss head", "True", "False"),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)  # fmt: skip
def test_each_difference_stops_the_run_with_both_values(verify, change, what, planned, found):
    with differs(what, planned, found):
        verify(change)


def test_what_runs_beside_the_plan_is_seen():
    on_host = session(method=Method.LORA, embedding_on_host=True)
    with on_host as (verify, *_), differs("embedding table in host RAM", False, True):
        verify({"embedding_on_host": False})
    with session(method=Method.LORA) as (verify, model, _):
        model.get_input_embeddings().weight.requires_grad_(True)
        with differs("the base is frozen", True, False):
            verify()
    with session(precision=Precision.FP16_MIXED) as (verify, *_), differs("precision", "fp16-mixed", "bf16-mixed"):
        verify(autocast=torch.bfloat16)
    with session() as (verify, _, optimizer):
        verify({"fused_kernels": True}, fused=FusedKernels(problem="no GPU"))
        with differs("fused kernels", "True", "False"):
            verify({"fused_kernels": True}, fused=FusedKernels(num_norms=5, num_gates=2))
        decayed, others = (group["params"] for group in optimizer.param_groups)
        others.append(decayed.pop())
        with differs("parameters without weight decay", 5, 6):
            verify()
        others.pop()
        with differs("parameters that are updated", 21, 20):
            verify()


@pytest.mark.parametrize("precision", [Precision.BF16_MIXED, Precision.BF16, Precision.FP16_MIXED])
def test_a_precision_of_16_bit_is_named_as_it_runs(precision):
    with session(precision=precision) as (verify, *_):
        assert verify().precision == precision


@contextmanager
def group_of(num_ranks: int) -> Iterator[None]:
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


def test_two_blocks_gathered_ahead_are_read_off_every_block():
    root = torch.nn.Sequential(torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4)))
    blocks: Any = root[0]
    with group_of(2):
        device_mesh = DeviceMesh("cpu", [0, 1])
        for module in (*blocks, root):
            fully_shard(module, mesh=device_mesh)
        engine = running_engine(root)
        assert not prefetches_two_blocks(root)
        for change in ("set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"):
            engine.prefetch_two_blocks(root)
            assert prefetches_two_blocks(root)
            getattr(blocks[2], change)([blocks[1]])
            assert not prefetches_two_blocks(root)


def test_the_mesh_of_a_plan_has_machines_outside_and_their_ranks_inside(monkeypatch):
    """Three ranks on each of two machines, whatever Accelerate's YAML says."""
    for name, value in {
        "WORLD_SIZE": 6, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "OMP_NUM_THREADS": 1,
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": 3,
        "ACCELERATE_USE_FSDP": "true",  # Accelerate sets it, and would leave it for the tests after this one
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    with group_of(6):
        accelerator = build_accelerator(rank_plan(Path("nowhere"), Sharding.HSDP, num_ranks=6), ds_config=None)
        mesh = accelerator.torch_device_mesh
        assert mesh["dp_replicate", "dp_shard"].mesh.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert accelerator.parallelism_config.fsdp_dim_names[0] == "dp_replicate"
        reset_accelerate()


@pytest.mark.parametrize("config", TINY.values(), ids=TINY)
def test_weights_that_are_read_have_the_bits_of_a_whole_build(config, tmp_path):
    """Under every method: tests/distributed/test_sharded_loading.py."""
    attention = Attention.SDPA if Attention.SDPA in read_model_shape(config).attentions else Attention.EAGER
    plan = rank_plan(Path("nowhere"), model_config=config, attention=attention, precision=Precision.BF16)
    plan = replace(plan, model_path=str(write_base(tmp_path, config)))
    meta_model, _ = build_meta_model(plan)
    load_onto(torch.device("cpu"), meta_model)
    models = (meta_model.model, build_model(plan))
    found, whole = (dict(each.named_parameters()) | dict(each.named_buffers()) for each in models)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert (found[name].dtype, found[name].requires_grad) == (tensor.dtype, tensor.requires_grad), name
        assert torch.equal(found[name], tensor), name


def test_w37_accelerate_confuses_parameters_without_elements():
    before, after = ([nn.Parameter(torch.empty(0)) for _ in range(2)] for _ in range(2))
    mapping = {parameter.data_ptr(): sharded for parameter, sharded in zip(before, after, strict=True)}
    optimizer = torch.optim.SGD(before)
    for parameter in before:
        vars(parameter)["data_ptr"] = parameter.data_ptr()  # as Accelerator._prepare_fsdp2 does
    fsdp2_switch_optimizer_parameters(optimizer, mapping)
    assert [parameter is after[1] for parameter in optimizer.param_groups[0]["params"]] == [True, True]
