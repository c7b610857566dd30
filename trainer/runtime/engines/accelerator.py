"""Accelerate's object for a plan, built from plan.json alone; verification after `prepare` that the plan's engine runs.

Accelerate also receives its YAML file as environment variables. Both have the same values, but every setting is passed
explicitly, because a plugin fills each unset field from the environment.

A falling or even an equal loss proves nothing about the engine: Accelerate and DeepSpeed silently select another one in
several set-ups (docs/workarounds.md). So the classes and the sharded elements themselves are compared with the plan,
and a difference stops the run with both values.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from shardwise.trainer.runtime.attention import attention_kernel_rows
from shardwise.trainer.runtime.attention.choice import attention_facts, attention_name, attention_of
from shardwise.trainer.runtime.engines import engine_of, running_engine
from shardwise.trainer.runtime.engines.engine import EngineChoice, Row
from shardwise.trainer.runtime.memory.compilation import fused_modules
from shardwise.trainer.runtime.memory.host_embedding import is_on_host
from shardwise.trainer.runtime.models.build import Installed, plain_model
from shardwise.trainer.runtime.models.fused_adapters import fused_layers
from shardwise.trainer.runtime.models.methods import method_facts, num_elements
from shardwise.trainer.runtime.optimizers import (
    NO_DECAY,
    expected_class_name,
    expected_groups,
    optimizer_facts,
    unwrapped,
    updates_in_backward,
)
from shardwise.trainer.runtime.precision.fp8 import check_precision
from shardwise.trainer.runtime.precision.mixed_precision import LossScaler, precision_facts
from shardwise.trainer.runtime.run.cores import active_cores
from shardwise.trainer.runtime.run.process import world_size_of_launch
from shardwise.trainer.runtime.run.types import compute_type, weight_type
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.report import Verified
from shardwise.trainer.spec.strategy import Checkpointing, Method, Precision


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
        reduces_every_micro_batch=chosen.reduce_every_micro_batch,
        reduces_in_bf16=chosen.bf16_reduction,
    )
    return engine_of(choice.sharding).accelerator(choice, ds_config)


def _check_sharding(plan: Plan) -> None:
    chosen, mesh = plan.chosen, plan.hybrid_mesh
    if mesh is not None and (min(mesh) < 2 or math.prod(mesh) != chosen.num_ranks):
        raise InputError(
            f"pin.sharding: hsdp has several copies, each over several ranks; the plan has {mesh[0]} over {mesh[1]} on "
            f"{chosen.num_ranks} ranks; use {'fsdp' if mesh[1] > 1 else 'ddp'}"
        )
    if chosen.strategy.sharding.facts.is_one_rank and chosen.num_ranks != 1:
        raise InputError(f"pin.sharding: none drives one device, the plan has {chosen.num_ranks} ranks; use ddp")


def _check_launch(chosen: Candidate) -> None:
    """Before Accelerate looks for the other ranks, which it would wait for or do without."""
    started = world_size_of_launch()
    if started != chosen.num_ranks:
        raise EnvironmentFaultError(
            f"ranks: the plan has {chosen.num_ranks}, {started} were started; start it with accelerate launch "
            "--config_file and the accelerate.yaml in the folder of plan.json"
        )


def verify_engine(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401  # Accelerate's wrapper
    installed: Installed,
    chosen: Candidate,
    *,
    hybrid_mesh: tuple[int, int] | None = None,
) -> Verified:
    """Returns what runs; raises EnvironmentFaultError with every difference from the plan and both values.

    Of hybrid sharding a plan fixes (replicas, shards) as well.
    """
    verified = observe(accelerator, model, optimizer, installed)
    differences = [
        f"{what}: the plan has {planned}, {found} runs"
        for what, planned, found in _comparisons(
            accelerator, model, optimizer, installed, chosen, verified, hybrid_mesh
        )
        if planned != found
    ]
    if differences:
        raise EnvironmentFaultError("what was built is not what was planned\n" + "\n".join(differences))
    return verified


def observe(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401  # Accelerate's wrapper
    installed: Installed,
) -> Verified:
    """The engine, precision and optimizer that run, read from the objects themselves."""
    plain, engine = plain_model(model), running_engine(model)
    sharded, elements = engine.owned(model)
    return Verified(
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        engine_class=type(model).__name__,
        sharded_parameters=sharded,
        partition_elements=elements,
        optimizer_class=type(unwrapped(optimizer)).__name__,
        attention=attention_of(plain),
        loss=str(installed.loss.head),
        precision=str(precision_of(accelerator, model, installed)),
        accumulation=engine.accumulation(accelerator, model),
        backend=dist.get_backend() if dist.is_initialized() else None,
        checkpointed_blocks=len(installed.recomputations),
    )


def facts_after_step(
    model: nn.Module, optimizer: object, installed: Installed, scaler: LossScaler | None
) -> dict[str, str]:
    """Facts that exist only after a step, as text."""
    plain = plain_model(model)
    cores = active_cores(os.environ, torch.get_num_threads())
    return {
        **({} if cores is None else {"CPU cores": cores[1]}),
        **method_facts(plain),
        **running_engine(model).facts(model, unwrapped(optimizer)),
        **optimizer_facts(optimizer),
        **installed.activation_facts(plain),
        **attention_facts(plain),
        **precision_facts(installed, scaler),
    }


def precision_of(accelerator: Accelerator, model: nn.Module, installed: Installed) -> Precision | str:
    """The precision in which matrix products run, from the engine's own switches and the type of what is trained."""
    autocast = installed.autocast
    compute, masters = running_engine(model).types(accelerator, model, autocast)
    if autocast is not None and autocast != compute:
        return f"{autocast} around {compute}"
    for precision in (Precision.FP32, Precision.FP16_MIXED, Precision.BF16_MIXED, Precision.BF16):
        if (compute_type(precision), weight_type(precision)) == (compute, masters):
            return Precision.FP8 if precision is Precision.BF16_MIXED and installed.fp8 is not None else precision
    return f"{compute} on {masters}"


def _comparisons(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: Any,  # noqa: ANN401  # Accelerate's wrapper
    installed: Installed,
    chosen: Candidate,
    verified: Verified,
    hybrid_mesh: tuple[int, int] | None,
) -> Iterator[Row]:
    """Everything that a plan fixes."""
    sharding, plain, engine = chosen.strategy.sharding, plain_model(model), running_engine(model)
    yield "ranks", chosen.num_ranks, verified.world_size
    yield "ranks as Accelerate counts them", chosen.num_ranks, accelerator.num_processes
    yield "sharding", str(sharding), str(engine.sharding_of(model))
    yield "offload", str(chosen.strategy.offload), str(engine.offload_of(model))
    yield "precision", str(chosen.strategy.precision), verified.precision
    yield "accumulation", chosen.accumulation, verified.accumulation
    yield "accumulation as Accelerate counts it", chosen.accumulation, accelerator.gradient_accumulation_steps
    planned, found = chosen.reduce_every_micro_batch, engine.reduces_every_micro_batch(accelerator)
    yield "gradients reduced with every micro batch", planned, found
    yield "gradients reduced in bf16", chosen.bf16_reduction, engine.reduces_in_bf16(model)
    yield "attention", attention_name(chosen.attention, chosen.flash_kernel), verified.attention
    yield from attention_kernel_rows()
    yield "fp32 products in TF32", chosen.tf32, torch.backends.cuda.matmul.fp32_precision == "tf32"
    yield "loss head", str(chosen.loss), verified.loss
    yield from _optimizer_rows(model, optimizer, chosen, verified)
    yield from _method_rows(plain, chosen)
    yield from _activation_rows(plain, installed, chosen)
    num_copies = 1 if hybrid_mesh is None else hybrid_mesh[0]
    if sharding.shards_optimizer:
        owns = _owns_a_share(accelerator, model, verified, num_ranks=chosen.num_ranks, num_copies=num_copies)
        yield "this rank owns a share of the state", True, owns
    if sharding.shards_weights:
        yield "weights are sharded", True, verified.sharded_parameters > 0
    if (cores := active_cores(os.environ, torch.get_num_threads())) is not None:
        yield "CPU cores of this rank", *cores
    if engine is engine_of(sharding):
        yield from engine.rows(model, chosen, hybrid_mesh)


def _optimizer_rows(model: nn.Module, optimizer: Any, chosen: Candidate, verified: Verified) -> Iterator[Row]:  # noqa: ANN401  # Accelerate's wrapper
    kind, inner = chosen.strategy.optimizer, unwrapped(optimizer)
    is_galore = chosen.method is Method.GALORE
    name = expected_class_name(kind, is_galore=is_galore)
    yield "optimizer", name, verified.optimizer_class
    planned = expected_groups(kind, is_galore=is_galore)
    found = tuple(group.get("name") for group in inner.param_groups)
    engine = running_engine(model)
    if engine.drops_empty_groups:
        planned = tuple(each for each in planned if each in found)
    yield "parameter groups", planned, found
    trained = [parameter for parameter in plain_model(model).parameters() if parameter.requires_grad]
    updated = engine.updated_groups(model, inner)
    undecayed = sum(len(group) for name, group in updated if name == NO_DECAY)
    yield "parameters that are updated", len(trained), sum(len(group) for _, group in updated)
    yield (
        "parameters without weight decay",
        sum(len(getattr(each, "ds_shape", each.shape)) < 2 for each in trained),
        undecayed,
    )  # ZeRO-3 flattens pieces
    if kind.facts.updates_on_host:
        yield "decoupled weight decay", True, getattr(inner, "adam_w_mode", None)
    if kind in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED) and not is_galore:
        yield "fused optimizer", kind is Optimizer.ADAMW_FUSED, bool(inner.defaults.get("fused"))
    if not is_galore:  # whose layerwise variant is a setting of the job
        planned_in_backward = chosen.optimizer_in_backward or kind.facts.updates_in_backward
        yield "the optimizer runs in the backward pass", planned_in_backward, updates_in_backward(optimizer)


def _method_rows(plain: PreTrainedModel, chosen: Candidate) -> Iterator[Row]:
    is_adapted = chosen.method.freezes_base
    yield "adapters", is_adapted, any(hasattr(module, "lora_A") for module in plain.modules())
    trained = [name for name, parameter in plain.named_parameters() if parameter.requires_grad]
    num_frozen = sum(not parameter.requires_grad for parameter in plain.parameters())
    yield "the base is frozen", is_adapted, num_frozen > 0 and all("lora_" in name for name in trained)
    is_packed = chosen.method is Method.QLORA
    yield "4-bit layers", is_packed, any("4bit" in type(module).__name__ for module in plain.modules())
    yield "fused adapters", chosen.fused_adapters, bool(fused_layers(plain))


def _activation_rows(plain: PreTrainedModel, installed: Installed, chosen: Candidate) -> Iterator[Row]:
    recomputes = chosen.checkpointing is not Checkpointing.NONE
    yield "blocks are recomputed", recomputes, bool(installed.recomputations)
    yield "embedding table in host RAM", chosen.embedding_on_host, is_on_host(plain)
    yield "activation offload", chosen.activation_offload, installed.offload is not None
    compiled = any(module._compiled_call_impl is not None for module in plain.modules())
    compilation = installed.compilation
    fused = installed.fused
    runs_fused = any(fused_modules(plain)) if fused is None else fused.run_in(plain)
    yield "fused kernels", chosen.fused_kernels, runs_fused
    yield "compiled loss head", chosen.compiled_head, installed.head is not None
    yield "compiled blocks", chosen.compile, compiled or (compilation is not None and compilation.problem is not None)


def _owns_a_share(
    accelerator: Accelerator, model: nn.Module, verified: Verified, *, num_ranks: int, num_copies: int
) -> bool:
    """True where the ranks together own each copy of what is partitioned, padding aside, and none more than its share.

    ZeRO partitions what is trained; FSDP2 every parameter, frozen ones too.
    """
    owned = verified.partition_elements or 0
    total = torch.tensor([owned], dtype=torch.int64, device=accelerator.device)
    if dist.is_initialized():
        dist.all_reduce(total)
    parameters = running_engine(model).partitioned(model)
    whole = sum(map(num_elements, parameters))
    padding = 2 * num_ranks * (len(parameters) + 4)
    least, share = num_copies * whole, int(total) / num_ranks
    return 0 < least <= int(total) <= least + padding and owned <= 1.5 * share + 4096
