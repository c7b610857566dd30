"""Text and rows of text as blocks of documents. What is bad: test_bad_data."""

import gzip
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_request_factory import written_source

from shardwise.trainer.runtime.data.sources import scan
from shardwise.trainer.runtime.data.sources.rows import RowReading
from shardwise.trainer.runtime.data.sources.scan import Block, check_file, cut_at_line_ends, read_blocks
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import DataFormat

TEXT = RowReading(DataFormat.TEXT, {}, vocab_size=100)


def read(file):
    """Contents, and bad rows with the folder taken off their names."""
    return [
        item.content if isinstance(item, Block) else str(item).rsplit("/", 1)[-1]
        for item in read_blocks(file, TEXT, defect=check_file(file).defect)
    ]


@pytest.mark.parametrize(
    "content, defect",
    [
        (b"plain\n", None),
        ("\ufeffé 日本\n".encode(), None),
        (b"ab\0cd", "NUL byte at offset 2"),
        (b"ab\xffcd", "byte 0xff at offset 2 is not UTF-8 (invalid start byte)"),
        (b"ab\xc3", "byte 0xc3 at offset 2 is not UTF-8 (unexpected end of data)"),
        (b"\0\xff", "NUL byte at offset 0"),
        (b"\xc3\0", "byte 0xc3 at offset 0 is not UTF-8"),
    ],
)
@pytest.mark.parametrize("read_bytes", [1, 3, 2**20])
def test_the_first_byte_that_is_not_text_is_named(tmp_path, monkeypatch, content, defect, read_bytes):
    monkeypatch.setattr(scan, "READ_BYTES", read_bytes)
    for name, stored in (("a.txt", content), ("a.txt.gz", gzip.compress(content))):
        found = check_file(written_source(tmp_path / name, stored)).defect
        assert found is None if defect is None else defect in found
    assert check_file(written_source(tmp_path / "a.jsonl", content)).defect is None, "rows are judged one by one"


@pytest.mark.parametrize(
    ("name", "content", "items"),
    [
        ("a.txt", "\ufeffone\r\ntwo\n", ["one\r\ntwo\n"]),
        ("a.txt", " \n\n", []),
        ("a.txt", b"ab\xff", ["a.txt: is not text: byte 0xff at offset 2 is not UTF-8 (invalid start byte)"]),
        ("a.txt.gz", gzip.compress(b"one\ntwo\n", mtime=0), ["one\ntwo\n"]),
        (
            "a.jsonl",
            '{"text": "one"}\n\n{"txt": 1}\n{"text": "two", "id": 2}\n',
            ["one", 'a.jsonl:3: has no field "text"; its fields: txt', "two"],
        ),
    ],
)
def test_a_text_file_is_one_document_and_a_row_of_text_another(tmp_path, name, content, items):
    assert read(written_source(tmp_path / name, content)) == items


def test_a_compressed_text_that_was_cut_off_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"a\.txt\.gz: .*gzip"):
        check_file(written_source(tmp_path / "a.txt.gz", gzip.compress(b"text" * 1000)[:-10]))


@pytest.mark.parametrize("block_chars", [1, 7, 50])
@pytest.mark.parametrize("read_bytes", [1, 5, 64])
def test_a_large_file_comes_in_blocks_that_are_its_text(tmp_path, monkeypatch, block_chars, read_bytes):
    monkeypatch.setattr(scan, "BLOCK_CHARS", block_chars)
    monkeypatch.setattr(scan, "READ_BYTES", read_bytes)
    text = "первая строка\nand a second, much longer than a block\n\n日本\n" * 3
    blocks: list[Any] = list(read_blocks(written_source(tmp_path / "a.txt", text), TEXT))
    assert "".join(block.content for block in blocks) == text
    assert [block.opens_document for block in blocks] == [True] + [False] * (len(blocks) - 1)
    assert all(len(block.content) <= block_chars for block in blocks)


@given(text=st.text(alphabet="ab\n", max_size=200), max_chars=st.integers(1, 30))
def test_pieces_are_short_and_end_with_lines_where_they_can(text, max_chars):
    pieces = list(cut_at_line_ends(text, max_chars))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= max_chars for piece in pieces)
    assert all(piece.endswith("\n") or "\n" not in piece for piece in pieces[:-1])
