"""The files, the argv and the environment of the launcher."""

import sys
from pathlib import Path
from typing import Any

import pytest
from engine_plan_factory import TINY_LLAMA, engine_plan, gpus
from msgspec.structs import replace

from shardwise.launch.engine.launcher import (
    accelerate_config,
    deepspeed_config,
    fill,
    launch_command,
    launch_environment,
)
from shardwise.launch.engine.offload import OffloadBuffers, offload_buffers
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind, Gpu, Hardware, Host, MeasuredRates, PeerCopy
from shardwise.trainer.spec.job.sections import Job, Limits, NvmeLimit, TrainJob
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import Buckets, Plan
from shardwise.trainer.spec.strategy import Precision
from shardwise.trainer.spec.units import MIB

ATTEMPT = Path("/run/attempts/1")
HOST = Host(cpu_name=None, num_cores=64, ram_bytes=2**36, ram_available_bytes=2**36)
BUCKETS = Buckets(
    reduce_elements=10, allgather_elements=20, prefetch_elements=30, live_parameters=40, persistence_elements=50
)


def zero_of(plan: Plan, **settings: str | None) -> dict[str, Any]:
    """The section of ZeRO."""
    return deepspeed_config(plan, **settings)["zero_optimization"]


def test_the_batch_and_clipping_are_the_jobs():
    job = Job(train=TrainJob(clip=0.25))
    config = deepspeed_config(engine_plan(Sharding.ZERO2, num_ranks=4, micro_batch=3, accumulation=5, job=job))
    expected = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 5, "train_batch_size": 60}
    assert config.items() >= {**expected, "gradient_clipping": 0.25}.items()


@pytest.mark.parametrize(
    ("buckets", "reduce", "prefetch", "persistence", "live"),
    [(BUCKETS, 10, 30, 50, 40), (None, 64 * 64, 3686, 640, 1_000_000_000)],
)
def test_planned_buckets_are_taken_and_others_follow_the_hidden_size(buckets, reduce, prefetch, persistence, live):
    zero = zero_of(engine_plan(Sharding.ZERO3, buckets=buckets))
    assert zero["reduce_bucket_size"] == reduce and zero["stage3_prefetch_bucket_size"] == prefetch
    assert zero["stage3_param_persistence_threshold"] == persistence
    assert zero["stage3_max_live_parameters"] == zero["stage3_max_reuse_distance"] == live


@pytest.mark.parametrize("argument", ["/scratch", None])
def test_state_on_nvme_goes_where_the_caller_or_else_the_job_says(argument: str | None):
    job = Job(limits=Limits(nvme=NvmeLimit(path="/from-job")))
    zero = zero_of(engine_plan(Sharding.ZERO3, Offload.NVME_ALL, job=job), nvme_path=argument)
    assert zero["offload_optimizer"]["nvme_path"] == zero["offload_param"]["nvme_path"] == (argument or "/from-job")
    with pytest.raises(InputError, match=r"limits\.nvme\.path"):
        deepspeed_config(engine_plan(Sharding.ZERO3, Offload.NVME_ALL))


def on_host(**host: int | None) -> Hardware:
    """A machine of one GPU with limits on its host."""
    return Hardware(gpus=gpus(1), host=replace(HOST, **host))


# 32,768 x 4,096 in each table, 6.3 billion weights in 32 blocks; of each table a rank of eight has a piece.
LARGE = {
    "vocab_size": 32768, "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32,
}  # fmt: skip
PIECE = 32768 * 4096 // 8


def buffers_of(offload: Offload, **facts: Any) -> OffloadBuffers:
    """The buffers of a rank of eight that trains the large model."""
    plan = engine_plan(Sharding.ZERO3, offload, num_ranks=8, **facts)
    return offload_buffers(replace(plan, model_shape=read_model_shape({**TINY_LLAMA, **LARGE})))


@pytest.mark.parametrize(
    ("memlock_bytes", "locked_mib"),
    [(None, 2000), (1500 * MIB, 1500)],  # the window that the memory estimate counts; what a process may lock
)
def test_sub_groups_are_cut_to_the_memory_that_may_be_locked(memlock_bytes: int | None, locked_mib: int):
    sizes = buffers_of(Offload.NVME_OPTIMIZER, hardware=on_host(memlock_limit_bytes=memlock_bytes))
    assert sizes.locked_bytes == 4 * 4 * (sizes.sub_group_elements + PIECE)
    assert locked_mib * MIB - 64 < sizes.locked_bytes <= locked_mib * MIB


def test_buffers_of_weights_are_locked_too_and_leave_less_for_sub_groups():
    some = buffers_of(Offload.NVME_OPTIMIZER, precision=Precision.BF16_MIXED)
    all_of_it = buffers_of(Offload.NVME_ALL, precision=Precision.BF16_MIXED)
    assert all_of_it.weight_buffer_elements == PIECE
    assert all_of_it.locked_bytes == 5 * 2 * PIECE + (4 * 4 + 2) * (all_of_it.sub_group_elements + PIECE)
    assert all_of_it.locked_bytes <= some.locked_bytes + 64
    assert all_of_it.sub_group_elements < some.sub_group_elements


@pytest.mark.parametrize(
    ("kind", "limit_bytes", "pins"),
    [
        (DeviceKind.CUDA, None, True),
        (DeviceKind.CUDA, 1000, True),
        (DeviceKind.CUDA, 999, False),  # as under WSL
        (DeviceKind.CPU, None, False),
    ],
)
def test_host_memory_is_pinned_where_there_is_a_gpu_and_room(kind: DeviceKind, limit_bytes: int | None, pins: bool):
    hardware = on_host(pinned_limit_bytes=limit_bytes)
    plan = engine_plan(Sharding.ZERO3, Offload.OPTIMIZER_PARAMS, kind=kind, hardware=hardware)
    memory = replace(plan.chosen.memory, pinned_bytes=1000)
    plan = replace(plan, candidates=(replace(plan.chosen, memory=memory),))
    zero = zero_of(plan)
    assert zero["offload_optimizer"]["pin_memory"] is zero["offload_param"]["pin_memory"] is pins
    if limit_bytes is None:
        plan = engine_plan(Sharding.ZERO2, Offload.OPTIMIZER, kind=kind, hardware=hardware)
        assert zero_of(plan)["offload_optimizer"]["pin_memory"] is pins


def test_weights_on_nvme_are_not_kept_for_reuse_and_few_are_gathered_ahead():
    names = ("stage3_max_reuse_distance", "stage3_prefetch_bucket_size")
    many = replace(BUCKETS, prefetch_elements=2**24, live_parameters=2**26)
    zero = zero_of(engine_plan(Sharding.ZERO3, Offload.NVME_ALL, buckets=many), nvme_path="/nvme")
    assert [zero[name] for name in names] == [0, 2 * MIB // 4], "two weights that can be swapped"
    zero = zero_of(engine_plan(Sharding.ZERO3, Offload.OPTIMIZER_PARAMS, buckets=many))
    assert [zero[name] for name in names] == [2**26, 2**24]


def test_weights_in_bf16_have_gradients_and_states_in_bf16():
    config = deepspeed_config(engine_plan(Sharding.ZERO2, precision=Precision.BF16))
    assert config["bf16"] == {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def test_a_hole_that_nothing_fills_is_an_error():
    with pytest.raises(ValueError, match=r"zero_optimization\.sub_group_size"):
        fill({"zero_optimization": {"sub_group_size": "auto"}}, engine_plan(Sharding.ZERO3), nvme_path=None)


def cluster(sharding: Sharding, *, num_ranks: int = 16, **candidate: Any) -> Plan:
    hardware = Hardware(gpus=gpus(8), host=HOST, num_nodes=2)
    return engine_plan(sharding, num_ranks=num_ranks, kind=DeviceKind.CUDA, hardware=hardware, **candidate)


@pytest.mark.parametrize("kind", DeviceKind)
@pytest.mark.parametrize(
    ("sharding", "num_ranks", "expected"),
    [
        (Sharding.NONE, 1, "NO"),
        (Sharding.DDP, 2, "MULTI_GPU"),
        (Sharding.ZERO2, 1, "DEEPSPEED"),
        (Sharding.FSDP, 2, "FSDP"),
    ],
)
def test_the_engine_decides_the_distributed_type(kind: DeviceKind, sharding: Sharding, num_ranks: int, expected: str):
    config = accelerate_config(engine_plan(sharding, num_ranks=num_ranks, kind=kind), attempt_dir=ATTEMPT)
    assert config["distributed_type"] == expected
    assert config["num_processes"] == num_ranks
    assert config["use_cpu"] is (kind is DeviceKind.CPU)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (Precision.FP32, "no"), (Precision.FP16_MIXED, "no"), (Precision.BF16_MIXED, "bf16"), (Precision.BF16, "no"),
        (Precision.FP8, "bf16"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("sharding", [Sharding.DDP, Sharding.FSDP])
def test_precision_is_what_accelerate_casts_to(sharding: Sharding, precision: Precision, expected: str):
    config = accelerate_config(engine_plan(sharding, num_ranks=2, precision=precision), attempt_dir=ATTEMPT)
    assert config["mixed_precision"] == expected


@pytest.mark.parametrize("sharding", [Sharding.DDP, Sharding.ZERO3])
def test_several_machines_agree_on_the_first_of_them(sharding: Sharding):
    without_port = accelerate_config(cluster(sharding), attempt_dir=ATTEMPT, head="node1")
    assert without_port["main_process_port"] == 29500
    launcher = without_port.get("deepspeed_config", {}).get("deepspeed_multinode_launcher")
    assert launcher == ("standard" if sharding.uses_deepspeed else None), "no ssh"
    config = accelerate_config(cluster(sharding), attempt_dir=ATTEMPT, node_rank=1, head="node1", port=4000)
    assert (config["num_machines"], config["machine_rank"], config["num_processes"]) == (2, 1, 16)
    assert (config["main_process_ip"], config["main_process_port"]) == ("node1", 4000)
    assert config["gpu_ids"] == "all"
    with pytest.raises(InputError, match=r"2 machines.*--node-rank and --head"):
        accelerate_config(cluster(sharding), attempt_dir=ATTEMPT)


def test_hybrid_sharding_stays_within_a_machine():
    assert cluster(Sharding.HSDP).hybrid_mesh == (2, 8)
    assert cluster(Sharding.HSDP, shard_group=4).hybrid_mesh == (4, 4)
    assert cluster(Sharding.FSDP).hybrid_mesh is None
    parallelism = accelerate_config(cluster(Sharding.HSDP), attempt_dir=ATTEMPT, head="n")["parallelism_config"]
    assert [parallelism[f"parallelism_config_dp_{name}_size"] for name in ("replicate", "shard")] == [2, 8]


@pytest.mark.parametrize(
    ("uuids", "num_ranks", "source", "expected"),
    [
        (("GPU-a", "GPU-b"), 2, "probe", "GPU-a,GPU-b"),
        (("GPU-a", "GPU-b"), 1, "probe", "GPU-a"),
        (("GPU-a", None), 2, "probe", "4,5"),
        (("GPU-a", "GPU-b"), 2, "2xH100-SXM5-80GB", "all"),  # described instead of probed
    ],
)
def test_gpus_are_named_by_uuid_or_else_by_index(uuids, num_ranks: int, source: str, expected: str):
    cards = tuple(
        Gpu(index=4 + index, name="A", spec_name=None, memory_bytes=1, uuid=uuid) for index, uuid in enumerate(uuids)
    )
    hardware = Hardware(gpus=cards, host=HOST, source=source)
    sharding = Sharding.NONE if num_ranks == 1 else Sharding.DDP
    plan = engine_plan(sharding, num_ranks=num_ranks, kind=DeviceKind.CUDA, hardware=hardware)
    assert accelerate_config(plan, attempt_dir=ATTEMPT)["gpu_ids"] == expected


def environment(base: dict[str, str], plan: Plan | None = None, *, cores: int = 8) -> dict[str, str]:
    plan = plan or engine_plan(Sharding.NONE)
    return launch_environment(base, plan, extensions_dir=Path("/cache/operators/one"), cores=cores)


def cuda_plan(num_ranks: int = 2) -> Plan:
    return engine_plan(Sharding.DDP, num_ranks=num_ranks, kind=DeviceKind.CUDA)


@pytest.mark.parametrize("plan", [engine_plan(Sharding.NONE), cuda_plan()])
def test_settings_of_another_launcher_do_not_leak_and_everything_else_passes_untouched(plan: Plan):
    stale = {
        "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "FSDP_OFFLOAD_PARAMS", "PARALLELISM_CONFIG_TP_SIZE",
        "MEGATRON_LM_TP_DEGREE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PET_NNODES",
        "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
    }  # fmt: skip
    assert stale & set(environment(dict.fromkeys(stale, "1"), plan)) == set()
    names = ["WANDB_API_KEY", "HF_TOKEN", "NCCL_SOCKET_IFNAME", "HTTPS_PROXY", "SLURM_JOB_ID", "HF_HOME", "CFLAGS"]
    theirs = dict.fromkeys(names, "as it was")
    assert environment(theirs, plan).items() >= theirs.items()


def test_ranks_of_one_machine_open_no_port_to_the_network_unless_the_user_selects_an_interface():
    """gloo listens on the interface of the machine's own name by default."""
    name = "GLOO_SOCKET_IFNAME"
    two = engine_plan(Sharding.DDP, num_ranks=2)
    assert environment({}, two)[name] == environment({}, cuda_plan())[name] == "lo"
    assert environment({name: "eth0"}, two)[name] == "eth0"
    assert name not in environment({}, cluster(Sharding.DDP)), "each machine selects its own"


@pytest.mark.parametrize(("cores", "num_ranks", "expected"), [(8, 1, "8"), (9, 4, "2"), (2, 4, "1")])
def test_ranks_share_the_cores_and_none_goes_without(cores: int, num_ranks: int, expected: str):
    plan = engine_plan(Sharding.DDP, num_ranks=num_ranks)
    assert environment({"OMP_NUM_THREADS": "99"}, plan, cores=cores)["OMP_NUM_THREADS"] == expected
    assert environment({}, cluster(Sharding.DDP), cores=64)["OMP_NUM_THREADS"] == "8", "of one machine"


def test_our_packages_and_programs_come_first_and_the_working_directory_nowhere():
    found = environment({"PYTHONPATH": ":/theirs:", "PATH": "/usr/bin"})
    assert found["PYTHONPATH"].split(":") == [str(Path(__file__).parents[3]), "/theirs"]
    assert found["PATH"].split(":") == [str(Path(sys.executable).parent), "/usr/bin"]
    assert found["PYTHONSAFEPATH"] == "1"


def test_ranks_see_only_the_gpus_of_the_plan_and_take_a_kernel_of_the_hub_from_the_cache_alone():
    plan = cuda_plan()
    found = environment({"CUDA_VISIBLE_DEVICES": "7"}, plan)
    assert (found["CUDA_VISIBLE_DEVICES"], found["CUDA_DEVICE_ORDER"]) == ("GPU-0,GPU-1", "PCI_BUS_ID")
    assert "HF_HUB_OFFLINE" not in found
    kernel = "kernels-community/flash-attn2@" + "0" * 40
    with_kernel = replace(plan, candidates=(replace(plan.chosen, flash_kernel=kernel),))
    assert environment({}, with_kernel)["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("rates", "num_ranks", "expected"),
    [
        ({"gathers_only_without_peers": True}, 2, "1"),
        ({"peer_copies": (PeerCopy(a=0, b=1),)}, 2, "1"),
        ({"peer_copies": (PeerCopy(a=0, b=1, bytes_per_s=9, is_correct=True),)}, 2, None),
        ({"gathers_only_without_peers": True}, 1, None),
        ({}, 2, None),
    ],
)
def test_cards_that_cannot_copy_to_each_other_go_through_host_memory(rates, num_ranks: int, expected: str | None):
    hardware = Hardware(gpus=gpus(2), host=HOST, rates=MeasuredRates(**rates))
    plan = engine_plan(Sharding.DDP, num_ranks=num_ranks, kind=DeviceKind.CUDA, hardware=hardware)
    assert environment({}, plan).get("NCCL_P2P_DISABLE") == expected
    read_back = codec.decode(codec.encode(plan), Plan, origin="plan.json").hardware
    assert read_back.needs_p2p_disabled is hardware.needs_p2p_disabled


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ],
)
def test_allocator_settings_of_the_user_win(theirs: dict[str, str], expected: dict[str, str]):
    found = environment(theirs, cuda_plan())
    assert {name: value for name, value in found.items() if "ALLOC_CONF" in name} == expected


@pytest.mark.parametrize(
    ("torch", "pinned", "is_exact"), [("2.13.0+cu130", 1, True), ("2.14.1", 1, True), ("2.12.1", 1, False),
                                      ("2.13.0", 0, False), ("assumed", 1, False), (None, 1, False)],
)  # fmt: skip
def test_torch_pins_no_more_than_the_plan_counts(torch: str | None, pinned: int, is_exact: bool):
    plan = cuda_plan()
    chosen = replace(plan.chosen, memory=replace(plan.chosen.memory, pinned_bytes=pinned))
    hardware = replace(plan.hardware, libraries={} if torch is None else {"torch": torch})
    setting = environment({}, replace(plan, candidates=(chosen,), hardware=hardware))["PYTORCH_ALLOC_CONF"]
    assert setting == "expandable_segments:True" + (",pinned_max_round_threshold_mb:1" if is_exact else "")
    theirs = {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    assert "PYTORCH_ALLOC_CONF" not in environment(theirs, replace(plan, candidates=(chosen,), hardware=hardware))


def test_deepspeed_gets_the_file_beside_and_no_setting_that_accelerate_refuses_there():
    config = accelerate_config(engine_plan(Sharding.ZERO3, num_ranks=2), attempt_dir=ATTEMPT)
    file = "/run/attempts/1/ds_config.json"
    assert config["deepspeed_config"] == {"deepspeed_config_file": file, "zero3_init_flag": False}
    assert "mixed_precision" not in config


def test_the_command_runs_accelerate_on_the_files_of_the_attempt():
    argv = launch_command(Path("/r/attempts/1"), log_dir=Path("/r/logs"), python="/venv/bin/python")
    assert argv == [
        "/venv/bin/python", "-m", "shardwise.trainer.runtime.run.launcher",
        "--config_file", "/r/attempts/1/accelerate.yaml",
        "-m", "shardwise.trainer", "/r/attempts/1/plan.json", "--log-dir", "/r/logs",
    ]  # fmt: skip
