"""A rank's own steps on the device, where every tensor knows its place, learn what they learn on a CPU."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from architecture_factory import TINY
from cuda_stand_in import H100, Machine, machine_environment, needs_no_cuda
from msgspec.structs import replace
from programs import printed_by

from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.job.sections import GaloreJob, LoraJob
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method, Precision

pytestmark = needs_no_cuda
WORKER = Path(__file__).parents[1] / "distributed" / "engine_worker.py"
IDLE = 0.4  # share of the time, that the profiler of the device records
EXACT = 1e-6  # of a loss and of adapters, where the same products are made of the same rows
TOLERANCE = 1e-5  # of a loss around 5: sums are made in another order by document
ON_HOST = "-table-on-host"
LORA = {"method": Method.LORA, "train": {"lora": LoraJob(rank=4)}}
OPTIMIZERS = [optimizer for optimizer in Optimizer if optimizer is not Optimizer.DEEPSPEED_CPU_ADAM]
QUICK = {  # one of each place and form of state; the others are long
    Optimizer.ADAMW, Optimizer.ADAMW_8BIT, Optimizer.ADEMAMIX_8BIT, Optimizer.ADAFACTOR, Optimizer.MUON,
    Optimizer.ADALOMO,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    **{optimizer.value: {"optimizer": optimizer, "lr": 1e-3} for optimizer in OPTIMIZERS},
    "accumulated": {"micro_batch": 2, "accumulation": 4},
    "recomputed": {"checkpointing": Checkpointing.FULL},
    "activation-offload": {"checkpointing": Checkpointing.FULL, "activation_offload": True},
    "in-backward": {"optimizer": Optimizer.ADAMW_FUSED, "optimizer_in_backward": True, "clip": 0.0},
    "fused-head": {"loss": LossHead.FUSED},
    "galore": {"method": Method.GALORE, "train": {"galore": GaloreJob(rank=8, update_gap=2)}},
    "lora": LORA,
    "qlora": {**LORA, "method": Method.QLORA},
    "neftune": {"train": {"neftune_alpha": 5.0}},
    "packed": {},
    "packed-lora": LORA,
    "packed-recomputed": {"checkpointing": Checkpointing.FULL},
    "packed-bf16": {"precision": Precision.BF16_MIXED},  # the one that takes the kernel of torch's `varlen_attn`
    "dpo": {},
    "dpo-lora": LORA,
    "sampled": {"num_steps": 12},
}
UNTIED = {"vocab_size": 256, "tie_word_embeddings": False}
CASES |= {
    f"lora-{name}": {**LORA, "num_steps": 2, "model_config": {**TINY[name], **UNTIED}}
    for name in ("gemma3_text", "gpt2")  # one scales the rows it looks up, one looks up a view of the ids
}
TABLES = ("lora", "qlora", "packed-lora", "dpo-lora", "lora-gemma3_text", "lora-gpt2")  # which may stay in host RAM
CASES |= {f"{name}{ON_HOST}": {**CASES[name], "embedding_on_host": True} for name in TABLES}
LONG = (pytest.mark.long, pytest.mark.products)
PARAMETERS = [pytest.param(name, marks=LONG if name in {*OPTIMIZERS} - QUICK else ()) for name in CASES]
BY_DEVICE = {"neftune"}  # noise is drawn by the device's own generator


def plan_of(name: str, kind: DeviceKind, caches: Mapping[str, Path]) -> Plan:
    from pair_factory import pair_plan
    from rank_factory import rank_plan

    rows = name.partition("-")[0] if name.startswith(("packed", "dpo")) else "rows"
    defaults = {"micro_batch": 8, "accumulation": 1, "num_steps": 3, "kind": kind}
    make = pair_plan if rows == "dpo" else rank_plan
    plan = make(caches[rows], **{**defaults, **CASES[name]})
    return replace(plan, data=replace(plan.data, is_packed=rows == "packed"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request) -> dict[tuple[str, DeviceKind], Path]:
    """The run of every case, on the device and on the CPU; one process for each device runs all."""
    from pair_factory import write_pairs
    from rank_factory import write_attempt, write_packed_rows, write_rows

    folder = tmp_path_factory.mktemp("steps")
    caches = {
        "rows": write_rows(folder / "rows"),
        "packed": write_packed_rows(folder / "packed"),
        "dpo": write_pairs(folder / "pairs"),
    }
    root = os.pathsep.join([str(WORKER.parents[2]), os.environ.get("PYTHONPATH", "")])
    plain = {"OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    on_card = machine_environment(Machine(cards=(H100,), idle_share=IDLE), folder / "machine")
    on_card["PYTHONPATH"] = os.pathsep.join([on_card["PYTHONPATH"], root])
    items = [item for item in request.session.items if item.path == request.path]
    names = dict.fromkeys(item.callspec.params["name"] for item in items if hasattr(item, "callspec"))
    names |= dict.fromkeys(name.removesuffix(ON_HOST) for name in names)
    found: dict[tuple[str, DeviceKind], Path] = {}
    for kind, environment in ((DeviceKind.CPU, plain), (DeviceKind.CUDA, {**plain, **on_card})):
        places = {name: folder / kind.value / name for name in names}
        paths = [write_attempt(run, plan_of(name, kind, caches)) for name, run in places.items()]
        printed_by(WORKER, *paths, **environment)
        found |= {(name, kind): run for name, run in places.items()}
    return found


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_step_on_the_device_learns_what_it_learns_on_a_cpu(runs, name: str):
    from attempt_runs import losses_of

    card, host = (losses_of(runs[name, kind]) for kind in (DeviceKind.CUDA, DeviceKind.CPU))
    assert len(card) == CASES[name].get("num_steps", 3)
    tolerance = 0.05 if "bf16" in name or name in BY_DEVICE else TOLERANCE
    assert card == pytest.approx(host, abs=tolerance)


@pytest.mark.parametrize("name", [f"{name}{ON_HOST}" for name in TABLES])
def test_a_table_in_host_ram_gives_the_losses_and_adapters_of_one_on_the_device(runs, name: str):
    """Ids come from the loader, so that no forward of a step waits; the check of packed documents has none of them."""
    from attempt_runs import engaged_of, losses_of
    from safetensors.numpy import load_file

    ours, theirs = (runs[each, DeviceKind.CUDA] for each in (name, name.removesuffix(ON_HOST)))
    assert losses_of(ours) == pytest.approx(losses_of(theirs), abs=EXACT)
    learned, expected = (load_file(run / "export" / "adapter_model.safetensors") for run in (ours, theirs))
    assert learned.keys() == expected.keys()
    for key, adapter in expected.items():
        assert learned[key] == pytest.approx(adapter, abs=EXACT), key
    fact = engaged_of(ours).facts["embedding table"]
    assert "KiB in host RAM; lookups: " in fact and ("waited" in fact) is name.startswith("packed")
    assert "embedding table" not in engaged_of(theirs).facts


@pytest.mark.parametrize("name", ["sampled", "accumulated"])
def test_a_device_that_is_idle_is_reported_on_the_line_that_ends_the_sample(runs, name: str):
    from attempt_runs import metrics_of

    shares = {line["step"]: line.get("gpu_idle_share") for line in metrics_of(runs[name, DeviceKind.CUDA])}
    found = {step: share for step, share in shares.items() if share is not None}
    assert found == ({6: pytest.approx(IDLE, abs=0.05)} if name == "sampled" else {}), "the others are too short"
    assert all("gpu_idle_share" not in line for line in metrics_of(runs[name, DeviceKind.CPU]))
