"""MANIFEST.json as values: what a checkpoint is of, where each piece of each tensor lies, what each file hashes to.

A tensor is described by its logical shape and by chunks: flat ranges of its row-major elements, each one key of one
file. Whole tensors, FSDP2's rows, ZeRO's fragments and partitions all are such ranges, so no engine leaves a trace in
the format. Scales of 8-bit state are saved one for each block of elements; blocks are those of the rank that saved, so
the first of a chunk may be cut. The fields are checked here as far as one field goes (names, signs, types); what only
the whole manifest can tell (holes, overlaps, files that are not listed) is checked by `check_manifest`.
"""

import hashlib
import math
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from trainer.runtime.checkpoint.files.ranges import covered_in_order
from trainer.runtime.run.spikes import SpikeRecord
from trainer.spec.errors import InputError
from trainer.spec.job.sections import GaloreJob, LoraJob
from trainer.spec.report import Evaluation
from trainer.spec.strategy import Optimizer, Precision, Sharding
from trainer.spec.value import Value

CHECKPOINT_FORMAT = 1
MANIFEST_NAME = "MANIFEST.json"
MANIFEST_MAX_BYTES = 1 << 28  # a model of 100k tensors on 1,000 ranks needs less
FOLDER_PATTERN = re.compile(r"step-(\d{8,12})")

Count = Annotated[int, Meta(ge=0)]
ShardName = Annotated[str, Meta(pattern=r"^shard-[0-9]{5}\.safetensors\Z")]  # a plain name: no folder, no `..`
HyperParameter = bool | int | float | str | None | tuple[float, ...]
Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class TensorType(StrEnum):
    """Element types, by their safetensors names."""

    F64 = "F64"
    F32 = "F32"
    F16 = "F16"
    BF16 = "BF16"
    I64 = "I64"
    I32 = "I32"
    I16 = "I16"
    I8 = "I8"
    U8 = "U8"
    BOOL = "BOOL"

    @property
    def element_bytes(self) -> int:
        return _ELEMENT_BYTES[self]


_ELEMENT_BYTES = {
    TensorType.F64: 8, TensorType.F32: 4, TensorType.F16: 2, TensorType.BF16: 2,
    TensorType.I64: 8, TensorType.I32: 4, TensorType.I16: 2, TensorType.I8: 1, TensorType.U8: 1, TensorType.BOOL: 1,
}  # fmt: skip


class LossScaler(Value, frozen=True, kw_only=True):
    """State of the fp16 gradient scaler, as plain numbers."""

    scale: float
    growth_tracker: int


class CheckpointFacts(Value, frozen=True, kw_only=True):
    """What a checkpoint is of, and how far. The second half is information only: any of it may differ on resume."""

    run_name: str
    step: Count  # optimizer steps done
    tokens_seen: Count
    seed: int
    sequences_per_step: Count
    tokens_per_step: Count
    model_config_sha256: Sha256  # of the model's config.json, see `config_sha256`
    data_fingerprint: str
    optimizer: Optimizer
    lora: LoraJob | None = None  # of what is trained beside a frozen base; None where all weights are
    galore: GaloreJob | None = None  # of whole weights whose gradients are projected
    is_quantised: bool = False  # the base is held in 4 bit
    base_fingerprint: str | None = None  # of the frozen base, which is not in the checkpoint
    spikes: SpikeRecord = SpikeRecord()  # what was not learned from, and what the next verdicts rest on

    sharding: Sharding
    world_size: Annotated[int, Meta(ge=1)]
    precision: Precision
    versions: dict[str, str] = {}
    evaluations: tuple[Evaluation, ...] = ()
    best_step: int | None = None  # of the lowest evaluation loss
    loss_scaler: LossScaler | None = None


class Chunk(Value, frozen=True, kw_only=True):
    """Elements [start, start + num_elements) of a logical tensor: the whole of one key in one file."""

    file: ShardName
    key: str
    start: Count
    num_elements: Annotated[int, Meta(ge=1)]
    first_elements: Annotated[int, Meta(ge=1)] = 1  # that the first value stands for, where one stands for several


class TensorEntry(Value, frozen=True, kw_only=True):
    """One logical tensor and where its elements lie; one saved value stands for up to `block` elements."""

    shape: tuple[Count, ...]
    type: TensorType
    chunks: tuple[Chunk, ...]
    block: Annotated[int, Meta(ge=1)] = 1

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


class ParameterEntry(Value, frozen=True, kw_only=True):
    """A parameter or a persistent buffer, with its optimizer state; a tied one only points at the one that is saved."""

    weight: TensorEntry | None = None  # the master weights; None where tied
    tied_to: str | None = None
    is_trained: bool = True
    is_buffer: bool = False
    group: str | None = None
    step: Count | None = None  # the optimizer's own count for this parameter; None where it keeps none
    state: dict[str, TensorEntry] = {}


class FileEntry(Value, frozen=True, kw_only=True):
    """Size and hash of one file."""

    size_bytes: Count
    sha256: Sha256


class Manifest(Value, frozen=True, kw_only=True):
    """The whole of MANIFEST.json; `groups` holds each group's hyper-parameters, which a resume does not take over."""

    format: Annotated[int, Meta(ge=CHECKPOINT_FORMAT, le=CHECKPOINT_FORMAT)] = CHECKPOINT_FORMAT
    facts: CheckpointFacts
    parameters: dict[str, ParameterEntry]
    groups: dict[str, dict[str, HyperParameter]]
    files: dict[ShardName, FileEntry]

    def entry(self, name: str) -> ParameterEntry:
        """The saved entry of a parameter, through a tie where there is one."""
        entry = self.parameters[name]
        return entry if entry.tied_to is None else self.parameters[entry.tied_to]


class CheckpointFolder(Value, frozen=True, kw_only=True):
    """A committed checkpoint whose manifest has been read and checked."""

    path: Path
    manifest: Manifest

    @property
    def facts(self) -> CheckpointFacts:
        return self.manifest.facts

    @property
    def step(self) -> int:
        return self.manifest.facts.step


def folder_name(step: int) -> str:
    """`step-00000030`."""
    return f"step-{step:08d}"


def config_sha256(config: dict[str, Any]) -> str:
    """Hash of a config.json dict, whatever the order of its keys."""
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()


def check_manifest(manifest: Manifest, *, origin: str) -> None:
    """InputError where tensors have holes or overlaps, ties lead nowhere, or a chunk lies in an unlisted file."""
    for name, entry in manifest.parameters.items():
        if entry.tied_to is not None:
            target = manifest.parameters.get(entry.tied_to)
            if target is None or target.weight is None:
                raise InputError(f"{origin}: {name} is tied to {entry.tied_to}, which is not saved")
            if entry.weight is not None or entry.state:
                raise InputError(f"{origin}: {name} is tied to {entry.tied_to} and saved as well")
        elif entry.weight is None:
            raise InputError(f"{origin}: {name} has neither weights nor a tie")
        for tensor_name, tensor in named_tensors(name, entry):
            _check_tensor(tensor, manifest, what=f"{origin}: {tensor_name}")


def named_tensors(name: str, entry: ParameterEntry) -> list[tuple[str, TensorEntry]]:
    """Every tensor of an entry, named for a message."""
    weight = [(name, entry.weight)] if entry.weight is not None else []
    return weight + [(f"{name} ({state})", tensor) for state, tensor in entry.state.items()]


def _check_tensor(tensor: TensorEntry, manifest: Manifest, *, what: str) -> None:
    covered_in_order(tensor.chunks, num_elements=tensor.num_elements, what=what)
    for chunk in tensor.chunks:
        if not chunk.first_elements <= min(tensor.block, chunk.num_elements):
            raise InputError(f"{what}: the first block of {chunk.key} has {chunk.first_elements} elements")
        if chunk.file not in manifest.files:
            raise InputError(f"{what}: lies in {chunk.file}, which the manifest does not list")
