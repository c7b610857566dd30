"""Pixels, rectangles and words, written as PNG by the standard library alone: one chart needs no drawing library.

A canvas holds one byte a pixel, an index into its palette (PNG specification, colour type 3). Letters are five dots
wide and eight high, each given by its columns from the left, the lowest bit at the top; what has no letter is a
question mark.
"""

import struct
import zlib
from collections.abc import Sequence

Colour = tuple[int, int, int]
LETTER_WIDTH, LETTER_HEIGHT = 6, 8  # dots, with the gap to the next
_FIRST = " "
_COLUMNS = bytes.fromhex(
    "0000000000" "00005f0000" "0007000700" "147f147f14" "242a7f2a12" "2313086462" "3649562050" "0008070300"
    "001c224100" "0041221c00" "2a1c7f1c2a" "08083e0808" "0080703000" "0808080808" "0000606000" "2010080402"
    "3e5149453e" "00427f4000" "7249494946" "2141494d33" "1814127f10" "2745454539" "3c4a494931" "4121110907"
    "3649494936" "464949291e" "0000140000" "0040340000" "0008142241" "1414141414" "0041221408" "0201590906"
    "3e415d594e" "7c1211127c" "7f49494936" "3e41414122" "7f4141413e" "7f49494941" "7f09090901" "3e41415173"
    "7f0808087f" "00417f4100" "2040413f01" "7f08142241" "7f40404040" "7f021c027f" "7f0408107f" "3e4141413e"
    "7f09090906" "3e4151215e" "7f09192946" "2649494932" "03017f0103" "3f4040403f" "1f2040201f" "3f4038403f"
    "6314081463" "0304780403" "6159494d43" "007f414141" "0204081020" "004141417f" "0402010204" "4040404040"
    "0003070800" "2054547840" "7f28444438" "3844444428" "384444287f" "3854545418" "00087e0902" "18a4a49c78"
    "7f08040478" "00447d4000" "2040403d00" "7f10284400" "00417f4000" "7c04780478" "7c08040478" "3844444438"
    "fc18242418" "18242418fc" "7c08040408" "4854545424" "04043f4424" "3c4040207c" "1c2040201c" "3c4030403c"
    "4428102844" "4c9090907c" "4464544c44" "0008364100" "0000770000" "0041360800" "0201020402"
)  # fmt: skip


class Canvas:
    """A picture of `width` x `height` pixels, the first colour of the palette its paper."""

    def __init__(self, width: int, height: int, palette: Sequence[Colour]) -> None:
        self.width, self.height, self._palette = width, height, tuple(palette)
        self._pixels = bytearray(width * height)

    def fill(self, left: int, top: int, width: int, height: int, colour: int) -> None:
        """Fills a rectangle; what lies outside the canvas is left out."""
        begin, end = max(0, left), min(self.width, left + width)
        for row in range(max(0, top), min(self.height, top + height)):
            self._pixels[row * self.width + begin : row * self.width + end] = bytes([colour]) * max(0, end - begin)

    def write(self, text: str, left: int, top: int, colour: int, *, scale: int = 2) -> None:
        """Writes one line from its upper left corner."""
        for number, letter in enumerate(text):
            for column, bits in enumerate(_letter(letter)):
                for row in range(LETTER_HEIGHT):
                    if bits >> row & 1:
                        x = left + (number * LETTER_WIDTH + column) * scale
                        self.fill(x, top + row * scale, scale, scale, colour)

    def png(self) -> bytes:
        """The picture as a PNG file."""
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 3, 0, 0, 0)
        rows = (self._pixels[row * self.width : (row + 1) * self.width] for row in range(self.height))
        data = b"".join(b"\0" + row for row in rows)  # no filter: rows of one colour are short already
        palette = bytes(part for colour in self._palette for part in colour)
        chunks = ((b"IHDR", header), (b"PLTE", palette), (b"IDAT", zlib.compress(data, 9)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in chunks)


def text_width(text: str, *, scale: int = 2) -> int:
    """Pixels that a line takes."""
    return len(text) * LETTER_WIDTH * scale


def _letter(letter: str) -> bytes:
    place = ord(letter) - ord(_FIRST)
    place = place if 0 <= place * 5 < len(_COLUMNS) else ord("?") - ord(_FIRST)
    return _COLUMNS[place * 5 : place * 5 + 5]


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
