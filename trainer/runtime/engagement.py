"""What was seen to run after `prepare`, held against the plan.

A falling or even an equal loss proves nothing about the engine: Accelerate and DeepSpeed take another one without a
word in several set-ups (docs/workarounds.md). So the classes and the sharded elements themselves are looked at, and a
difference stops the run with both values.
"""

from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from trainer.runtime.activation_memory import activation_facts, count_checkpointed_blocks
from trainer.runtime.methods import method_facts
from trainer.runtime.mixed_precision import LossScaler, precision_facts
from trainer.runtime.model import attention_name, attention_of, is_deepspeed, plain_model
from trainer.runtime.optimizers import expected_class_name, optimizer_facts, unwrapped
from trainer.runtime.precision import compute_type, weight_type
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.plan import Candidate
from trainer.spec.report import Engaged
from trainer.spec.strategy import Checkpointing, Method, Optimizer, Precision, Sharding

_ZERO_STAGES = {Sharding.ZERO1: 1, Sharding.ZERO2: 2, Sharding.ZERO3: 3}


def check_engagement(accelerator: Accelerator, model: nn.Module, optimizer: Any, chosen: Candidate) -> Engaged:  # noqa: ANN401  # Accelerate's wrapper
    """What runs; EnvironmentFaultError naming every difference from the plan, with both values."""
    engaged = observe(accelerator, model, optimizer)
    differences = [
        f"{what}: the plan says {planned}, {found} runs"
        for what, planned, found in _comparisons(accelerator, model, optimizer, chosen, engaged)
        if planned != found
    ]
    if differences:
        raise EnvironmentFaultError("what was built is not what was planned\n" + "\n".join(differences))
    return engaged


def observe(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> Engaged:  # noqa: ANN401  # Accelerate's wrapper
    """What runs, read off the objects themselves."""
    plain = plain_model(model)
    sharded, elements = _sharded(model, plain)
    return Engaged(
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        engine_class=type(model).__name__,
        sharded_parameters=sharded,
        partition_elements=elements,
        optimizer_class=type(unwrapped(optimizer)).__name__,
        attention=attention_of(plain),
        loss=str(getattr(plain, "shardwise_loss_head", "none")),
        precision=str(precision_of(accelerator, model, plain)),
        accumulation=_accumulation(accelerator, model),
        backend=dist.get_backend() if dist.is_initialized() else None,
        checkpointed_blocks=count_checkpointed_blocks(plain),
    )


def facts_after_step(model: nn.Module, optimizer: object, scaler: LossScaler | None) -> dict[str, str]:
    """What can only be seen once a step has run, in words."""
    plain = plain_model(model)
    return {
        **method_facts(plain),
        **optimizer_facts(optimizer),
        **activation_facts(plain),
        **precision_facts(plain, scaler),
    }


def sharding_of(model: nn.Module) -> Sharding:
    """The engine that wraps the model."""
    if is_deepspeed(model):
        stage = int(model.zero_optimization_stage())  # type: ignore[operator]  # DeepSpeedEngine, untyped
        return {number: sharding for sharding, number in _ZERO_STAGES.items()}.get(stage, Sharding.NONE)
    if isinstance(model, FSDPModule):
        return Sharding.FSDP if _reshards_after_forward(model) else Sharding.FSDP_GRAD_OP
    return Sharding.DDP if isinstance(model, DistributedDataParallel) else Sharding.NONE


def precision_of(accelerator: Accelerator, model: nn.Module, plain: PreTrainedModel) -> Precision | str:
    """The precision in which matrix products run, from the engine's own switches and the weights' type."""
    weights = next(p.dtype for p in plain.parameters() if p.is_floating_point())
    if is_deepspeed(model):
        compute, masters = _deepspeed_types(model)
    elif isinstance(model, FSDPModule):
        policy = model._get_fsdp_state()._mp_policy
        compute, masters = policy.param_dtype or weights, weights
    else:
        compute = _ACCELERATE_TYPES[accelerator.mixed_precision] if accelerator.native_amp else weights
        masters = weights
    for precision in (Precision.FP32, Precision.FP16_MIXED, Precision.BF16_MIXED, Precision.BF16):
        if (compute_type(precision), weight_type(precision)) == (compute, masters):
            return precision
    return f"{compute} on {masters}"


_ACCELERATE_TYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _deepspeed_types(model: Any) -> tuple[torch.dtype, torch.dtype]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """(computing type, type of the masters)."""
    compute = torch.bfloat16 if model.bfloat16_enabled() else torch.float16 if model.fp16_enabled() else torch.float32
    groups = _zero_groups(model)
    return compute, groups[0].dtype if groups else compute


def _zero_groups(model: Any) -> list[torch.Tensor]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """The flat fp32 partition of each parameter group that this rank owns."""
    zero = model.optimizer
    flats = getattr(zero, "fp32_partitioned_groups_flat", None)
    return list(zero.single_partition_of_fp32_groups if flats is None else flats)


def _sharded(model: nn.Module, plain: nn.Module) -> tuple[int, int | None]:
    """(parameters of which this rank holds a part, elements it owns); (0, None) where nothing is sharded."""
    if is_deepspeed(model):
        owned = sum(flat.numel() for flat in _zero_groups(model))
        parted = sum(hasattr(parameter, "ds_tensor") for parameter in plain.parameters())
        return parted, owned
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
    chosen: Candidate,
    engaged: Engaged,
) -> list[tuple[str, object, object]]:
    """(what, planned, found) for everything that a plan fixes."""
    sharding, blocks = chosen.strategy.sharding, engaged.checkpointed_blocks
    inner = unwrapped(optimizer)
    rows: list[tuple[str, object, object]] = [
        ("ranks", chosen.num_ranks, engaged.world_size),
        ("ranks as Accelerate counts them", chosen.num_ranks, accelerator.num_processes),
        ("sharding", str(sharding), str(sharding_of(model))),
        ("precision", str(chosen.strategy.precision), engaged.precision),
        ("optimizer", _optimizer_class(chosen), engaged.optimizer_class),
        ("accumulation", chosen.accumulation, engaged.accumulation),
        ("accumulation as Accelerate counts it", chosen.accumulation, accelerator.gradient_accumulation_steps),
        ("attention", attention_name(chosen.attention), engaged.attention),
        ("loss head", str(chosen.loss), engaged.loss),
        ("blocks are recomputed", chosen.checkpointing is Checkpointing.FULL, blocks > 0),
        ("parameter groups", 2, len(inner.param_groups)),
    ]
    if chosen.strategy.optimizer is Optimizer.DEEPSPEED_CPU_ADAM:
        rows.append(("decoupled weight decay", True, getattr(inner, "adam_w_mode", None)))
    if chosen.strategy.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED):
        is_fused = chosen.strategy.optimizer is Optimizer.ADAMW_FUSED
        rows.append(("fused optimizer", is_fused, bool(inner.defaults.get("fused"))))
    if sharding.shards_optimizer:
        rows.append(("this rank owns a share of the state", True, _owns_a_share(accelerator, engaged, chosen)))
    if sharding.shards_weights:
        rows.append(("weights are sharded", True, engaged.sharded_parameters > 0))
    return rows


def _optimizer_class(chosen: Candidate) -> str:
    return expected_class_name(
        chosen.strategy.optimizer,
        is_galore=chosen.method is Method.GALORE,
        in_backward=chosen.optimizer_in_backward,
    )


def _owns_a_share(accelerator: Accelerator, engaged: Engaged, chosen: Candidate) -> bool:
    """True where the ranks together own the model about once: padding aside, no rank holds more than its share."""
    owned = engaged.partition_elements or 0
    total = torch.tensor([owned], dtype=torch.int64, device=accelerator.device)
    if dist.is_initialized():
        dist.all_reduce(total)
    share = int(total) / chosen.num_ranks
    return share > 0 and owned <= 1.5 * share + 4096
