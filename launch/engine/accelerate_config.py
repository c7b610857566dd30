"""A plan as `accelerate launch --config_file` reads it: number of ranks, engine, devices.

The ranks build their engine from plan.json; this file starts them and gives Accelerate the same values, so that

    accelerate launch --config_file RUN/attempts/1/accelerate.yaml -m shardwise.trainer RUN/attempts/1/plan.json

works by hand. FSDP strategies fill the "per job" lines of their base file under fsdp_configs/. DeepSpeed strategies
point at the filled `ds_config.json` beside this file, without `mixed_precision`, which Accelerate refuses beside it.

On a CPU the same distributed types start the ranks. MULTI_CPU is not among them: without MPI it starts one rank
without a message (docs/workarounds.md). `use_cpu: true` under MULTI_GPU starts all of them.
"""

from pathlib import Path
from typing import Any

import yaml

from shardwise.launch.engine.deepspeed_config import read_base
from shardwise.launch.probe.gpu_selection import rank_gpu_names
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Precision

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
