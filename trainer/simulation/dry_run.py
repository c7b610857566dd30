"""One dry run: a request in, what its rank would hold out.

Two steps run, because the optimizer's state comes into being in the first one; the second is measured. Of preference
pairs they are steps of DPO: under adapters the model without them is asked first, as in a run; where all weights are
trained, what the reference said is looked up, and only those numbers are on the device.
"""

import importlib.metadata
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import Optimizer as TorchOptimizer
from transformers import PreTrainedModel

from trainer.runtime.adapters import trained_parameters
from trainer.runtime.data import MicroBatch
from trainer.runtime.dpo import DpoLoss, turn_dropout_off
from trainer.runtime.optimizers import build_optimizer
from trainer.runtime.reference import no_reference, plain_base
from trainer.runtime.step import Objective, TokenLoss
from trainer.simulation.allocator import min_capacity_bytes, replay
from trainer.simulation.build import (
    blocks_of,
    build_on_meta,
    materialise,
    num_parameters,
    prepare_engine,
    process_group,
)
from trainer.simulation.checks import builds_masks, check_run, check_supported
from trainer.simulation.fake_device import as_if_available, enable_fake_cuda, ready_backward_thread
from trainer.simulation.kernels import Kernels
from trainer.simulation.step import run_step, told
from trainer.simulation.tracker import Kind, LiveStorage, Tracker
from trainer.simulation.zero import (
    deepspeed_as_if_available,
    load_deepspeed,
    mark_zero,
    prepare_zero,
    run_zero_step,
    zero_config,
)
from trainer.spec.errors import InputError
from trainer.spec.hardware import DeviceKind
from trainer.spec.simulation import LiveGroup, Simulation, SimulationRequest

NUM_LIVE_GROUPS = 60
_LEARNING_RATE, _WEIGHT_DECAY, _BETA = 1e-4, 0.1, 0.1
_LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "peft", "bitsandbytes")


def simulate(request: SimulationRequest) -> Simulation:
    """The dry run of a request; InputError for what it cannot run."""
    check_supported(request)
    if request.device_kind is DeviceKind.CUDA:
        enable_fake_cuda()
    if request.sharding.uses_deepspeed:
        load_deepspeed()
    started = time.monotonic()
    model = build_on_meta(request)
    objective = _objective(model, request)
    counts = (num_parameters(model), sum(p.numel() for p in trained_parameters(model)))
    has_masks = builds_masks(model, request.seq_len)  # before FSDP2 changes the model's class
    kernels = Kernels(request.device_kind.value, request.compute_capability)
    tracker = Tracker(request.device_kind.value)
    try:
        with (
            as_if_available(request.compute_capability),
            kernels.installed(),
            deepspeed_as_if_available() if request.sharding.uses_deepspeed else nullcontext(),
            process_group(request) as mesh,
            FakeTensorMode(),  # after the mesh, which reads the numbers of its ranks
        ):
            steady, after = _run(model, request, mesh, tracker, objective)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise InputError(
            f"{type(model).__name__} decides by the values of its tensors ({error}); a dry run has no values"
        ) from error
    checks = check_run(request, tracker, kernels, has_masks=has_masks, steady=steady, after=after)
    return _answer(tracker, steady, checks, counts, seconds=time.monotonic() - started)


def _run(
    model: PreTrainedModel,
    request: SimulationRequest,
    mesh: DeviceMesh | None,
    tracker: Tracker,
    objective: Objective,
) -> tuple[int, int]:
    """Loads the model and runs two steps; the live bytes before and after the second one."""
    micro_batches = [_micro_batch(request) for _ in range(request.accumulation)]
    tracker.leave_out(tensor for batch in micro_batches for tensor in (batch.input_ids, batch.labels))
    with tracker:
        tracker.begin("load")
        step = _load(model, request, mesh, tracker, objective)
        load_bytes = tracker.peak_bytes
        with told(model, blocks_of(model), model.get_output_embeddings(), tracker):
            step(micro_batches)
            steady = tracker.live_bytes
            tracker.start_measuring()
            step(micro_batches)
            after = tracker.live_bytes
    tracker.events = {"load": load_bytes, **tracker.events}
    return steady, after


Step = Callable[[Sequence[MicroBatch]], None]


def _load(
    model: PreTrainedModel, request: SimulationRequest, mesh: DeviceMesh | None, tracker: Tracker, objective: Objective
) -> Step:
    """A step of the engine with the model on the fake device, to which FSDP2 moves it from the host."""
    device = torch.device(request.device_kind.value)
    if request.device_kind is DeviceKind.CUDA:
        ready_backward_thread()
    materialise(model, "cpu" if request.sharding.uses_fsdp else device.type)
    if request.sharding.uses_deepspeed:
        zero = prepare_zero(model, _optimizer(request, model), zero_config(request, model.config.hidden_size))
        mark_zero(zero, tracker)
        return lambda micro_batches: run_zero_step(zero, micro_batches, tracker, objective)
    engine = prepare_engine(model, request, mesh)
    tracker.mark([*engine.parameters(), *engine.buffers()], Kind.WEIGHTS)
    optimizer = _optimizer(request, engine)
    return lambda micro_batches: run_step(engine, optimizer, micro_batches, tracker, device, objective)


def _optimizer(request: SimulationRequest, model: nn.Module) -> TorchOptimizer:
    return build_optimizer(request.optimizer, model, lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)


def _objective(model: PreTrainedModel, request: SimulationRequest) -> Objective:
    """What a run asks of the model; for DPO its own dropout goes off, as a run turns it off."""
    if request.rows_per_example == 1:
        return TokenLoss()
    turn_dropout_off(model)
    return DpoLoss(_BETA, plain_base if request.method.freezes_base else no_reference)


def _micro_batch(request: SimulationRequest) -> MicroBatch:
    shape = (request.rows_per_example * request.micro_batch, request.seq_len)
    return MicroBatch(
        input_ids=torch.zeros(shape, dtype=torch.long),
        labels=torch.zeros(shape, dtype=torch.long),
        num_targets=shape[0] * (shape[1] - 1),
        num_pairs=request.micro_batch if request.rows_per_example == 2 else 0,
    )


def _answer(
    tracker: Tracker, steady: int, checks: tuple[str, ...], counts: tuple[int, int], *, seconds: float
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
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for storage in live:
        groups[storage.kind.value, storage.module, storage.operation].append(storage.num_bytes)
    rows = [
        LiveGroup(kind=kind, module=module, operation=operation, num_tensors=len(sizes), num_bytes=sum(sizes))
        for (kind, module, operation), sizes in groups.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.num_bytes)[:NUM_LIVE_GROUPS])
