"""The finely named terms of an event, grouped into the four parts that a running trainer can tell apart.

weights          parameters as the model holds them, adapters and quantisation scales included
optimizer_state  the optimizer's state, and an engine's fp32 masters
gradients        accumulated, new, and waiting to be reduced
activations      everything else: saved for the backward, temporaries, gathered parameters, buffers, workspaces
"""

from collections.abc import Mapping

_GROUPS = {
    "weights": "weights",
    "adapters": "weights",
    "quant_state": "weights",
    "master_weights": "optimizer_state",
    "optimizer_state": "optimizer_state",
    "gradients": "gradients",
    "fresh_gradients": "gradients",
}


def grouped(parts: Mapping[str, int]) -> dict[str, int]:
    """The parts of an estimate under the names that measured parts have; the sum is unchanged."""
    groups = dict.fromkeys(("weights", "optimizer_state", "gradients", "activations"), 0)
    for name, num_bytes in parts.items():
        groups[_GROUPS.get(name, "activations")] += num_bytes
    return groups
