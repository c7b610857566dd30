"""The DeepSpeed and Accelerate files of a plan: the base files of its strategy with every hole filled.

The ranks build their engine from plan.json. These files start them, give Accelerate and DeepSpeed the same values, and
work by hand: `accelerate launch --config_file RUN/attempts/1/accelerate.yaml -m shardwise.trainer
RUN/attempts/1/plan.json`.

DeepSpeed drops an unfilled `"auto"` silently and runs with its own default, so none is left. Filled are exactly the
holes that Accelerate and transformers fill by hand (Accelerate refuses any other `"auto"`): batch sizes, clipping,
precision, bucket sizes in elements, NVMe path. `_limits` replaces defaults by those of the plan's memory estimate.
Which keys DeepSpeed 0.19.8 reads is in docs/engine-configs.md. Accelerate refuses `mixed_precision` beside a DeepSpeed
file.

On a CPU the same distributed types start the ranks. MULTI_CPU is not among them: without MPI it starts one rank
without a message (docs/workarounds.md). `use_cpu: true` under MULTI_GPU starts all of them.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from shardwise.launch.engine.offload import offload_buffers
from shardwise.launch.probe.gpu_selection import rank_gpu_names
from shardwise.trainer import FOLDER
from shardwise.trainer.spec.engines import Offload
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Buckets, Plan
from shardwise.trainer.spec.strategy import Precision

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


FREE_PORT = 0  # Accelerate selects a free one, on a single machine
DEFAULT_PORT = 29500  # torch's own; every machine of a run must know it beforehand

_MIXED_PRECISION = {
    Precision.FP32: "no",
    Precision.FP16_MIXED: "no",  # our own autocast and scaler: Accelerate's fp16 is fp32 on a CPU
    Precision.BF16_MIXED: "bf16",
    Precision.BF16: "no",  # the model itself is bf16: nothing is cast
    Precision.FP8: "bf16",  # our own FP8; Accelerate's is partial under FSDP2 and DeepSpeed
}


def accelerate_config(
    plan: Plan, *, attempt_dir: Path, node_rank: int = 0, head: str | None = None, port: int | None = None
) -> dict[str, Any]:
    """The configuration of the launcher on machine `node_rank`; raises InputError for machines without `head`."""
    sharding = plan.chosen.strategy.sharding
    launch = _launch(plan, node_rank=node_rank, head=head, port=port)
    precision = {"mixed_precision": _MIXED_PRECISION[plan.chosen.strategy.precision]}
    if sharding.uses_fsdp:
        return _fsdp(plan, {**launch, **precision})
    if sharding.uses_deepspeed:
        return {"distributed_type": "DEEPSPEED", **launch, "deepspeed_config": _deepspeed(plan, attempt_dir)}
    kind = "NO" if plan.chosen.num_ranks == 1 else "MULTI_GPU"
    return {"distributed_type": kind, **launch, **precision}


def accelerate_file(attempt_dir: Path, node_rank: int) -> Path:
    """The file of a machine's launcher."""
    return attempt_dir / ("accelerate.yaml" if node_rank == 0 else f"accelerate-{node_rank}.yaml")


def _launch(plan: Plan, *, node_rank: int, head: str | None, port: int | None) -> dict[str, Any]:
    machines = plan.num_machines
    if machines > 1 and head is None:
        raise InputError(
            f"the plan is for {machines} machines, this is one of them; start it with shardwise submit under Slurm, "
            "else with --nodes, --node-rank and --head on each"
        )
    gpus = rank_gpu_names(plan)
    return {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "use_cpu": plan.device_kind is DeviceKind.CPU,
        "num_machines": machines,
        "machine_rank": node_rank,
        "num_processes": plan.chosen.num_ranks,
        "gpu_ids": "all" if gpus is None else ",".join(gpus),
        "main_process_ip": head,
        "main_process_port": port if port is not None else FREE_PORT if machines == 1 else DEFAULT_PORT,
        "rdzv_backend": "static",
        "same_network": True,
        "main_training_function": "main",
        "enable_cpu_affinity": False,
    }


def _deepspeed(plan: Plan, attempt_dir: Path) -> dict[str, Any]:
    section: dict[str, Any] = {
        "deepspeed_config_file": str(attempt_dir.absolute() / "ds_config.json"),
        "zero3_init_flag": False,  # the ranks read the weights before the engine is built
    }
    if plan.num_machines > 1:
        section["deepspeed_multinode_launcher"] = "standard"  # one launcher a machine, no ssh from the first
    return section


def _fsdp(plan: Plan, filled: dict[str, Any]) -> dict[str, Any]:
    strategy = plan.chosen.strategy
    if strategy.base_config is None:
        raise ValueError(f"{strategy.name} names no file under fsdp_configs/")
    config: dict[str, Any] = yaml.safe_load(read_base(strategy.base_config))
    config.update(filled)
    config["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = plan.model_shape.block_class
    config["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] = False  # every rank reads the same weights itself
    if plan.hybrid_mesh is not None:
        replicas, shards = plan.hybrid_mesh
        config["parallelism_config"]["parallelism_config_dp_replicate_size"] = replicas
        config["parallelism_config"]["parallelism_config_dp_shard_size"] = shards
    return config
