"""Saving, on all ranks: each writes what it holds, all agree, rank 0 commits; while training waits or continues.

In the background a checkpoint is copied at the step's end, written by a thread, and committed later:

    step s      every rank copies its pieces into host memory and a thread begins to write and hash them
    step s+1..  at each step's end the ranks exchange whether their threads are done; when all are, rank 0 commits

So a checkpoint has its name only when all of it is on the disk. At most one is pending: a save waits for the one
before. Errors in a thread are raised by the next `poll` or `finish`, the same on every rank. Only main threads
communicate.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
from torch import nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from shardwise.trainer.runtime.checkpoint.engines import StateAdapter, adapter_of
from shardwise.trainer.runtime.checkpoint.folders import OnPoint, Retention, commit, prune, staging_folder
from shardwise.trainer.runtime.checkpoint.manifest import (
    CheckpointFacts,
    Chunk,
    Manifest,
    ParameterEntry,
    TensorEntry,
    folder_name,
)
from shardwise.trainer.runtime.checkpoint.optimizer_state import check_supported, hyper_parameters
from shardwise.trainer.runtime.checkpoint.pieces import Piece, Replica, put_away_after
from shardwise.trainer.runtime.checkpoint.ranks import Ranks, on_first, together
from shardwise.trainer.runtime.checkpoint.shards import (
    NonFiniteStateError,
    ShardRecord,
    ShardRecords,
    dealt,
    write_shards,
)
from shardwise.trainer.runtime.optimizers import unwrapped
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding


class Save:
    """One save in its three parts; a context manager that holds the writer's lock.

    Collective: every rank makes one after the same step, and finishes it; `write` is each rank's own and may run in a
    thread. The newest `keep` checkpoints stay, those of every `keep_every`-th step, and the steps of `protect` (the
    best one); so does a whole checkpoint of this very step. EnvironmentFaultError, the same on every rank, if the disk
    is full, the folder not writable or another process is saving there; NonFiniteStateError for NaN and infinity:
    older checkpoints are then untouched. InputError for an optimizer without checkpoints. `on_point` gets the name of
    every point at which a crash would have another result.
    """

    def __init__(
        self,
        root: Path,
        *,
        model: nn.Module,
        optimizer: object,
        sharding: Sharding,
        facts: CheckpointFacts,
        ranks: Ranks,
        keep: int,
        keep_every: int | None = None,
        protect: tuple[int, ...] = (),
        on_point: OnPoint = lambda point: None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1, not {keep}")
        engine, inner = adapter_of(sharding), unwrapped(optimizer)
        self.final = root / folder_name(facts.step)
        self.step, self.ranks, self.on_point = facts.step, ranks, on_point
        self._root, self._facts = root, facts
        self._retention = Retention(keep=keep, keep_every=keep_every, protect=protect)
        self._doing = f"the checkpoint of step {facts.step} was not saved"
        self._held = ExitStack()

        def look() -> list[Piece]:
            pieces = _pieces_to_write(engine, model, inner, facts=facts, ranks=ranks)
            # Entries and groups as they are of this step: when the shards are written training may be further.
            self._described = engine.describe(model, inner) if ranks.is_first else {}
            self._groups = hyper_parameters(inner)
            return pieces

        self.pieces = together(ranks, look, doing=self._doing)
        self.all_bytes = sum(map(int, ranks.exchange(str(self.num_bytes).encode())))
        self._staged = ""

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank writes."""
        return sum(piece.num_bytes for piece in self.pieces)

    @property
    def is_needed(self) -> bool:
        """False where this very step is saved already, whole."""
        return bool(self._staged)

    def __enter__(self) -> "Save":
        self._held.enter_context(put_away_after(self.pieces))
        try:
            self._staged = on_first(self.ranks, self._stage, doing=self._doing).decode()
        except BaseException:
            self._held.close()
            raise
        if self._staged:
            self.on_point("staged")
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def run(self) -> Path:
        """Saves while training waits; returns the committed folder."""
        with self:
            if self.is_needed:
                self.finish(self.write)
        return self.final

    def write(self) -> bytes:
        """Writes this rank's files; what rank 0 must know of them."""
        records = write_shards(
            self._root / self._staged,
            self.pieces,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            on_point=self.on_point,
        )
        return codec.encode(ShardRecords(files=records))

    def finish(self, write: Callable[[], bytes]) -> None:
        """Commits once `write` is done on every rank; what it raises on one rank is raised on all."""
        written = self.ranks.gather(together(self.ranks, write, doing=self._doing))
        decoded = [codec.decode(content, ShardRecords, origin="a rank's records") for content in written]
        records = [record for of_rank in decoded for record in of_rank.files]
        on_first(self.ranks, lambda: self._commit(records), doing=self._doing)

    def _stage(self) -> bytes:
        staging = staging_folder(
            self._root, self._facts, num_bytes=self.all_bytes, retention=self._retention, on_point=self.on_point
        )
        return self._held.enter_context(staging).encode()

    def _commit(self, records: Sequence[ShardRecord]) -> bytes:
        manifest = Manifest(
            facts=self._facts,
            parameters=_with_chunks(self._described, records),
            groups=self._groups,
            files={record.file: record.entry for record in records},
        )
        commit(self._root / self._staged, manifest, final=self.final, on_point=self.on_point)
        prune(self._root, newest=self._facts.step, retention=self._retention, on_point=self.on_point)
        return b""


def _pieces_to_write(
    engine: StateAdapter, model: nn.Module, optimizer: TorchOptimizer, *, facts: CheckpointFacts, ranks: Ranks
) -> list[Piece]:
    """Pieces that this rank writes: all that it alone holds, and its share by bytes of those that others hold too."""
    check_supported(optimizer)
    _check_finite(facts)
    pieces = engine.held_pieces(model, optimizer)
    everywhere = Replica(ranks.rank, ranks.world_size)
    common: dict[Replica, list[Piece]] = {}
    for piece in pieces:
        replica = everywhere if piece.is_shared else piece.replica
        if replica is not None:
            common.setdefault(replica, []).append(piece)
    own = [piece for piece in pieces if not piece.is_shared and piece.replica is None]
    for replica, held in common.items():
        own += dealt(held, replica.number, replica.num_replicas)
    return own


def _check_finite(facts: CheckpointFacts) -> None:
    for evaluation in facts.evaluations:
        if not (math.isfinite(evaluation.loss) and math.isfinite(evaluation.perplexity)):
            raise NonFiniteStateError(
                f"the evaluation loss of step {evaluation.step} is {evaluation.loss}, so nothing was saved"
            )


def _with_chunks(described: dict[str, ParameterEntry], records: Sequence[ShardRecord]) -> dict[str, ParameterEntry]:
    """The entries with the chunks that all ranks wrote, in order."""
    chunks: dict[tuple[str, str | None], list[Chunk]] = {}
    for record in records:
        for placed in record.placed:
            chunks.setdefault((placed.name, placed.state), []).append(placed.chunk)

    def filled(name: str, state: str | None, tensor: TensorEntry) -> TensorEntry:
        in_order = sorted(chunks.get((name, state), []), key=lambda chunk: chunk.start)
        return msgspec.structs.replace(tensor, chunks=tuple(in_order))

    return {
        name: msgspec.structs.replace(
            entry,
            weight=None if entry.weight is None else filled(name, None, entry.weight),
            state={state: filled(name, state, tensor) for state, tensor in entry.state.items()},
        )
        for name, entry in described.items()
    }


class BackgroundSave:
    """One save on its way; every method is collective."""

    def __init__(self, save: Save) -> None:
        """Copies what `save` has checked; errors of `Save`, as far as they show before it is written."""
        self._save = save
        self.step = save.step
        self.is_over = False
        self._save.__enter__()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._written: Future[bytes] | None = None
        try:
            if save.is_needed:
                doing = f"the state of step {save.step} was not copied"
                save.pieces = together(save.ranks, lambda: [_copied(each) for each in save.pieces], doing=doing)
                save.on_point("copied")
                self._written = self._writer.submit(save.write)
        except BaseException:
            self._close()
            raise

    def poll(self) -> bool:
        """Commits if every rank has written; whether the save is over. Raises as `Save` does."""
        if self.is_over:
            return True
        is_written = self._written is None or self._written.done()
        if not self._save.ranks.all_agree(is_written):
            return False
        self.finish()
        return True

    def finish(self) -> None:
        """Waits for every rank and commits."""
        if self.is_over:
            return
        try:
            if self._written is not None:
                self._save.finish(self._written.result)
        finally:
            self._close()

    def _close(self) -> None:
        """Lets go of the copy, the thread and the lock."""
        self.is_over = True
        self._writer.shutdown(wait=True)
        self._save.__exit__()
        self._save.pieces = []


def _copied(piece: Piece) -> Piece:
    """The same piece in memory that training does not touch."""
    with torch.no_grad():
        return piece._replace(values=piece.at_hand().to("cpu", copy=True), elsewhere=None)
