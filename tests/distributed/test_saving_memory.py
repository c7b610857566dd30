"""No rank that holds parts of a model ever holds all of it, neither while it saves nor while it resumes."""

import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from rank_factory import rank_plan, write_attempt

from shardwise.trainer.runtime.checkpoint import read_weights
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.units import MIB

WORKER = Path(__file__).with_name("saving_worker.py")
LARGE = {
    "model_type": "llama", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6,
    "num_attention_heads": 8, "num_key_value_heads": 8,
}  # fmt: skip
SLACK = 20 * MIB  # blocks of 4 MiB on their way to the disk and back, and what the heap keeps
CASES = ((Sharding.FSDP, Offload.NONE), (Sharding.ZERO3, Offload.NONE), (Sharding.ZERO3, Offload.OPTIMIZER_PARAMS))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache_dir, start_ranks) -> Path:
    folder = tmp_path_factory.mktemp("memory")
    plans = []
    for sharding, offload in CASES:
        plan = rank_plan(
            cache_dir, sharding, offload, num_ranks=2, micro_batch=4, accumulation=1, num_steps=1, model_config=LARGE
        )
        plan = replace(plan, model_shape=read_model_shape(dict(plan.model_config)))
        plans.append(str(write_attempt(folder / f"{sharding}-{offload}", plan)))
    start_ranks([str(WORKER), *plans], 2)
    return folder


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_saving_and_loading_take_a_few_blocks_beside_what_an_engine_holds(case, runs):
    run_dir = runs / "-".join(case)
    weights = read_weights(open_checkpoint(run_dir / "checkpoints" / "step-00000001"))
    whole = sum(weight.numel() * 4 for weight in weights.values())
    assert whole > 4 * SLACK, "a rank that held the model would be seen"
    for rank in (0, 1):
        seen = json.loads((run_dir / "attempts" / "1" / f"memory-{rank}.json").read_text())
        assert 0.95 * whole < seen["kept"] < 1.1 * whole + SLACK, "half of both moments"
        assert seen["loading"] < SLACK
        assert seen["saving"] < SLACK
