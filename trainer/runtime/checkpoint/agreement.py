"""One outcome on every rank: what fails on one fails on all, with the same sentence, and nobody waits for ever.

A rank that went on alone into the next collective would hang until its timeout; so a failure is exchanged first and
raised after. An error that is no person's to mend (a bug) still reaches the exchange, and then ends its rank.
"""

from collections.abc import Callable
from typing import TypeVar

from trainer.runtime.checkpoint.files.shards import NonFiniteStateError
from trainer.runtime.checkpoint.ranks import Ranks
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, InputError, ShardwiseError
from trainer.spec.value import Value

T = TypeVar("T")

_KINDS: tuple[type[ShardwiseError], ...] = (NonFiniteStateError, InputError, EnvironmentFaultError, ShardwiseError)


class _Failure(Value, frozen=True, kw_only=True):
    kind: str
    message: str


_UNFORESEEN = _Failure(kind=ShardwiseError.__name__, message="ended with an error; its log says which")


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
        answers = ranks.exchange(b"" if failure is None else codec.encode(failure))
    for rank, answer in enumerate(answers):
        if answer:
            _raise(codec.decode(answer, _Failure, origin=f"rank {rank}"), rank=rank)
    return result


def on_first(ranks: Ranks, work: Callable[[], bytes], *, doing: str) -> bytes:
    """Runs `work` on rank 0 and returns its answer on all; else raises the same on all."""
    return ranks.broadcast(together(ranks, lambda: work() if ranks.is_first else b"", doing=doing))


def _raise(failure: _Failure, *, rank: int) -> None:
    kind = next(kind for kind in _KINDS if kind.__name__ == failure.kind)
    raise kind(failure.message if rank == 0 else f"rank {rank}: {failure.message}")


def _kind_of(error: ShardwiseError) -> type[ShardwiseError]:
    return next(kind for kind in _KINDS if isinstance(error, kind))


def _sentence(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
