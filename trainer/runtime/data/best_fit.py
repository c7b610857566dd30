"""Packs documents into rows by best-fit decreasing, so that hardly any document is cut and hardly any row ends short.

The longest document that is left goes into the fullest row that still has room for it, or into a new row (Ding et al.,
"Fewer Truncations Improve Language Modeling", arXiv:2404.10830, section 3.2). Never more
than 11/9 of the fewest rows that would do, and 4 (Johnson et al., "Worst-Case Performance Bounds for Simple
One-Dimensional Packing Algorithms", 1974).

Documents of one length are placed together: as many as fit go into the fullest row with room, which then is still the
fullest, and rows of equal room are filled alike. So the work is that of the lengths that differ, not of the documents,
and each step moves many rows at once. Which rooms there are is a bit each in one large number; the smallest that
suffices is its lowest bit from there on.
"""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def best_fit_rows(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The row of each document [num_documents], rows numbered in the order of their first document.

    A function of the lengths, each from 1 to `capacity`, and their order; ValueError for a length beyond.
    """
    if not len(lengths):
        return np.zeros(0, np.int64)
    if lengths.min() < 1 or lengths.max() > capacity:
        raise ValueError(f"lengths from {lengths.min()} to {lengths.max()}; a row holds 1 to {capacity}")
    longest_first = np.argsort(-lengths, kind="stable")
    rows = np.empty(len(lengths), np.int64)
    rows[longest_first] = _placed(lengths[longest_first], capacity)
    _, first_documents, numbers = np.unique(rows, return_index=True, return_inverse=True)
    rank = np.empty(len(first_documents), np.int64)
    rank[np.argsort(first_documents)] = np.arange(len(first_documents))
    return rank[numbers]


def _placed(lengths: NDArray[np.int64], capacity: int) -> NDArray[np.int64]:
    """The row of each document of descending lengths."""
    rows = np.empty(len(lengths), np.int64)
    open_rows = _OpenRows(capacity)
    bounds = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(lengths)]
    for first, end in pairwise(bounds):
        length = int(lengths[first])
        while first < end:
            room, taken = open_rows.take(length, end - first)
            each = room // length
            placed = min(end - first, len(taken) * each)
            rows[first : first + placed] = np.repeat(taken, each)[:placed]
            first += placed
            last = placed - (len(taken) - 1) * each  # documents in the last of them
            open_rows.put_back(room - each * length, taken[:-1] if last < each else taken)
            if last < each:
                open_rows.put_back(room - last * length, taken[-1:])
    return rows


class _OpenRows:
    """Rows that are not full, by the room that they have."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_room: dict[int, list[int]] = {}
        self._rooms = 0  # bit r: some row has room for r tokens
        self._num_rows = 0

    def take(self, length: int, count: int) -> tuple[int, list[int]]:
        """(room, rows): as many of the fullest rows with room for `length` as `count` documents need, at most."""
        above = self._rooms >> length
        if not above:
            needed = -(-count // (self._capacity // length))
            self._num_rows += needed
            return self._capacity, list(range(self._num_rows - needed, self._num_rows))
        room = length + (above & -above).bit_length() - 1
        rows = self._by_room[room]
        needed = min(len(rows), -(-count // (room // length)))
        taken = rows[-needed:]
        del rows[-needed:]
        if not rows:
            self._rooms ^= 1 << room
        return room, taken

    def put_back(self, room: int, rows: list[int]) -> None:
        if rows and room:
            self._by_room.setdefault(room, []).extend(rows)
            self._rooms |= 1 << room
