"""Results that are computed once: the same as without, for every configuration."""

import inspect
from collections.abc import Callable
from typing import Any

from estimate_factory import LLAMA_1B, LLAMA_8B, QWEN_HALF_B, TINY, configurations_of, cpu, gpu
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shardwise.trainer.planning.configuration import Configuration, forget
from shardwise.trainer.planning.device import Device
from shardwise.trainer.planning.memory.activations import block_activations
from shardwise.trainer.planning.memory.states import states_of
from shardwise.trainer.planning.policy.precision_policy import dims_of, policy_of, policy_of_one
from shardwise.trainer.planning.speed.step import computing_seconds, state_seconds
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.job.sections import GaloreJob, LoraJob
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.strategy import Strategy

SHARED: dict[Callable[..., Any], Callable[[Configuration, ModelShape, Device], tuple[Any, ...]]] = {
    policy_of_one: lambda chosen, shape, device: (device, dims_of(shape)),
    states_of: lambda chosen, shape, device: (device, dims_of(shape)),
    block_activations: lambda chosen, shape, device: (policy_of(chosen, device, dims_of(shape)), dims_of(shape)),
    computing_seconds: lambda chosen, shape, device: (shape, device),
    state_seconds: lambda chosen, shape, device: (shape, device),
}


@given(
    chosen=configurations_of(),
    shape=st.sampled_from([TINY, QWEN_HALF_B, LLAMA_1B, LLAMA_8B]),
    device=st.sampled_from([gpu("8xA100-SXM4-80GB"), gpu("2xT4"), gpu("1xRTX-4090"), cpu(2)]),
    rows_per_example=st.sampled_from([1, 2]),
    lora=st.builds(LoraJob, dora=st.booleans()),
    galore=st.builds(GaloreJob, layerwise=st.booleans()),
    neighbour=st.sampled_from(CATALOGUE),
)
def test_what_is_shared_is_what_each_configuration_has_alone(
    chosen: Configuration, shape: ModelShape, device: Device, rows_per_example: int, neighbour: Strategy, **choices: Any
) -> None:
    """Also after a neighbour was computed, whose strategy may be the same where the function reads it."""
    chosen = replace(chosen, policy=replace(chosen.policy, rows_per_example=rows_per_example), **choices)
    strategy = replace(neighbour, precision=chosen.strategy.precision)
    forget()
    for function, others_of in SHARED.items():
        others = others_of(chosen, shape, device)
        for sharding in (neighbour.sharding, chosen.strategy.sharding):
            function(replace(chosen, strategy=replace(strategy, sharding=sharding)), *others)
        assert function(chosen, *others) == inspect.unwrap(function)(chosen, *others), function.__name__
