"""Files of text and of rows: the same rows out of every kind, text as blocks. What is bad: test_bad_data."""

import csv
import gzip
import io
import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare_request_factory import written_source
from table_files import COMPRESSORS, arrow_of, lines_of, parquet_of

from shardwise.trainer.runtime.data.sources import scan
from shardwise.trainer.runtime.data.sources.files import holds_rows, read_rows
from shardwise.trainer.runtime.data.sources.rows import RowReading
from shardwise.trainer.runtime.data.sources.scan import Block, check_file, cut_at_line_ends, read_blocks
from shardwise.trainer.spec.job.sections import DataFormat

TEXT = RowReading(DataFormat.TEXT, {}, vocab_size=100)


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
    file = written_source(tmp_path / name, content)
    found = read_blocks(file, TEXT, defect=check_file(file).defect)
    assert [each.content if isinstance(each, Block) else str(each).rsplit("/", 1)[-1] for each in found] == items


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


ROWS = [
    {"text": "first\nwith a second line", "note": 'a "quoted", word'},
    {"text": "日本, é\u2028and a separator", "note": ""},
    *({"text": f"row {number}", "note": "x"} for number in range(3, 40)),
]
TABLE = pa.Table.from_pylist(ROWS)


def delimited(delimiter, line_end="\r\n"):
    stream = io.StringIO(newline="")
    writer = csv.DictWriter(stream, ("text", "note"), delimiter=delimiter, lineterminator=line_end)
    writer.writeheader()
    writer.writerows(ROWS)
    return stream.getvalue().encode()


LINES = lines_of(ROWS)
FILES = {
    "a.jsonl": LINES,
    "windows.jsonl": b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"),
    "a.ndjson": LINES.rstrip(b"\n"),
    "lines.json": LINES,
    "array.json": json.dumps(ROWS).encode(),
    "indented.json": b"\n" + json.dumps(ROWS, indent=2).encode(),
    "a.csv": delimited(","),
    "excel.csv": b"\xef\xbb\xbf" + delimited(";"),
    "unix.csv": delimited(",", "\n"),
    "a.tsv": delimited("\t"),
    "a.parquet": parquet_of(TABLE),
    "groups.PARQUET": parquet_of(TABLE, row_group_size=5, compression="zstd"),
    "stream.arrow": arrow_of(TABLE, 7),
    "file.arrow": arrow_of(TABLE, 7, open_writer=pa.ipc.new_file),
}


COMPRESSED = {
    f"{name}{suffix}": compress(FILES[name])
    for name in ("a.jsonl", "a.csv", "array.json", "a.parquet", "file.arrow")
    for suffix, compress in COMPRESSORS.items()
} | {
    f"two.jsonl{suffix}": compress(lines_of(ROWS[:1])) + compress(lines_of(ROWS[1:]))
    for suffix, compress in COMPRESSORS.items()
}  # fmt: skip


@pytest.mark.parametrize("name", [*FILES, *COMPRESSED])
def test_every_kind_of_file_holds_the_same_rows_compressed_too(tmp_path, name):
    file = written_source(tmp_path / name, {**FILES, **COMPRESSED}[name])
    assert holds_rows(file)
    assert list(read_rows(file)) == list(enumerate(ROWS, start=1))


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.jsonl", b'\n{"text": "a"}\n  \n{"text": "b"}\n', {2: "a", 4: "b"}),  # blank lines count
        ("a.csv", b"\ntext\n\na\n\nb\n", {1: "a", 2: "b"}),  # blank records do not
        ("a.csv", b"text\n" + b"x" * 10**6 + b"\n", {1: "x" * 10**6}),
        ("a.json", b'{\n "text": "one"\n}', {1: "one"}),
        ("a.jsonl", b"", {}),
        ("a.json", b"", {}),
        ("a.csv", b"", {}),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0), {}),
    ],
)
def test_rows_are_numbered_as_a_person_counts_them(tmp_path, name, content, rows):
    found = dict(read_rows(written_source(tmp_path / name, content)))
    assert found == {number: {"text": text} for number, text in rows.items()}


TURNS = [[{"role": "user", "content": text}, {"role": "assistant", "content": f"{text}!"}] for text in ("a", "é", "a")]
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
VIEWED = pa.struct([("role", pa.dictionary(pa.int8(), pa.string())), ("content", pa.large_string())])


@pytest.mark.parametrize(("suffix", "write"), [("parquet", parquet_of), ("arrow", lambda table: arrow_of(table, 2))])
@pytest.mark.parametrize(
    ("column", "value"),
    [
        *((pa.array(["a", "é", "a"], each), ["a", "é", "a"]) for each in (pa.large_string(), pa.string_view())),
        (pa.array(["a", "é", "a"]).dictionary_encode(), ["a", "é", "a"]),
        (pa.ExtensionArray.from_storage(pa.json_(), pa.array(["[1]", "{}", "null"])), ["[1]", "{}", "null"]),
        *((pa.array(TURNS, each), TURNS) for each in (pa.list_(MESSAGE), pa.large_list(MESSAGE), pa.list_view(VIEWED))),
    ],
    ids=lambda each: str(each.type) if isinstance(each, pa.Array) else "",
)
def test_a_column_is_read_as_the_values_that_it_holds_whatever_its_type(tmp_path, suffix, write, column, value):
    file = written_source(tmp_path / f"a.{suffix}", write(pa.table({"value": column})))
    assert list(read_rows(file)) == [(number, {"value": each}) for number, each in enumerate(value, start=1)]
