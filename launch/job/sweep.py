"""The points of a sweep: every combination of the values that `--sweep key=a,b` gives. Pure."""

import itertools
from collections.abc import Iterator, Sequence

from trainer.spec.errors import InputError

MOST_POINTS = 1000  # of an array on a cluster as installed (MaxArraySize 1001)
_OPENING, _CLOSING = "[{(", "]})"


def sweep_points(sweeps: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """The overrides of each point, one without any where nothing is swept; the last sweep varies fastest."""
    choices = [_choices(sweep) for sweep in sweeps]
    keys = [each[0].partition("=")[0] for each in choices]
    double = next((key for number, key in enumerate(keys) if key in keys[:number]), None)
    if double is not None:
        raise InputError(f"--sweep {double}: is swept twice; give all of its values at once: --sweep {double}=a,b,c")
    points = tuple(itertools.product(*choices))
    if len(points) > MOST_POINTS:
        raise InputError(f"--sweep: {len(points)} points; an array holds {MOST_POINTS} at most")
    return points


def _choices(sweep: str) -> list[str]:
    key, equals, values = (part.strip() for part in sweep.partition("="))
    found = [value.strip() for value in _parts(values)]
    if not key or not equals or not all(found):
        raise InputError(f"--sweep {sweep!r}: expected key=a,b, such as train.lr=1e-4,3e-4")
    if key.split(".")[0] in ("slurm", "output"):
        raise InputError(
            f"--sweep {key}: every point is a task of one array, so {key.split('.')[0]} is the same for all"
        )
    if len(set(found)) < len(found):
        raise InputError(f"--sweep {sweep}: a value stands there twice")
    return [f"{key}={value}" for value in found]


def _parts(text: str) -> Iterator[str]:
    """The text cut at commas, those in brackets or quotes left alone."""
    depth, quote, begin = 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter == "," and not depth:
            yield text[begin:place]
            begin = place + 1
        depth += (letter in _OPENING) - (letter in _CLOSING) if not quote else 0
    yield text[begin:]
