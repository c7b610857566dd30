"""Accelerate's object for a plan, built from plan.json alone.

Accelerate also receives its YAML file as environment variables. They say the same (`engagement` checks what came out),
but every setting is passed explicitly here, because a plugin fills each field that is left open from the environment.
"""

import json
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, ParallelismConfig
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from shardwise.trainer.runtime.engines import cpu_ranks
from shardwise.trainer.runtime.engines.nvme_reads import (
    read_each_weight_once,
    swap_gradients_between_blocks,
    swap_weights_in_their_type,
)
from shardwise.trainer.runtime.precision.fp8 import check_precision
from shardwise.trainer.runtime.run.operators import answer_for_processor, use_built_operators
from shardwise.trainer.runtime.run.process import world_size_of_launch
from shardwise.trainer.runtime.run.types import accelerate_precision, compute_type
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.strategy import Offload, Precision, Sharding

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a rank may load or save for long while the others wait
NCCL = "nccl"


class EngineChoice(NamedTuple):
    """The settings that decide which engine Accelerate wraps a model in, from a plan or from a dry run."""

    sharding: Sharding
    precision: Precision
    num_ranks: int
    accumulation: int
    device_kind: DeviceKind
    block_class: str  # what FSDP2 wraps
    offload: Offload = Offload.NONE
    hybrid_mesh: tuple[int, int] | None = None  # (machines, devices on each) of HSDP


def build_accelerator(plan: Plan, *, ds_config: Mapping[str, Any] | None) -> Accelerator:
    """The Accelerator of the chosen candidate; its engine is what `prepare` will wrap the model in."""
    chosen = plan.chosen
    check_precision(chosen.strategy.precision)
    _check_sharding(plan)
    _check_launch(chosen)
    choice = EngineChoice(
        sharding=chosen.strategy.sharding,
        precision=chosen.strategy.precision,
        num_ranks=chosen.num_ranks,
        accumulation=chosen.accumulation,
        device_kind=plan.device_kind,
        block_class=plan.model_shape.block_class,
        offload=chosen.strategy.offload,
        hybrid_mesh=plan.hybrid_mesh,
    )
    return accelerator_of(choice, ds_config=ds_config)


def accelerator_of(choice: EngineChoice, *, ds_config: Mapping[str, Any] | None) -> Accelerator:
    """The Accelerator of an engine, in the process group of this rank."""
    if choice.sharding.uses_deepspeed:
        return _with_deepspeed(choice, ds_config)
    return _with_fsdp(choice) if choice.sharding.uses_fsdp else _plain(choice)


def read_ds_config(attempt_dir: Path, sharding: Sharding) -> dict[str, Any] | None:
    """The filled DeepSpeed file beside plan.json; None for rows that have none."""
    if not sharding.uses_deepspeed:
        return None
    path = attempt_dir / "ds_config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise EnvironmentFaultError(f"{path}: {sharding} needs it, and it cannot be read: {error}") from error
    assert isinstance(config, dict)
    return config


def _check_sharding(plan: Plan) -> None:
    chosen, mesh = plan.chosen, plan.hybrid_mesh
    if mesh is not None and min(mesh) < 2:
        machines, on_each = mesh
        raise InputError(
            f"pin.sharding: hsdp spreads over several devices of each of several machines; the plan has {machines} of "
            f"{on_each}; take {'fsdp' if machines < 2 else 'ddp'}"
        )
    if chosen.strategy.sharding is Sharding.NONE and chosen.num_ranks != 1:
        raise InputError(f"pin.sharding: none drives one device, the plan has {chosen.num_ranks} ranks; take ddp")


def _check_launch(chosen: Candidate) -> None:
    """Before Accelerate looks for the other ranks, which it would wait for or do without."""
    started = world_size_of_launch()
    if started != chosen.num_ranks:
        raise EnvironmentFaultError(
            f"ranks: the plan says {chosen.num_ranks}, {started} runs; start it with accelerate launch --config_file "
            "and the accelerate.yaml beside plan.json"
        )


def _process_group(kind: DeviceKind, *, holds_shards_on_host: bool = False) -> InitProcessGroupKwargs:
    """NCCL knows no tensor in host RAM: the norm of gradients whose shards are there is summed by gloo."""
    on_gpu = f"cuda:{NCCL},cpu:{cpu_ranks.GLOO}" if holds_shards_on_host else NCCL
    return InitProcessGroupKwargs(
        backend=cpu_ranks.GLOO if kind is DeviceKind.CPU else on_gpu, timeout=COLLECTIVE_TIMEOUT
    )


def _plain(choice: EngineChoice) -> Accelerator:
    return Accelerator(
        cpu=choice.device_kind is DeviceKind.CPU,
        mixed_precision=accelerate_precision(choice.precision),
        gradient_accumulation_steps=choice.accumulation,
        kwargs_handlers=[
            _process_group(choice.device_kind),
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
        ]
        if choice.num_ranks > 1
        else [],
    )


def _with_deepspeed(choice: EngineChoice, ds_config: Mapping[str, Any] | None) -> Accelerator:
    assert ds_config is not None, "the row needs ds_config.json"
    if choice.device_kind is DeviceKind.CPU:
        cpu_ranks.choose_deepspeed_cpu()
    answer_for_processor()
    use_built_operators()
    if choice.offload.uses_nvme:
        swap_gradients_between_blocks()
    if choice.offload is Offload.NVME_ALL:
        read_each_weight_once()
        swap_weights_in_their_type()
    plugin = DeepSpeedPlugin(hf_ds_config=_without_remap(ds_config), zero3_init_flag=False)
    accelerator = Accelerator(
        deepspeed_plugin=plugin,
        mixed_precision=accelerate_precision(choice.precision),
        gradient_accumulation_steps=choice.accumulation,
        kwargs_handlers=[_process_group(choice.device_kind)],
    )
    unset_hf_deepspeed_config()  # else transformers shards the model while it is built, whatever the flag says (W4)
    return accelerator


def _without_remap(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with Accelerate kept from replacing the optimizer under offload (W5); it asks for nothing else."""
    return {**ds_config, "zero_force_ds_cpu_optimizer": False}


def _with_fsdp(choice: EngineChoice) -> Accelerator:
    is_on_cpu, keeps_shards_on_host = choice.device_kind is DeviceKind.CPU, choice.offload is not Offload.NONE
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=choice.sharding is not Sharding.FSDP_GRAD_OP,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[choice.block_class],
        cpu_offload=keeps_shards_on_host,
        state_dict_type="SHARDED_STATE_DICT",
        mixed_precision_policy=_fsdp_types(choice.precision),
        activation_checkpointing=False,  # done in activation_memory, the same way for every engine
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
        gradient_accumulation_steps=choice.accumulation,
        kwargs_handlers=[_process_group(choice.device_kind, holds_shards_on_host=keeps_shards_on_host)],
    )
    if is_on_cpu:
        cpu_ranks.take_fsdp_branch(accelerator, plugin, mesh)
    return accelerator


def _mesh(replicas: int, shards: int) -> ParallelismConfig:
    """Neighbouring ranks, which are those of one machine, hold shards of one copy of the model."""
    return ParallelismConfig(dp_replicate_size=replicas, dp_shard_size=shards, tp_size=1, cp_size=1, sp_size=1)


def _fsdp_types(precision: Precision) -> MixedPrecisionPolicy | None:
    """Gathers parameters in the computing type and adds gradients in fp32, as every other engine does.

    Accelerate's own policy would add them in 16 bit, and would also round the loss, an output of the root, to 16 bit.
    """
    if precision in (Precision.FP32, Precision.BF16):
        return None
    return MixedPrecisionPolicy(param_dtype=compute_type(precision), reduce_dtype=torch.float32)
