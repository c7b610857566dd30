"""Reads a stream of documents window by window: of every source its share, in the order of its files.

The stream is the listed files in order. A window is the consecutive documents whose text reaches its size; a text that
is longer is cut at a line end, and its rest begins the next window. Of several sources each gives a share of every
window, its weight times its bytes; their documents are mixed when the rows are shuffled. A source that ends begins
again, its files in another order. Within one window a source is not read more often than its weight says, so that
small data give small windows.

A place is a count of what was read of a file: going on there reads the file again up to it, and tokenises nothing.
"""

import math
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from trainer.runtime.data.sources.examples import size_of
from trainer.runtime.data.sources.row_shapes import RowReading
from trainer.runtime.data.sources.source_streams import BadRow
from trainer.runtime.data.sources.text_sources import Block, read_unsurveyed_blocks
from trainer.runtime.data.stream.files import FileFetcher
from trainer.runtime.data.stream.values import Place
from trainer.spec.data.order import permuted
from trainer.spec.data.request import SourceFile

Item = Block | BadRow


class StreamReader:
    """All sources of a stream, from a place in each of them."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        window_bytes: int,
        begin: Sequence[Place],
        reading: RowReading,
        fetcher: FileFetcher,
    ) -> None:
        groups = grouped(files)
        places = begin or [Place()] * len(groups)
        self._sources = [
            _SourceReader(group, place, reading, fetcher) for group, place in zip(groups, places, strict=True)
        ]
        bytes_drawn = [sum(file.size_bytes for file in group) * group[0].weight for group in groups]
        size = window_bytes if len(groups) == 1 else min(window_bytes, math.ceil(sum(bytes_drawn)))
        self._sizes = [size * drawn / sum(bytes_drawn) for drawn in bytes_drawn]
        self._num_passes = [1 if len(groups) == 1 else math.ceil(group[0].weight) for group in groups]

    @property
    def places(self) -> tuple[Place, ...]:
        """Where the next window begins."""
        return tuple(source.place for source in self._sources)

    def read_window(self) -> list[Item]:
        """The next window, its sources one after the other."""
        return [
            item
            for source, size, num_passes in zip(self._sources, self._sizes, self._num_passes, strict=True)
            for item in source.read(size, num_passes)
        ]


def grouped(files: Sequence[SourceFile]) -> list[list[SourceFile]]:
    """The files of each source."""
    groups: dict[int, list[SourceFile]] = {}
    for file in files:
        groups.setdefault(file.source, []).append(file)
    return list(groups.values())


class _SourceReader:
    """The documents of one source, without an end."""

    def __init__(self, files: Sequence[SourceFile], place: Place, reading: RowReading, fetcher: FileFetcher) -> None:
        self._files, self._reading, self._fetcher = files, reading, fetcher
        self.place = place
        self._items = self._read_from(place)

    def read(self, size: float, num_passes: int) -> Iterator[Item]:
        """Items until they have `size` characters, or until `num_passes` passes began and ended here."""
        num_chars = num_whole = 0
        begins_pass, opens = self.place == Place(num_passes=self.place.num_passes), True
        while num_chars < size and num_whole < num_passes:
            item, self.place = next(self._items)
            if item is None:
                num_whole += begins_pass
                begins_pass = True
            elif isinstance(item, Block):
                num_chars += size_of(item.content)
                yield item._replace(opens_document=opens or item.opens_document)
                opens = False
            else:
                yield item

    def _read_from(self, place: Place) -> Iterator[tuple[Item | None, Place]]:
        """Each item with the place after it; None at the end of a pass."""
        num_passes, first_file, num_items = place.num_passes, place.file, place.num_items
        while True:
            for number in range(first_file, len(self._files)):
                file = self._files[self._file_of(number, num_passes)]
                for count, item in enumerate(self._read_file(file), start=1):
                    if count > num_items:
                        yield item, Place(num_passes=num_passes, file=number, num_items=count)
                num_items = 0
            num_passes, first_file = num_passes + 1, 0
            yield None, Place(num_passes=num_passes)

    def _file_of(self, number: int, num_passes: int) -> int:
        """The first pass is in the order of the listing."""
        if num_passes == 0:
            return number
        return permuted(number, num_rows=len(self._files), seed=0, epoch=num_passes)

    def _read_file(self, file: SourceFile) -> Iterator[Item]:
        with self._fetcher.opened(file) as local:
            alike = replace(local, weight=1.0)  # the share of a source is that of its windows
            for item in read_unsurveyed_blocks(alike, self._reading):
                yield item._replace(where=item.where.replace(local.path, file.path))
