"""Configurations at random, for tests of what holds for all of them."""

from typing import Any

from estimate_factory import configuration
from hypothesis import strategies as st

from shardwise.trainer.planning.configuration import Configuration, PolicyChoices
from shardwise.trainer.planning.memory.reference_trainers import REFERENCE_TRAINERS
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision

OFFLOADS = {
    Sharding.ZERO2: [Offload.NONE, Offload.OPTIMIZER],
    Sharding.ZERO3: list(Offload),
    Sharding.FSDP: [Offload.NONE, Offload.OPTIMIZER_PARAMS],
}


@st.composite
def configurations_of(draw: st.DrawFn) -> Configuration:
    sharding = draw(st.sampled_from(list(Sharding)))
    num_ranks = 1 if sharding is Sharding.NONE else draw(st.sampled_from([2, 8, 64]))
    fields: dict[str, Any] = {
        "method": draw(st.sampled_from(list(Method))),
        "precision": draw(st.sampled_from(list(Precision))),
        "optimizer": draw(st.sampled_from(list(Optimizer))),
        "offload": draw(st.sampled_from(OFFLOADS.get(sharding, [Offload.NONE]))),
        "micro_batch": draw(st.sampled_from([1, 2, 7, 32])),
        "seq_len": draw(st.sampled_from([128, 1000, 4096])),
        "accumulation": draw(st.sampled_from([1, 4])),
        "checkpointing": draw(st.sampled_from(list(Checkpointing))),
        "checkpoint_every_n": 2,
        "attention": draw(st.sampled_from(list(Attention))),
        "loss": draw(st.sampled_from(list(LossHead))),
        "loss_chunk_tokens": draw(st.sampled_from([None, 128])),
        "optimizer_in_backward": draw(st.booleans()),
        "activation_offload": draw(st.booleans()),
        "compile": draw(st.booleans()),
        "reference": draw(st.sampled_from(list(REFERENCE_TRAINERS))),
        "policy": PolicyChoices(
            residual_bytes=draw(st.sampled_from([None, 4])),
            adapter_bytes=draw(st.sampled_from([None, 2, 4])),
            reduce_bytes=draw(st.sampled_from([None, 2, 4])),
            reduces_every_micro_batch=draw(st.sampled_from([None, True, False])),
        ),
    }
    return configuration(sharding, num_ranks=num_ranks, **fields)
