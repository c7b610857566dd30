"""Functions of the estimates that a search calls again and again with what decides their result unchanged.

A search compares thousands of configurations which differ in a few settings, and most parts of an estimate depend on
fewer. `once` computes a result once for equal arguments, `same_for_all` once for all configurations that differ only in
settings without an effect on it. Whoever changes a constant of the estimates calls `forget` afterwards.
"""

from collections.abc import Callable
from functools import lru_cache, wraps
from operator import attrgetter
from typing import ParamSpec, TypeVar, TypeVarTuple

from msgspec.structs import replace

from shardwise.trainer.planning.configuration import Configuration

_MOST_RESULTS = 4096  # of a function; a search needs some hundreds

_Arguments = ParamSpec("_Arguments")
_Others = TypeVarTuple("_Others")
_Result = TypeVar("_Result")

_forgets: list[Callable[[], None]] = []


def once(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function, computed once for equal arguments; all are hashable."""
    computed = lru_cache(maxsize=_MOST_RESULTS)(function)
    _forgets.append(computed.cache_clear)
    return computed  # type: ignore[return-value]  # typeshed: any hashable arguments


def same_for_all(
    *reads: str, **settings: object
) -> Callable[[Callable[[Configuration, *_Others], _Result]], Callable[[Configuration, *_Others], _Result]]:
    """A function of a configuration that does not depend on these settings, called with the given values of them.

    `reads` names what it reads of others, such as `strategy.precision`: all else of the strategy has no effect either.
    `__wrapped__` is the function itself, for the configuration as it is. No result is None.
    """
    partly = {name.partition(".")[0] for name in reads}
    names = [name for name in Configuration.__struct_fields__ if name not in settings and name not in partly]
    values_of = attrgetter(*names, *reads)

    def decorate(
        function: Callable[[Configuration, *_Others], _Result],
    ) -> Callable[[Configuration, *_Others], _Result]:
        known: dict[object, _Result] = {}
        _forgets.append(known.clear)

        @wraps(function)
        def shared(configuration: Configuration, /, *others: *_Others) -> _Result:
            key = (values_of(configuration), others)
            found = known.get(key)
            if found is None:
                if len(known) == _MOST_RESULTS:
                    known.clear()
                found = known[key] = function(replace(configuration, **settings), *others)
            return found

        return shared

    return decorate


def forget() -> None:
    """Forgets all results."""
    for clear in _forgets:
        clear()
