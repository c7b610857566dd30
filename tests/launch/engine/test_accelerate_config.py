"""What Accelerate is told: type, ranks, machines, devices, precision."""

from pathlib import Path

import pytest
from engine_plan_factory import engine_plan, gpus

from shardwise.launch.engine.config import accelerate_config
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind, Gpu, Hardware, Host
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Precision, Sharding

ATTEMPT = Path("/run/attempts/1")
HOST = Host(cpu_name=None, num_cores=64, ram_bytes=None, ram_available_bytes=None)


def cluster(sharding: Sharding, *, num_ranks: int = 16) -> Plan:
    hardware = Hardware(gpus=gpus(8), host=HOST, num_nodes=2)
    return engine_plan(sharding, num_ranks=num_ranks, kind=DeviceKind.CUDA, hardware=hardware)


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
        (Precision.FP32, "no"),
        (Precision.FP16_MIXED, "no"),
        (Precision.BF16_MIXED, "bf16"),
        (Precision.BF16, "no"),
        (Precision.FP8, "bf16"),
    ],
)
@pytest.mark.parametrize("sharding", [Sharding.DDP, Sharding.FSDP])
def test_precision_is_what_accelerate_casts_to(sharding: Sharding, precision: Precision, expected: str):
    config = accelerate_config(engine_plan(sharding, num_ranks=2, precision=precision), attempt_dir=ATTEMPT)
    assert config["mixed_precision"] == expected


def test_deepspeed_gets_the_file_beside_and_no_setting_that_accelerate_refuses_there():
    config = accelerate_config(engine_plan(Sharding.ZERO3, num_ranks=2), attempt_dir=ATTEMPT)
    assert config["deepspeed_config"] == {
        "deepspeed_config_file": "/run/attempts/1/ds_config.json",
        "zero3_init_flag": False,
    }
    assert "mixed_precision" not in config


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


def test_several_machines_without_a_first_one_are_refused():
    with pytest.raises(InputError, match=r"2 machines.*--node-rank and --head"):
        accelerate_config(cluster(Sharding.DDP), attempt_dir=ATTEMPT)


def test_hybrid_sharding_stays_within_a_machine():
    assert cluster(Sharding.HSDP).hybrid_mesh == (2, 8)
    assert cluster(Sharding.FSDP).hybrid_mesh is None
    parallelism = accelerate_config(cluster(Sharding.HSDP), attempt_dir=ATTEMPT, head="n")["parallelism_config"]
    assert parallelism["parallelism_config_dp_replicate_size"] == 2
    assert parallelism["parallelism_config_dp_shard_size"] == 8


@pytest.mark.parametrize(
    ("uuids", "num_ranks", "expected"),
    [
        (("GPU-a", "GPU-b"), 2, "GPU-a,GPU-b"),
        (("GPU-a", "GPU-b"), 1, "GPU-a"),
        (("GPU-a", None), 2, "4,5"),
    ],
)
def test_gpus_are_named_by_uuid_or_else_by_index(uuids: tuple[str | None, ...], num_ranks: int, expected: str):
    cards = tuple(
        Gpu(index=4 + index, name="A", spec_name=None, memory_bytes=1, uuid=uuid) for index, uuid in enumerate(uuids)
    )
    sharding = Sharding.NONE if num_ranks == 1 else Sharding.DDP
    plan = engine_plan(sharding, num_ranks=num_ranks, kind=DeviceKind.CUDA, hardware=Hardware(gpus=cards, host=HOST))
    assert accelerate_config(plan, attempt_dir=ATTEMPT)["gpu_ids"] == expected


def test_a_machine_that_was_described_instead_of_probed_names_no_gpus():
    hardware = Hardware(gpus=gpus(2), host=HOST, source="2xH100-SXM5-80GB")
    plan = engine_plan(Sharding.DDP, num_ranks=2, kind=DeviceKind.CUDA, hardware=hardware)
    assert accelerate_config(plan, attempt_dir=ATTEMPT)["gpu_ids"] == "all"
