"""The launcher of the ranks: its command and environment, and the DeepSpeed and Accelerate files of a plan.

The ranks build their engine from plan.json. The files start them, give Accelerate and DeepSpeed the same values, and
work by hand: `accelerate launch --config_file RUN/attempts/1/accelerate.yaml -m shardwise.trainer
RUN/attempts/1/plan.json`.

DeepSpeed drops an unfilled `"auto"` silently and runs with its own default, so none is left. Filled are exactly the
holes that Accelerate and transformers fill by hand (Accelerate refuses any other `"auto"`): batch sizes, clipping,
precision, bucket sizes in elements, NVMe path. `_limits` replaces defaults by those of the plan's memory estimate.
Which keys DeepSpeed 0.19.8 reads is in docs/strategies.md. Accelerate refuses `mixed_precision` with a DeepSpeed
file.

On a CPU the same distributed types start the ranks. MULTI_CPU is not among them: without MPI it starts one rank
without a message (docs/workarounds.md). `use_cpu: true` under MULTI_GPU starts all of them.

A launcher inherits variables of an earlier `accelerate` or torchrun, of an MPI, a list of GPUs. Accelerate fills every
open setting from them, so all that it could read as a setting is removed. Everything else passes: proxies, NCCL
settings, and secrets, which are never written to a file.

A `trainer.py` in the working directory must not shadow this package. PYTHONSAFEPATH keeps the working directory out of
the module path, but Accelerate's DeepSpeed launcher puts it back through PYTHONPATH, and so does an empty entry of a
user's own PYTHONPATH. Hence our packages come first in PYTHONPATH.

The folder of the interpreter comes first in PATH: a rank that loads a compiled operator runs `ninja`, which is
installed there, and a virtual environment need not be active.
"""

import copy
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from shardwise.launch.engine.offload import nvme_folder, offload_buffers
from shardwise.launch.probe.gpus import ALLOCATOR_VARIABLES, cuda_variables, rank_gpu_names
from shardwise.launch.rundir import paths as run_dirs
from shardwise.launch.worker import import_settings, with_first
from shardwise.trainer import FOLDER
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Engine, Offload
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.job.sections import without_url
from shardwise.trainer.spec.messages.rank_files import REPORT_ROOM_BYTES, SUPERVISED, report_room_path
from shardwise.trainer.spec.network import LOOPBACK_NAME
from shardwise.trainer.spec.plan import Buckets, Candidate, Plan
from shardwise.trainer.spec.strategy import Precision

# Read as settings by Accelerate, DeepSpeed, torch.distributed or their MPI discovery.
_STALE_PREFIXES = (
    "ACCELERATE_",
    "FSDP_",
    "PARALLELISM_CONFIG_",
    "MEGATRON_LM_",
    "TORCHELASTIC_",
    "PET_",  # torchrun reads each of its options from one of these
    "OMPI_COMM_WORLD_",
    "MV2_COMM_WORLD_",
    "PMI_",
)
_STALE_NAMES = frozenset({
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "NODE_RANK",
    "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "CROSS_SIZE", "CROSS_RANK",
    "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR", "FORK_LAUNCHED", "MPI_LOCALNRANKS", "MPI_LOCALRANKID",
})  # fmt: skip

# torch rounds pinned blocks up to powers of two, twice what is requested at worst; this limits it to small ones. The
# first release whose setting was read.
_EXACT, _EXACT_SINCE = "pinned_max_round_threshold_mb:1", (2, 13)
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_PROGRAMS = Path(sys.executable).parent  # not resolved: the link in a virtual environment counts


def launch_command(attempt_dir: Path, *, log_dir: Path | None, python: str, node_rank: int = 0) -> list[str]:
    """The argv that starts every rank of this machine from the files of the attempt; `python` has the libraries."""
    folder = attempt_dir.absolute()
    argv = [
        python,
        "-m",
        "shardwise.trainer.runtime.run.launcher",
        "--config_file",
        str(accelerate_file(folder, node_rank)),
    ]
    argv += ["-m", "shardwise.trainer", str(folder / "plan.json")]
    return argv if log_dir is None else [*argv, "--log-dir", str(log_dir.absolute())]


def launch_environment(base: Mapping[str, str], plan: Plan, *, extensions_dir: Path, cores: int) -> dict[str, str]:
    """`base` with our settings instead of other launchers'; this machine's ranks share `cores`."""
    inherited = {name: value for name, value in base.items() if not _is_stale(name)}
    ranks_here = max(1, plan.chosen.num_ranks // plan.num_machines)
    ours = {
        **import_settings(inherited),
        "PATH": with_first(_PROGRAMS, inherited.get("PATH", os.defpath)),
        "OMP_NUM_THREADS": str(max(1, cores // ranks_here)),
        "TOKENIZERS_PARALLELISM": "false",  # the ranks fork; a tokenizer's threads would not survive it
        "TORCH_EXTENSIONS_DIR": str(extensions_dir),
        "DS_ACCELERATOR": plan.device_kind.value,
        SUPERVISED: "1",
        "PET_SIGNALS_TO_HANDLE": "SIGQUIT",  # torchrun would end its ranks at a TERM; they save and end themselves
    }
    if plan.num_machines == 1:
        ours[GLOO_INTERFACE] = inherited.get(GLOO_INTERFACE, LOOPBACK_NAME)  # no port is open to the network
    if plan.chosen.flash_kernel is not None:
        ours["HF_HUB_OFFLINE"] = "1"  # it is in the cache; no rank connects to the hub
    return inherited | ours | (_cuda(inherited, plan) if plan.device_kind is DeviceKind.CUDA else {})


def _is_stale(name: str) -> bool:
    return name in _STALE_NAMES or name.startswith(_STALE_PREFIXES)


def _cuda(inherited: Mapping[str, str], plan: Plan) -> dict[str, str]:
    ours = cuda_variables(plan.hardware, plan.chosen.num_ranks, inherited)
    pins = plan.chosen.memory.pinned_bytes > 0 and _release(plan.hardware.libraries.get("torch")) >= _EXACT_SINCE
    if pins and not any(name in inherited for name in ALLOCATOR_VARIABLES):
        ours["PYTORCH_ALLOC_CONF"] = ",".join(filter(None, (ours.get("PYTORCH_ALLOC_CONF"), _EXACT)))
    if plan.hardware.needs_p2p_disabled and plan.chosen.num_ranks > 1:
        ours["NCCL_P2P_DISABLE"] = "1"  # overrides the shell: these cards hang, or deliver other values
    return ours


def _release(version: str | None) -> tuple[int, ...]:
    """`2.13.0+cu130` as (2, 13); empty if it is not known."""
    parts = (version or "").split(".")[:2]
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def prepare_attempt(plan: Plan, candidate: Candidate, *, run_dir: Path, resume: bool) -> Path:
    """Writes the next `attempts/N/` with everything its ranks read; returns it."""
    number = run_dirs.next_attempt(run_dir)
    attempt_dir = run_dir / "attempts" / str(number)
    try:
        (attempt_dir / "logs").mkdir(parents=True)
        attempt_plan = msgspec.structs.replace(plan, candidates=(candidate,), resume=resume, job=without_url(plan.job))
        codec.write(attempt_dir / "plan.json", attempt_plan)
        folder = nvme_folder(attempt_plan, run_dir, number)
        head = socket.gethostname() if attempt_plan.num_machines > 1 else None  # each agent writes its own later
        settings = accelerate_config(attempt_plan, attempt_dir=attempt_dir, head=head)
        _write_engine_files(attempt_plan, settings, attempt_dir, nvme_path=None if folder is None else str(folder))
        report_room_path(attempt_dir).write_bytes(bytes(REPORT_ROOM_BYTES))
    except OSError as error:
        raise EnvironmentFaultError(f"{attempt_dir}: cannot be written: {error.strerror}") from error
    return attempt_dir


def write_engine_files(plan: Plan, folder: Path) -> list[str]:
    """Writes accelerate.yaml, and ds_config.json for ZeRO, for a script of the user's own; returns their names.

    InputError for a plan of several machines, or of NVMe offload without `limits.nvme.path`.
    """
    settings = accelerate_config(plan, attempt_dir=folder)
    if plan.chosen.strategy.precision is Precision.FP16_MIXED and not plan.chosen.strategy.sharding.uses_deepspeed:
        settings["mixed_precision"] = "fp16"  # with Accelerate's scaler, where our ranks have their own
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return _write_engine_files(plan, settings, folder, nvme_path=plan.job.limits.nvme.path)
    except OSError as error:
        raise EnvironmentFaultError(f"{folder}: cannot be written: {error.strerror}") from error


def _write_engine_files(plan: Plan, settings: Mapping[str, Any], folder: Path, *, nvme_path: str | None) -> list[str]:
    names = ["accelerate.yaml"]
    if plan.chosen.strategy.sharding.uses_deepspeed:
        config = deepspeed_config(plan, nvme_path=nvme_path)
        filled = msgspec.json.format(msgspec.json.encode(config), indent=1)
        codec.write_bytes(folder / "ds_config.json", filled + b"\n")
        names.append("ds_config.json")
    codec.write_bytes(folder / "accelerate.yaml", yaml.safe_dump(dict(settings), sort_keys=False).encode())
    return names


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
    for table, key, dotted in list(_entries(filled)):
        if table[key] == HOLE:
            if dotted not in values:
                raise ValueError(f"nothing fills {dotted} of {plan.chosen.strategy.base_config}")
            table[key] = values[dotted]
        elif dotted in limits:
            table[key] = limits[dotted]
    return filled


def _entries(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """(its table, its key, its dotted name) of every value that is not a table."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _entries(value, f"{prefix}{key}.")
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
    match sharding.facts.engine:
        case Engine.FSDP:
            return _fsdp(plan, {**launch, **precision})
        case Engine.DEEPSPEED:
            return {"distributed_type": "DEEPSPEED", **launch, "deepspeed_config": _deepspeed(plan, attempt_dir)}
        case Engine.TORCH:
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
