"""DeepSpeed's ZeRO-1, -2 and -3 on the device that is not there: the real engine, in a group without other ranks.

Accelerate starts it as in a run, with our optimizer and the file of the row under ds_configs/, filled as a run fills it
where a plan names no buckets. What it asks of a device, which is not there, is answered here:

    torch.cuda      there is one GPU, without a word on its memory. DeepSpeed flattens parameters on the device where
                    they fit beside themselves, and else on the host; it is told that they do not fit
    other ranks     ZeRO-3 compares the order of modules with theirs

Values are read in the backward and the step only (`step` answers): overflows, norms. They are read after the tensors
exist that they are read of, and decide about no memory of a step that is taken.

Rank 0 is simulated. Its partition begins with the embedding, whose gradient lives for as long as a view of it.
Not covered: offload, fp16's loss scaling, quantised weights.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedModel

from shardwise.trainer import FOLDER
from shardwise.trainer.runtime.engines.engine_state import partitions
from shardwise.trainer.simulation.fake_device import replaced
from shardwise.trainer.simulation.step import CLIP_NORM
from shardwise.trainer.simulation.tracker import Kind, Tracker
from shardwise.trainer.spec.messages.simulation import SimulationRequest
from shardwise.trainer.spec.strategy import Precision


def load_deepspeed() -> None:
    """Imports DeepSpeed for a machine with GPUs; it looks around while it is imported."""
    os.environ["DS_ACCELERATOR"] = "cuda"
    import deepspeed  # noqa: F401  # slow, and only these dry runs need it


def zero_config(request: SimulationRequest, model: PreTrainedModel) -> dict[str, Any]:
    """The configuration of a run whose plan names no buckets; every "auto" of the row's file is filled."""
    config: dict[str, Any] = json.loads((FOLDER / "ds_configs" / f"{request.sharding}.json").read_text())
    hidden_size = model.config.hidden_size
    square, is_pure = hidden_size * hidden_size, request.precision is Precision.BF16
    config |= {
        "train_batch_size": request.micro_batch * request.accumulation * request.num_ranks,
        "train_micro_batch_size_per_gpu": request.micro_batch,
        "gradient_accumulation_steps": request.accumulation,
        "gradient_clipping": CLIP_NORM,
        "bf16": {
            "enabled": request.precision is not Precision.FP32,
            "bf16_master_weights_and_grads": is_pure,
            "bf16_optimizer_states": is_pure,
        },
        "zero_force_ds_cpu_optimizer": False,
    }
    config["fp16"]["enabled"] = False
    zero = config["zero_optimization"]
    zero["reduce_bucket_size"] = square
    if zero["stage"] == 3:
        zero["stage3_prefetch_bucket_size"] = 9 * square // 10
        zero["stage3_param_persistence_threshold"] = 10 * hidden_size
    return config


@contextmanager
def deepspeed_as_if_available() -> Iterator[None]:
    """Answers what DeepSpeed reads of torch.cuda and torch beyond FSDP2; DeepSpeed's process state starts fresh."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import partitioned_param_coordinator
    from deepspeed.utils import groups

    properties = torch.cuda.get_device_properties(0)
    known = SimpleNamespace(**vars(properties), total_memory=0)
    none = lambda *_, **__: None  # noqa: E731  # seven times below
    cuda = {
        "get_device_properties": lambda *_: known,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": none,
        "empty_cache": none,
    }
    kept = dict(vars(groups))
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, **cuda))
        stack.enter_context(replaced(torch.cuda.nvtx, range_push=none, range_pop=none))
        stack.enter_context(replaced(comm, cdb=None))
        linear = torch.nn.functional.linear  # ZeRO-3 puts its own in this place and leaves it there
        stack.enter_context(replaced(torch.nn.functional, linear=linear))
        stack.enter_context(replaced(partitioned_param_coordinator, assert_ints_same_as_other_ranks=none))
        stack.callback(vars(groups).update, kept)
        yield


def mark_zero(engine: Any, tracker: Tracker) -> None:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """Says which storages hold weights, whole or in pieces, and which masters."""
    parameters = list(engine.module.parameters())
    pieces = [each.ds_tensor for each in parameters if getattr(each, "ds_tensor", None) is not None]
    tracker.mark(pieces or parameters, Kind.WEIGHTS)
    tracker.mark(engine.module.buffers(), Kind.WEIGHTS)
    tracker.mark(partitions(engine), Kind.OPTIMIZER_STATE)
