"""FSDP2 and hybrid sharding: each rank holds some rows of every parameter, as DTensors."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import GradientAccumulationPlugin, ParallelismConfig
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.engines import cpu_ranks
from shardwise.trainer.runtime.engines.engine import (
    Engine,
    EngineChoice,
    Row,
    places,
    process_group,
    state_tensors,
    trained_type,
)
from shardwise.trainer.runtime.engines.sharded_loading import load_into_fsdp
from shardwise.trainer.runtime.memory.recomputation import blocks_of
from shardwise.trainer.runtime.models.meta_model import MetaModel
from shardwise.trainer.runtime.run.types import accelerate_precision, compute_type
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import Precision


class Fsdp(Engine):
    """Accelerate with its FSDP plugin, version 2."""

    def accelerator(self, choice: EngineChoice, ds_config: Mapping[str, Any] | None) -> Accelerator:
        is_on_cpu, keeps_shards_on_host = choice.device_kind is DeviceKind.CPU, choice.offload is not Offload.NONE
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=choice.sharding is not Sharding.FSDP_GRAD_OP,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[choice.block_class],
            cpu_offload=keeps_shards_on_host,
            state_dict_type="SHARDED_STATE_DICT",
            mixed_precision_policy=_types(choice),
            activation_checkpointing=False,  # `memory.recomputation` does it, the same way for every engine
            cpu_ram_efficient_loading=False,
        )
        mesh = None if choice.hybrid_mesh is None else _mesh(*choice.hybrid_mesh)
        if is_on_cpu:
            cpu_ranks.forget_mesh_of_launch()
        accelerator = Accelerator(
            cpu=is_on_cpu,
            fsdp_plugin=plugin,
            parallelism_config=None if is_on_cpu else mesh,
            mixed_precision=accelerate_precision(choice.precision),
            gradient_accumulation_plugin=GradientAccumulationPlugin(
                num_steps=choice.accumulation, sync_each_batch=choice.reduces_every_micro_batch
            ),
            kwargs_handlers=[process_group(choice.device_kind, holds_shards_on_host=keeps_shards_on_host)],
        )
        if is_on_cpu:
            cpu_ranks.use_fsdp_branch(accelerator, plugin, mesh)
        return accelerator

    def runs(self, model: nn.Module) -> bool:
        return isinstance(model, FSDPModule)

    def sharding_of(self, model: nn.Module) -> Sharding:
        if any(len(mesh) > 1 for mesh, _ in meshes(model)):
            return Sharding.HSDP
        return Sharding.FSDP if _reshards_after_forward(model) else Sharding.FSDP_GRAD_OP

    def load_shards(self, meta_model: MetaModel, accelerator: Accelerator) -> None:
        load_into_fsdp(meta_model, accelerator)

    def prepare(self, accelerator: Accelerator, model: nn.Module, optimizer: TorchOptimizer) -> tuple[nn.Module, Any]:
        """Puts shards that were loaded already back into the groups.

        Accelerate looks for the optimizer's parameters by the address of their memory, which empty shards share (W37).
        """
        groups = [list(group["params"]) for group in optimizer.param_groups]
        prepared = super().prepare(accelerator, model, optimizer)
        if any(isinstance(parameter, DTensor) for parameters in groups for parameter in parameters):
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
        return prepared

    def prefetch_two_blocks(self, model: nn.Module) -> None:
        """Of blocks alone: the head still gathers the last block in backward, and the first block the embedding."""
        blocks = _blocks(model)
        for place, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, place - 2) : place][::-1])

    def release_gathered(self, model: nn.Module) -> None:
        """The root, and under fsdp_grad_op every block, stay gathered."""
        for module in _modules(model):
            module.reshard()

    def backward_leaf(self, model: nn.Module, parameter: nn.Parameter) -> Tensor | None:
        """The gathered parameter, which is one object from the first forward on."""
        every = (each for group in _groups(_modules(model)) for each in group.fsdp_params)
        return next(
            (getattr(each, "_unsharded_param", None) for each in every if each.sharded_param is parameter), None
        )

    def offload_of(self, model: nn.Module) -> Offload:
        is_moved = any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in _groups(_modules(model)))
        return Offload.OPTIMIZER_PARAMS if is_moved else Offload.NONE

    def types(
        self, accelerator: Accelerator, model: nn.Module, autocast: torch.dtype | None
    ) -> tuple[torch.dtype, torch.dtype]:
        weights = trained_type(model)
        policy = model._get_fsdp_state()._mp_policy  # type: ignore[operator]  # FSDPModule's
        return policy.param_dtype or weights, weights

    def reduces_in_bf16(self, model: nn.Module) -> bool:
        policy = model._get_fsdp_state()._mp_policy  # type: ignore[operator]  # FSDPModule's
        return policy.reduce_dtype is torch.bfloat16

    def owned(self, model: nn.Module) -> tuple[int, int | None]:
        sizes = [shard.to_local().numel() for shard in _shards(model)]
        return len(sizes), sum(sizes) if sizes else None

    def rows(self, model: nn.Module, chosen: Candidate, hybrid_mesh: tuple[int, int] | None) -> Iterator[Row]:
        """Every shard lies over the same ranks, and the ranks of a copy are neighbours."""
        planned = (chosen.num_ranks,) if hybrid_mesh is None else hybrid_mesh
        *copies, shards = planned
        placements = (*(Replicate() for _ in copies), Shard(0))
        yield "mesh and placements of the shards", [(planned, placements)], sorted(meshes(model), key=str)
        has_next = len(blocks_of(model)) > 1
        yield "two blocks are gathered ahead", chosen.prefetch_two_blocks and has_next, prefetches_two_blocks(model)
        begin = dist.get_rank() // shards * shards
        yield "ranks of this rank's copy", [(*range(begin, begin + shards),)], ranks_of_copy(model)

    def facts(self, model: nn.Module, optimizer: TorchOptimizer) -> dict[str, str]:
        shards = [parameter.to_local() for parameter in _shards(model)]
        moments = [each.to_local() if isinstance(each, DTensor) else each for each in state_tensors(optimizer)]
        copies = {shape[0] for shape, _ in meshes(model) if len(shape) > 1}
        return {
            **({"copies of the weights": ", ".join(map(str, copies))} if copies else {}),
            "shards": places((each, each.numel(), False) for each in shards),
            "place of optimizer state": places((each, each.numel(), False) for each in moments),
        }

    def held_rows(self, parameter: Tensor) -> Tensor:
        return parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()

    def gathered(self, parameter: Tensor) -> Tensor:
        return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter.detach()).cpu()


def _types(choice: EngineChoice) -> MixedPrecisionPolicy | None:
    """Gathers parameters in the computing type and adds gradients in fp32, unless the job allows bf16 over ranks.

    Accelerate's own policy would add them in 16 bit, and would also round the loss, an output of the root, to 16 bit.
    """
    if choice.precision in (Precision.FP32, Precision.BF16):
        return None
    summed = torch.bfloat16 if choice.reduces_in_bf16 else torch.float32
    return MixedPrecisionPolicy(param_dtype=compute_type(choice.precision), reduce_dtype=summed)


def _mesh(replicas: int, shards: int) -> ParallelismConfig:
    """Neighbouring ranks, of one machine or of whole ones, hold shards of one copy of the model."""
    return ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards, tp_size=1, cp_size=1, sp_size=1)


def meshes(model: nn.Module) -> set[tuple[tuple[int, ...], tuple[Placement, ...]]]:
    """(size of each axis, placement on it) of the meshes that the shards lie on."""
    return {(tuple(shard.device_mesh.shape), tuple(shard.placements)) for shard in _shards(model)}


def ranks_of_copy(model: nn.Module) -> list[tuple[int, ...]]:
    """The ranks that share one copy of the weights with this one; one entry unless shards differ."""
    groups = {shard.device_mesh.get_group(shard.device_mesh.ndim - 1) for shard in _shards(model)}
    return sorted({tuple(dist.get_process_group_ranks(group)) for group in groups})


def _shards(model: nn.Module) -> list[DTensor]:
    return [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]


def _modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def prefetches_two_blocks(model: nn.Module) -> bool:
    """True if every block gathers the two after it in forward, and the two before it in backward."""
    states = [block._get_fsdp_state() for block in _blocks(model)]
    return len(states) > 1 and all(
        state._states_to_forward_prefetch == states[place + 1 : place + 3]
        and state._states_to_backward_prefetch == states[max(0, place - 2) : place][::-1]
        for place, state in enumerate(states)
    )


def _blocks(model: nn.Module) -> list[FSDPModule]:
    """The blocks in the order they run, each a group of its own."""
    return [block for block in blocks_of(model) if isinstance(block, FSDPModule)]


def _groups(modules: list[FSDPModule]) -> list[Any]:
    """FSDP2's parameter groups of modules; private and untyped."""
    groups = (module._get_fsdp_state()._fsdp_param_group for module in modules)
    return [group for group in groups if group is not None]


def _reshards_after_forward(model: nn.Module) -> bool:
    blocks = [module for module in _modules(model) if id(module) != id(model)]
    return any(group.post_forward_mesh_info is not None for group in _groups(blocks))
