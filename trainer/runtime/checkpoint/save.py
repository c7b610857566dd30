"""Saving, on all ranks: each writes what it holds, all agree, rank 0 commits."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from torch import nn
from torch.optim.optimizer import Optimizer as TorchOptimizer

from trainer.runtime.checkpoint.agreement import on_first, together
from trainer.runtime.checkpoint.commit import OnPoint, commit, prune, staging_folder
from trainer.runtime.checkpoint.engines import Engine, engine_of
from trainer.runtime.checkpoint.manifest import (
    CheckpointFacts,
    Chunk,
    Manifest,
    ParameterEntry,
    TensorEntry,
    folder_name,
)
from trainer.runtime.checkpoint.optimizer_state import check_supported, hyper_parameters
from trainer.runtime.checkpoint.pieces import Piece
from trainer.runtime.checkpoint.ranges import share_of_rank
from trainer.runtime.checkpoint.ranks import Ranks
from trainer.runtime.checkpoint.shards import NonFiniteStateError, ShardRecord, write_shard
from trainer.runtime.optimizers import unwrapped
from trainer.spec import codec
from trainer.spec.strategy import Sharding


def save_checkpoint(
    root: Path,
    *,
    model: nn.Module,
    optimizer: object,
    sharding: Sharding,
    facts: CheckpointFacts,
    ranks: Ranks,
    keep: int,
    protect: tuple[int, ...] = (),
    on_point: OnPoint = lambda point: None,
) -> Path:
    """Saves under `root` and returns the committed folder; collective: every rank calls it after the same step.

    `protect` names steps that are not pruned (the best one). A whole checkpoint of this very step is kept as it is.
    EnvironmentFaultError, the same on every rank, where the disk is full, the folder not writable or another process
    is saving there; NonFiniteStateError where the state is not worth keeping. Older checkpoints are then untouched and
    training may go on. InputError for an engine or an optimizer that has no checkpoints yet.
    `on_point` is told the name of every point at which a crash would leave something different behind.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, not {keep}")
    engine, inner, final = engine_of(sharding), unwrapped(optimizer), root / folder_name(facts.step)
    doing = f"the checkpoint of step {facts.step} was not saved"
    pieces = together(ranks, lambda: _pieces_to_write(engine, model, inner, facts=facts, ranks=ranks), doing=doing)
    num_bytes = sum(map(int, ranks.exchange(str(sum(piece.num_bytes for piece in pieces)).encode())))
    with ExitStack() as held:

        def stage() -> bytes:
            return held.enter_context(staging_folder(root, facts, num_bytes=num_bytes)).encode()

        def write() -> bytes:
            return codec.encode(write_shard(root / staged, pieces, rank=ranks.rank, on_point=on_point))

        def finish() -> bytes:
            manifest = Manifest(
                facts=facts,
                parameters=_with_chunks(engine.describe(model, inner), records),
                groups=hyper_parameters(inner),
                files={record.file: record.entry for record in records},
            )
            commit(root / staged, manifest, final=final, on_point=on_point)
            prune(root, newest=facts.step, keep=keep, protect=protect, on_point=on_point)
            return b""

        staged = on_first(ranks, stage, doing=doing).decode()
        if staged:
            on_point("staged")
            written = ranks.gather(together(ranks, write, doing=doing))
            records = [codec.decode(content, ShardRecord, origin="a rank's answer") for content in written]
            on_first(ranks, finish, doing=doing)
    return final


def _pieces_to_write(
    engine: Engine, model: nn.Module, optimizer: TorchOptimizer, *, facts: CheckpointFacts, ranks: Ranks
) -> list[Piece]:
    """What this rank writes: all it holds, or its share by bytes of what every rank holds."""
    check_supported(optimizer)
    _check_finite(facts)
    pieces = engine.held_pieces(model, optimizer)
    if not engine.is_replicated:
        return pieces
    sizes = [(piece.num_elements, piece.values.element_size()) for piece in pieces]
    return [
        pieces[share.position].part(share.start, share.num_elements)
        for share in share_of_rank(sizes, rank=ranks.rank, world_size=ranks.world_size)
    ]


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
