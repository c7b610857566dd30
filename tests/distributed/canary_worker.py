"""One of two gloo ranks that does what shardwise does *without* its workarounds, and prints what came of it as JSON.

rank_launch.py 2 canary_worker.py CANARY
"""

import json
import os
import sys

import torch


def fsdp_on_cpu() -> dict[str, object]:
    """The engine of a model under the plugin; and what is said of the plugin with a mesh."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Linear(4, 4)
    wrapped, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=2))
    except ValueError as error:
        return {"engine": type(wrapped).__name__, "refused": str(error)}
    return {"refused": ""}


def deepspeed_without_backend() -> dict[str, object]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    return {"num_processes": accelerator.num_processes, "started": torch.distributed.get_world_size()}


if __name__ == "__main__":
    answer = {"fsdp": fsdp_on_cpu, "deepspeed": deepspeed_without_backend}[sys.argv[1]]()
    if os.environ["RANK"] == "0":
        sys.stdout.write(f"\ncanary: {json.dumps(answer)}\n")
    torch.distributed.destroy_process_group()
