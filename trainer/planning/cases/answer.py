"""Prediction cases: everything is pinned, nothing is searched; what would it need, how fast would it be, does it fit?

`read_case` turns one JSON object into the values that the estimates take, `answer_case` writes their answer. Both are
pure, so a case gives the same answer on every machine; names of models become configs in `launch.commands.estimate`.
Cases come by the thousand and share models and machines, hence the caches: bounded, so a stream of any length fits.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from msgspec.structs import replace

from shardwise.trainer.planning.cases.reading import (
    CaseInput,
    ElementType,
    MachineInput,
    TrainInput,
    impossibility,
    misplaced,
    parse_case,
)
from shardwise.trainer.planning.device import Device, device_of
from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.planning.search.settings import chunk_tokens
from shardwise.trainer.planning.setting import RecipeChoices, Setting, fp8_recipe_of
from shardwise.trainer.planning.speed.step import estimate_speed
from shardwise.trainer.planning.tables.catalogue import CATALOGUE, EXACT_OPTIMIZERS, EXACT_PRECISIONS
from shardwise.trainer.planning.tables.gpu_names import hardware_from_spec, match_card
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import Hardware, Host, LinkKind
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.model.shape import ModelShape
from shardwise.trainer.spec.plan import MemoryEstimate, SpeedEstimate
from shardwise.trainer.spec.strategy import (
    LossHead,
    Offload,
    Optimizer,
    Precision,
    Quant,
    Sharding,
    Strategy,
)
from shardwise.trainer.spec.value import Value

MAX_PARAMETERS = 10**15
_UNKNOWN_HOST = Host(cpu_name=None, num_cores=None, ram_bytes=None, ram_available_bytes=None)
# Of a device from a file: what divides a size or a time, where 0 would mean nonsense rather than a slow machine.
_POSITIVE = tuple(
    name
    for name in Device.__struct_fields__
    if name in ("num_nodes", "memory_bytes") or name.endswith(("_watts", "_bytes_per_s", "_flops_per_s"))
)
_ROWS = {(row.sharding, row.offload, row.optimizer, row.precision): row for row in CATALOGUE}


class PredictionCase(Value, frozen=True, kw_only=True):
    """One case, ready for `estimate_memory` and `estimate_speed`."""

    id: str
    shape: ModelShape
    device: Device
    setting: Setting


def read_case(case: Mapping[str, Any]) -> PredictionCase:
    """The values of one case; InputError is the sentence that says what is wrong with it."""
    fields = parse_case(case)
    shape = _shape_of(msgspec.json.encode(fields.model))
    device = _device_of(fields)
    setting = _setting_of(fields, shape, device)
    reason = misplaced(fields.train, device) or impossibility(shape, device, setting)
    if reason is not None:
        raise InputError(reason)
    return PredictionCase(id=fields.id, shape=shape, device=device, setting=setting)


def answer_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one case as it is printed: an estimate, or the sentence that says why there is none."""
    try:
        read = read_case(case)
    except InputError as error:
        return {"id": case.get("id"), "error": " ".join(str(error).split())}
    memory = estimate_memory(read.shape, read.setting, read.device)
    speed = estimate_speed(read.shape, read.setting, read.device)
    if not math.isfinite(speed.step_s):  # JSON has no word for it, and it is no answer
        return {"id": read.id, "error": "a size of the model or of the machine is so large that no speed follows"}
    return {
        "id": read.id,
        "fits": memory.fits and _host_suffices(memory, read.device),
        "memory": _memory_answer(memory),
        "speed": _speed_answer(speed),
    }


def _memory_answer(memory: MemoryEstimate) -> dict[str, Any]:
    return {
        "steady_allocated_bytes": memory.steady_allocated_bytes,
        "peak_allocated_bytes": memory.peak_allocated_bytes,
        "peak_reserved_bytes": memory.peak_reserved_bytes,
        "device_bytes": memory.device_bytes,
        "low_bytes": memory.low_bytes,
        "high_bytes": memory.high_bytes,
        "peak_event": memory.peak_event,
        "parts": memory.parts,
        "host_bytes": memory.pinned_bytes + memory.host_bytes,
        "nvme_bytes": memory.nvme_bytes,
    }


def _speed_answer(speed: SpeedEstimate) -> dict[str, Any]:
    return {
        "step_s": speed.step_s,
        "tokens_per_s_per_gpu": speed.tokens_per_s_per_gpu,
        "mfu": speed.mfu,
        "parts": speed.parts,
    }


def _host_suffices(memory: MemoryEstimate, device: Device) -> bool:
    """True if the host has the RAM that is used beside a GPU; unknown for a machine of the catalogue."""
    return device.host_ram_bytes is None or memory.pinned_bytes + memory.host_bytes <= device.host_ram_bytes


@lru_cache(maxsize=256)
def _shape_of(config: bytes) -> ModelShape:
    shape = read_model_shape(msgspec.json.decode(config), origin="model")
    if shape.num_parameters > MAX_PARAMETERS:
        raise InputError(f"model: {shape.num_parameters} parameters are more than {MAX_PARAMETERS}")
    return shape


def _device_of(fields: CaseInput) -> Device:
    machine, recipe = fields.machine(), fields.recipe
    device = _catalogue_device(machine) if isinstance(machine, MachineInput) else _probed_device(machine)
    if recipe.node_network_bytes_per_s is not None:
        device = replace(device, network_bytes_per_s=round(recipe.node_network_bytes_per_s))
    if recipe.pcie_p2p is not None and device.link_kind is not LinkKind.NVLINK:
        device = replace(device, has_peer_access=recipe.pcie_p2p)
    return device


@lru_cache(maxsize=256)
def _catalogue_device(machine: MachineInput) -> Device:
    """One GPU stands for all of a node: they are equal, and a node of a thousand costs no more than one of eight."""
    found = match_card(machine.gpu, count=machine.gpus_per_node)
    if found.others:
        raise InputError(f"hardware.gpu: {machine.gpu} names {', '.join((found.spec.name, *found.others))}; name one")
    hardware = hardware_from_spec(f"1x{machine.gpu}", local_host=lambda: _UNKNOWN_HOST)
    hardware = replace(hardware, num_nodes=machine.nodes, vram_cap_bytes=machine.vram_bytes)
    return replace(device_of(hardware), devices_per_node=machine.gpus_per_node)


def _probed_device(hardware: Hardware) -> Device:
    if hardware.num_devices < 1:
        raise InputError("hardware: a machine needs at least one device")
    device = device_of(hardware)
    for name in _POSITIVE:
        value = getattr(device, name)
        if isinstance(value, int | float) and value < 1:
            raise InputError(f"hardware: {name} of {device.name} would be {value}")
    return device


def _setting_of(fields: CaseInput, shape: ModelShape, device: Device) -> Setting:
    train, recipe = fields.train, fields.recipe
    slice_tokens = train.loss_chunk_tokens
    if slice_tokens is None and train.loss is LossHead.CHUNKED:
        slice_tokens = chunk_tokens(shape)
    return Setting(
        strategy=_strategy_of(train),
        method=train.method,
        num_ranks=device.num_devices,
        ranks_per_node=device.devices_per_node,
        micro_batch=train.micro_batch,
        accumulation=train.grad_accum,
        seq_len=train.seq_len,
        checkpointing=train.checkpointing,
        attention=train.attention,
        loss=train.loss,
        checkpoint_every_n=train.n,
        loss_chunk_tokens=slice_tokens,
        compile=train.compile,
        activation_offload=train.activation_offload,
        optimizer_in_backward=train.optimizer_in_backward,
        fp8_recipe=fp8_recipe_of(train.precision, train.fp8_recipe),
        lora=train.lora,
        galore=train.galore,
        quant=train.quant or Quant.NF4_DQ,
        stack=fields.stack,
        recipe=RecipeChoices(
            longest_seq=recipe.longest_seq,
            residual_bytes=_width(recipe.residual_dtype),
            adapter_bytes=_width(recipe.adapter_dtype),
            reduce_bytes=_width(recipe.reduce_dtype),
            reduces_every_micro_batch=recipe.reduce_every_micro_batch,
        ),
    )


def _width(element: ElementType | None) -> int | None:
    return None if element is None else element.num_bytes


def _strategy_of(train: TrainInput) -> Strategy:
    optimizer = train.optimizer
    # Whatever a case calls it, DeepSpeed updates Adam's state off the device with its own implementation.
    moves_adam = train.sharding.uses_deepspeed and train.offload is not Offload.NONE
    if moves_adam and optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED):
        optimizer = Optimizer.DEEPSPEED_CPU_ADAM
    row = _ROWS.get((train.sharding, train.offload, optimizer, train.precision))
    return row or _foreign_strategy(train.sharding, train.offload, optimizer, train.precision)


@lru_cache(maxsize=4096)
def _foreign_strategy(sharding: Sharding, offload: Offload, optimizer: Optimizer, precision: Precision) -> Strategy:
    """A combination that our catalogue does not have and other software may."""
    return Strategy(
        name=f"{sharding}+{offload}/{precision}/{optimizer}",
        sharding=sharding,
        offload=offload,
        optimizer=optimizer,
        precision=precision,
        is_exact=optimizer in EXACT_OPTIMIZERS and precision in EXACT_PRECISIONS,
    )
