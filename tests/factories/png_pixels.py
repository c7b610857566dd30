"""The pixels of a PNG whose pixels are numbers of a palette, read without a library."""

import struct
import zlib


def chunks_of(png: bytes) -> dict[bytes, bytes]:
    """The chunks by name, each with its checksum right."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    found, place = {}, 8
    while place < len(png):
        size, kind = struct.unpack(">I4s", png[place : place + 8])
        content = png[place + 8 : place + 8 + size]
        assert struct.unpack(">I", png[place + 8 + size : place + 12 + size])[0] == zlib.crc32(kind + content)
        found[kind] = content
        place += 12 + size
    return found


def rows_of(png: bytes) -> list[bytes]:
    """One byte a pixel."""
    chunks = chunks_of(png)
    width, data = int.from_bytes(chunks[b"IHDR"][:4]), zlib.decompress(chunks[b"IDAT"])
    return [data[row + 1 : row + 1 + width] for row in range(0, len(data), width + 1)]
