"""DeepSpeed's ZeRO-1, -2 and -3 on the device that is not there: the real engine, in a group without other ranks.

`deepspeed.initialize` gets the model, our optimizer and the file of the row under ds_configs/, filled as a run fills it
where a plan names no buckets. What it asks of a device or of values, which a fake tensor has not, is answered here:

    torch.cuda      there is one GPU, without a word on its memory. DeepSpeed flattens parameters on the device where
                    they fit beside themselves, and else on the host; it is told that they do not fit
    values          read in the backward and the step only: overflows (none), norms (0.0). They are read after the
                    tensors exist that they are read of, and decide about no memory of a step that is taken
    torch.tensor    makes a tensor of a real device from a list; an empty one of the same shape stands for it
    other ranks     ZeRO-3 compares the order of modules with theirs

Rank 0 is simulated. Its partition begins with the embedding, whose gradient lives for as long as a view of it.
Not covered: offload, fp16's loss scaling, quantised weights.
"""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses import fake_impls
from transformers import PreTrainedModel

from trainer.runtime.data import MicroBatch
from trainer.runtime.engine_state import partitions
from trainer.runtime.step import Objective
from trainer.simulation.fake_device import replaced
from trainer.simulation.step import CLIP_NORM, FORWARD, LOSS, STEP
from trainer.simulation.tracker import Kind, Tracker
from trainer.spec.simulation import SimulationRequest
from trainer.spec.strategy import Precision

_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs"
_READ = torch.ops.aten._local_scalar_dense.default


def load_deepspeed() -> None:
    """Imports DeepSpeed for a machine with GPUs; it looks around while it is imported."""
    os.environ |= {"DS_ACCELERATOR": "cuda", "LOCAL_RANK": "0"}
    import deepspeed  # noqa: F401  # slow, and only these dry runs need it


def zero_config(request: SimulationRequest, hidden_size: int) -> dict[str, Any]:
    """The configuration of a run whose plan names no buckets; every "auto" of the row's file is filled."""
    config: dict[str, Any] = json.loads((_CONFIGS / f"{request.sharding}.json").read_text())
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
    """What DeepSpeed asks of torch.cuda and of torch beyond what FSDP2 does; its own state of this process is fresh."""
    from deepspeed.comm import comm
    from deepspeed.runtime.zero import partitioned_param_coordinator
    from deepspeed.utils import groups

    properties = torch.cuda.get_device_properties(0)
    known = SimpleNamespace(**vars(properties), total_memory=0)
    none = lambda *_, **__: None  # noqa: E731  # seven times below
    cuda = {
        "is_available": lambda: True,
        "get_device_properties": lambda *_: known,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": none,
        "empty_cache": none,
        "is_current_stream_capturing": lambda: False,
    }
    kept = dict(vars(groups))
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, **cuda))
        stack.enter_context(replaced(torch.cuda.nvtx, range_push=none, range_pop=none))
        stack.enter_context(replaced(torch, tensor=_empty_tensor(torch.tensor)))
        stack.enter_context(replaced(comm, cdb=None))
        stack.enter_context(replaced(partitioned_param_coordinator, assert_ints_same_as_other_ranks=none))
        stack.callback(vars(groups).update, kept)
        yield


def _empty_tensor(make: Any) -> Any:  # noqa: ANN401  # torch.tensor
    def tensor(values: Any, *, dtype: torch.dtype | None = None, device: Any = None, **more: Any) -> Tensor:  # noqa: ANN401  # torch's
        if device is None or torch.device(device).type != "cuda":
            made: Tensor = make(values, dtype=dtype, device=device, **more)
            return made
        return torch.empty(np.shape(values), dtype=dtype or torch.from_numpy(np.asarray(values)).dtype, device=device)

    return tensor


def prepare_zero(model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """The engine around a model that has its type and its device already."""
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl", dist_init_required=False)
    seam: Any = model
    seam.to = lambda *_, **__: model  # the fake mode cannot swap a tensor that something else refers to
    seam.bfloat16 = seam.float = lambda: model
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    return engine


def run_zero_step(
    engine: Any,  # noqa: ANN401  # DeepSpeedEngine, untyped
    micro_batches: Sequence[MicroBatch],
    tracker: Tracker,
    objective: Objective,
) -> None:
    """One optimizer step as Accelerate drives the engine: it clips and updates behind the last micro batch."""
    device, last = torch.device("cuda"), len(micro_batches) - 1
    tracker.begin(FORWARD, is_forward=True)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for index, micro_batch in enumerate(micro_batches):
        tracker.begin(FORWARD, is_forward=True)
        engine.set_gradient_accumulation_boundary(is_boundary=index == last)
        terms = objective(engine, micro_batch, device)
        total += terms.loss.detach()
        tracker.begin(LOSS)
        with _values_are_zero():
            engine.backward(terms.loss * 1.0)
            tracker.block = ""
            tracker.name_gradients()
            del terms
            if index == last:
                tracker.begin(STEP)
            engine.step()
    tracker.mark(_states(engine), Kind.OPTIMIZER_STATE)


def mark_zero(engine: Any, tracker: Tracker) -> None:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """Says which storages hold weights, whole or in pieces, and which masters."""
    parameters = list(engine.module.parameters())
    pieces = [each.ds_tensor for each in parameters if getattr(each, "ds_tensor", None) is not None]
    tracker.mark(pieces or parameters, Kind.WEIGHTS)
    tracker.mark(engine.module.buffers(), Kind.WEIGHTS)
    tracker.mark(partitions(engine), Kind.OPTIMIZER_STATE)


def _states(engine: Any) -> Iterator[Tensor]:  # noqa: ANN401  # DeepSpeedEngine, untyped
    states = engine.optimizer.optimizer.state.values()
    return (value for state in states for value in state.values() if isinstance(value, Tensor))


@contextmanager
def _values_are_zero() -> Iterator[None]:
    """Where a value is read, it is false, 0 or 0.0."""
    implementations: Any = fake_impls.op_implementations_dict
    before = implementations[_READ]
    implementations[_READ] = lambda _mode, _func, tensor: (
        False if tensor.dtype is torch.bool else 0.0 if tensor.is_floating_point() else 0
    )
    try:
        yield
    finally:
        implementations[_READ] = before
