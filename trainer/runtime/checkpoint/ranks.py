"""Collectives of ranks that save and resume: bytes over gloo, votes, and one outcome on every rank.

The group is gloo and of its own: checkpoints come from the CPU, and must not queue behind training's collectives. Only
bytes are sent; nothing is pickled (torch's `*_object` collectives do that).

What fails on one rank fails on all, with the same message (`together`, `on_first`): a rank that entered the next
collective alone would hang until its timeout. An unforeseen error (a bug) reaches the exchange too, and ends its rank.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from shardwise.trainer.runtime.checkpoint.shards import NonFiniteStateError
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError, ShardwiseError
from shardwise.trainer.spec.value import Value


class Ranks:
    """This process among those that save together; every method but the two properties is collective."""

    def __init__(self, *, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group

    @classmethod
    def alone(cls) -> "Ranks":
        """A single process."""
        return cls(rank=0, world_size=1, group=None)

    @classmethod
    def distributed(cls, *, timeout_s: float = 1800.0) -> "Ranks":
        """All ranks of torch's default process group; make it once. A rank that waits longer than the timeout fails."""
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        assert group is not None
        return cls(rank=dist.get_rank(), world_size=dist.get_world_size(), group=group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        """Returns when every rank has come here."""
        if self._group is not None:
            dist.barrier(group=self._group)

    def all_agree(self, ok: bool) -> bool:  # noqa: FBT001  # the vote itself
        """True if every rank passed true."""
        if self._group is None:
            return ok
        vote = torch.tensor([int(ok)])
        dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=self._group)
        return bool(vote.item())

    def broadcast(self, content: bytes) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self._group is None:
            return content
        size = torch.tensor([len(content)])
        dist.broadcast(size, src=0, group=self._group)
        if not size.item():
            return b""
        buffer = _tensor(content, length=int(size.item()))
        dist.broadcast(buffer, src=0, group=self._group)
        return buffer.numpy().tobytes()

    def exchange(self, content: bytes) -> tuple[bytes, ...]:
        """Every rank's bytes, on every rank, by rank."""
        if self._group is None:
            return (content,)
        sizes = self._sizes(content)
        received = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        if max(sizes):
            dist.all_gather(received, _tensor(content, length=max(sizes)), group=self._group)
        return _cut(received, sizes)

    def gather(self, content: bytes) -> tuple[bytes, ...]:
        """Every rank's bytes on rank 0, by rank; nothing elsewhere."""
        if self._group is None:
            return (content,)
        sizes = self._sizes(content)
        received = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes] if self.is_first else None
        if max(sizes):
            dist.gather(_tensor(content, length=max(sizes)), received, dst=0, group=self._group)
        return _cut(received, sizes) if received is not None else ()

    def _sizes(self, content: bytes) -> list[int]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        dist.all_gather(sizes, torch.tensor([len(content)]), group=self._group)
        return [int(size.item()) for size in sizes]


def _tensor(content: bytes, *, length: int) -> torch.Tensor:
    """The bytes as a tensor of `length` elements, at least one, filled up with zeros."""
    return torch.frombuffer(bytearray(content.ljust(length, b"\0")), dtype=torch.uint8)


def _cut(received: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(tensor[:size].numpy().tobytes() for tensor, size in zip(received, sizes, strict=True))


T = TypeVar("T")

_KINDS: tuple[type[ShardwiseError], ...] = (NonFiniteStateError, InputError, EnvironmentFaultError, ShardwiseError)


class _Failure(Value, frozen=True, kw_only=True):
    kind: str
    message: str


_UNFORESEEN = _Failure(kind=ShardwiseError.__name__, message="ended with an error; see its log")


def together(ranks: Ranks, work: Callable[[], T], *, doing: str) -> T:
    """Runs `work` on this rank and returns its result once it is done on all; else raises the same on all."""
    failure: _Failure | None = _UNFORESEEN
    try:
        result = work()
        failure = None
    except OSError as error:
        failure = _Failure(kind=EnvironmentFaultError.__name__, message=f"{doing}: {_sentence(error)}")
    except ShardwiseError as error:
        failure = _Failure(kind=_kind_of(error).__name__, message=str(error))
    finally:
        failures = ranks.exchange(b"" if failure is None else codec.encode(failure))
    for rank, encoded in enumerate(failures):
        if encoded:
            _raise(codec.decode(encoded, _Failure, origin=f"rank {rank}"), rank=rank)
    return result


def on_first(ranks: Ranks, work: Callable[[], bytes], *, doing: str) -> bytes:
    """Runs `work` on rank 0 and returns its result on all; else raises the same on all."""
    return ranks.broadcast(together(ranks, lambda: work() if ranks.is_first else b"", doing=doing))


def _raise(failure: _Failure, *, rank: int) -> None:
    kind = next(kind for kind in _KINDS if kind.__name__ == failure.kind)
    raise kind(failure.message if rank == 0 else f"rank {rank}: {failure.message}")


def _kind_of(error: ShardwiseError) -> type[ShardwiseError]:
    return next(kind for kind in _KINDS if isinstance(error, kind))


def _sentence(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
