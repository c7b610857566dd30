"""Adapters train alike under every engine, on a whole base and on one in 4 bit, and nothing but them leaves a run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attempt_runs import engaged_of, losses_of
from plain_training import plain_model, train_plainly
from rank_factory import NUM_STEPS, SEED, rank_plan
from safetensors.torch import load_file

from shardwise.trainer.runtime.models.methods import seed_adapters
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.strategy import Checkpointing, Method, Precision

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks

EXACT = 1e-5
NUM_ADAPTERS, NUM_LENGTHS = 8192, 1024  # elements of rank 4 on 14 layers; rows of these layers
LORA = LoraJob(rank=4, alpha=8.0)
DORA = LoraJob(rank=4, alpha=8.0, dora=True, rslora=True)
DROPPED = LoraJob(rank=4, alpha=8.0, dora=True, dropout=0.1, targets=("q_proj", "layers.1.mlp.up_proj"))
LORA_RUN: dict[str, Any] = {"method": Method.LORA, "train": {"lora": LORA}, "num_steps": NUM_STEPS}
FULL = {"checkpointing": Checkpointing.FULL}
KINDS: dict[str, dict[str, Any]] = {
    "lora": LORA_RUN,
    "dropped": {**LORA_RUN, "train": {"lora": DROPPED}, **FULL},
    "noisy": {**LORA_RUN, "train": {"lora": LORA, "neftune_alpha": 5.0}},
    "qlora": {**LORA_RUN, "method": Method.QLORA, "train": {"lora": DORA}, **FULL},
    "qlora-mixed": {**LORA_RUN, "method": Method.QLORA, "precision": Precision.BF16_MIXED},
}
DDP, FSDP, ZERO1, ZERO2, ZERO3 = Sharding.DDP, Sharding.FSDP, Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3
PLAIN = tuple((sharding, "lora") for sharding in (DDP, FSDP, ZERO1, ZERO3))
SHARDED = (
    (FSDP, "dropped"), (FSDP, "noisy"), (FSDP, "qlora"), (ZERO1, "qlora"),
    (FSDP, "qlora-mixed"), (ZERO2, "qlora-mixed"),
)  # fmt: skip
RUNS = (*PLAIN, *((DDP, kind) for kind in KINDS if kind != "lora"), *SHARDED)


def each(runs: Sequence[tuple[Sharding, str]]):
    return pytest.mark.parametrize(("sharding", "kind"), runs, ids=[f"{sharding}-{kind}" for sharding, kind in runs])


@pytest.fixture(scope="module")
def runs(run_dirs, cache_dir) -> Callable[[Sharding, str], Path]:
    settings: dict[str, Any] = {"micro_batch": 4, "accumulation": 1}
    run_dir_of = run_dirs(lambda run, _: rank_plan(cache_dir, run[0], **settings, **KINDS[run[1]]), RUNS)
    return lambda sharding, kind: run_dir_of((sharding, kind))


@pytest.fixture(scope="module")
def reference(cache_dir) -> tuple[list[float], dict[str, torch.Tensor]]:
    from peft import LoraConfig, get_peft_model

    plan = rank_plan(cache_dir, num_steps=NUM_STEPS)
    base = plain_model(plan)
    seed_adapters(SEED)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8.0, target_modules="all-linear", task_type="CAUSAL_LM"))
    losses = train_plainly(plan, model=model).losses
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return list(losses.values()), {name.replace(".default", ""): value.detach() for name, value in trained.items()}


@each(PLAIN)
def test_every_step_equals_that_of_peft_in_a_single_process(sharding, kind, runs, reference):
    expected, adapters = reference
    run_dir = runs(sharding, kind)
    assert losses_of(run_dir) == pytest.approx(expected, abs=EXACT)
    assert expected[-1] < expected[0] - 0.1, "the reference learns, so that a difference would show"
    exported = load_file(run_dir / "export" / "adapter_model.safetensors")
    torch.testing.assert_close(exported, adapters, rtol=0, atol=1e-4)


@each(SHARDED)
def test_a_sharding_engine_trains_adapters_as_ddp_does(sharding, kind, runs):
    found, expected = losses_of(runs(sharding, kind)), losses_of(runs(DDP, kind))
    assert found == pytest.approx(expected, abs=2e-3 if "mixed" in kind else EXACT)
    assert expected[-1] < expected[0]
    if "mixed" in kind:
        exact = losses_of(runs(DDP, "qlora"))
        assert found[0] == pytest.approx(exact[0], abs=5e-3), "before the first update DoRA changes nothing"


@each(RUNS)
def test_the_method_of_the_plan_is_the_one_that_ran(sharding, kind, runs):
    seen = engaged_of(runs(sharding, kind))
    facts = seen.facts
    is_mixed, is_zero = "mixed" in kind, sharding.uses_deepspeed
    trained = {"qlora": NUM_ADAPTERS + NUM_LENGTHS, "dropped": 2048}.get(kind, NUM_ADAPTERS)
    assert facts["trained parameters"].startswith(f"{trained:,} of {106_816 + trained:,} (")
    layers = 3 if kind == "dropped" else 14
    assert facts["adapters"] == f"{'bfloat16' if is_mixed and is_zero else 'float32'}, on {layers} layers"
    assert facts["base"] == ("bfloat16" if is_mixed else "float32")
    assert ("4-bit layers" in facts) is kind.startswith("qlora")
    if kind.startswith("qlora"):
        stored, computed = "bfloat16" if sharding.uses_fsdp else "uint8", "bfloat16" if is_mixed else "float32"
        for fact in ("14 of nf4", f"stored as {stored}", f"computed in {computed}"):
            assert fact in facts["4-bit layers"]
    if kind == "noisy":
        assert "alpha 5, added in 1 " in facts["embedding noise"]
    assert seen.checkpointed_blocks == (2 if kind in ("dropped", "qlora") else 0)
    num_parameters = {"dropped": 21 + 3 * 3, "qlora": 21 + 3 * 14}.get(kind, 21 + 2 * 14)
    assert seen.sharded_parameters == (num_parameters if sharding.shards_weights else 0)


def test_fsdp_leaves_each_rank_half_of_the_packed_weights(runs):
    """81,920 weights in 14 layers are 20,480 pairs of bytes; embeddings, head and norms stay whole numbers."""
    owned = [engaged_of(runs(Sharding.FSDP, "qlora-mixed"), rank).partition_elements for rank in (0, 1)]
    whole = 106_816 - 73_728 + 73_728 // 4 + NUM_ADAPTERS
    assert sum(owned) == whole
    assert max(owned) <= 0.51 * whole


@each([(ZERO1, "lora"), (ZERO2, "qlora-mixed"), (ZERO3, "lora")])
def test_deepspeed_keeps_masters_of_adapters_only(sharding, kind, runs):
    assert [engaged_of(runs(sharding, kind), rank).partition_elements for rank in (0, 1)] == [NUM_ADAPTERS // 2] * 2
