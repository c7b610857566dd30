"""Every file under ds_configs/ and fsdp_configs/: its row, its holes, and the real library that reads it."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from engine_plan_factory import engine_plan

from shardwise.launch.engine.launcher import HOLE, accelerate_config, deepspeed_config
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.hardware import DeviceKind, Hardware, Host
from shardwise.trainer.spec.plan import Buckets, Plan
from shardwise.trainer.spec.strategy import Precision

ROOT = Path(__file__).parent.parent
ENGINE_CONFIGS = {(row.sharding, row.offload): row.base_config for row in CATALOGUE if row.base_config}
DEEPSPEED_ROWS = [row for row, path in ENGINE_CONFIGS.items() if path.startswith("ds_configs/")]
FSDP_ROWS = [row for row, path in ENGINE_CONFIGS.items() if path.startswith("fsdp_configs/")]
BUCKETS = Buckets(
    reduce_elements=1001, allgather_elements=2001, prefetch_elements=3001, live_parameters=4001,
    persistence_elements=5001,
)  # fmt: skip
REUSE_DISTANCE = "zero_optimization.stage3_max_reuse_distance"
LIMITS_OF_BUCKETS = {"zero_optimization.stage3_max_live_parameters", REUSE_DISTANCE}
LIMITS_OF_OFFLOAD = {
    "zero_optimization.sub_group_size", "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_param.pin_memory", "zero_optimization.offload_param.buffer_size",
}  # fmt: skip

Row = tuple[Sharding, Offload]


def plan_of(row: Row, *, num_ranks: int = 2, **settings: Any) -> Plan:
    if row[0] is Sharding.HSDP:
        host = Host(cpu_name=None, num_cores=8, ram_bytes=None, ram_available_bytes=None)
        settings["hardware"] = Hardware(gpus=(), host=host, num_nodes=2, num_cpu_devices=num_ranks // 2)
    return engine_plan(*row, num_ranks=num_ranks, **settings)


def base_text(row: Row) -> str:
    return (ROOT / ENGINE_CONFIGS[row]).read_text()


def filled_yaml(row: Row, tmp_path: Path, **settings: Any) -> dict[str, Any]:
    return accelerate_config(plan_of(row, **settings), attempt_dir=tmp_path, head="node1")


def leaves(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def differing(base: dict[str, Any], filled: dict[str, Any]) -> set[str]:
    left, right = leaves(base), leaves(filled)
    return {name for name in left.keys() | right.keys() if left.get(name, ...) != right.get(name, ...)}


@pytest.mark.parametrize("row", DEEPSPEED_ROWS)
def test_a_filled_deepspeed_file_differs_from_its_base_only_in_the_holes_and_with_buckets_in_the_limits(row: Row):
    base = json.loads(base_text(row))
    holes = {name for name, value in leaves(base).items() if value == HOLE}
    limits = LIMITS_OF_OFFLOAD | ({REUSE_DISTANCE} if row[1] is Offload.NVME_ALL else set())
    for kind, precision in product(DeviceKind, Precision):
        filled = deepspeed_config(plan_of(row, kind=kind, precision=precision), nvme_path="/nvme")
        assert HOLE not in json.dumps(filled) and None not in leaves(filled).values()
        assert precision is Precision.BF16 or differing(base, filled) - limits == holes
    with_buckets = deepspeed_config(plan_of(row, buckets=BUCKETS), nvme_path="/nvme")
    assert differing(base, with_buckets) - holes - LIMITS_OF_OFFLOAD == LIMITS_OF_BUCKETS & leaves(base).keys()


@pytest.mark.parametrize("row", FSDP_ROWS)
def test_a_filled_fsdp_file_differs_from_its_base_only_in_the_lines_marked_per_job(row: Row, tmp_path: Path):
    base = yaml.safe_load(base_text(row))
    marked = {line.split(":")[0].strip() for line in base_text(row).splitlines() if " # per job" in line}
    filled = filled_yaml(row, tmp_path, num_ranks=6, precision=Precision.FP32)
    changed = {name.rpartition(".")[2] for name in differing(base, filled)}
    assert changed <= marked
    assert leaves(base).keys() == leaves(filled).keys()
    assert HOLE not in leaves(filled).values()


# What the libraries make of the files. They are asked in processes of their own: importing them takes seconds and
# warns, and DeepSpeed decides at import what it runs on. Each writes {file: answer} as its last line.

ASK_DEEPSPEED = """
import json, sys
from deepspeed.runtime import config as deepspeed

class Watched(dict):
    def __init__(self, table):
        super().__init__({k: Watched(v) if isinstance(v, dict) else v for k, v in table.items()})
        self.read = set()
    def __copy__(self): return self
    def __contains__(self, key): self.read.add(key); return super().__contains__(key)
    def __getitem__(self, key): self.read.add(key); return super().__getitem__(key)
    def get(self, key, default=None): self.read.add(key); return super().get(key, default)

answers = {}
for name, (ranks, table) in json.load(sys.stdin).items():
    deepspeed.dist.get_rank, deepspeed.dist.get_world_size = lambda *_: 0, lambda *_, ranks=ranks: ranks
    watched = Watched(table)
    made = deepspeed.DeepSpeedConfig(watched)
    unread = set(watched) - watched.read
    if "aio" in watched:
        unread |= set(watched["aio"]) - watched["aio"].read
    zero = made.zero_config
    answers[name] = {
        "unread": sorted(unread),
        "stage": int(zero.stage),
        "batch": [made.train_batch_size, made.train_micro_batch_size_per_gpu, made.gradient_accumulation_steps],
        "bf16": made.bfloat16_config.enabled, "fp16": made.float16_config.enabled,
        "pure_bf16": made.bfloat16_config.bf16_optimizer_states,
        "clip": made.gradient_clipping, "reduce": zero.reduce_bucket_size, "live": zero.max_live_parameters,
        "reduces_in": str(made.communication_data_type),
        "scaling": [made.float16_config.loss_scale_window, made.float16_config.consecutive_hysteresis],
        "sub_group": zero.sub_group_size,
        "optimizer_on": str(zero.offload_optimizer.device) if zero.offload_optimizer else "none",
        "weights_on": str(zero.offload_param.device) if zero.offload_param else "none",
        "nvme_path": str(zero.offload_param.nvme_path) if zero.offload_param else None,
        "optimizer_path": str(zero.offload_optimizer.nvme_path) if zero.offload_optimizer else None,
    }
print(json.dumps(answers))
"""

# What `accelerate launch` makes of a file, up to starting ranks, and the plugin that a script then gets from it.
ASK_ACCELERATE = """
import contextlib, json, os, sys
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import FullyShardedDataParallelPlugin, patch_environment
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import CPUOffloadPolicy
answers = {}
for name, path in json.load(sys.stdin).items():
    loaded = load_config_from_file(path)
    args = launch_command_parser().parse_args(["--config_file", path, "script.py"])
    with contextlib.redirect_stdout(sys.stderr):
        args, _, _ = _validate_launch_command(args)
    args.main_process_port = 0
    with patch_environment(**prepare_multi_gpu_env(args)):
        plugin, mesh = FullyShardedDataParallelPlugin(), ParallelismConfig()
        precision = os.environ["ACCELERATE_MIXED_PRECISION"]
    answers[name] = {
        "type": loaded.distributed_type.value, "version": plugin.fsdp_version,
        "reshards": plugin.reshard_after_forward, "offloads": isinstance(plugin.cpu_offload, CPUOffloadPolicy),
        "wraps": plugin.transformer_cls_names_to_wrap, "wraps_blocks": plugin.auto_wrap_policy is not None,
        "recomputes": plugin.activation_checkpointing, "loads_on_rank_0": plugin.cpu_ram_efficient_loading,
        "mesh": [mesh.dp_replicate_size, mesh.dp_shard_size],
        "ranks": [args.num_processes, args.num_machines, args.nproc_per_node], "precision": precision,
    }
print(json.dumps(answers))
"""


def ask(program: str, question: Any) -> dict[str, Any]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "FSDP_"))}
    answer = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(question),
        env=environment | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-4000:]
    found = json.loads(answer.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def deepspeed_answers() -> dict[str, Any]:
    settings: dict[str, Any] = {"micro_batch": 3, "accumulation": 5, "buckets": BUCKETS}
    planned = {
        f"{ENGINE_CONFIGS[row]} {precision}": deepspeed_config(
            plan_of(row, precision=precision, **settings), nvme_path="/nvme"
        )
        for row, precision in product(DEEPSPEED_ROWS, Precision)
    }
    return ask(ASK_DEEPSPEED, {name: (2, table) for name, table in planned.items()})


@pytest.mark.parametrize("row", DEEPSPEED_ROWS)
@pytest.mark.parametrize("precision", Precision)
def test_deepspeed_understands_a_filled_file_as_the_plan_means_it(row, precision, deepspeed_answers):
    sharding, offload = row
    place, on_disk = ("nvme", "/nvme") if offload.uses_nvme else ("cpu", "None")
    answer = dict(deepspeed_answers[f"{ENGINE_CONFIGS[row]} {precision}"])
    optimizer_on, weights_on = answer.pop("optimizer_on"), answer.pop("weights_on")
    live, sub_group = answer.pop("live"), answer.pop("sub_group")
    assert answer == {
        "unread": [], "stage": {Sharding.ZERO1: 1, Sharding.ZERO2: 2, Sharding.ZERO3: 3}[sharding],
        "batch": [2 * 3 * 5, 3, 5], "fp16": precision is Precision.FP16_MIXED, "scaling": [2000, False],
        "bf16": precision in (Precision.BF16_MIXED, Precision.BF16, Precision.FP8),
        "pure_bf16": precision is Precision.BF16, "reduces_in": "torch.float32", "clip": 1.0,
        "reduce": BUCKETS.reduce_elements, "nvme_path": on_disk if offload.moves_parameters else None,
        "optimizer_path": None if offload is Offload.NONE else on_disk,
    }  # fmt: skip
    assert sharding is not Sharding.ZERO3 or (live == BUCKETS.live_parameters and sub_group < 1_000_000)
    assert optimizer_on.endswith("none" if offload is Offload.NONE else place)
    assert weights_on.endswith(place if offload.moves_parameters else "none")


@pytest.fixture(scope="module")
def accelerate_answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("fsdp")
    question: dict[str, str] = {}
    for row in FSDP_ROWS:
        path = folder / Path(ENGINE_CONFIGS[row]).name
        path.write_text(yaml.safe_dump(filled_yaml(row, folder, num_ranks=6, precision=Precision.BF16_MIXED)))
        question |= {f"{row[0]}+{row[1]}": str(path), f"{row[0]}+{row[1]} by hand": str(ROOT / ENGINE_CONFIGS[row])}
    return ask(ASK_ACCELERATE, question)


@pytest.mark.parametrize("row", FSDP_ROWS)
def test_accelerate_understands_an_fsdp_file_as_its_row_means_it(row: Row, accelerate_answers: dict[str, Any]):
    answer, by_hand = (accelerate_answers[f"{row[0]}+{row[1]}{suffix}"] for suffix in ("", " by hand"))
    for each in (answer, by_hand):
        assert (each["type"], each["version"]) == ("FSDP", 2)
        assert each["reshards"] is (row[0] is not Sharding.FSDP_GRAD_OP)
        assert each["offloads"] is (row[1] is Offload.OPTIMIZER_PARAMS)
        assert each["wraps_blocks"] is True and each["recomputes"] is False
    is_hybrid = row[0] is Sharding.HSDP
    assert answer["ranks"] == ([6, 2, "3"] if is_hybrid else [6, 1, "6"])
    assert answer["mesh"] == ([2, 3] if is_hybrid else [1, 1])
    assert (answer["precision"], answer["wraps"]) == ("bf16", ["LlamaDecoderLayer"])
    assert answer["loads_on_rank_0"] is False and by_hand["loads_on_rank_0"] is True
