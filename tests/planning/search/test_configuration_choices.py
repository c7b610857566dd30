"""What a pin leaves of an axis, and what is offered without one."""

import pytest
from planning_factory import context_for

from shardwise.trainer.planning.memory.activations import block_activations
from shardwise.trainer.planning.memory.precision_policy import dims_of, policy_of
from shardwise.trainer.planning.search.configurations import checkpointings, every_n, first_configuration
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method

ROW = next(row for row in CATALOGUE if row.name == "none/bf16-mixed/adamw_fused")


@pytest.mark.parametrize(("written", "n"), [({}, 2), ({"checkpointing_n": 4}, 4)])
def test_every_n_takes_the_n_of_the_job_and_two_where_it_says_none(written, n):
    context = context_for("1b", "1xA100-SXM4-80GB", pin={"checkpointing": Checkpointing.EVERY_N, **written})
    configuration = first_configuration(context, ROW, checkpointing=Checkpointing.EVERY_N, loss=LossHead.CHUNKED)
    assert (checkpointings(context), configuration.checkpoint_every_n) == ((Checkpointing.EVERY_N,), n)
    dims = dims_of(context.shape)
    blocks = block_activations(configuration, policy_of(configuration, context.device, dims), dims)
    recomputed = dims.layers // n
    assert blocks.retained == recomputed * blocks.boundary + (dims.layers - recomputed) * blocks.whole
    assert (blocks.recomputed > 0, blocks.recomputed_by_last) == (True, 0), "the first of each n, so not the last"


@pytest.mark.parametrize("checkpointing", sorted(set(Checkpointing) - {Checkpointing.EVERY_N}))
def test_where_every_block_is_treated_alike_there_is_no_n(checkpointing):
    assert every_n(context_for("1b", "1xA100-SXM4-80GB"), checkpointing) is None


def test_selective_is_offered_where_weights_are_trained_and_not_for_frozen_ones():
    """Of a frozen block it keeps more than the block would keep by itself."""
    full, lora = (context_for("8b", "1xA100-SXM4-80GB", method=method) for method in (Method.FULL, Method.LORA))
    assert Checkpointing.SELECTIVE in checkpointings(full)
    assert Checkpointing.SELECTIVE not in checkpointings(lora)
