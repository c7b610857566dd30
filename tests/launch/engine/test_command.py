"""The argv and the environment of the launcher; what really starts is asked of the real `accelerate launch`."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_plan_factory import engine_plan, gpus
from msgspec.structs import replace

from shardwise.launch.engine.command import launch_command, launch_environment
from shardwise.launch.engine.config import accelerate_config, deepspeed_config
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.hardware import DeviceKind, Hardware, Host, MeasuredRates, PeerCopy
from shardwise.trainer.spec.plan import Plan

EXTENSIONS = Path("/cache/operators/one")
ROOT = Path(__file__).parents[3]


def environment(base: dict[str, str], plan: Plan | None = None, *, cores: int = 8) -> dict[str, str]:
    return launch_environment(base, plan or engine_plan(Sharding.NONE), extensions_dir=EXTENSIONS, cores=cores)


def cuda_plan(num_ranks: int = 2) -> Plan:
    return engine_plan(Sharding.DDP, num_ranks=num_ranks, kind=DeviceKind.CUDA)


def test_the_command_runs_accelerate_on_the_files_of_the_attempt():
    argv = launch_command(Path("/r/attempts/1"), log_dir=Path("/r/logs"), python="/venv/bin/python")
    assert argv == [
        "/venv/bin/python", "-m", "accelerate.commands.launch", "--config_file", "/r/attempts/1/accelerate.yaml",
        "-m", "shardwise.trainer", "/r/attempts/1/plan.json", "--log-dir", "/r/logs",
    ]  # fmt: skip


def test_settings_of_another_launcher_do_not_leak():
    names = {
        "ACCELERATE_USE_FSDP", "ACCELERATE_MIXED_PRECISION", "FSDP_OFFLOAD_PARAMS", "PARALLELISM_CONFIG_TP_SIZE",
        "MEGATRON_LM_TP_DEGREE", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PET_NNODES",
        "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_RANK",
    }  # fmt: skip
    assert names & set(environment(dict.fromkeys(names, "1"))) == set()


@pytest.mark.parametrize("plan", [engine_plan(Sharding.NONE), cuda_plan()])
def test_everything_else_passes_untouched(plan: Plan):
    names = ["WANDB_API_KEY", "HF_TOKEN", "NCCL_SOCKET_IFNAME", "HTTPS_PROXY", "SLURM_JOB_ID", "HF_HOME", "CFLAGS"]
    theirs = dict.fromkeys(names, "as it was")
    assert environment(theirs, plan).items() >= theirs.items()


@pytest.mark.parametrize(("cores", "num_ranks", "expected"), [(8, 1, "8"), (9, 4, "2"), (2, 4, "1")])
def test_ranks_share_the_cores_and_none_goes_without(cores: int, num_ranks: int, expected: str):
    plan = engine_plan(Sharding.DDP, num_ranks=num_ranks)
    assert environment({"OMP_NUM_THREADS": "99"}, plan, cores=cores)["OMP_NUM_THREADS"] == expected


def test_cores_are_shared_by_the_ranks_of_one_machine():
    host = Host(cpu_name=None, num_cores=64, ram_bytes=None, ram_available_bytes=None)
    hardware = Hardware(gpus=gpus(8), host=host, num_nodes=2)
    plan = engine_plan(Sharding.DDP, num_ranks=16, kind=DeviceKind.CUDA, hardware=hardware)
    assert environment({}, plan, cores=64)["OMP_NUM_THREADS"] == "8"


def test_our_packages_and_programs_come_first_and_the_working_directory_nowhere():
    found = environment({"PYTHONPATH": ":/theirs:", "PATH": "/usr/bin"})
    assert found["PYTHONPATH"].split(":") == [str(ROOT), "/theirs"]
    assert found["PATH"].split(":") == [str(Path(sys.executable).parent), "/usr/bin"]
    assert found["PYTHONSAFEPATH"] == "1"


def test_ranks_see_only_the_gpus_of_the_plan():
    found = environment({"CUDA_VISIBLE_DEVICES": "7"}, cuda_plan())
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-0,GPU-1"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def hanging_machine(**rates: Any) -> Hardware:
    host = Host(cpu_name=None, num_cores=8, ram_bytes=None, ram_available_bytes=None)
    return Hardware(gpus=gpus(2), host=host, rates=MeasuredRates(**rates))


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
def test_cards_that_cannot_copy_to_each_other_go_through_host_memory(
    rates: dict[str, Any], num_ranks: int, expected: str | None
):
    hardware = hanging_machine(**rates)
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


# The real launcher, below.

SEEN_BY_A_RANK = """
import json, os, sys
from pathlib import Path
seen = {name: value for name, value in os.environ.items() if name.startswith(("ACCELERATE_", "FSDP_"))}
seen |= {name: os.environ.get(name) for name in ("WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONSAFEPATH")}
Path(sys.argv[1], os.environ.get("RANK", "0")).write_text(json.dumps(seen))
"""


def write_attempt(plan: Plan, attempt_dir: Path) -> None:
    attempt_dir.mkdir(parents=True)
    settings = accelerate_config(plan, attempt_dir=attempt_dir)
    (attempt_dir / "accelerate.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    if plan.chosen.strategy.sharding.uses_deepspeed:
        (attempt_dir / "ds_config.json").write_text(json.dumps(deepspeed_config(plan)))


def run(argv: list[str], plan: Plan, *, cwd: Path, **base: str) -> subprocess.CompletedProcess[str]:
    inherited = {**os.environ, **base}
    return subprocess.run(
        argv,
        env=launch_environment(inherited, plan, extensions_dir=cwd / "operators", cores=2),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("sharding", "num_ranks", "engine"),
    [
        (Sharding.NONE, 1, "ACCELERATE_USE_CPU"),
        (Sharding.DDP, 2, None),
        pytest.param(Sharding.ZERO2, 1, "ACCELERATE_USE_DEEPSPEED", marks=pytest.mark.long),
        (Sharding.ZERO3, 2, "ACCELERATE_USE_DEEPSPEED"),
        (Sharding.FSDP, 2, "ACCELERATE_USE_FSDP"),
    ],
)
def test_accelerate_starts_every_rank_on_a_cpu_without_a_question_or_a_warning(
    tmp_path: Path, sharding: Sharding, num_ranks: int, engine: str | None
):
    plan = engine_plan(sharding, num_ranks=num_ranks)
    write_attempt(plan, tmp_path / "attempt")
    (tmp_path / "seen").mkdir()
    (tmp_path / "rank.py").write_text(SEEN_BY_A_RANK)
    argv = launch_command(tmp_path / "attempt", log_dir=None, python=sys.executable)
    start = argv.index("shardwise.trainer") - 1
    done = run(
        [*argv[:start], str(tmp_path / "rank.py"), "seen"], plan, cwd=tmp_path, ACCELERATE_USE_MEGATRON_LM="true"
    )
    assert done.returncode == 0, done.stdout
    assert "had defaults used instead" not in done.stdout and "Warning" not in done.stdout
    seen = {path.name: json.loads(path.read_text()) for path in (tmp_path / "seen").iterdir()}
    assert set(seen) == {str(rank) for rank in range(num_ranks)}
    for rank in seen.values():
        engines = {
            name for name, value in rank.items() if name.startswith("ACCELERATE_USE_") and value.lower() == "true"
        }
        assert engines == ({engine} if engine else set())
        assert rank["OMP_NUM_THREADS"] == str(2 // num_ranks)
        assert rank["PYTHONSAFEPATH"] == "1"
        assert int(rank["WORLD_SIZE"] or 1) == num_ranks


@pytest.mark.parametrize(
    ("sharding", "num_ranks"),
    [(Sharding.NONE, 1), pytest.param(Sharding.DDP, 2, marks=pytest.mark.long), (Sharding.ZERO2, 2)],
)
def test_a_trainer_in_the_working_directory_is_not_taken_for_ours(tmp_path: Path, sharding: Sharding, num_ranks: int):
    for name in ("shardwise", "accelerate"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('SHADOWED')")
    plan = engine_plan(sharding, num_ranks=num_ranks)
    write_attempt(plan, tmp_path / "attempt")
    (tmp_path / "attempt" / "plan.json").write_text("{}")
    argv = launch_command(tmp_path / "attempt", log_dir=None, python=sys.executable)
    done = run(argv, plan, cwd=tmp_path, PYTHONPATH=":")
    assert done.returncode != 0
    assert "SHADOWED" not in done.stdout and "plan.json" in done.stdout


def test_ranks_take_a_kernel_of_the_hub_from_the_cache_alone():
    plan = cuda_plan()
    kernel = "kernels-community/flash-attn2@" + "0" * 40
    with_kernel = replace(plan, candidates=(replace(plan.chosen, flash_kernel=kernel),))
    assert environment({}, with_kernel)["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in environment({}, plan)
