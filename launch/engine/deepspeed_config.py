"""A ZeRO plan as DeepSpeed reads it: the base file of its strategy under ds_configs/ with every hole filled.

DeepSpeed drops an unfilled `"auto"` silently and runs with its own default instead, so none is left here. Two kinds of
value come from the plan:

- The holes, `"auto"` in the base file: batch sizes, clipping, precision, bucket sizes, NVMe path. Exactly those that
  Accelerate and transformers fill when the file is used by hand. Accelerate refuses any other `"auto"`.
- The limits (`_limits`): numbers that are good defaults by hand, and that a plan replaces by those of its memory
  estimate. Nothing else differs from the base file.

Bucket sizes are elements, not bytes. Which keys DeepSpeed 0.19.8 reads is in docs/engine-configs.md.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.launch.engine.offload import offload_buffers
from shardwise.trainer import FOLDER
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.plan import Buckets, Plan
from shardwise.trainer.spec.strategy import Offload, Precision

HOLE = "auto"


def deepspeed_config(plan: Plan, *, nvme_path: str | None = None) -> dict[str, Any]:
    """The filled configuration of the chosen candidate; raises InputError for NVMe offload without a path."""
    strategy = plan.chosen.strategy
    if not strategy.sharding.uses_deepspeed or strategy.base_config is None:
        raise ValueError(f"{strategy.name} is not a DeepSpeed strategy")
    path = nvme_path or plan.job.limits.nvme.path
    if strategy.offload.uses_nvme and path is None:
        raise InputError(f"limits.nvme.path: {strategy.name} needs a folder on a local NVMe disk to keep state in")
    return fill(json.loads(read_base(strategy.base_config)), plan, nvme_path=path)


def read_base(base_config: str) -> str:
    """The text of a file under ds_configs/ or fsdp_configs/, by its name in the catalogue."""
    path = FOLDER / base_config
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise EnvironmentFaultError(
            f"{path}: this part of the installation cannot be read: {error.strerror}; install shardwise again"
        ) from error


def fill(base: Mapping[str, Any], plan: Plan, *, nvme_path: str | None) -> dict[str, Any]:
    """A copy of `base` with its holes filled and its limits set for the chosen candidate."""
    filled = copy.deepcopy(dict(base))
    values, limits = _holes(plan, nvme_path), _limits(plan)
    for table, key, dotted in list(_leaves(filled)):
        if table[key] == HOLE:
            if dotted not in values:
                raise ValueError(f"nothing fills {dotted} of {plan.chosen.strategy.base_config}")
            table[key] = values[dotted]
        elif dotted in limits:
            table[key] = limits[dotted]
    return filled


def _leaves(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """(its table, its key, its dotted name) of every value that is not a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield table, key, prefix + key


def _holes(plan: Plan, nvme_path: str | None) -> dict[str, Any]:
    chosen = plan.chosen
    buckets = chosen.buckets or _buckets_by_hidden_size(plan.model_shape.hidden_size)
    precision, prefetch = chosen.strategy.precision, buckets.prefetch_elements
    if chosen.strategy.offload is Offload.NVME_ALL:
        prefetch = min(prefetch, offload_buffers(plan).ahead_elements)
    return {
        # Padding rows of the last micro batch count: DeepSpeed requires this product.
        "train_batch_size": chosen.micro_batch * chosen.accumulation * chosen.num_ranks,
        "train_micro_batch_size_per_gpu": chosen.micro_batch,
        "gradient_accumulation_steps": chosen.accumulation,
        "gradient_clipping": plan.job.train.clip,
        "bf16.enabled": precision in (Precision.BF16_MIXED, Precision.BF16, Precision.FP8),
        "fp16.enabled": precision is Precision.FP16_MIXED,
        "zero_optimization.reduce_bucket_size": buckets.reduce_elements,
        "zero_optimization.stage3_prefetch_bucket_size": prefetch,
        "zero_optimization.stage3_param_persistence_threshold": buckets.persistence_elements,
        "zero_optimization.offload_optimizer.nvme_path": nvme_path,
        "zero_optimization.offload_param.nvme_path": nvme_path,
    }


def _buckets_by_hidden_size(hidden_size: int) -> Buckets:
    """Buckets as Accelerate and transformers fill them, for a candidate without planned buckets."""
    square = hidden_size * hidden_size
    return Buckets(
        reduce_elements=square,
        allgather_elements=square,
        prefetch_elements=9 * square // 10,
        live_parameters=square,
        persistence_elements=10 * hidden_size,
    )


def _limits(plan: Plan) -> dict[str, Any]:
    """Numbers of the base files that a plan replaces.

    `allgather_bucket_size` is none of them: with the all-gather into one tensor that torch has, nothing reads it
    (DeepSpeed 0.19.8, runtime/utils.py, all_gather_dp_groups).
    """
    chosen, limits = plan.chosen, dict[str, Any]()
    if chosen.buckets is not None:
        limits["stage3_max_live_parameters"] = chosen.buckets.live_parameters
        limits["stage3_max_reuse_distance"] = chosen.buckets.live_parameters
    if chosen.strategy.sharding.shards_weights or chosen.strategy.offload is not Offload.NONE:
        limits |= _offload_limits(plan)
    limits = {f"zero_optimization.{name}": value for name, value in limits.items()}
    if chosen.strategy.precision is Precision.BF16:
        limits["bf16.bf16_master_weights_and_grads"] = True
        limits["bf16.bf16_optimizer_states"] = True
    return limits


def _offload_limits(plan: Plan) -> dict[str, Any]:
    """Sub-groups, swap buffers and pinning; only those that the base file has are used."""
    sizes = offload_buffers(plan)
    limits: dict[str, Any] = {
        "sub_group_size": sizes.sub_group_elements,
        "offload_optimizer.pin_memory": sizes.pins_memory,
        "offload_optimizer.buffer_count": sizes.optimizer_buffers,
        "offload_param.pin_memory": sizes.pins_memory,
        "offload_param.buffer_count": sizes.weight_buffers,
        "offload_param.buffer_size": sizes.weight_buffer_elements,
    }
    if plan.chosen.strategy.offload is Offload.NVME_ALL:
        limits["stage3_max_reuse_distance"] = 0  # a weight that stays gathered keeps its buffer too
    return limits
