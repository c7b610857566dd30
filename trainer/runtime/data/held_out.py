"""Which part of the training sources is held out for evaluation: decided by content, so that it never changes.

A unit of text is held out when the hash of its content is below a threshold. New data, another order or another folder
never moves a unit from one side to the other, and a copy of a text is always on the same side as the original, so that
nothing that is learned is scored.

A unit is a whole document (of a very long one, each block). Where few documents make one side miss its share by more
than a factor of two, units are pieces of 4096 characters cut at line ends; and where even these leave a side empty, the
one piece with the lowest or highest hash goes there.
"""

from collections.abc import Iterator
from hashlib import blake2b
from itertools import groupby
from typing import NamedTuple

from trainer.runtime.data.sources.examples import Content, identity_of, size_of
from trainer.runtime.data.sources.text_sources import Block, cut_at_line_ends
from trainer.spec.errors import InputError

PIECE_CHARS = 4096
_HASH_BYTES = 8
_HASH_END = 2 ** (8 * _HASH_BYTES)


class Split(NamedTuple):
    """The rule: units whose hash is below `threshold` are held out."""

    threshold: int
    piece_chars: int | None = None  # None: documents are not cut


class Unit(NamedTuple):
    """A stretch of one document that lies on one side of the split."""

    content: Content
    weight: float
    opens_document: bool  # nothing of the same document precedes it directly on its side
    is_held_out: bool
    where: str  # the file, or file:row


ALL_TRAIN = Split(threshold=0)
ALL_HELD_OUT = Split(threshold=_HASH_END)


class SplitCensus:
    """Sees every block once and then names the split that comes near the share asked for."""

    def __init__(self, share: float) -> None:
        if not 0 < share < 1:
            raise InputError(f"data.eval: {share:.0%} cannot be held out; give a share above 0% and below 100%")
        self.share = share
        self.by_document = _Tally(Split(threshold=int(share * _HASH_END)))
        self.by_piece = _Tally(Split(threshold=int(share * _HASH_END), piece_chars=PIECE_CHARS))

    def add(self, block: Block) -> None:
        self.by_document.add(block)
        self.by_piece.add(block)

    def split(self) -> Split:
        """The split; InputError if there is nothing to divide."""
        held_out = self.by_document.held_out_share
        if self.share / 2 <= held_out <= self.share * 2 and (1 - self.share) / 2 <= 1 - held_out:
            return self.by_document.split
        pieces = self.by_piece
        if 0 < pieces.held_out_share < 1:
            return pieces.split
        if pieces.lowest_hash == pieces.highest_hash:
            raise InputError(
                f"data.eval: {self.share:.3g} of {pieces.size} characters cannot be held out: there is one piece;\n"
                "give more text, a file of its own with data.eval=FILE, or data.eval=none"
            )
        threshold = pieces.lowest_hash + 1 if pieces.held_out_share == 0 else pieces.highest_hash
        return Split(threshold=threshold, piece_chars=PIECE_CHARS)


class _Tally:
    """How much a split would hold out."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.size = self.held_out_size = 0  # characters or tokens
        self.lowest_hash, self.highest_hash = _HASH_END, 0

    def add(self, block: Block) -> None:
        for content in _cut(block.content, self.split):
            key = content_hash(content)
            self.lowest_hash, self.highest_hash = min(key, self.lowest_hash), max(key, self.highest_hash)
            size = size_of(content)
            self.size += size
            self.held_out_size += size if key < self.split.threshold else 0

    @property
    def held_out_share(self) -> float:
        return self.held_out_size / max(self.size, 1)


def units(blocks: Iterator[Block], split: Split) -> Iterator[Unit]:
    """The blocks of a split in order, cut where the side changes; neighbours on one side stay in one piece."""
    was_held_out = None
    for block in blocks:
        if block.opens_document:
            was_held_out = None
        for content, is_held_out in _sides(block, split):
            yield Unit(content, block.weight, is_held_out is not was_held_out, is_held_out, block.where)
            was_held_out = is_held_out


def _sides(block: Block, split: Split) -> Iterator[tuple[Content, bool]]:
    if not isinstance(block.content, str):
        yield block.content, content_hash(block.content) < split.threshold
        return
    pieces = _cut(block.content, split)
    for is_held_out, neighbours in groupby(pieces, key=lambda piece: content_hash(piece) < split.threshold):
        yield "".join(map(str, neighbours)), is_held_out


def _cut(content: Content, split: Split) -> Iterator[Content]:
    if not isinstance(content, str) or split.piece_chars is None:
        yield content
    else:
        yield from cut_at_line_ends(content, split.piece_chars)


def content_hash(content: Content) -> int:
    """64 bits that depend on the content alone."""
    return int.from_bytes(blake2b(identity_of(content), digest_size=_HASH_BYTES).digest(), "big")
