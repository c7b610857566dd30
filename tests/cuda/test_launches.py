"""`shardwise train` on cards that are not there, from the probe to the report: every sharding and every method."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cuda_stand_in import RTX_4060, T4, Machine, machine_environment, needs_no_cuda
from operator_cache import folder_with_operators
from workplace_factory import TINY_CONFIG, Workplace, make_workplace

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report

pytestmark = needs_no_cuda
NUM_CORES = len(os.sched_getaffinity(0))
ONE, TWO, OLD = Machine(cards=(RTX_4060,)), Machine(cards=(RTX_4060,) * 2), Machine(cards=(T4,))
FSDP_OFFLOAD = {"sharding": "fsdp", "offload": "optimizer+params"}
LORA, QLORA = ({"method": method, "lora": {"rank": 4}} for method in ("lora", "qlora"))
DPO, PAIRS = {"objective": "dpo"}, {"train": "pairs.jsonl"}
CONFIGS = {
    "wide": {**TINY_CONFIG, "intermediate_size": 3200},  # bitsandbytes pages the state of 100,000 elements or more
    "untied": {**TINY_CONFIG, "tie_word_embeddings": False},
}
ANY_UPDATE = ["offload_cpu", "optimizer_8bit", "optimizer_approx", "bf16_weights"]


class Case(NamedTuple):
    machine: Machine
    pin: dict[str, Any] = {}
    train: dict[str, Any] = {}
    data: dict[str, Any] = {}
    model: dict[str, Any] = {}
    seen: dict[str, str] = {}  # facts of the report, as patterns


ZERO_OFFLOAD = {"optimizer": "DeepSpeedCPUAdam", "master weights": "cpu", "place of optimizer state": "cpu"}
PINNED = {"shards": "on pinned cpu", "place of optimizer state": "on cpu"}
FROM_SCRATCH = {
    "zero2-offload": Case(ONE, {"sharding": "zero2", "offload": "optimizer"}, seen=ZERO_OFFLOAD),
    "fsdp-offload": Case(TWO, FSDP_OFFLOAD, seen=PINNED),
    "fp16": Case(OLD, {"precision": "fp16-mixed"}, seen={"loss scale": r"\d"}),
    "full": Case(ONE),
    "ddp": Case(TWO, {"sharding": "ddp"}),
    "zero1": Case(TWO, {"sharding": "zero1"}, seen={"master weights": "on cuda"}),
    "zero3": Case(TWO, {"sharding": "zero3"}, seen={"weights": "on cuda"}),
    "zero3-offload": Case(
        TWO, {"sharding": "zero3", "offload": "optimizer+params"}, seen={**ZERO_OFFLOAD, "weights": "on pinned cpu"}
    ),
    "fsdp": Case(TWO, {"sharding": "fsdp"}, seen={"shards": "on cuda"}),
    "unpacked": Case(ONE, data={"packing": False}),
    "8bit": Case(ONE, {"optimizer": "adamw_8bit"}, seen={"optimizer_state": "uint8"}),
    "paged": Case(ONE, {"optimizer": "paged_adamw"}, model={"config": "wide"}, seen={"optimizer_state": "paged"}),
    "galore": Case(ONE, train={"method": "galore", "galore": {"rank": 8}}, seen={"projectors": "16 x 8"}),
    "activation-offload": Case(
        ONE, {"activation_offload": True, "checkpointing": "full"}, seen={"activation_offload": "in host RAM"}
    ),
}
ADAPTERS = {"adapters": "float32", "trained parameters": "12.4 %"}
ON_WEIGHTS = {
    "qlora": Case(ONE, train=QLORA, seen={**ADAPTERS, "4-bit layers": "nf4"}),
    "lora": Case(ONE, train=LORA, seen=ADAPTERS),
    "lora-zero3": Case(TWO, {"sharding": "zero3"}, LORA),
    "qlora-fsdp": Case(TWO, {"sharding": "fsdp"}, QLORA, seen={"4-bit layers": "nf4", "shards": "on cuda"}),
    "qlora-fsdp-offload": Case(TWO, FSDP_OFFLOAD, QLORA, seen={"4-bit layers": "nf4", "shards": "on pinned cpu"}),
    "dpo-lora": Case(ONE, train={**LORA, **DPO}, data=PAIRS, seen=ADAPTERS),
    "dpo-fsdp": Case(TWO, {"sharding": "fsdp"}, {**LORA, **DPO}, data=PAIRS, seen={"shards": "on cuda"}),
}
LONG = (pytest.mark.long, pytest.mark.products)
SHORT = ("zero2-offload", "fsdp-offload", "fp16", "qlora")  # one of each library, of each chip, and on weights


def job_of(case: Case) -> dict[str, Any]:
    job: dict[str, Any] = {"pin": case.pin, "train": {"steps": 2, **case.train}, "data": case.data, "model": case.model}
    return {**job, "allow": ANY_UPDATE, "checkpoint": {"every": "2 steps"}}


class Launch(NamedTuple):
    place: Workplace
    run_dir: Path

    @property
    def report(self) -> Report:
        return codec.read(self.run_dir / "report.json", Report)


def check(run: Launch, case: Case, *, num_steps: int = 2) -> None:
    report = run.report
    assert report.ending is Ending.FINISHED and report.step == num_steps
    assert report.verified is not None and report.verified.world_size == len(case.machine.cards)
    if "sharding" in case.pin:
        assert report.plan.strategy.sharding == case.pin["sharding"]
        assert (report.verified.backend or "").startswith(("nccl", "cuda:nccl"))
    if "CPU cores" in report.verified.facts:  # of ranks that are bound: every core is visible, and there are enough
        assert "offload" in case.pin and report.verified.world_size > 1
        assert report.verified.facts["CPU cores"].endswith(f" with {NUM_CORES // 2} threads")
    for name, pattern in case.seen.items():
        assert re.search(pattern, report.verified.facts[name]), (name, report.verified.facts)
    assert report.measured.memory.peak_allocated_bytes


@pytest.fixture(scope="module")
def launch(tmp_path_factory) -> Callable[..., Launch]:
    """Runs the small job in one workplace, with DeepSpeed's operator, on a machine; `--resume` continues run `name`."""
    place = make_workplace(tmp_path_factory.mktemp("cuda") / "work place")  # with a space in every path
    for name, config in CONFIGS.items():
        (place.folder / name).mkdir()
        (place.folder / name / "config.json").write_text(json.dumps(config))
    operators = folder_with_operators("cpu_adam").parent
    (place.folder / "cache").mkdir()
    (place.folder / "cache" / operators.name).symlink_to(operators)  # a machine builds it once
    environments: dict[Machine, dict[str, str]] = {}

    def run(name: str, machine: Machine, *words: str, **sections: Any) -> Launch:
        if machine not in environments:
            environments[machine] = machine_environment(machine, place.folder / "machines" / str(len(environments)))
        here = place._replace(environment={**place.environment, **environments[machine]})
        here.write_job(output=f"runs/{name}", **sections)
        here.run("train", "job.yaml", *words)
        (run_dir,) = (here.folder / "runs").glob(f"{name}-2*")
        return Launch(here, run_dir)

    return run


@pytest.fixture(scope="module")
def weights(launch) -> dict[str, str | None]:
    """The model section of a job that goes on from weights, which one launch trained; and pairs to prefer from."""
    run = launch("weights", ONE, **job_of(Case(ONE)))
    check(run, Case(ONE))
    pairs = [
        {"prompt": f"the {animal} ", "chosen": f"sat on {number} mats", "rejected": f"ran {number} hills"}
        for animal in ("cat", "dog")
        for number in range(40)
    ]
    (run.place.folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    return {"name": str(run.run_dir / "export"), "config": None, "tokenizer": None}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SHORT else LONG) for name in (*FROM_SCRATCH, *ON_WEIGHTS)],
)
def test_it_trains_to_the_report(launch, request, name: str):
    case = (FROM_SCRATCH | ON_WEIGHTS)[name]
    model = request.getfixturevalue("weights") if name in ON_WEIGHTS else case.model
    check(launch(name, case.machine, **{**job_of(case), "model": model}), case)


@pytest.mark.long
@pytest.mark.products
@pytest.mark.parametrize("method", [LORA, QLORA], ids=["lora", "qlora"])
def test_a_run_whose_embeddings_stay_in_host_ram_evaluates_samples_resumes_and_exports(launch, method: dict[str, Any]):
    job, name = job_of(Case(ONE)), f"table-{method['method']}"
    base = launch(f"untied-{name}", ONE, **{**job, "model": {"config": "untied"}})
    weights = {"name": str(base.run_dir / "export"), "config": None, "tokenizer": None}
    case = Case(ONE, {"embedding_on_host": True}, {**method, "schedule": "constant", "warmup": "0 steps"})
    case = case._replace(seen={"embedding table": "20 KiB in host RAM; lookups: "})
    adapted = {**job_of(case), "model": weights, "eval": {"every": "1 steps"}}
    run = launch(name, ONE, **adapted)
    check(run, case)
    resumed = launch(name, ONE, "--resume", **{**adapted, "train": {**adapted["train"], "steps": 4}})
    check(resumed, case, num_steps=4)
    assert resumed.report.resumed_from_step == 2
    base.place.run("export", str(run.run_dir), f"merged-{name}", "--merge")
    assert (base.place.folder / f"merged-{name}" / "model.safetensors").is_file()
