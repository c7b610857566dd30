"""Prediction cases: one JSON object with every setting fixed, and its memory, its speed and whether it fits.

docs/memory-model.md explains the fields. A case fixes everything that decides memory and speed, so most of `train` has
no default. Every error is one sentence that names the field, its value and the values allowed.

A case that cannot run is refused. Incompatibilities come from the tables of `rules`: all of them apply to our own
runtime, those that reach `ALL` also to other software. A configuration that is merely pointless (FSDP on one GPU) is
estimated. Both steps are pure; names of models become configs in `launch.commands.estimate`. Cases come by the thousand
and share models and machines, hence the bounded caches.
"""

import math
import re
from collections.abc import Callable, Mapping
from enum import Enum, StrEnum
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec.structs import replace

from shardwise.trainer.planning.configuration import SHARDWISE, Configuration, PolicyChoices
from shardwise.trainer.planning.device import Device, device_of
from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.planning.rules.incompatible import LAYOUTS, ROWS, SETTINGS
from shardwise.trainer.planning.rules.rule_input import (
    Reach,
    capability_text,
    filled,
    first_broken,
    reaching,
    rule_input_of,
)
from shardwise.trainer.planning.search.configurations import chunk_tokens
from shardwise.trainer.planning.speed.step import estimate_speed
from shardwise.trainer.planning.tables.catalogue import CATALOGUE, EXACT_OPTIMIZERS, EXACT_PRECISIONS
from shardwise.trainer.planning.tables.gpu_names import hardware_from_spec, match_card
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import InputError, close_matches
from shardwise.trainer.spec.fp8 import DEFAULT_RECIPES, FP8_RECIPES
from shardwise.trainer.spec.hardware import Hardware, Host, LinkKind
from shardwise.trainer.spec.job.sections import GaloreJob, LoraJob
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.model.shape import ModelShape, Positions
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import MemoryEstimate
from shardwise.trainer.spec.strategy import (
    Attention,
    Checkpointing,
    Fp8Recipe,
    LossHead,
    Method,
    Precision,
    Quant,
    Strategy,
)
from shardwise.trainer.spec.value import Value

Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]  # far above any machine, far below what overflows a float
V = TypeVar("V", bound=Value)


class ElementType(StrEnum):
    """The type of a tensor's elements."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def num_bytes(self) -> int:
        return 4 if self is ElementType.FP32 else 2


class MachineInput(Value, frozen=True, kw_only=True):
    """Equal nodes of equal GPUs that the catalogue knows."""

    gpu: str
    gpus_per_node: Count = 1
    nodes: Count = 1
    vram_bytes: Annotated[int, msgspec.Meta(ge=1)] | None = None  # caps each GPU, never raises it


class TrainInput(Value, frozen=True, kw_only=True):
    """Settings of a case, on every axis."""

    method: Method
    sharding: Sharding
    precision: Precision
    optimizer: Optimizer
    micro_batch: Count
    seq_len: Count
    checkpointing: Checkpointing
    attention: Attention
    loss: LossHead
    grad_accum: Count = 1
    offload: Offload = Offload.NONE
    lora_rank: Count | None = None
    lora_targets: str | tuple[str, ...] | None = None  # all-linear, or names of linear layers of a block
    galore_rank: Count | None = None
    quant: Quant | None = None
    fp8_recipe: Fp8Recipe | None = None
    n: Count | None = None  # blocks between two checkpoints, of every_n
    loss_chunk_tokens: Count | None = None
    compile: bool = False
    optimizer_in_backward: bool = False
    activation_offload: bool = False
    layerwise: bool = False  # of galore
    shard_group: Count | None = None  # ranks that share one copy of the state under hsdp; null: those of a node
    embedding_on_host: bool = False  # the frozen table of input embeddings is in host RAM

    @property
    def lora(self) -> LoraJob:
        default, sentence = LoraJob(), self.lora_targets
        targets = (sentence,) if isinstance(sentence, str) else sentence
        return LoraJob(rank=self.lora_rank or default.rank, targets=default.targets if targets is None else targets)

    @property
    def galore(self) -> GaloreJob:
        return GaloreJob(rank=self.galore_rank or GaloreJob().rank, layerwise=self.layerwise)


class PolicyInput(Value, frozen=True, kw_only=True):
    """Behaviour of software or machine beyond the axes; null: that of the reference trainer or the catalogue."""

    longest_seq: Count | None = None
    residual_dtype: ElementType | None = None
    adapter_dtype: ElementType | None = None
    reduce_dtype: ElementType | None = None
    reduce_every_micro_batch: bool | None = None
    flash_generation: Annotated[int, msgspec.Meta(ge=1, le=3)] | None = None
    loops_over_experts: bool = False
    node_network_bytes_per_s: Annotated[float, msgspec.Meta(ge=1.0, le=1e18)] | None = None
    pcie_p2p: bool | None = None


class CaseInput(Value, frozen=True, kw_only=True):
    """One case; `model` is a config.json, `hardware` a machine of the catalogue or a whole hardware.json."""

    id: str
    model: dict[str, Any]
    hardware: dict[str, Any]
    train: TrainInput
    stack: str = SHARDWISE  # the reference trainer
    recipe: PolicyInput = PolicyInput()  # the precision policy

    def machine(self) -> MachineInput | Hardware:
        """The hardware, in either of its two forms."""
        if "gpus" in self.hardware or "host" in self.hardware:
            return _convert(self.hardware, Hardware, at="hardware")
        return _convert(self.hardware, MachineInput, at="hardware")


def parse_case(case: Mapping[str, Any]) -> CaseInput:
    """The fields of a case; InputError is one sentence on the first that is wrong."""
    return _convert(case, CaseInput)


_SECTIONS: dict[str, type[Value]] = {
    "": CaseInput,
    "train": TrainInput,
    "recipe": PolicyInput,
    "hardware": MachineInput,
}


def _convert(content: Any, kind: type[V], *, at: str = "") -> V:  # noqa: ANN401 - any JSON value
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise InputError(_sentence(str(error), kind, content, at)) from None


def _sentence(message: str, kind: type[Value], content: Any, at: str) -> str:  # noqa: ANN401 - any JSON value
    """msgspec's message about the expected type and the place, with the allowed values added."""
    sentence, _, place = message.partition(" - at `$")
    steps = [step for step in (at, *place.rstrip("`").split(".")) if step]
    for pattern, write in ((r"Object contains unknown field `(.*)`", _unknown), (r"(Invalid enum value) .*", _member)):
        found = re.fullmatch(pattern, sentence)
        section = _SECTIONS.get(".".join(steps[: 1 if write is _member else None])) if kind is not Hardware else None
        if found and section:
            return write(found[1], steps, section, content)
    missing = re.fullmatch(r"Object missing required field `(.*)`", sentence)
    if missing:
        return f"{'.'.join([*steps, missing[1]])} is missing"
    return f"{'.'.join(steps) or 'a case'}: {sentence[0].lower()}{sentence[1:].replace('`', '')}"


def _unknown(name: str, steps: list[str], section: type[Value], _content: object) -> str:
    legal = section.__struct_fields__
    near = close_matches(name, legal)
    hint = f"did you mean {near[0]}?" if near else f"fields: {', '.join(legal)}"
    return f"{'.'.join([*steps, name])} is not a field; {hint}"


def _member(_matched: str, steps: list[str], section: type[Value], content: Any) -> str:  # noqa: ANN401
    value = content
    for step in steps:
        value = value[step]
    return f"{'.'.join(steps)}: {value!r} is not one of {', '.join(_members(section, steps[-1]))}"


def _members(section: type[Value], name: str) -> list[str]:
    field = next(field for field in msgspec.structs.fields(section) if field.name == name)
    kinds = getattr(field.type, "__args__", (field.type,))
    enum = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum))
    return [member.value for member in enum]


Check = Callable[[ModelShape, Configuration], str | None]

_INCOMPATIBILITIES = (*LAYOUTS, *ROWS, *SETTINGS)
# A case has GPUs where a plan has ranks.
_REASONS_FOR_GPUS = {
    "several_ranks_share_nothing": "sharding: none would train {num_ranks} different models on {num_ranks} GPUs",
}


def impossibility(shape: ModelShape, device: Device, configuration: Configuration) -> str | None:
    """Why this configuration cannot run on this device, or None if it can."""
    is_ours = configuration.reference == SHARDWISE
    rule_input = rule_input_of(configuration, shape, device, trusts_unknown_cards=True)
    broken = first_broken(reaching(_INCOMPATIBILITIES, Reach.OURS if is_ours else Reach.ALL), rule_input)
    if broken is not None:
        sentence = filled(_REASONS_FOR_GPUS.get(broken.name, broken.reason), rule_input)
        return sentence if broken.instead is None else f"{sentence}; use {broken.instead_of(rule_input)}"
    return next((clash for check in VALUES if (clash := check(shape, configuration)) is not None), None)


def misplaced(train: TrainInput, device: Device) -> str | None:
    """Why a field that `Configuration` lacks is incompatible with the others or with the chip; None if none is."""
    if train.quant is not None and train.method is not Method.QLORA:
        return f"train.quant is of method: qlora, not of {train.method}"
    if train.fp8_recipe is None:
        return None
    if train.precision is not Precision.FP8:
        return f"train.fp8_recipe is of precision: fp8, not of {train.precision}"
    least, capability = FP8_RECIPES[train.fp8_recipe].capability, device.compute_capability
    if capability is not None and capability < least:
        version = f"{least[0]}.{least[1]}"
        return f"train.fp8_recipe: {train.fp8_recipe} needs compute capability {version}; {capability_text(device)}"
    return None


def _layerwise(_shape: ModelShape, configuration: Configuration) -> str | None:
    is_misplaced = configuration.galore.layerwise and configuration.method is not Method.GALORE
    return "layerwise is of method: galore" if is_misplaced else None


def _every_n(shape: ModelShape, configuration: Configuration) -> str | None:
    num_blocks, is_every_n = configuration.checkpoint_every_n, configuration.checkpointing is Checkpointing.EVERY_N
    if num_blocks is None:
        return (
            "checkpointing: every_n needs n, the number of blocks from one checkpoint to the next"
            if is_every_n
            else None
        )
    if not is_every_n:
        return f"n is of checkpointing: every_n, not of {configuration.checkpointing}"
    return f"n is {num_blocks}, and the model has {shape.num_layers} blocks" if num_blocks > shape.num_layers else None


def _slices(_shape: ModelShape, configuration: Configuration) -> str | None:
    if configuration.loss_chunk_tokens is None or configuration.loss is LossHead.CHUNKED:
        return None
    return f"loss_chunk_tokens is of loss: chunked, not of {configuration.loss}"


def _positions(shape: ModelShape, configuration: Configuration) -> str | None:
    longest = configuration.policy.longest_seq or configuration.seq_len
    if shape.positions is not Positions.LEARNED or shape.max_positions is None or longest <= shape.max_positions:
        return None
    return f"a sequence of {longest} tokens is longer than the model's table of {shape.max_positions} positions"


def _longest(_shape: ModelShape, configuration: Configuration) -> str | None:
    longest = configuration.policy.longest_seq
    if longest is None or longest >= configuration.seq_len:
        return None
    return f"recipe.longest_seq is {longest}, less than train.seq_len {configuration.seq_len}"


def _targets(shape: ModelShape, configuration: Configuration) -> str | None:
    """PEFT ignores a name that no layer has, as long as another name has one; so may any reference trainer."""
    if not configuration.method.freezes_base or configuration.lora.targets == ("all-linear",):
        return None
    names = tuple(dict.fromkeys(linear.name for linear in shape.linears))
    unknown = [target for target in configuration.lora.targets if target not in names]
    is_foreign = configuration.reference != SHARDWISE
    if configuration.lora.targets and (not unknown or (is_foreign and len(unknown) < len(configuration.lora.targets))):
        return None
    sentence = repr(unknown[0]) if unknown else "an empty list"
    return f"lora_targets: {sentence} names no linear layer of this model; it has {', '.join(names)}, or all-linear"


VALUES: tuple[Check, ...] = (_layerwise, _every_n, _slices, _positions, _longest, _targets)


MAX_PARAMETERS = 10**15
_UNKNOWN_HOST = Host(cpu_name=None, num_cores=None, ram_bytes=None, ram_available_bytes=None)
# Of a device from a file: divisors of a size or a time, which 0 would make meaningless.
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
    configuration: Configuration


def read_case(case: Mapping[str, Any]) -> PredictionCase:
    """The values of one case; InputError with one sentence if it is invalid."""
    fields = parse_case(case)
    shape = _shape_of(msgspec.json.encode(fields.model))
    device = _device_of(fields)
    configuration = _configuration_of(fields, shape, device)
    reason = misplaced(fields.train, device) or impossibility(shape, device, configuration)
    if reason is not None:
        raise InputError(reason)
    return PredictionCase(id=fields.id, shape=shape, device=device, configuration=configuration)


_MEMORY_FIELDS = (
    "steady_allocated_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "device_bytes", "low_bytes", "high_bytes",
    "peak_event", "parts",
)  # fmt: skip
_SPEED_FIELDS = ("step_s", "tokens_per_s_per_gpu", "mfu", "parts")


def estimate_case(case: Mapping[str, Any]) -> dict[str, Any]:
    """The result of one case as it is printed: an estimate, or the reason why there is none."""
    try:
        read = read_case(case)
    except InputError as error:
        return {"id": case.get("id"), "error": " ".join(str(error).split())}
    memory = estimate_memory(read.shape, read.configuration, read.device)
    speed = estimate_speed(read.shape, read.configuration, read.device)
    if not math.isfinite(speed.step_s):  # JSON has no such number
        return {"id": read.id, "error": "a size of the model or of the machine is so large that no speed follows"}
    return {
        "id": read.id,
        "fits": memory.fits and _host_suffices(memory, read.device),
        "memory": {
            **{name: getattr(memory, name) for name in _MEMORY_FIELDS},
            "host_bytes": memory.pinned_bytes + memory.host_bytes,
            "nvme_bytes": memory.nvme_bytes,
        },
        "speed": {name: getattr(speed, name) for name in _SPEED_FIELDS},
    }


def _host_suffices(memory: MemoryEstimate, device: Device) -> bool:
    """True if a run may use and pin the RAM that the configuration needs, or the RAM of the host is unknown."""
    limits = (
        (memory.pinned_bytes + memory.host_bytes, device.host_ram_bytes),
        (memory.pinned_bytes, device.pinnable_ram_bytes),
    )
    return all(limit is None or need <= limit for need, limit in limits)


@lru_cache(maxsize=256)
def _shape_of(config: bytes) -> ModelShape:
    shape = read_model_shape(msgspec.json.decode(config), origin="model")
    if shape.num_parameters > MAX_PARAMETERS:
        raise InputError(f"model: {shape.num_parameters} parameters are more than {MAX_PARAMETERS}")
    return shape


def _device_of(fields: CaseInput) -> Device:
    machine, policy = fields.machine(), fields.recipe
    device = _catalogue_device(machine) if isinstance(machine, MachineInput) else _probed_device(machine)
    if policy.node_network_bytes_per_s is not None:
        device = replace(device, network_bytes_per_s=round(policy.node_network_bytes_per_s))
    if policy.pcie_p2p is not None and device.link_kind is not LinkKind.NVLINK:
        device = replace(device, has_peer_access=policy.pcie_p2p)
    return device


@lru_cache(maxsize=256)
def _catalogue_device(machine: MachineInput) -> Device:
    """One GPU represents all of a node: they are equal, and the cost does not grow with their number."""
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


def _configuration_of(fields: CaseInput, shape: ModelShape, device: Device) -> Configuration:
    train, policy = fields.train, fields.recipe
    slice_tokens, is_hybrid = train.loss_chunk_tokens, train.sharding.facts.shards_within_group
    if slice_tokens is None and train.loss is LossHead.CHUNKED:
        slice_tokens = chunk_tokens(shape)
    return Configuration(
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
        embedding_on_host=train.embedding_on_host,
        fp8_recipe=train.fp8_recipe or (DEFAULT_RECIPES[0] if train.precision is Precision.FP8 else None),
        shard_group=train.shard_group or (device.devices_per_node if is_hybrid else None),
        lora=train.lora,
        galore=train.galore,
        quant=train.quant or Quant.NF4_DQ,
        reference=fields.stack,
        policy=PolicyChoices(
            longest_seq=policy.longest_seq,
            residual_bytes=_width(policy.residual_dtype),
            adapter_bytes=_width(policy.adapter_dtype),
            reduce_bytes=_width(policy.reduce_dtype),
            reduces_every_micro_batch=policy.reduce_every_micro_batch,
            flash_generation=policy.flash_generation,
            loops_over_experts=policy.loops_over_experts,
        ),
    )


def _width(element: ElementType | None) -> int | None:
    return None if element is None else element.num_bytes


def _strategy_of(train: TrainInput) -> Strategy:
    optimizer = train.optimizer
    # DeepSpeed updates Adam's state off the device with its own implementation, also if a case has another name.
    moves_adam = train.sharding.uses_deepspeed and train.offload is not Offload.NONE
    if moves_adam and optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_FUSED):
        optimizer = Optimizer.DEEPSPEED_CPU_ADAM
    row = _ROWS.get((train.sharding, train.offload, optimizer, train.precision))
    return row or _foreign_strategy(train.sharding, train.offload, optimizer, train.precision)


@lru_cache(maxsize=4096)
def _foreign_strategy(sharding: Sharding, offload: Offload, optimizer: Optimizer, precision: Precision) -> Strategy:
    """A strategy that our catalogue lacks and other software may have."""
    return Strategy(
        name=f"{sharding}+{offload}/{precision}/{optimizer}",
        sharding=sharding,
        offload=offload,
        optimizer=optimizer,
        precision=precision,
        is_exact=optimizer in EXACT_OPTIMIZERS and precision in EXACT_PRECISIONS,
    )
