"""A picture is a PNG that any reader takes, and its letters are where they were written."""

import struct
import zlib

from launch.png_canvas import LETTER_HEIGHT, Canvas, text_width


def chunks_of(png: bytes) -> dict[bytes, bytes]:
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    found, place = {}, 8
    while place < len(png):
        size, kind = struct.unpack(">I4s", png[place : place + 8])
        content = png[place + 8 : place + 8 + size]
        assert struct.unpack(">I", png[place + 8 + size : place + 12 + size])[0] == zlib.crc32(kind + content)
        found[kind] = content
        place += 12 + size
    return found


def rows_of(canvas: Canvas) -> list[bytes]:
    data = zlib.decompress(chunks_of(canvas.png())[b"IDAT"])
    return [data[row + 1 : row + 1 + canvas.width] for row in range(0, len(data), canvas.width + 1)]


PALETTE = ((255, 255, 255), (0, 0, 0))


def test_the_chunks_of_a_picture_say_its_size_and_its_colours():
    chunks = chunks_of(Canvas(7, 3, PALETTE).png())
    assert list(chunks) == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    assert struct.unpack(">IIBBBBB", chunks[b"IHDR"]) == (7, 3, 8, 3, 0, 0, 0)
    assert chunks[b"PLTE"] == bytes([255, 255, 255, 0, 0, 0])


def test_a_rectangle_is_filled_and_cut_at_the_edge():
    canvas = Canvas(4, 3, PALETTE)
    canvas.fill(2, 1, 10, 10, 1)
    canvas.fill(-3, -3, 4, 4, 1)
    assert rows_of(canvas) == [b"\1\0\0\0", b"\0\0\1\1", b"\0\0\1\1"]


def test_a_letter_is_drawn_and_what_has_none_is_a_question_mark():
    def drawn(text: str) -> list[str]:
        canvas = Canvas(text_width(text, scale=1), LETTER_HEIGHT, PALETTE)
        canvas.write(text, 0, 0, 1, scale=1)
        return ["".join("#" if pixel else "." for pixel in row) for row in rows_of(canvas)]

    assert drawn("L") == ["#.....", *["#....."] * 5, "#####.", "......"]
    assert drawn("ü") == drawn("?") != drawn("u")
    assert all(any("#" in row for row in drawn(chr(code))) for code in range(33, 127))
