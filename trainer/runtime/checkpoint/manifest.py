"""MANIFEST.json as values: what a checkpoint is of, the ranges of each tensor, the hash of each file.

A tensor is described by its logical shape and by chunks: flat ranges of its row-major elements, each one key of one
file. Everything an engine holds is such a range: a whole tensor (none, ddp), some rows (FSDP2's Shard(0)), a fragment
(ZeRO-1 and 2), a partition (ZeRO-3, without its padding). So the format does not depend on the engine, and any engine
reads what any other wrote. Scales of 8-bit state are saved one for each block of elements; blocks are those of the
rank that saved, so the first of a chunk may be cut. Each field is checked by its type (names, signs); holes, overlaps
and files that are not listed are found by `check_manifest`.
"""

import hashlib
import math
import os
import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta

from shardwise.trainer.runtime.run.state import SpikeRecord
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import GaloreJob, LoraJob
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Evaluation
from shardwise.trainer.spec.strategy import Precision
from shardwise.trainer.spec.value import Value


class Ranged(Protocol):
    """Something that holds elements [start, start + num_elements) of a logical tensor."""

    @property
    def start(self) -> int: ...

    @property
    def num_elements(self) -> int: ...


R = TypeVar("R", bound=Ranged)


class Blocks(NamedTuple):
    """Values that stand for blocks of elements: one for each block, of which the first and the last may be cut."""

    num_elements: int
    first_elements: int
    block: int

    @property
    def num_values(self) -> int:
        return 1 + -(-(self.num_elements - self.first_elements) // self.block)

    def value_of(self, element: int) -> int:
        """The value that stands for an element."""
        return 0 if element < self.first_elements else 1 + (element - self.first_elements) // self.block

    def begin_of(self, value: int) -> int:
        """The first element that a value stands for; of the one after the last, where the elements end."""
        if value == 0:
            return 0
        return min(self.first_elements + (value - 1) * self.block, self.num_elements)


class Overlap(NamedTuple):
    """A stretch that a chunk and a wanted range share, in offsets into each."""

    in_chunk: int
    in_wanted: int
    num_elements: int


def covered_in_order(chunks: Iterable[R], *, num_elements: int, what: str) -> tuple[R, ...]:
    """The chunks by position; InputError unless they cover [0, num_elements) exactly once."""
    ordered = sorted(chunks, key=lambda chunk: chunk.start)
    position = 0
    for chunk in ordered:
        if chunk.start > position:
            raise InputError(f"{what}: elements {position} to {chunk.start - 1} of {num_elements} are missing")
        if chunk.start < position:
            raise InputError(f"{what}: elements {chunk.start} to {position - 1} of {num_elements} are there twice")
        position = chunk.start + chunk.num_elements
    if position != num_elements:
        what_is_wrong = "are missing" if position < num_elements else "are too many"
        first, last = sorted((position, num_elements))
        raise InputError(f"{what}: elements {first} to {last - 1} of {num_elements} {what_is_wrong}")
    return tuple(ordered)


def overlap(chunk: Ranged, *, start: int, num_elements: int) -> Overlap | None:
    """Overlap of the chunk with [start, start + num_elements); None if there is none."""
    first = max(chunk.start, start)
    last = min(chunk.start + chunk.num_elements, start + num_elements)
    if first >= last:
        return None
    return Overlap(in_chunk=first - chunk.start, in_wanted=first - start, num_elements=last - first)


class Share(NamedTuple):
    """One rank's stretch of one of several tensors laid end to end."""

    position: int  # of the tensor in the list
    start: int
    num_elements: int


def share_of_rank(sizes: Sequence[tuple[int, int]], *, rank: int, world_size: int) -> list[Share]:
    """The rank's stretch of tensors given as (num_elements, element_bytes), laid end to end and cut evenly by bytes.

    A cut falls between two elements: the one it would divide goes to the rank in which it begins.
    """
    total_bytes = sum(num_elements * element_bytes for num_elements, element_bytes in sizes)
    begin, end = (total_bytes * boundary // world_size for boundary in (rank, rank + 1))
    shares, offset_bytes = [], 0
    for position, (num_elements, element_bytes) in enumerate(sizes):
        first, last = (
            min(max(-(-(boundary - offset_bytes) // element_bytes), 0), num_elements) for boundary in (begin, end)
        )
        if last > first:
            shares.append(Share(position=position, start=first, num_elements=last - first))
        offset_bytes += num_elements * element_bytes
    return shares


CHECKPOINT_FORMAT = 1
MANIFEST_NAME = "MANIFEST.json"
MANIFEST_MAX_BYTES = 1 << 28  # a model of 100k tensors on 1,000 ranks needs less
FOLDER_PATTERN = re.compile(r"step-(\d{8,12})")

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 64 << 10  # of each file, spread evenly; the first holds the header's beginning

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
    """Identity and progress of the run. The second half is information only: any of it may differ on resume."""

    run_name: str
    step: Count  # optimizer steps done
    tokens_seen: Count  # positions that went through the model, without padding
    targets_seen: Count | None = None  # None: of an earlier version, whose tokens_seen are the targets
    seed: int
    sequences_per_step: Count
    tokens_per_step: Count
    model_config_sha256: Sha256  # of the model's config.json, see `config_sha256`
    data_fingerprint: str
    optimizer: Optimizer
    lora: LoraJob | None = None  # of the adapters on a frozen base; None where all weights are trained
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

    @property
    def num_targets(self) -> int:
        """Tokens learned from so far."""
        return self.tokens_seen if self.targets_seen is None else self.targets_seen


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
    """The whole of MANIFEST.json; `groups` holds each group's hyper-parameters, which a resume does not restore."""

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
    """Hash of a config.json dict, in any order of its keys."""
    return hashlib.sha256(msgspec.json.encode(config, order="sorted")).hexdigest()


def base_fingerprint(plan: Plan) -> str:
    """Identity of a frozen base, independent of the location of its files.

    It is a hash of the names, sizes, headers and a sample of the bytes of its safetensors files, as hashing all of them
    would take minutes; for a base that was initialized, of its config and the seed.
    """
    digest = hashlib.sha256()
    if plan.model_path is None:
        digest.update(msgspec.json.encode([plan.model_config, plan.job.train.seed], order="sorted"))
        return digest.hexdigest()[:32]
    for path in sorted(Path(plan.model_path).glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for sample in range(_NUM_SAMPLES):
                file.seek(sample * max(size - _SAMPLE_BYTES, 0) // (_NUM_SAMPLES - 1), os.SEEK_SET)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:32]


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
