"""Host RAM and NVMe of one node.

Where every rank computes with the whole model, it builds it in host memory in the type of its master weights: a node
needs that many copies once, at the start, and the offloaded state for the rest of the run. An engine that shards
weights is filled shard by shard, and QLoRA quantises each tensor as it is read: a rank then never holds more than one
tensor and one on its way, beside what it keeps. FP8 converts the layers of a whole model. On a CPU device the model
itself is the device's memory and is not counted twice.
"""

from trainer.planning.memory.recipe import Dims, Recipe
from trainer.planning.memory.states import States
from trainer.planning.setting import Setting
from trainer.spec.strategy import Method, Precision
from trainer.spec.units import MIB
from trainer.spec.value import Value

PROCESS_BYTES = 2048 * MIB  # a rank that drives a GPU: interpreter, libraries and CUDA's host side


class HostMemory(Value, frozen=True, kw_only=True):
    """Bytes of one node."""

    pinned: int
    pageable: int
    nvme: int


def host_memory(setting: Setting, recipe: Recipe, dims: Dims, states: States, *, activations: int) -> HostMemory:
    """Bytes of RAM and NVMe that the ranks of one node need."""
    num_ranks = min(setting.ranks_per_node, setting.num_ranks)
    pinned = states.pinned + activations
    if not recipe.is_cuda:
        return HostMemory(pinned=0, pageable=num_ranks * (pinned + states.pageable), nvme=num_ranks * states.nvme)
    building = loading_bytes(setting, recipe, dims)
    # The built model is given back as it is sharded, before the offloaded state is complete.
    pageable = PROCESS_BYTES + states.managed + max(building, states.pageable)
    return HostMemory(pinned=num_ranks * pinned, pageable=num_ranks * pageable, nvme=num_ranks * states.nvme)


def loading_bytes(setting: Setting, recipe: Recipe, dims: Dims) -> int:
    """Bytes of host RAM that a rank takes while it loads the model, beside what it keeps."""
    width = recipe.compute_bytes if recipe.is_frozen else recipe.master_bytes
    loads_sharded = setting.strategy.sharding.shards_weights and setting.strategy.precision is not Precision.FP8
    if setting.method is Method.QLORA or loads_sharded:
        return 2 * width * dims.largest_tensor
    return width * dims.parameters
