"""What is read out of files, and what is said of files and rows that cannot be used."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.runtime import text_sources
from trainer.runtime.text_sources import (
    BadRow,
    Block,
    RowReading,
    cut_at_line_ends,
    detect_format,
    read_blocks,
    survey,
)
from trainer.spec.data_request import SourceFile
from trainer.spec.errors import InputError
from trainer.spec.job import DataFormat

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
    monkeypatch.setattr(text_sources, "READ_BYTES", read_bytes)
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
    monkeypatch.setattr(text_sources, "BLOCK_CHARS", block_chars)
    monkeypatch.setattr(text_sources, "READ_BYTES", read_bytes)
    text = "первая строка\nand a second, much longer than a block\n\n日本\n" * 3
    file = source(tmp_path / "a.txt", text)
    blocks = list(read_blocks(file, None, TEXT))
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


BAD_ROWS = [
    ('{"text": "ab"', "is not valid JSON"),
    (b'{"text": "\xff"}', "is not UTF-8"),
    (r'{"text": "\ud800"}', "is not valid JSON"),
    ("[" * 100_000, "nested too deep"),
    ("[1]", "is a list, not an object"),
    ("3", "is a number, not an object"),
    ('"text"', "is text, not an object"),
    ("null", "is null, not an object"),
    ("{}", 'has no field "text"; its fields: none'),
    ('{"body": "a", "id": 1}', 'has no field "text"; its fields: body, id'),
    ('{"text": 3}', 'field "text" is a number, not text'),
    ('{"text": null}', 'field "text" is null, not text'),
    ('{"text": ["a"]}', 'field "text" is a list, not text'),
    ('{"text": ""}', 'field "text" is empty'),
    ('{"text": " \\n"}', 'field "text" is empty'),
]


@pytest.mark.parametrize("row, reason", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_row_with_its_reason(tmp_path, row, reason):
    row = row if isinstance(row, bytes) else row.encode()
    content = b'{"text": "good"}\n\n' + row + b'\n{"text": "good"}\n'
    first, bad, last = read(source(tmp_path / "a.jsonl", content))
    assert (first, last) == ("good", "good")
    assert bad.startswith("a.jsonl:3: ")
    assert reason in bad


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"tokens": [1, 2, 99]}, [1, 2, 99]),
        ({"input_ids": [1, 2], "labels": [1, 2]}, [1, 2]),
        ({"tokens": [1, 100]}, "token 100 is not in the model's vocabulary of 100"),
        ({"tokens": [1, -1]}, "token -1 is not in the model's vocabulary of 100"),
        ({"tokens": [1]}, 'field "tokens" has 1 tokens'),
        ({"tokens": []}, 'field "tokens" has 0 tokens'),
        ({"tokens": [1, 2.0]}, "is not a list of token ids"),
        ({"tokens": [1, True]}, "is not a list of token ids"),
        ({"tokens": "1 2"}, "is not a list of token ids"),
        ({"text": "a"}, 'has no field "tokens"; its fields: text'),
    ],
)
def test_rows_of_tokens(tmp_path, row, expected):
    [found] = read(source(tmp_path / "a.jsonl", lines(row)), TOKENS)
    assert found == expected if isinstance(expected, list) else expected in found


def test_columns_are_mapped(tmp_path):
    file = source(tmp_path / "a.jsonl", lines({"content": "one", "ids": [1, 2]}))
    assert read(file, RowReading(DataFormat.TEXT, {"text": "content"}, 100)) == ["one"]
    assert read(file, RowReading(DataFormat.TOKENS, {"tokens": "ids"}, 100)) == [[1, 2]]


@pytest.mark.parametrize(
    "row, fields, shape",
    [
        ({"text": "a"}, {}, DataFormat.TEXT),
        ({"text": "a", "tokens": [1]}, {}, DataFormat.TEXT),
        ({"tokens": [1, 2]}, {}, DataFormat.TOKENS),
        ({"input_ids": [1, 2]}, {}, DataFormat.TOKENS),
        ({"ids": [1, 2]}, {"tokens": "ids"}, DataFormat.TOKENS),
        ({"messages": [], "content": "a"}, {"text": "content"}, DataFormat.TEXT),
        ({"something": "else"}, {}, DataFormat.TEXT),
        ([1], {}, DataFormat.TEXT),
    ],
)
def test_the_shape_is_read_off_the_columns(tmp_path, row, fields, shape):
    assert detect_format([source(tmp_path / "a.jsonl", lines(row))], DataFormat.AUTO, fields) is shape


@pytest.mark.parametrize(
    "row, shape",
    [
        ({"messages": []}, "chat"),
        ({"conversations": []}, "chat"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"instruction": "a", "input": "", "output": "b"}, "prompt_completion"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference"),
    ],
)
def test_shapes_of_a_later_version_are_refused_by_name(tmp_path, row, shape):
    with pytest.raises(InputError, match=f"shape {shape}, which comes with shardwise 0.4"):
        detect_format([source(tmp_path / "a.jsonl", lines(row))], DataFormat.AUTO, {})


@pytest.mark.parametrize("shape", [DataFormat.CHAT, DataFormat.PREFERENCE, DataFormat.PROMPT_COMPLETION])
def test_asking_for_a_shape_of_a_later_version_is_refused(shape):
    with pytest.raises(InputError, match=f"data.format: {shape} comes with shardwise 0.4"):
        detect_format([], shape, {})


def test_tokens_are_not_read_from_text_files(tmp_path):
    with pytest.raises(InputError, match=r"tokens are read from \.jsonl files; .*a\.txt is text"):
        detect_format([source(tmp_path / "a.txt", "a")], DataFormat.TOKENS, {})


def test_a_field_that_no_row_has_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"data\.fields: prompt is not a field of text rows"):
        detect_format([source(tmp_path / "a.jsonl", lines({"text": "a"}))], DataFormat.AUTO, {"prompt": "q"})


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
