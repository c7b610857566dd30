"""Problems a person can fix, each with the exit code that `shardwise` ends with.

    ShardwiseError                1  a fault of ours: please report it
    +-- InputError                2  the job file, the input or the command line is wrong
    |   +-- InputProblemsError    2  several of them, shown together
    +-- NothingFitsError          3  no strategy fits this machine
    +-- EnvironmentFaultError     4  permission, disk, missing library, or the run failed

Three more endings are not errors but outcomes of a run: 5 (out of memory after every fallback), 75 (stopped to be
requeued) and 130 (Ctrl-C, or a spent limit, after a saved checkpoint).
A message is one to three lines: what is wrong, with both numbers where there are two, and what would do.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple


class ExitCode(IntEnum):
    """Exit codes of every `shardwise` command."""

    DONE = 0
    INTERNAL = 1
    INPUT = 2
    NOTHING_FITS = 3
    ENVIRONMENT = 4
    OUT_OF_MEMORY = 5
    REQUEUE = 75
    INTERRUPTED = 130


class ShardwiseError(Exception):
    """A problem with a sentence for the person who can mend it."""

    exit_code: ExitCode = ExitCode.INTERNAL


class InputError(ShardwiseError):
    """The job file, the data, the model or the command line is wrong."""

    exit_code = ExitCode.INPUT


class InputProblemsError(InputError):
    """Every problem found in one input, so that one run shows them all."""

    def __init__(self, problems: Sequence[str]) -> None:
        if not problems:
            raise ValueError("InputProblemsError needs at least one problem")
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class Attempt(NamedTuple):
    """The smallest configuration of a strategy, and a budget that it exceeds."""

    method: str
    strategy: str
    resource: str  # card, RAM of a rank, host RAM, pinned host RAM, NVMe, time or cost
    need: float  # bytes, seconds for time, the job's currency for cost
    usable: float  # in the unit of `need`


class NothingFitsError(ShardwiseError):
    """No strategy fits; the message names the smallest change that would.

    `tried` has the strategies that come nearest, those that exceed their budgets least first; empty if none was
    searched.
    """

    exit_code = ExitCode.NOTHING_FITS

    def __init__(self, message: str, tried: Sequence[Attempt] = ()) -> None:
        super().__init__(message)
        self.tried = tuple(tried)


class EnvironmentFaultError(ShardwiseError):
    """The machine is in the way: a permission, a full disk, a missing library, a run that failed."""

    exit_code = ExitCode.ENVIRONMENT


def close_matches(name: str, known: Iterable[str], *, count: int = 1, cutoff: float = 0.66) -> list[str]:
    """Up to `count` of the known names that resemble `name`, the closest first: the "did you mean" of a message."""
    from difflib import get_close_matches  # a millisecond at every start, for a slip of the pen

    return get_close_matches(name, list(known), n=count, cutoff=cutoff)
