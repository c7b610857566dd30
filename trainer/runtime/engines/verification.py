"""Verification after `prepare`: compares what runs with the plan.

A falling or even an equal loss proves nothing about the engine: Accelerate and DeepSpeed take another one without a
word in several set-ups (docs/workarounds.md). So the classes and the sharded elements themselves are looked at, and a
difference stops the run with both values.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from shardwise.trainer.runtime.attention.choice import attention_facts, attention_name, attention_of
from shardwise.trainer.runtime.attention.kernels import attention_kernel_rows
from shardwise.trainer.runtime.engines import engine_state
from shardwise.trainer.runtime.models.build import Installed, is_deepspeed, plain_model
from shardwise.trainer.runtime.models.methods import method_facts
from shardwise.trainer.runtime.optimizers import (
    NO_DECAY,
    expected_class_name,
    expected_groups,
    optimizer_facts,
    unwrapped,
    updates_in_backward,
)
from shardwise.trainer.runtime.precision.mixed_precision import LossScaler, precision_facts
from shardwise.trainer.runtime.run.types import compute_type, weight_type
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.report import Engaged
from shardwise.trainer.spec.strategy import Checkpointing, Method, Optimizer, Precision, Sharding

_ZERO_STAGES = {Sharding.ZERO1: 1, Sharding.ZERO2: 2, Sharding.ZERO3: 3}

Row = tuple[str, object, object]  # what, planned, found


def check_engagement(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401  # Accelerate's wrapper
    installed: Installed,
    chosen: Candidate,
    *,
    hybrid_mesh: tuple[int, int] | None = None,
) -> Engaged:
    """Returns what runs; raises EnvironmentFaultError with every difference from the plan and both values.

    Of hybrid sharding a plan fixes (replicas, shards) as well.
    """
    engaged = observe(accelerator, model, optimizer, installed)
    differences = [
        f"{what}: the plan says {planned}, {found} runs"
        for what, planned, found in _comparisons(accelerator, model, optimizer, installed, chosen, engaged, hybrid_mesh)
        if planned != found
    ]
    if differences:
        raise EnvironmentFaultError("what was built is not what was planned\n" + "\n".join(differences))
    return engaged


def observe(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401  # Accelerate's wrapper
    installed: Installed,
) -> Engaged:
    """The engine, precision and optimizer that run, read from the objects themselves."""
    plain = plain_model(model)
    sharded, elements = _sharded(model, plain)
    return Engaged(
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        engine_class=type(model).__name__,
        sharded_parameters=sharded,
        partition_elements=elements,
        optimizer_class=type(unwrapped(optimizer)).__name__,
        attention=attention_of(plain),
        loss=str(installed.loss.head),
        precision=str(precision_of(accelerator, model, installed)),
        accumulation=_accumulation(accelerator, model),
        backend=dist.get_backend() if dist.is_initialized() else None,
        checkpointed_blocks=len(installed.recomputations),
    )


def facts_after_step(
    model: nn.Module, optimizer: object, installed: Installed, scaler: LossScaler | None
) -> dict[str, str]:
    """Facts that exist only after a step, as text."""
    plain = plain_model(model)
    return {
        **method_facts(plain),
        **engine_state.engine_facts(model, unwrapped(optimizer)),
        **optimizer_facts(optimizer),
        **installed.activation_facts(plain),
        **attention_facts(plain),
        **precision_facts(installed, scaler),
    }


def sharding_of(model: nn.Module) -> Sharding:
    """The engine that wraps the model."""
    if is_deepspeed(model):
        stage = int(model.zero_optimization_stage())  # type: ignore[operator]  # DeepSpeedEngine, untyped
        return {number: sharding for sharding, number in _ZERO_STAGES.items()}.get(stage, Sharding.NONE)
    if isinstance(model, FSDPModule):
        if any(len(mesh) > 1 for mesh, _ in engine_state.meshes(model)):
            return Sharding.HSDP
        return Sharding.FSDP if _reshards_after_forward(model) else Sharding.FSDP_GRAD_OP
    return Sharding.DDP if isinstance(model, DistributedDataParallel) else Sharding.NONE


def precision_of(accelerator: Accelerator, model: nn.Module, installed: Installed) -> Precision | str:
    """The precision in which matrix products run, from the engine's own switches and the type of what is trained."""
    weights = next(p.dtype for p in plain_model(model).parameters() if p.requires_grad)
    autocast = installed.autocast
    if is_deepspeed(model):
        compute, masters = _deepspeed_types(model)
    elif isinstance(model, FSDPModule):
        policy = model._get_fsdp_state()._mp_policy
        compute, masters = policy.param_dtype or weights, weights
    else:
        compute = _ACCELERATE_TYPES[accelerator.mixed_precision] if accelerator.native_amp else weights
        compute, masters = autocast or compute, weights
    if autocast is not None and autocast != compute:
        return f"{autocast} around {compute}"
    for precision in (Precision.FP32, Precision.FP16_MIXED, Precision.BF16_MIXED, Precision.BF16):
        if (compute_type(precision), weight_type(precision)) == (compute, masters):
            return Precision.FP8 if precision is Precision.BF16_MIXED and num_fp8_layers(installed) else precision
    return f"{compute} on {masters}"


def num_fp8_layers(installed: Installed) -> int:
    """Linear layers that were converted to multiply in FP8."""
    return 0 if installed.fp8 is None else len(installed.fp8.layers)


_ACCELERATE_TYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _deepspeed_types(model: Any) -> tuple[torch.dtype, torch.dtype]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """(computing type, type of the masters)."""
    compute = torch.bfloat16 if model.bfloat16_enabled() else torch.float16 if model.fp16_enabled() else torch.float32
    return compute, engine_state.partition_type(model)


def _sharded(model: nn.Module, plain: nn.Module) -> tuple[int, int | None]:
    """(parameters of which this rank holds a part, elements it owns); (0, None) where nothing is sharded."""
    if is_deepspeed(model):
        parted = sum(hasattr(parameter, "ds_tensor") for parameter in plain.parameters())
        return parted, sum(engine_state.partition_sizes(model))
    shards = [p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)]
    return len(shards), sum(shards) if shards else None


def _reshards_after_forward(model: FSDPModule) -> bool:
    blocks = [m for m in model.modules() if isinstance(m, FSDPModule) and m is not model]  # type: ignore[attr-defined]  # also an nn.Module
    groups = [group for block in blocks if (group := block._get_fsdp_state()._fsdp_param_group) is not None]
    return any(group.post_forward_mesh_info is not None for group in groups)


def _accumulation(accelerator: Accelerator, model: Any) -> int:  # noqa: ANN401  # DeepSpeedEngine, untyped
    return int(model.gradient_accumulation_steps() if is_deepspeed(model) else accelerator.gradient_accumulation_steps)


def _comparisons(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401  # Accelerate's wrapper
    installed: Installed,
    chosen: Candidate,
    engaged: Engaged,
    hybrid_mesh: tuple[int, int] | None,
) -> Iterator[Row]:
    """Everything that a plan fixes."""
    sharding, plain = chosen.strategy.sharding, plain_model(model)
    yield "ranks", chosen.num_ranks, engaged.world_size
    yield "ranks as Accelerate counts them", chosen.num_ranks, accelerator.num_processes
    yield "sharding", str(sharding), str(sharding_of(model))
    yield "offload", str(chosen.strategy.offload), str(engine_state.offload_of(model))
    yield "precision", str(chosen.strategy.precision), engaged.precision
    yield "accumulation", chosen.accumulation, engaged.accumulation
    yield "accumulation as Accelerate counts it", chosen.accumulation, accelerator.gradient_accumulation_steps
    yield "attention", attention_name(chosen.attention, chosen.flash_kernel), engaged.attention
    yield from attention_kernel_rows()
    yield "fp32 products in TF32", chosen.tf32, torch.backends.cuda.matmul.fp32_precision == "tf32"
    yield "loss head", str(chosen.loss), engaged.loss
    yield from _optimizer_rows(model, optimizer, chosen, engaged)
    yield from _method_rows(plain, chosen)
    yield from _activation_rows(plain, installed, chosen)
    num_copies = 1 if hybrid_mesh is None else hybrid_mesh[0]
    if sharding.shards_optimizer:
        owns = _owns_a_share(accelerator, model, engaged, num_ranks=chosen.num_ranks, num_copies=num_copies)
        yield "this rank owns a share of the state", True, owns
    if sharding.shards_weights:
        yield "weights are sharded", True, engaged.sharded_parameters > 0
    if sharding.uses_fsdp and isinstance(model, FSDPModule):
        yield from _mesh_rows(model, (chosen.num_ranks,) if hybrid_mesh is None else hybrid_mesh)
    if is_deepspeed(model):
        yield from _deepspeed_rows(model, plain, chosen)


def _optimizer_rows(model: nn.Module, optimizer: Any, chosen: Candidate, engaged: Engaged) -> Iterator[Row]:  # noqa: ANN401  # Accelerate's wrapper
    kind, inner = chosen.strategy.optimizer, unwrapped(optimizer)
    is_galore = chosen.method is Method.GALORE
    name = expected_class_name(kind, is_galore=is_galore)
    yield "optimizer", name, engaged.optimizer_class
    planned = expected_groups(kind, is_galore=is_galore)
    found = tuple(group.get("name") for group in inner.param_groups)
    if is_deepspeed(model):  # which leaves out groups without parameters: adapters have no norms
        planned = tuple(each for each in planned if each in found)
    yield "parameter groups", planned, found
    trained = [parameter for parameter in plain_model(model).parameters() if parameter.requires_grad]
    yield "parameters that are updated", len(trained), len(_updated(model, inner))
    yield "parameters without weight decay", sum(_num_dims(each) < 2 for each in trained), _num_undecayed(model, inner)
    if kind.facts.updates_on_host:
        yield "decoupled weight decay", True, getattr(inner, "adam_w_mode", None)
    if kind in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED) and not is_galore:
        yield "fused optimizer", kind is Optimizer.ADAMW_FUSED, bool(inner.defaults.get("fused"))
    if not is_galore:  # whose layerwise variant is a setting of the job
        planned_in_backward = chosen.optimizer_in_backward or kind.facts.updates_in_backward
        yield "the optimizer runs in the backward pass", planned_in_backward, updates_in_backward(optimizer)


def _updated(model: nn.Module, inner: Any) -> list[nn.Parameter]:  # noqa: ANN401  # torch's
    if is_deepspeed(model):
        return engine_state.updated_parameters(model)
    return [parameter for group in inner.param_groups for parameter in group["params"]]


def _num_undecayed(model: nn.Module, inner: Any) -> int:  # noqa: ANN401  # torch's
    """Parameters in the group without weight decay."""
    if is_deepspeed(model):
        return sum(len(group) for name, group in engine_state.updated_groups(model) if name == NO_DECAY)
    return sum(len(group["params"]) for group in inner.param_groups if group.get("name") == NO_DECAY)


def _num_dims(parameter: Any) -> int:  # noqa: ANN401  # ZeRO-3 keeps the shape of a parameter whose pieces are flat
    return len(getattr(parameter, "ds_shape", parameter.shape))


def _method_rows(plain: PreTrainedModel, chosen: Candidate) -> Iterator[Row]:
    is_adapted = chosen.method.freezes_base
    yield "adapters", is_adapted, any(hasattr(module, "lora_A") for module in plain.modules())
    trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    num_frozen = sum(not parameter.requires_grad for parameter in plain.parameters())
    yield "the base is frozen", is_adapted, num_frozen > 0 and all("lora_" in name for name in trained)
    is_packed = chosen.method is Method.QLORA
    yield "4-bit layers", is_packed, any("4bit" in type(module).__name__ for module in plain.modules())


def _activation_rows(plain: PreTrainedModel, installed: Installed, chosen: Candidate) -> Iterator[Row]:
    recomputes = chosen.checkpointing is not Checkpointing.NONE
    yield "blocks are recomputed", recomputes, bool(installed.recomputations)
    yield "activation offload", chosen.activation_offload, installed.offload is not None
    compiled = any(module._compiled_call_impl is not None for module in plain.modules())
    yield "compiled blocks", chosen.compile, compiled


def _mesh_rows(model: nn.Module, planned: tuple[int, ...]) -> Iterator[Row]:
    """Every shard lies over the same ranks, and the ranks of a copy are neighbours: those of one machine."""
    *copies, shards = planned
    placements = (*(Replicate() for _ in copies), Shard(0))
    yield "mesh and placements of the shards", [(planned, placements)], sorted(engine_state.meshes(model), key=str)
    begin = dist.get_rank() // shards * shards
    yield "ranks of this rank's copy", [(*range(begin, begin + shards),)], engine_state.ranks_of_copy(model)


def _deepspeed_rows(model: nn.Module, plain: PreTrainedModel, chosen: Candidate) -> Iterator[Row]:
    if chosen.strategy.offload.uses_nvme:
        swapped, large = engine_state.swapped_partitions(model)
        yield "partitions on NVMe", large, swapped
        swapped, large = engine_state.swapped_weights(plain)
        yield "weights on NVMe", large if chosen.strategy.offload.moves_parameters else 0, swapped
    if chosen.buckets is None:
        return
    for name, taken in engine_state.taken_buckets(model).items():
        if name == "prefetch_elements" and chosen.strategy.offload.uses_nvme:
            continue  # fewer, so that swap buffers suffice
        yield f"buckets: {name.replace('_', ' ')}", getattr(chosen.buckets, name), taken


def _owns_a_share(
    accelerator: Accelerator, model: nn.Module, engaged: Engaged, *, num_ranks: int, num_copies: int
) -> bool:
    """True where the ranks together own each copy of what is partitioned, padding aside, and none more than its share.

    ZeRO partitions what is trained; FSDP2 every parameter, frozen ones too.
    """
    owned = engaged.partition_elements or 0
    total = torch.tensor([owned], dtype=torch.int64, device=accelerator.device)
    if dist.is_initialized():
        dist.all_reduce(total)
    parameters = engine_state.updated_parameters(model) if is_deepspeed(model) else list(model.parameters())
    whole = sum(map(engine_state.num_elements, parameters))
    padding = 2 * num_ranks * (len(parameters) + 4)
    least, share = num_copies * whole, int(total) / num_ranks
    return 0 < least <= int(total) <= least + padding and owned <= 1.5 * share + 4096
