"""One dry run: from a request to the memory of its rank, by two steps of `trainer.runtime.loop.step.run_step`.

The optimizer's state is created in the first step; the second is measured. Preference pairs run steps of DPO: under
adapters the model without them runs first, as in a run; where all weights are trained, only the stored outputs of the
reference are on the device. Rank 0 is simulated, whose ZeRO partition begins with the embedding. Not covered: offload,
fp16's loss scaling, quantised weights.

The clock of the step reports when a forward, a backward and an update begin. The events of a backward begin when a
gradient arrives: that of the logits, of the last hidden state, of the last block's output, of the first one's, of the
first one's input. Hooks on those tensors report it, without references to them.

Fake tensors have no values. Those that the step reads after the forward (norms, overflows) are supplied: its sums, the
only tensors of float64, are the number of terms each, every other number is 0 and every boolean False. They do not
change the memory of a step that is not skipped. Reading a value in a forward ends the dry run.

ZeRO-1, -2 and -3 are DeepSpeed's real engine, in a group without other ranks. Accelerate starts it as in a run, with
our optimizer and the file of the row under ds_configs/, filled as for a plan without buckets. It also finds

    torch.cuda      one GPU, of unknown memory. DeepSpeed flattens parameters on the device if they fit twice, and else
                    on the host; here they never fit
    other ranks     whose order of modules is the same, which ZeRO-3 compares
"""

import importlib.metadata
import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.optim.optimizer import Optimizer as TorchOptimizer
from transformers import PreTrainedModel

from shardwise.trainer import FOLDER
from shardwise.trainer.runtime import engines
from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.engines.sharded_loading import shard_without_memory
from shardwise.trainer.runtime.engines.zero import partitions
from shardwise.trainer.runtime.loop.objectives import DpoLoss, no_reference, plain_base, turn_dropout_off
from shardwise.trainer.runtime.loop.step import Objective, TokenLoss, run_step
from shardwise.trainer.runtime.models.methods import trained_parameters
from shardwise.trainer.runtime.optimizers import build_optimizer, unwrapped
from shardwise.trainer.runtime.precision.mixed_precision import LossScaler, install_autocast
from shardwise.trainer.runtime.run.clock import Clock
from shardwise.trainer.runtime.run.types import compute_type
from shardwise.trainer.simulation.build import (
    blocks_of,
    build_on_meta,
    engine_of,
    keep_in_place,
    materialise,
    num_parameters,
)
from shardwise.trainer.simulation.checks import builds_masks, check_run, check_supported
from shardwise.trainer.simulation.device_memory import Kind, LiveStorage, Tracker, min_capacity_bytes, replay
from shardwise.trainer.simulation.fake_device import (
    FakeDeviceMode,
    PinnedPages,
    as_if_available,
    enable_fake_cuda,
    ready_backward_thread,
    replaced,
)
from shardwise.trainer.simulation.kernels import Kernels
from shardwise.trainer.simulation.package_functions import as_installed
from shardwise.trainer.spec.engines import SUB_GROUP_BUFFERS, sub_group_elements
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.worker_requests import LiveGroup, Simulation, SimulationRequest
from shardwise.trainer.spec.strategy import Precision

FORWARD, LOSS, HEAD, NORM = "forward_end", "loss_backward", "head_backward", "norm_backward"
TOP, MIDDLE, BOTTOM = "block_backward_top", "block_backward_middle", "block_backward_bottom"
COMPLETE, CLIP, STEP = "gradients_complete", "clip", "optimizer_step"
CLIP_NORM, LEARNING_RATE = 1.0, 1e-4
_READ = torch.ops.aten._local_scalar_dense.default
_implementations: Any = fake_impls.op_implementations_dict
_no_result = _implementations[_READ]
NUM_LIVE_GROUPS = 60
_WEIGHT_DECAY, _BETA = 0.1, 0.1
_LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes")


class Engine(NamedTuple):
    """Objects that Accelerate has prepared, for `run_step`."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: Any  # Accelerate's wrapper around torch's or DeepSpeed's
    scaler: LossScaler | None

    def step(self, micro_batches: Sequence[MicroBatch], tracker: Tracker, objective: Objective) -> None:
        """Runs the runtime's step once."""
        num_terms = self.accelerator.num_processes * sum(batch.num_terms for batch in micro_batches)
        tracker.begin(FORWARD, is_forward=True)
        with _reads_as(lambda _mode, _func, tensor: _value(tensor, num_terms)):
            run_step(
                self.accelerator,
                self.model,
                self.optimizer,
                micro_batches,
                num_terms=num_terms,
                step=1,
                seed=0,
                lr=LEARNING_RATE,
                clip=CLIP_NORM,
                clock=_EventClock(tracker, reads_in_backward=running_engine(self.model).updates_in_last_backward),
                scaler=self.scaler,
                objective=objective,
            )
        states = unwrapped(self.optimizer).state.values()
        tensors = (value for state in states for value in state.values() if isinstance(value, Tensor))
        tracker.mark(tensors, Kind.OPTIMIZER_STATE)


def simulate(request: SimulationRequest) -> Simulation:
    """The dry run of a request; InputError for what it cannot run."""
    check_supported(request)
    if request.device_kind is DeviceKind.CUDA:
        enable_fake_cuda()
    if request.sharding.uses_deepspeed:
        load_deepspeed()
    started = time.monotonic()
    model, _ = build_on_meta(request)
    objective = _objective(model, request)
    counts = (num_parameters(model), sum(p.numel() for p in trained_parameters(model)))
    has_masks = builds_masks(model, request.seq_len)  # before FSDP2 changes the model's class
    kernels = Kernels(request.device_kind.value, request.compute_capability)
    tracker, pages = Tracker(request.device_kind.value), PinnedPages()
    is_cuda, is_zero = request.device_kind is DeviceKind.CUDA, request.sharding.uses_deepspeed
    try:
        with (
            as_if_available(request.compute_capability, pages) if is_cuda else nullcontext(),
            kernels.installed(),
            as_installed(model, request.packages, tracker),
            deepspeed_as_if_available() if is_zero else nullcontext(),
            engine_of(request, model, zero_config(request, model) if is_zero else None) as accelerator,
            FakeDeviceMode(),
        ):
            steady, after = _run(model, request, accelerator, tracker, objective)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InputError(
            f"{type(model).__name__} decides by the values of its tensors ({error}); a dry run has no values"
        ) from error
    checks = check_run(request, tracker, kernels, has_masks=has_masks, steady=steady, after=after)
    return _result(tracker, pages, steady, checks, counts, seconds=time.monotonic() - started)


def _run(
    model: PreTrainedModel,
    request: SimulationRequest,
    accelerator: Accelerator,
    tracker: Tracker,
    objective: Objective,
) -> tuple[int, int]:
    """Loads the model and runs two steps; the live bytes before and after the second one."""
    micro_batches = [_micro_batch(request) for _ in range(request.accumulation)]
    tracker.omit(tensor for batch in micro_batches for tensor in batch if isinstance(tensor, torch.Tensor))
    with tracker:
        tracker.begin("load")
        engine = _load(model, request, accelerator, tracker)
        load_bytes = tracker.peak_bytes
        with reporting(engine, model, blocks_of(model), model.get_output_embeddings(), tracker):
            engine.step(micro_batches, tracker, objective)
            steady = tracker.live_bytes
            tracker.start_measuring()
            engine.step(micro_batches, tracker, objective)
            after = tracker.live_bytes
    tracker.events = {"load": load_bytes, **tracker.events}
    return steady, after


def _load(model: PreTrainedModel, request: SimulationRequest, accelerator: Accelerator, tracker: Tracker) -> Engine:
    """The engine with the model on the fake device, in the order of the runtime's `build_session`."""
    device = accelerator.device
    if device.type == "cuda":
        ready_backward_thread()
    if request.precision is Precision.FP16_MIXED:
        install_autocast(model, request.device_kind, compute_type(request.precision))
    if request.sharding.uses_fsdp:
        materialise(model, "meta", buffers_on=device.type)
        shard_without_memory(model, accelerator)
    else:
        materialise(model, device.type)
        keep_in_place(model)
    engine = engines.engine_of(request.sharding)
    prepared, optimizer = engine.prepare(accelerator, model, _optimizer(request, model))
    if request.prefetch_two_blocks:
        engine.prefetch_two_blocks(prepared)
    if request.sharding.uses_deepspeed:
        mark_zero(prepared, tracker)
    else:
        tracker.mark([*prepared.parameters(), *prepared.buffers()], Kind.WEIGHTS)
    return Engine(
        accelerator, prepared, optimizer, engine.loss_scaler(prepared, request.precision, request.device_kind)
    )


def _optimizer(request: SimulationRequest, model: nn.Module) -> TorchOptimizer:
    return build_optimizer(request.optimizer, model, lr=LEARNING_RATE, weight_decay=_WEIGHT_DECAY)


def _objective(model: PreTrainedModel, request: SimulationRequest) -> Objective:
    """The objective, as in a run; for DPO the model's dropout is disabled, as a run does."""
    if request.rows_per_example == 1:
        return TokenLoss()
    turn_dropout_off(model)
    return DpoLoss(_BETA, plain_base if request.method.freezes_base else no_reference)


def _micro_batch(request: SimulationRequest) -> MicroBatch:
    shape = (request.rows_per_example * request.micro_batch, request.seq_len)
    micro_batch = MicroBatch(
        input_ids=torch.zeros(shape, dtype=torch.long),
        labels=torch.zeros(shape, dtype=torch.long),
        num_targets=shape[0] * (shape[1] - 1),
        num_pairs=request.micro_batch if request.rows_per_example == 2 else 0,
    )
    length = request.seq_len if request.document_tokens is None else max(1, round(request.document_tokens))
    if length >= request.seq_len:  # no positions come with rows that hold one document each
        return micro_batch
    starts = (row * shape[1] + place for row in range(shape[0]) for place in range(0, shape[1], length))
    return micro_batch._replace(
        position_ids=torch.zeros(shape, dtype=torch.long), document_bounds=(*starts, shape[0] * shape[1])
    )


def _result(
    tracker: Tracker,
    pages: PinnedPages,
    steady: int,
    checks: tuple[str, ...],
    counts: tuple[int, int],
    *,
    seconds: float,
) -> Simulation:
    live = tracker.at_peak()
    unlimited = replay(tracker.trace)
    return Simulation(
        steady_allocated_bytes=steady,
        peak_allocated_bytes=tracker.peak_bytes,
        peak_event=tracker.peak_event,
        events=tracker.events,
        parts=_by_kind(live),
        live=_by_place(live),
        peak_reserved_bytes=unlimited.peak_reserved_bytes,
        expandable_reserved_bytes=replay(tracker.trace, is_expandable=True).peak_reserved_bytes,
        min_capacity_bytes=min_capacity_bytes(tracker.trace, unlimited),
        pinned_host_bytes=pages.peak_bytes,
        checks=checks,
        num_parameters=counts[0],
        num_trained_parameters=counts[1],
        seconds=round(seconds, 2),
        versions={name: importlib.metadata.version(name) for name in _LIBRARIES},
    )


def _by_kind(live: Sequence[LiveStorage]) -> dict[str, int]:
    sums: dict[str, int] = defaultdict(int)
    for kind in Kind:
        num_bytes = sum(storage.num_bytes for storage in live if storage.kind is kind)
        if num_bytes:
            sums[kind.value] = num_bytes
    return dict(sums)


def _by_place(live: Sequence[LiveStorage]) -> tuple[LiveGroup, ...]:
    sizes_of: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for storage in live:
        sizes_of[storage.kind.value, storage.module, storage.operation].append(storage.num_bytes)
    rows = [
        LiveGroup(kind=kind, module=module, operation=operation, num_tensors=len(sizes), num_bytes=sum(sizes))
        for (kind, module, operation), sizes in sizes_of.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.num_bytes)[:NUM_LIVE_GROUPS])


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
        sizes = [parameter.numel() for parameter in model.parameters()]
        zero["sub_group_size"] = sub_group_elements(
            partition=-(-sum(sizes) // request.num_ranks),
            piece=-(-max(sizes) // request.num_ranks),
            num_bytes=SUB_GROUP_BUFFERS * request.precision.master_bytes,
        )
    return config


@contextmanager
def deepspeed_as_if_available() -> Iterator[None]:
    """Provides what DeepSpeed reads of torch.cuda and torch beyond FSDP2; DeepSpeed's process state starts fresh."""
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
    retained = dict(vars(groups))
    with ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, **cuda))
        stack.enter_context(replaced(torch.cuda.nvtx, range_push=none, range_pop=none))
        stack.enter_context(replaced(comm, cdb=None))
        linear = torch.nn.functional.linear  # ZeRO-3 replaces it by its own, for good
        stack.enter_context(replaced(torch.nn.functional, linear=linear))
        stack.enter_context(replaced(partitioned_param_coordinator, assert_ints_same_as_other_ranks=none))
        stack.callback(vars(groups).update, retained)
        yield


def mark_zero(engine: Any, tracker: Tracker) -> None:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """Marks the storages that hold weights, whole or in pieces, and those that hold masters."""
    parameters = list(engine.module.parameters())
    pieces = [each.ds_tensor for each in parameters if getattr(each, "ds_tensor", None) is not None]
    tracker.mark(pieces or parameters, Kind.WEIGHTS)
    tracker.mark(engine.module.buffers(), Kind.WEIGHTS)
    tracker.mark(partitions(engine), Kind.OPTIMIZER_STATE)


def _value(tensor: Tensor, num_terms: int) -> float | bool:
    if tensor.dtype is torch.bool:
        return False
    if tensor.dtype is torch.float64:
        return float(num_terms)
    return 0.0 if tensor.is_floating_point() else 0


@contextmanager
def _reads_as(implementation: Callable[..., Any]) -> Iterator[None]:
    """Runs the block with `implementation` where a value is read."""
    before = _implementations[_READ]
    _implementations[_READ] = implementation
    try:
        yield
    finally:
        _implementations[_READ] = before


class _EventClock(Clock):
    """The clock of a step, which measures nothing and reports to the tracker what begins."""

    def __init__(self, tracker: Tracker, *, reads_in_backward: bool) -> None:
        super().__init__(torch.device("cpu"))
        self._tracker = tracker
        self._reads_in_backward = reads_in_backward  # DeepSpeed, whose last backward updates the weights

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Begins the event of a phase."""
        tracker = self._tracker
        if phase == "forward":
            tracker.begin(FORWARD, is_forward=True)
            with _reads_as(_no_result):
                yield
        elif phase == "backward":
            tracker.begin(LOSS)
            with nullcontext() if self._reads_in_backward else _reads_as(_no_result):
                yield
            tracker.block = ""
            tracker.name_gradients()
        else:
            if tracker.event != STEP:  # DeepSpeed's is over
                tracker.begin(CLIP)
            yield


@contextmanager
def reporting(
    engine: Engine, model: nn.Module, blocks: Sequence[nn.Module], head: nn.Module, tracker: Tracker
) -> Iterator[None]:
    """Within the block, reports the running module and the begin of backward events and the update to the tracker."""
    hooks = [hook for name, module in model.named_modules() for hook in _naming(module, _short(name), tracker)]
    for index, block in enumerate(blocks):
        hooks.append(block.register_forward_hook(_block_hook(index, len(blocks), tracker)))
    hooks.append(blocks[0].register_forward_pre_hook(_input_hook(tracker, COMPLETE), with_kwargs=True))
    hooks.append(head.register_forward_pre_hook(_input_hook(tracker, NORM), with_kwargs=True))
    hooks.append(head.register_forward_hook(_head_hook(tracker)))
    if running_engine(engine.model).updates_in_last_backward:
        _report_step(engine.model, tracker)
    else:
        hooks.append(unwrapped(engine.optimizer).register_step_pre_hook(lambda *_: tracker.begin(STEP)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _report_step(engine: Any, tracker: Tracker) -> None:  # noqa: ANN401  # DeepSpeedEngine, untyped
    """Its step begins with the norm of the gradients, long before the optimizer's own."""
    step = engine.step

    def reported_step(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  # DeepSpeed's
        tracker.name_gradients()
        tracker.begin(STEP)
        return step(*args, **kwargs)

    engine.step = reported_step


def _short(name: str) -> str:
    """A module's name with the numbers of blocks and experts left out, so that equal blocks count together."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _naming(module: nn.Module, name: str, tracker: Tracker) -> Iterator[Any]:
    yield module.register_forward_pre_hook(lambda *_: tracker.modules.append(name))
    yield module.register_forward_hook(lambda *_: _exit(tracker), always_call=True)


def _exit(tracker: Tracker) -> None:
    tracker.modules.pop()


def _block_hook(index: int, num_blocks: int, tracker: Tracker) -> Any:  # noqa: ANN401  # a forward hook
    event = BOTTOM if index == 0 else TOP if index == num_blocks - 1 else MIDDLE

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:  # noqa: ANN401  # torch's
        if tracker.event == FORWARD:  # not when a block runs again
            _on_gradient(output, tracker, event, "backward of block *")

    return hook


def _head_hook(tracker: Tracker) -> Any:  # noqa: ANN401  # a forward hook
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:  # noqa: ANN401  # torch's
        if output.ndim > 1:  # logits, not the loss of a chunked head or its sums of rows
            _on_gradient(output, tracker, HEAD, "backward of the head")

    return hook


def _input_hook(tracker: Tracker, event: str) -> Any:  # noqa: ANN401  # a forward pre-hook
    def hook(_module: nn.Module, inputs: Any, kwargs: Any) -> None:  # noqa: ANN401  # torch's
        if tracker.event == FORWARD:
            _on_gradient(inputs or kwargs["hidden_states"], tracker, event, f"backward: {event}")

    return hook


def _on_gradient(values: Any, tracker: Tracker, event: str, place: str) -> None:  # noqa: ANN401  # a tensor, or a tuple that begins with one
    tensor = values if isinstance(values, Tensor) else values[0]

    def arrived(_gradient: Tensor) -> None:
        tracker.block = place
        tracker.begin(event)

    if tensor.requires_grad:
        tensor.register_hook(arrived)
