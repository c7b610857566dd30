"""From a checkpoint back into a model and its optimizer, in the order that works under every engine.

The prepared engine is filled, range by range: masters, moments, counts; then it makes the copy that it computes with
from the masters. A tensor's values are copied, never rounded, unless the engine keeps a frozen weight in the computing
type. Nothing here depends on how many ranks wrote, or under which engine.

A resumption uses the newest folder whose names, sizes and headers are whole. Every rank fills what it holds, and
hashes its share of the files while it reads them; then all ranks exchange whether the hashes are those of the
manifest. If they are not, the next older checkpoint fills all of the same memory again, so nothing of the
damaged one remains. A checkpoint that does not fit the job is an error only once the hashes have shown that it
was saved like that.

Reading back is the rehearsal of a save, once, after the first step: the checkpoint just written is read from the disk
and compared with memory. A faulty file system or a missing adapter would otherwise show when the run is resumed.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from shardwise.trainer.runtime.checkpoint.engines import adapter_of
from shardwise.trainer.runtime.checkpoint.folders import (
    check_hashes,
    none_whole,
    open_checkpoint,
    skipped_text,
    steps_in,
    verified,
)
from shardwise.trainer.runtime.checkpoint.manifest import (
    CheckpointFacts,
    CheckpointFolder,
    Manifest,
    ParameterEntry,
    TensorEntry,
    folder_name,
    named_tensors,
)
from shardwise.trainer.runtime.checkpoint.optimizer_state import (
    Stretch,
    check_supported,
    fill_coded,
    fill_decoded,
    is_coded,
)
from shardwise.trainer.runtime.checkpoint.pieces import (
    Coded,
    Piece,
    dtype_of,
    flat,
    named_state,
    put_away_after,
    spread,
    type_of,
)
from shardwise.trainer.runtime.checkpoint.ranks import Ranks, on_first, together
from shardwise.trainer.runtime.checkpoint.shards import BLOCK_BYTES, OpenShards, check_shards, read_pieces
from shardwise.trainer.runtime.optimizers import unwrapped
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError, InputProblemsError, ShardwiseError
from shardwise.trainer.spec.optimizers import have_same_state

_SHOWN = 3  # names in a message


def check_compatible(checkpoint: CheckpointFolder, facts: CheckpointFacts) -> None:
    """InputError, with both values, where the checkpoint is of another model, dataset, seed, batch or optimizer.

    Of `facts`, those in which the checkpoint may differ are not compared: step, tokens, engine, world size, precision.
    """
    saved = checkpoint.facts
    is_same_state = have_same_state(saved.optimizer, facts.optimizer)
    compared: tuple[tuple[str, object, object], ...] = (
        ("model (sha256 of its config)", saved.model_config_sha256[:12], facts.model_config_sha256[:12]),
        ("dataset (fingerprint)", saved.data_fingerprint, facts.data_fingerprint),
        ("train.seed", saved.seed, facts.seed),
        ("train.tokens_per_step", saved.tokens_per_step, facts.tokens_per_step),
        ("sequences per step", saved.sequences_per_step, facts.sequences_per_step),
        ("optimizer", saved.optimizer, saved.optimizer if is_same_state else facts.optimizer),
        ("kind of training", _kind(saved), _kind(facts)),
        ("base model (fingerprint)", (saved.base_fingerprint or "none")[:12], (facts.base_fingerprint or "none")[:12]),
    )
    where = f"{checkpoint.path.name} of {saved.run_name}"
    problems = [f"{where}: another {what}: it has {old}, this job {new}" for what, old, new in compared if old != new]
    if problems:
        raise InputProblemsError([*problems, "undo the change, or start a new run without --resume"])


def import_weights(model: nn.Module, checkpoint: CheckpointFolder) -> None:
    """Fills every parameter and persistent buffer of a plain model, before `accelerator.prepare`.

    InputError where names or shapes differ, or where the model holds fewer bits than the checkpoint (fp32 into bf16).
    """
    manifest = checkpoint.manifest
    state = named_state(model)
    _check_names(state, manifest)
    with OpenShards(checkpoint) as shards:
        for name, item in state.items():
            entry = manifest.entry(name).weight
            assert entry is not None, "check_manifest saw it"
            _check_weight(name, tuple(item.tensor.shape), item.tied_to, manifest)
            if item.tied_to is None:
                shards.fill(flat(item.tensor, name=name), entry, start=0, what=name)


def read_weights(checkpoint: CheckpointFolder) -> dict[str, torch.Tensor]:
    """Every saved weight by its name, a tied one once, without a model to put them in."""
    weights = {}
    with OpenShards(checkpoint) as shards:
        for name, entry in checkpoint.manifest.parameters.items():
            if entry.weight is not None:
                values = torch.empty(entry.weight.num_elements, dtype=dtype_of(entry.weight.type))
                shards.fill(values, entry.weight, start=0, what=name)
                weights[name] = values.view(entry.weight.shape)
    return weights


def import_state(model: nn.Module, optimizer: object, checkpoint: CheckpointFolder, *, sharding: Sharding) -> int:
    """`fill_engine`, and what the engine computes with follows; collective under an engine that shards weights."""
    num_coded_anew = fill_engine(model, optimizer, checkpoint, sharding=sharding)
    adapter_of(sharding).settle(model)
    return num_coded_anew


def fill_engine(
    model: nn.Module,
    optimizer: object,
    checkpoint: CheckpointFolder,
    *,
    sharding: Sharding,
    hashed: Collection[str] = (),
    digests: dict[str, str] | None = None,
) -> int:
    """Fills weights, moments and step counts after `accelerator.prepare`, without stepping; rates stay the job's.

    Each rank reads its own ranges. Returns the number of blocks of 8-bit state that this rank had to code anew, none
    under the same plan. InputError if names, shapes or the kinds of state differ, or if the model holds fewer bits than
    the checkpoint. The copy that an engine computes with is not refreshed. The sha256 of each file of `hashed`, which
    is read whole, goes into `digests`.
    """
    engine, inner, manifest = adapter_of(sharding), unwrapped(optimizer), checkpoint.manifest
    check_supported(inner)
    ours = engine.describe(model, inner)
    _check_names(ours, manifest)
    for name, entry in ours.items():
        saved = manifest.entry(name)
        if entry.tied_to is None and entry.is_trained != saved.is_trained:
            was, is_now = ("trained", "frozen") if saved.is_trained else ("frozen", "trained")
            raise InputError(f"{name}: was {was} when the checkpoint was saved and is {is_now} in this job")
    _check_weights(ours, manifest)
    engine.create_state(model, inner, manifest)
    _check_shapes_of_state(engine.describe(model, inner), manifest)
    pieces = engine.held_pieces(model, inner)
    return _fill(pieces, checkpoint, hashed=hashed, digests=digests)


def load_weights(model: nn.Module, optimizer: object, checkpoint: CheckpointFolder, *, sharding: Sharding) -> None:
    """Fills the weights of a prepared model without changing the optimizer's state; collective."""
    engine, inner = adapter_of(sharding), unwrapped(optimizer)
    ours = engine.describe(model, inner)
    _check_names(ours, checkpoint.manifest)
    _check_weights(ours, checkpoint.manifest)
    _fill([piece for piece in engine.held_pieces(model, inner) if piece.state is None], checkpoint)
    engine.settle(model)


def _fill(
    pieces: Sequence[Piece],
    checkpoint: CheckpointFolder,
    *,
    hashed: Collection[str] = (),
    digests: dict[str, str] | None = None,
) -> int:
    """Fills every piece; how many blocks of 8-bit state were coded anew."""
    in_codes: dict[int, tuple[Coded, list[Stretch]]] = {}
    in_memory, others = list[tuple[Piece, TensorEntry]](), list[tuple[Piece, ParameterEntry, TensorEntry]]()
    for piece in pieces:
        saved = checkpoint.manifest.entry(piece.name)
        if (piece.state is not None and not saved.state) or piece.blocks is not None:
            continue  # never updated: its part of a partition starts from zeros; or scales, which follow the codes
        entry = saved.weight if piece.state is None else saved.state.get(piece.state)
        if entry is None:
            raise InputError(f"{piece.title}: is not in the checkpoint")
        if piece.coded is not None:
            in_codes.setdefault(id(piece.coded), (piece.coded, []))[1].append(_stretch(piece, saved))
        elif piece.elsewhere is None and not _is_decoded(piece, saved):
            in_memory.append((piece, entry))
        else:
            others.append((piece, saved, entry))
    found = read_pieces(checkpoint, in_memory, hashed=hashed)
    if digests is not None:
        digests |= found
    with OpenShards(checkpoint) as shards, put_away_after(pieces):
        for piece, saved, entry in others:
            values = piece.at_hand(to_fill=True)
            if _is_decoded(piece, saved):
                fill_decoded(values, _stretch(piece, saved), shards)
            else:
                shards.fill(values, entry, start=piece.start, what=piece.title, may_round=piece.may_round)
        return sum(fill_coded(moment, stretches, shards) for moment, stretches in in_codes.values())


def _is_decoded(piece: Piece, saved: ParameterEntry) -> bool:
    """True if a moment that was saved in 8 bit is in fp32 here."""
    return piece.state is not None and piece.coded is None and is_coded(saved, piece.state)


def _stretch(piece: Piece, saved: ParameterEntry) -> Stretch:
    assert piece.state is not None
    return Stretch(
        title=piece.title,
        entry=saved,
        state=piece.state,
        start=piece.start,
        num_elements=piece.num_elements,
        offset=piece.offset,
    )


def _check_shapes_of_state(ours: Mapping[str, ParameterEntry], manifest: Manifest) -> None:
    """InputError where what an optimizer keeps of a weight has another shape than what was saved."""
    for name, entry in ours.items():
        saved = manifest.entry(name).state
        for state, tensor in entry.state.items():
            if state in saved and saved[state].shape != tensor.shape:
                raise InputError(
                    f"{name} ({state}): has shape {saved[state].shape} in the checkpoint, {tensor.shape} in this job"
                )


def _check_weights(ours: Mapping[str, ParameterEntry], manifest: Manifest) -> None:
    for name, entry in ours.items():
        shape = None if entry.weight is None else entry.weight.shape
        _check_weight(name, shape, entry.tied_to, manifest)


def _check_weight(name: str, shape: tuple[int, ...] | None, tied_to: str | None, manifest: Manifest) -> None:
    """InputError where a tensor of this job is another one in the checkpoint; a tied one may come without shape."""
    saved = manifest.entry(name).weight
    if shape is not None and saved is not None and shape != saved.shape:
        raise InputError(f"{name}: has shape {saved.shape} in the checkpoint, {shape} in this job")
    if tied_to is not None and manifest.entry(name) is not manifest.entry(tied_to):
        raise InputError(f"{name}: is tied to {tied_to} in this job and not in the checkpoint")


def _kind(facts: CheckpointFacts) -> str:
    """`all weights`, or what the adapters are, as far as they mean another function with the same shapes."""
    lora = facts.lora
    if lora is None:
        if facts.galore is None:
            return "all weights"
        galore = facts.galore
        return f"galore of rank {galore.rank}, projection {galore.projection}, scale {galore.scale:g}"
    base = "4-bit base, " if facts.is_quantised else ""
    scaling = "rank-stabilised " if lora.rslora else ""
    return f"{base}adapters of {scaling}rank {lora.rank}, alpha {lora.alpha:g}{', DoRA' if lora.dora else ''}"


def _check_names(names: Iterable[str], manifest: Manifest) -> None:
    ours, saved = set(names), set(manifest.parameters)
    for which, missing in (("the checkpoint has no", ours - saved), ("this job's model has no", saved - ours)):
        if missing:
            shown = ", ".join(sorted(missing)[:_SHOWN])
            more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
            raise InputError(f"{which} {shown}{more}")


def begin_resumption(
    root: Path,
    *,
    check: Callable[[CheckpointFolder], None],
    on_skip: Callable[[str], None],
    ranks: Ranks | None = None,
) -> "Resumption | None":
    """The newest checkpoint of `root` that looks whole; None if there is none at all. Collective.

    `check` raises if one is not of this job; `on_skip` gets a line for a damaged one, on rank 0. EnvironmentFaultError
    if all are damaged: to start over silently would lose the run.
    """
    ranks = ranks or Ranks.alone()
    doing = f"{root}: the newest checkpoint cannot be read"
    is_empty = on_first(ranks, lambda: b"" if steps_in(root) else b"empty", doing=doing)
    return None if is_empty else Resumption(root, check=check, on_skip=on_skip, ranks=ranks)


class Resumption:
    """A checkpoint that is about to be loaded; every method is collective."""

    checkpoint: CheckpointFolder

    def __init__(
        self,
        root: Path,
        *,
        check: Callable[[CheckpointFolder], None],
        on_skip: Callable[[str], None],
        ranks: Ranks,
    ) -> None:
        self._root, self._check, self._on_skip, self._ranks = root, check, on_skip, ranks
        self._doing = f"{root}: the newest checkpoint cannot be read"
        self._steps = steps_in(root) if ranks.is_first else []
        self._num_steps = len(self._steps)
        self._open_next()

    def load(self, model: nn.Module, optimizer: object, *, sharding: Sharding) -> int:
        """`fill_engine` for the newest checkpoint whose hashes are right; then the engine's copy follows.

        Returns the number of blocks coded anew on all ranks that share the state. InputError if it does not fit;
        errors of `begin_resumption` if all turn out to be damaged.
        """
        while True:
            own = sorted(self.checkpoint.manifest.files)[self._ranks.rank :: self._ranks.world_size]
            digests: dict[str, str] = {}
            problem: ShardwiseError | None = None
            try:
                num_coded_anew = together(
                    self._ranks,
                    partial(
                        fill_engine, model, optimizer, self.checkpoint, sharding=sharding, hashed=own, digests=digests
                    ),
                    doing=f"{self.checkpoint.path}: cannot be loaded",
                )
            except ShardwiseError as error:
                problem = error
            damage = self._damage(own, digests)
            if damage:
                if self._ranks.is_first:
                    self._on_skip(damage)
                self._open_next()
                continue
            if problem is not None:
                raise problem
            adapter_of(sharding).settle(model)
            if not sharding.shards_optimizer:
                return num_coded_anew
            return sum(int(each) for each in self._ranks.exchange(str(num_coded_anew).encode()))

    def _open_next(self) -> None:
        """The next older one, verified and compared with the job."""
        name = on_first(self._ranks, self._next_name, doing=self._doing).decode()
        self.checkpoint = together(self._ranks, lambda: open_checkpoint(self._root / name), doing=self._doing)
        self._check(self.checkpoint)

    def _next_name(self) -> bytes:
        while self._steps:
            folder = self._root / folder_name(self._steps.pop())
            try:
                check_shards(folder, open_checkpoint(folder).manifest)
            except (InputError, OSError) as error:
                self._on_skip(skipped_text(folder, error))
            else:
                return folder.name.encode()
        raise none_whole(self._root, self._num_steps)

    def _damage(self, own: Sequence[str], digests: Mapping[str, str]) -> str:
        """Reason to skip the checkpoint, the same on every rank; empty if its hashes are right."""
        try:
            check_hashes(self.checkpoint, only=own, known=digests)
            damage = ""
        except (InputError, OSError) as error:
            damage = skipped_text(self.checkpoint.path, error)
        return next((each.decode() for each in self._ranks.exchange(damage.encode()) if each), "")


_BLOCK_ELEMENTS = 1 << 20


def state_digest(model: nn.Module, optimizer: object, *, sharding: Sharding) -> str:
    """Hash over every weight, moment and step count this rank holds, by name: equal where all bits are equal."""
    engine, inner = adapter_of(sharding), unwrapped(optimizer)
    digest = hashlib.sha256()
    for name, entry in sorted(engine.describe(model, inner).items()):
        digest.update(f"{name} {entry.tied_to} {entry.step}\n".encode())
    pieces = sorted(engine.held_pieces(model, inner), key=lambda piece: piece.title)
    with put_away_after(pieces):
        for piece in pieces:
            digest.update(f"{piece.title} {piece.start} {type_of(piece.values)} {piece.num_elements}\n".encode())
            digest.update(piece.at_hand().cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checkpoint_digest(checkpoint: CheckpointFolder) -> str:
    """Hash over every weight, state and step count of a checkpoint, by name.

    Equal for two checkpoints of equal state, with any number of ranks and any engine.
    """
    digest = hashlib.sha256()
    with OpenShards(checkpoint) as shards:
        for name, entry in sorted(checkpoint.manifest.parameters.items()):
            digest.update(f"{name} {entry.tied_to} {entry.step} {entry.is_trained} {entry.group}\n".encode())
            for title, tensor in sorted(named_tensors(name, entry)):
                digest.update(f"{title} {tensor.type} {tensor.shape}\n".encode())
                for start in range(0, tensor.num_elements, _BLOCK_ELEMENTS):
                    size = min(_BLOCK_ELEMENTS, tensor.num_elements - start)
                    values = torch.empty(size, dtype=dtype_of(tensor.type))
                    shards.fill(values, tensor, start=start, what=title)
                    digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_read_back(folder: Path, *, model: nn.Module, optimizer: object, sharding: Sharding, ranks: Ranks) -> None:
    """EnvironmentFaultError, the same on every rank, unless the checkpoint holds what the ranks hold, bit for bit.

    Collective, and to be called before the state changes again. Rank 0 hashes every file, each rank compares what it
    holds; nothing is held twice but a block.
    """
    engine, inner = adapter_of(sharding), unwrapped(optimizer)
    doing = f"{folder}: was written and cannot be read back"

    def hash_files() -> bytes:
        for path in folder.iterdir():
            _forget(path)
        return bytes(verified(folder).path)

    def compare() -> None:
        checkpoint = open_checkpoint(folder)
        pieces = engine.held_pieces(model, inner)
        with put_away_after(pieces), OpenShards(checkpoint) as shards:
            for piece in pieces:
                _compare(piece, checkpoint, shards)

    try:
        on_first(ranks, hash_files, doing=doing)
        together(ranks, compare, doing=doing)
    except InputError as error:
        raise EnvironmentFaultError(
            f"{error};\nthis checkpoint could not be resumed from, nor later ones: name another disk with output"
        ) from error


def _forget(path: Path) -> None:
    """Drops the file from the page cache, so that it is read from the disk."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _compare(piece: Piece, checkpoint: CheckpointFolder, shards: OpenShards) -> None:
    """InputError unless the checkpoint's range has the bits of the piece."""
    entry = checkpoint.manifest.parameters.get(piece.name)
    tensor = None if entry is None else entry.weight if piece.state is None else entry.state.get(piece.state)
    if tensor is None:
        raise InputError(f"{checkpoint.path}: has no {piece.title}")
    held = piece.at_hand()
    blocks = piece.blocks
    block_elements = max(BLOCK_BYTES // held.element_size(), 1)
    for begin in range(0, piece.num_elements, block_elements):
        size = min(block_elements, piece.num_elements - begin)
        if blocks is None:
            part = held[begin : begin + size].cpu()
        else:
            values = held[blocks.value_of(begin) : blocks.value_of(begin + size - 1) + 1].cpu()
            part = spread(values, blocks, start=begin, num_elements=size)
        read = torch.empty_like(part)
        shards.fill(read, tensor, start=piece.start + begin, what=piece.title, may_round=piece.may_round)
        if not torch.equal(read.view(torch.uint8), part.view(torch.uint8)):
            raise InputError(f"{checkpoint.path}: {piece.title} was read back otherwise than it was written")
