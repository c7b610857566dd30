"""In which order rows are learned: a function of (seed, epoch, position), so that position needs no state.

Every epoch is a permutation of the rows, computed one index at a time: nothing the size of the data is stored or
shuffled, and any number of ranks, at any step, agree without a word. A run resumes at a step, and the same step holds
the same rows on one rank or on a thousand.

The permutation of [0, n) is a Feistel network on a rectangle: a number below a * b, with a and b the smallest that are
near sqrt(n) and cover n, is a pair (left, right), and each round adds to one half a hash of the other, modulo the
side. That is a bijection whatever the hash is, because it can be undone round by round. Numbers from n up are walked
again until they land below n ("cycle walking", Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002); as
a * b - n is below sqrt(n) + 1, that hardly ever happens. The hash is the finaliser of splitmix64 (Steele, Lea and
Flood, "Fast Splittable Pseudorandom Number Generators", 2014). It mixes well and keeps no secrets.
"""

from functools import lru_cache
from math import isqrt

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_DOUBLE_ROUNDS = 4


def row_of_sequence(sequence: int, *, seed: int, num_rows: int) -> int:
    """The row that the `sequence`-th sequence of a run is; sequences are counted over all epochs, from 0."""
    if sequence < 0 or num_rows < 1:
        raise ValueError(f"sequence {sequence} of {num_rows} rows")
    epoch, position = divmod(sequence, num_rows)
    return permuted(position, num_rows=num_rows, seed=seed, epoch=epoch)


def permuted(position: int, *, num_rows: int, seed: int, epoch: int) -> int:
    """Where the permutation of [0, num_rows) that belongs to (seed, epoch) sends `position`."""
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
