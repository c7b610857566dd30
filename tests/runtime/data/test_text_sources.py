"""What is read out of files, and what is said of files and rows that cannot be used."""

import gzip
import json
import lzma
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.trainer.runtime.data.sources import scan
from shardwise.trainer.runtime.data.sources.examples import TokenIds
from shardwise.trainer.runtime.data.sources.files import BadRow
from shardwise.trainer.runtime.data.sources.rows import RowReading
from shardwise.trainer.runtime.data.sources.scan import Block, cut_at_line_ends, read_blocks, survey
from shardwise.trainer.spec.data.request import SourceFile
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import DataFormat

TEXT = RowReading(DataFormat.TEXT, {}, vocab_size=100)
TOKENS = RowReading(DataFormat.TOKENS, {}, vocab_size=100)


def source(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    status = path.stat()
    return SourceFile(path=str(path), size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def read(file, reading=TEXT):
    """Contents and bad rows, with the folder taken off their names."""
    return [
        item.content if isinstance(item, Block) else str(item).rsplit("/", 1)[-1]
        for item in read_blocks(file, survey(file).defect, reading)
    ]


@pytest.mark.parametrize(
    "content, defect",
    [
        (b"plain\n", None),
        ("é 日本\n".encode(), None),
        (b"\xef\xbb\xbfwith a mark", None),
        (b"ab\0cd", "NUL byte at offset 2"),
        (b"ab\xffcd", "byte 0xff at offset 2 is not UTF-8 (invalid start byte)"),
        (b"ab\xc3", "byte 0xc3 at offset 2 is not UTF-8 (unexpected end of data)"),
        (b"\xff\0", "byte 0xff at offset 0 is not UTF-8"),
        (b"\0\xff", "NUL byte at offset 0"),
        (b"\xc3\0", "byte 0xc3 at offset 0 is not UTF-8"),
    ],
)
@pytest.mark.parametrize("read_bytes", [1, 3, 2**20])
def test_the_first_byte_that_is_not_text_is_named(tmp_path, monkeypatch, content, defect, read_bytes):
    monkeypatch.setattr(scan, "READ_BYTES", read_bytes)
    found = survey(source(tmp_path / "a.txt", content)).defect
    assert found is None if defect is None else defect in found


def test_a_file_of_rows_is_not_judged_as_a_whole(tmp_path):
    assert survey(source(tmp_path / "a.jsonl", b"\xff\n")).defect is None


def test_a_digest_is_of_the_content(tmp_path):
    digests = [
        survey(source(tmp_path / name, content)).digest
        for name, content in (("a.txt", "one"), ("b.txt", "one"), ("c.txt", "two"))
    ]
    assert digests[0] == digests[1] != digests[2]


def test_a_text_file_is_one_document(tmp_path):
    assert read(source(tmp_path / "a.txt", "one\r\ntwo\n")) == ["one\r\ntwo\n"]


@pytest.mark.parametrize("content", ["\ufefftext", "text"])
def test_a_byte_order_mark_is_not_text(tmp_path, content):
    assert read(source(tmp_path / "a.txt", content)) == ["text"]


def test_a_blank_text_file_is_nothing(tmp_path):
    assert read(source(tmp_path / "a.txt", " \n\n")) == []


@pytest.mark.parametrize("block_chars", [1, 7, 50])
@pytest.mark.parametrize("read_bytes", [1, 5, 64])
def test_a_large_file_comes_in_blocks_that_are_its_text(tmp_path, monkeypatch, block_chars, read_bytes):
    monkeypatch.setattr(scan, "BLOCK_CHARS", block_chars)
    monkeypatch.setattr(scan, "READ_BYTES", read_bytes)
    text = "первая строка\nand a second, much longer than a block\n\n日本\n" * 3
    file = source(tmp_path / "a.txt", text)
    blocks: list[Any] = list(read_blocks(file, None, TEXT))
    assert "".join(block.content for block in blocks) == text
    assert [block.opens_document for block in blocks] == [True] + [False] * (len(blocks) - 1)
    assert all(len(block.content) <= max(block_chars, 1) for block in blocks)


@given(text=st.text(alphabet="ab\n", max_size=200), max_chars=st.integers(1, 30))
def test_pieces_are_short_and_end_with_lines_where_they_can(text, max_chars):
    pieces = list(cut_at_line_ends(text, max_chars))
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= max_chars for piece in pieces)
    assert all(piece.endswith("\n") or "\n" not in piece for piece in pieces[:-1])


def test_rows_are_documents_and_blank_lines_are_not_rows(tmp_path):
    file = source(tmp_path / "a.jsonl", lines({"text": "one"}) + "\n" + lines({"text": "two", "id": 2}))
    assert read(file) == ["one", "two"]


def test_an_array_is_rows(tmp_path):
    file = source(tmp_path / "a.json", json.dumps([{"text": "one"}, {"text": "two"}, {"txt": "three"}], indent=2))
    assert read(file) == ["one", "two", 'a.json:3: has no field "text"; its fields: txt']


def test_json_lines_may_be_called_json(tmp_path):
    assert read(source(tmp_path / "a.json", lines({"text": "one"}, {"text": "two"}))) == ["one", "two"]


def test_a_damaged_array_is_one_bad_row_that_names_the_file(tmp_path):
    [bad] = read(source(tmp_path / "a.json", '[{"text": "one"}, '))
    assert bad.startswith("a.json: is not valid JSON")


def test_compressed_text_is_judged_and_read_by_its_content(tmp_path):
    good = source(tmp_path / "a.txt.gz", gzip.compress(b"one\ntwo\n"))
    assert read(good) == ["one\ntwo\n"]
    bad = source(tmp_path / "b.txt.xz", lzma.compress(b"ab\xffcd"))
    assert survey(bad).defect == "is not text: byte 0xff at offset 2 is not UTF-8 (invalid start byte)"


def test_a_digest_is_of_the_bytes_as_they_lie(tmp_path):
    content = gzip.compress(b"text", mtime=0)
    assert survey(source(tmp_path / "a.txt.gz", content)).digest == blake2b(content, digest_size=32).digest()


def test_rows_of_tokens_are_documents(tmp_path):
    file = source(tmp_path / "a.jsonl", lines({"tokens": [1, 2, 99]}, {"tokens": [1, 100]}))
    assert read(file, TOKENS) == [TokenIds([1, 2, 99]), "a.jsonl:2: token 100 is not in the model's vocabulary of 100"]


def test_a_bad_row_stands_where_it_was_read(tmp_path):
    file = source(tmp_path / "a.jsonl", b'{"text": "good"}\n\n{"txt": 1}\n{"text": "good"}\n')
    assert read(file) == ["good", 'a.jsonl:3: has no field "text"; its fields: txt', "good"]


def test_a_file_that_changed_since_it_was_listed_is_refused(tmp_path):
    file = source(tmp_path / "a.txt", "text")
    source(tmp_path / "a.txt", "more text")
    with pytest.raises(InputError, match=r"changed since it was listed \(4 bytes then, 9 now\)"):
        survey(file)


def test_a_file_that_went_is_refused(tmp_path):
    file = source(tmp_path / "a.txt", "text")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(InputError, match="is gone since"):
        list(read_blocks(file, None, TEXT))


def test_a_bad_text_file_gives_no_block(tmp_path):
    file = source(tmp_path / "a.txt", b"good text\xff")
    assert list(read_blocks(file, survey(file).defect, TEXT)) == [
        BadRow(file.path, "is not text: byte 0xff at offset 9 is not UTF-8 (invalid start byte)")
    ]
