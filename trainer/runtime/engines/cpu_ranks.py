"""The shim that exists only for ranks on a CPU. GPU ranks never run a line of it.

Accelerate and DeepSpeed support CPU ranks half-way: they silently fall back to another engine, or guess a device.
Each function mends one such case and names its entry in docs/workarounds.md, where the canary is named that fails once
upstream is mended. `accelerator` verifies afterwards, on every device, that the engine of the plan runs.
"""

import os

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType, ParallelismConfig

GLOO = "gloo"


def choose_deepspeed_cpu() -> None:
    """Makes DeepSpeed use the CPU, and gloo rather than its shared-memory operator (W3).

    Without the first variable it looks for other accelerators; without the second, which its own launcher sets, ZeRO-3
    starts numactl with every gradient that it reduces. The operator is compiled for minutes at first use, serves small
    tensors only, and changes no result.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def forget_mesh_of_launch() -> None:
    """Keeps Accelerate from reading the mesh of its YAML, which it refuses for CPU ranks (W1)."""
    os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)


def use_fsdp_branch(
    accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin, mesh: ParallelismConfig | None
) -> None:
    """Gives Accelerate the FSDP plugin that it drops for CPU ranks, where it would wrap in DDP instead (W1).

    And then the mesh, which it uses under FSDP alone. Both places are needed: each new AcceleratorState copies
    PartialState's over its own.
    """
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    if mesh is not None:
        accelerator.state.parallelism_config = mesh
        accelerator.state.device_mesh = mesh.get_device_mesh(accelerator.device.type)
        mesh._validate_accelerator(accelerator)
