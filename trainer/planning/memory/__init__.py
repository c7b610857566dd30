"""The memory of one training step in closed form: no torch, microseconds, every byte with a name.

    recipe           types of tensors, kernels, sizes of the model
    states           weights, gradients, masters, optimizer state (with `optimizer_state`)
    activations      what blocks keep for backward, and what their backward needs
    loss_head        logits and their gradients
    sharding         gathered parameters, buckets, gradients on their way
    events           all of it at every event of a step; the largest is the peak
    host, overheads  host RAM and NVMe; allocator, context, communicators, margins

What is covered, and how it was checked, is in docs/memory-model.md.
"""

from trainer.planning.device import Device
from trainer.planning.memory.activations import block_activations
from trainer.planning.memory.events import StepMemory, resident_bytes, step_events
from trainer.planning.memory.host import host_memory
from trainer.planning.memory.loss_head import head_memory
from trainer.planning.memory.overheads import overheads
from trainer.planning.memory.recipe import dims_of, recipe_of
from trainer.planning.memory.sharding import sharding_memory
from trainer.planning.memory.states import model_states
from trainer.planning.setting import Setting
from trainer.spec.model_shape import ModelShape
from trainer.spec.plan import MemoryEstimate


def estimate_memory(shape: ModelShape, setting: Setting, device: Device) -> MemoryEstimate:
    """Bytes of one device, and of its node's host, at the worst event of a step of `setting`."""
    dims = dims_of(shape)
    recipe = recipe_of(setting, device, dims)
    step = StepMemory(
        setting=setting,
        recipe=recipe,
        dims=dims,
        states=model_states(setting, recipe, dims),
        blocks=block_activations(setting, recipe, dims),
        head=head_memory(setting, recipe, dims),
        sharding=sharding_memory(setting, recipe, dims),
    )
    resident = resident_bytes(step)
    events = step_events(step, resident)
    totals = {name: sum(event.values()) for name, event in events.items()}
    peak_event = max(totals, key=totals.__getitem__)
    steady = sum(resident.values())
    around = overheads(recipe, device, events, totals, num_ranks=setting.num_ranks, steady=steady)
    host = host_memory(setting, recipe, dims, step.states, activations=step.blocks.kept)
    return MemoryEstimate(
        parts={name: num_bytes for name, num_bytes in events[peak_event].items() if num_bytes},
        peak_event=peak_event,
        events=totals,
        steady_allocated_bytes=steady,
        peak_allocated_bytes=totals[peak_event],
        peak_reserved_bytes=around.reserved,
        device_bytes=around.device + step.states.managed,
        low_bytes=around.low,
        high_bytes=around.high,
        need_bytes=around.need,
        usable_bytes=device.usable_bytes,
        pinned_bytes=host.pinned,
        host_bytes=host.pageable,
        nvme_bytes=host.nvme,
    )
