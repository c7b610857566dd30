"""One of two gloo ranks that does what shardwise does *without* its workarounds, and prints what came of it as JSON.

rank_launch.py 2 canary_worker.py CANARY
"""

import json
import os
import sys

import torch


def fsdp_plugin_on_cpu() -> dict[str, object]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Linear(4, 4)
    wrapped, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    return {"engine": type(wrapped).__name__}


def mesh_on_cpu() -> dict[str, object]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap", reshard_after_forward=True)
    mesh = ParallelismConfig(dp_shard_size=2)
    try:
        Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=mesh)
    except ValueError as error:
        return {"refused": str(error)}
    return {"refused": ""}


def deepspeed_without_backend() -> dict[str, object]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed
    from accelerate import Accelerator, DeepSpeedPlugin

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    return {"num_processes": accelerator.num_processes, "started": torch.distributed.get_world_size()}


CANARIES = {function.__name__: function for function in (fsdp_plugin_on_cpu, mesh_on_cpu, deepspeed_without_backend)}

if __name__ == "__main__":
    answer = CANARIES[sys.argv[1]]()
    if os.environ["RANK"] == "0":
        sys.stdout.write(f"\ncanary: {json.dumps(answer)}\n")
    torch.distributed.destroy_process_group()
