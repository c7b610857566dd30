"""Order of the training rows: a function of (seed, epoch, position), so that a position needs no state.

Every epoch is a permutation of the rows, computed one index at a time: nothing the size of the data is stored or
shuffled, and any number of ranks, at any step, agree without communication. A run resumes at a step, and the same step
has the same rows on one rank or on a thousand. Epochs follow each other without a gap: step s is the sequences
[s * sequences_per_step, (s + 1) * sequences_per_step) of all epochs laid end to end, so that each of them has every
row exactly once, and a step in which one epoch ends has the rest of its rows from the next.

Rows of unequal length are grouped, so that little of a batch is padding: the steps that lie within one epoch are cut
into windows of at most WINDOW_STEPS, all alike but for one step; the rows of a window are sorted by length, cut into
steps, and the steps are shuffled. A step that two epochs share is not grouped. Within a step the longest row comes
first in either case: micro batches that are cut from it in turn hold rows of like length.

A longest row of the data is in the first step, so that a run out of memory fails there: in the first epoch it is
exchanged with the row that would be first.

The permutation of [0, n) is a Feistel network on a rectangle: a number below a * b, with a and b the smallest that are
near sqrt(n) and cover n, is a pair (left, right), and each round adds to one half a hash of the other, modulo the
side. That is a bijection for any hash, because it can be undone round by round. Numbers from n up are walked
again until they land below n ("cycle walking", Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002); as
a * b - n is below sqrt(n) + 1, that hardly ever happens. The hash is the finaliser of splitmix64 (Steele, Lea and
Flood, "Fast Splittable Pseudorandom Number Generators", 2014). It mixes well and is not cryptographic.
"""

from collections.abc import Callable
from functools import lru_cache
from math import isqrt

WINDOW_STEPS = 64
_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_DOUBLE_ROUNDS = 4


class DataOrder:
    """The rows of every step of a run."""

    def __init__(
        self,
        length_of: Callable[[int], int],
        *,
        num_rows: int,
        longest: int,  # index of a row of the greatest length
        seed: int,
        sequences_per_step: int,
        is_grouped: bool,
    ) -> None:
        if num_rows < 1 or sequences_per_step < 1:
            raise ValueError(f"{sequences_per_step} sequences a step of {num_rows} rows")
        self._length_of = length_of
        self._num_rows = num_rows
        self._seed = seed
        self._sequences_per_step = sequences_per_step
        self._is_grouped = is_grouped
        first = permuted(0, num_rows=num_rows, seed=seed, epoch=0)
        self._exchanged = {first: longest, longest: first} if length_of(first) < length_of(longest) else {}
        self._steps_of_window = lru_cache(maxsize=2)(self._make_window)

    def rows_of_step(self, step: int) -> list[int]:
        """The rows of the global batch of a step, counted from 0; the longest first.

        A grouped step computes its window: O(window) at the first step of the window, O(1) at the others.
        """
        if step < 0:
            raise ValueError(f"step {step}")
        first = step * self._sequences_per_step
        epoch, position = divmod(first, self._num_rows)
        if self._is_grouped and position + self._sequences_per_step <= self._num_rows:
            return self._grouped(epoch, position)
        sequences = range(first, first + self._sequences_per_step)
        return self._by_length([self._row(*divmod(sequence, self._num_rows)) for sequence in sequences])

    def _grouped(self, epoch: int, position: int) -> list[int]:
        """The rows of the step that starts at `position` of an epoch and lies within it."""
        first = -epoch * self._num_rows % self._sequences_per_step  # where the first such step of the epoch starts
        num_steps = (self._num_rows - first) // self._sequences_per_step
        number = (position - first) // self._sequences_per_step
        num_windows = -(-num_steps // WINDOW_STEPS)
        window = ((number + 1) * num_windows - 1) // num_steps
        begin, end = (num * num_steps // num_windows for num in (window, window + 1))
        return self._steps_of_window(epoch, first + begin * self._sequences_per_step, end - begin)[number - begin]

    def _make_window(self, epoch: int, position: int, num_steps: int) -> list[list[int]]:
        size = self._sequences_per_step
        rows = self._by_length([self._row(epoch, position + place) for place in range(num_steps * size)])
        order = [
            permuted(step, num_rows=num_steps, seed=self._seed ^ (position + 1) * _GOLDEN_GAMMA, epoch=epoch)
            for step in range(num_steps)
        ]
        if epoch == position == 0:  # the longest rows are for the first step
            place = order.index(0)
            order[0], order[place] = order[place], order[0]
        return [rows[number * size : (number + 1) * size] for number in order]

    def _row(self, epoch: int, position: int) -> int:
        row = permuted(position, num_rows=self._num_rows, seed=self._seed, epoch=epoch)
        return self._exchanged.get(row, row) if epoch == 0 else row

    def _by_length(self, rows: list[int]) -> list[int]:
        return sorted(rows, key=self._length_of, reverse=True)  # of equal length in the order they had


def permuted(position: int, *, num_rows: int, seed: int, epoch: int) -> int:
    """Image of `position` under the permutation of [0, num_rows) of (seed, epoch)."""
    if not 0 <= position < num_rows:
        raise ValueError(f"position {position} of {num_rows} rows")
    left_side = isqrt(num_rows - 1) + 1
    right_side = -(-num_rows // left_side)
    keys = _round_keys(seed, epoch)
    index = position
    while True:
        index = _feistel(index, left_side, right_side, keys)
        if index < num_rows:
            return index


def _feistel(index: int, left_side: int, right_side: int, keys: tuple[tuple[int, int], ...]) -> int:
    left, right = divmod(index, right_side)
    for left_key, right_key in keys:
        left = (left + _mix(right ^ left_key)) % left_side
        right = (right + _mix(left ^ right_key)) % right_side
    return left * right_side + right


@lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[tuple[int, int], ...]:
    state = _mix(_mix(seed & _MASK) ^ (epoch + 1) * _GOLDEN_GAMMA & _MASK)
    keys = [_mix((state + number * _GOLDEN_GAMMA) & _MASK) for number in range(2 * _DOUBLE_ROUNDS)]
    return tuple(zip(keys[::2], keys[1::2], strict=True))


def _mix(word: int) -> int:
    word = (word + _GOLDEN_GAMMA) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
