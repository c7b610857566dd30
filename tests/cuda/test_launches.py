"""`shardwise train` on cards that are not there, from the probe to the report: every sharding and every method.

What a card does differently is not seen here (kernels, precision, speed, streams). What is: every line of the CUDA path
in Python, on tensors that know where they are, so that a tensor which was not moved ends the run.
"""

import json
import re
import subprocess
from typing import Any, NamedTuple

import pytest
from cuda_launches import Launch
from cuda_stand_in import RTX_4060, T4, Machine, needs_no_cuda
from workplace_factory import LIMIT_S

from shardwise.trainer.spec.report import Ending

pytestmark = needs_no_cuda
ONE, TWO, OLD = Machine(cards=(RTX_4060,)), Machine(cards=(RTX_4060,) * 2), Machine(cards=(T4,))
FSDP_OFFLOAD = {"sharding": "fsdp", "offload": "optimizer+params"}
LORA, QLORA = ({"method": method, "lora": {"rank": 4}} for method in ("lora", "qlora"))
DPO, PAIRS = {"objective": "dpo"}, {"train": "pairs.jsonl"}
ANY_UPDATE = ["offload_cpu", "optimizer_8bit", "optimizer_approx", "bf16_weights"]


class Case(NamedTuple):
    """A launch: the machine, what the job file pins and sets, and what the report must have seen."""

    machine: Machine
    pin: dict[str, Any] = {}
    train: dict[str, Any] = {}
    data: dict[str, Any] = {}
    model: dict[str, Any] = {}
    seen: dict[str, str] = {}  # facts of the report, as patterns


ZERO_OFFLOAD = {"optimizer": "DeepSpeedCPUAdam", "master weights": "cpu", "place of optimizer state": "cpu"}
SHARDINGS = {
    "ddp": Case(TWO, {"sharding": "ddp"}),
    "zero1": Case(TWO, {"sharding": "zero1"}, seen={"master weights": "on cuda"}),
    "zero3": Case(TWO, {"sharding": "zero3"}, seen={"weights": "on cuda"}),
    "zero2-offload": Case(ONE, {"sharding": "zero2", "offload": "optimizer"}, seen=ZERO_OFFLOAD),
    "zero3-offload": Case(
        TWO, {"sharding": "zero3", "offload": "optimizer+params"}, seen={**ZERO_OFFLOAD, "weights": "on pinned cpu"}
    ),
    "fsdp": Case(TWO, {"sharding": "fsdp"}, seen={"shards": "on cuda"}),
    "fsdp-offload": Case(TWO, FSDP_OFFLOAD, seen={"shards": "on pinned cpu", "place of optimizer state": "on cpu"}),
}
METHODS = {
    "full": Case(ONE),
    "unpacked": Case(ONE, data={"packing": False}),
    "fp16": Case(OLD, {"precision": "fp16-mixed"}, seen={"loss scale": r"\d"}),
    "8bit": Case(ONE, {"optimizer": "adamw_8bit"}, seen={"optimizer_state": "uint8"}),
    "paged": Case(ONE, {"optimizer": "paged_adamw"}, model={"config": "wide"}, seen={"optimizer_state": "paged"}),
    "galore": Case(ONE, train={"method": "galore", "galore": {"rank": 8}}, seen={"projectors": "16 x 8"}),
    "activation-offload": Case(
        ONE, {"activation_offload": True, "checkpointing": "full"}, seen={"activation_offload": "in host RAM"}
    ),
}
ADAPTERS = {"adapters": "float32", "trained parameters": "12.4 %"}
ON_WEIGHTS = {
    "lora": Case(ONE, train=LORA, seen=ADAPTERS),
    "lora-zero3": Case(TWO, {"sharding": "zero3"}, LORA),
    "qlora": Case(ONE, train=QLORA, seen={**ADAPTERS, "4-bit layers": "nf4"}),
    "qlora-fsdp": Case(TWO, {"sharding": "fsdp"}, QLORA, seen={"4-bit layers": "nf4", "shards": "on cuda"}),
    "qlora-fsdp-offload": Case(TWO, FSDP_OFFLOAD, QLORA, seen={"4-bit layers": "nf4", "shards": "on pinned cpu"}),
    "dpo-lora": Case(ONE, train={**LORA, **DPO}, data=PAIRS, seen=ADAPTERS),
    "dpo-fsdp": Case(TWO, {"sharding": "fsdp"}, {**LORA, **DPO}, data=PAIRS, seen={"shards": "on cuda"}),
}


def job_of(case: Case) -> dict[str, Any]:
    return {
        "pin": case.pin,
        "train": {"steps": 2, **case.train},
        "data": case.data,
        "model": case.model,
        "allow": ANY_UPDATE,
        "checkpoint": {"every": "2 steps"},
    }


def check(run: Launch, case: Case, *, num_steps: int = 2, num_ranks: int | None = None) -> None:
    """It came to its end on the cards, with what was pinned."""
    report = run.report
    assert report.ending is Ending.FINISHED and report.step == num_steps
    assert report.verified is not None and report.verified.world_size == (num_ranks or len(case.machine.cards))
    if "sharding" in case.pin:
        assert report.plan.strategy.sharding == case.pin["sharding"]
        assert (report.verified.backend or "").startswith(("nccl", "cuda:nccl"))
    for name, pattern in case.seen.items():
        assert re.search(pattern, report.verified.facts[name]), (name, report.verified.facts)
    assert report.measured.memory.peak_allocated_bytes


@pytest.mark.parametrize("name", [*SHARDINGS, *METHODS])
def test_it_trains_to_the_report(launch, name: str):
    case = (SHARDINGS | METHODS)[name]
    check(launch(name, case.machine, **job_of(case)), case)


@pytest.fixture(scope="session")
def weights(launch) -> dict[str, str | None]:
    """The model section of a job that goes on from weights, which one launch trained; and pairs to prefer from."""
    run = launch("weights", ONE, **job_of(Case(ONE)))
    pairs = [
        {"prompt": f"the {animal} ", "chosen": f"sat on {number} mats", "rejected": f"ran {number} hills"}
        for animal in ("cat", "dog")
        for number in range(40)
    ]
    (run.place.folder / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))
    return {"name": str(run.run_dir / "export"), "config": None, "tokenizer": None}


@pytest.mark.parametrize("name", ON_WEIGHTS)
def test_it_trains_on_weights_to_the_report(launch, weights, name: str):
    case = ON_WEIGHTS[name]
    check(launch(name, case.machine, **{**job_of(case), "model": weights}), case)


def test_a_run_goes_on_from_its_checkpoint(launch):
    pin = {"sharding": "fsdp", "optimizer": "adamw_fused", "precision": "bf16-mixed", "compile": False}
    case = Case(TWO, pin, {"schedule": "constant", "warmup": "0 steps"})
    job = job_of(case)
    four = {**job, "train": {**job["train"], "steps": 4}}
    whole = launch("whole", TWO, **four)
    launch("half", TWO, **job)
    resumed = launch("half", TWO, "--resume", **four)
    check(resumed, case, num_steps=4)
    assert resumed.report.resumed_from_step == 2 and resumed.losses == whole.losses


def test_two_machines_of_two_cards_shard_within_each(launch, slurm):
    """The machines are those of the tests' cluster, each with its own network and name; its Slurm is not asked."""
    case = Case(TWO, {"sharding": "hsdp"}, seen={"shards": "on cuda"})
    place = launch.on(TWO)
    place.write_job(**job_of(case))
    run_dir, processes = place.folder / "runs" / "hsdp", []
    for rank in range(2):
        words = ("--nodes", "2", "--node-rank", str(rank), "--head", "n1", "--run-dir", run_dir)
        argv = slurm.on_node(f"n{rank + 1}", *place.command("train", "job.yaml", *words))
        processes.append(
            subprocess.Popen(
                argv,
                cwd=place.folder,
                env=place.environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    check(Launch(place, run_dir, outputs[0]), case, num_ranks=4)
