"""A picture is a PNG that any reader takes, and its letters are where they were written."""

import struct

from png_pixels import chunks_of, rows_of

from launch.png_canvas import LETTER_HEIGHT, Canvas, text_width

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
    assert rows_of(canvas.png()) == [b"\1\0\0\0", b"\0\0\1\1", b"\0\0\1\1"]


def test_a_letter_is_drawn_and_what_has_none_is_a_question_mark():
    def drawn(text: str) -> list[str]:
        canvas = Canvas(text_width(text, scale=1), LETTER_HEIGHT, PALETTE)
        canvas.write(text, 0, 0, 1, scale=1)
        return ["".join("#" if pixel else "." for pixel in row) for row in rows_of(canvas.png())]

    assert drawn("L") == ["#.....", *["#....."] * 5, "#####.", "......"]
    assert drawn("ü") == drawn("?") != drawn("u")
    assert all(any("#" in row for row in drawn(chr(code))) for code in range(33, 127))
