"""The same rows out of every kind of file, and how each kind counts them. What is bad: test_bad_data."""

import csv
import gzip
import io
import json

import pyarrow as pa
import pytest
from prepare_request_factory import written_source
from table_files import COMPRESSORS, arrow_of, lines_of, parquet_of

from shardwise.trainer.runtime.data.sources.files import holds_rows, read_rows
from shardwise.trainer.spec.data.profile import ROW_SUFFIXES

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


def test_every_suffix_of_rows_has_a_file_here():
    assert all(any(name.lower().endswith(suffix) for name in FILES) for suffix in ROW_SUFFIXES)


COMPRESSED = {
    f"{name}{suffix}": compress(FILES[name])
    for name in ("a.jsonl", "a.csv", "array.json", "a.parquet", "file.arrow")
    for suffix, compress in COMPRESSORS.items()
}


@pytest.mark.parametrize("name", [*FILES, *COMPRESSED])
def test_every_kind_of_file_holds_the_same_rows_compressed_too(tmp_path, name):
    file = written_source(tmp_path / name, {**FILES, **COMPRESSED}[name])
    assert holds_rows(file)
    assert list(read_rows(file)) == list(enumerate(ROWS, start=1))


def test_two_compressed_streams_in_one_file_are_read_both(tmp_path):
    for suffix, compress in COMPRESSORS.items():
        content = compress(lines_of(ROWS[:1])) + compress(lines_of(ROWS[1:]))
        assert [row for _, row in read_rows(written_source(tmp_path / f"a.jsonl{suffix}", content))] == ROWS


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
