"""Two ranks run the code that comes with a model, and load its weights straight into shards."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from custom_model import CONFIG, MARKER, code_of, write_custom_model
from msgspec.structs import replace
from rank_factory import rank_plan, write_attempt
from registered_code import transformers_as_it_was

from shardwise.trainer.simulation.describe import describe
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.model.shape import DescriptionRequest
from shardwise.trainer.spec.strategy import Checkpointing

WORKER = Path(__file__).with_name("loading_worker.py")
SHARDINGS = (Sharding.FSDP, Sharding.ZERO3)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache_dir, start_ranks: Callable[[Sequence[str], int], str]) -> Path:
    """What ranks of both engines started from, of code that computes its buffers in its constructor only."""
    folder = tmp_path_factory.mktemp("runs")
    weights = write_custom_model(folder / "tiny", recomputes_buffers=False)
    code = code_of(weights)
    with transformers_as_it_was():
        shape = describe(DescriptionRequest(model_config=CONFIG, origin="config.json", model_code=code))
    attempts = []
    for sharding in SHARDINGS:
        plan = rank_plan(
            cache_dir, sharding, num_ranks=2, micro_batch=2, accumulation=1, model_config=CONFIG,
            checkpointing=Checkpointing.FULL,
        )  # fmt: skip
        packed = replace(plan.data, is_packed=True)  # so that documents are looked at before the first step
        plan = replace(plan, model_code=code, model_path=str(weights), model_shape=shape, data=packed)
        attempts.append(f"{write_attempt(folder / sharding, plan)}:start")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARKER, str(folder / "marker"))
        start_ranks([str(WORKER), *attempts], 2)
    return folder


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_shards_have_the_weights_and_buffers_of_a_whole_build(sharding, runs):
    for rank in (0, 1):
        seen = json.loads((runs / sharding / "attempts" / "1" / f"start-{rank}.json").read_text())
        assert (seen["differing"], seen["surplus"], seen["is_updated"]) == ([], [], True)
        assert (seen["loads_by_tensor"], seen["num_tensors"]) == (True, 22)


def test_each_rank_runs_each_file_once(runs):
    lines = (runs / "marker").read_text().splitlines()
    ranks = {line.split()[0] for line in lines}
    assert len(ranks) == 2
    assert len(lines) == len(set(lines)) == 6
