"""The shape of data that nobody has prepared, as its first row shows it."""

import bz2
import gzip
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pytest
from prepare_request_factory import listed_request
from pyarrow import parquet

from launch.inputs.data_files import shape_of_first_row
from trainer.spec.job.sections import DataFormat
from trainer.spec.messages.extension import Extension, Hook

CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}
ROWS = [
    ({"text": "a"}, DataFormat.TEXT),
    (CHAT, DataFormat.CHAT),
    ({"conversations": CHAT["messages"], "text": "a"}, DataFormat.CHAT),
    ({"instruction": "a", "input": "", "output": "b"}, DataFormat.CHAT),
    ({"prompt": "a", "completion": "b"}, DataFormat.PROMPT_COMPLETION),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, DataFormat.PREFERENCE),
    ({"input_ids": [1, 2]}, DataFormat.TOKENS),
    ({"chosen": None, "rejected": None, "text": "a"}, DataFormat.TEXT),
    ({"title": "a"}, None),
]


@pytest.mark.parametrize(("row", "shape"), ROWS, ids=lambda value: str(value)[:30])
def test_the_first_line_tells_the_shape(row: dict[str, object], shape: DataFormat | None, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f"\ufeff\n  \n{json.dumps(row)}\nnot JSON\n")
    assert shape_of_first_row(listed_request(tmp_path / "rows.jsonl", cache_root=tmp_path)) is shape


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)])
def test_compressed_lines_are_read(suffix: str, pack: object, tmp_path: Path) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    assert callable(pack)
    path.write_bytes(pack(json.dumps(CHAT).encode()))
    assert shape_of_first_row(listed_request(path, cache_root=tmp_path)) is DataFormat.CHAT


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "id;prompt;completion\n1;a;b\n"),
        ("a.tsv", "prompt\tcompletion\n"),
        ("a.csv", '"prompt","completion"\n'),
    ],
)
def test_a_header_tells_the_shape(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    assert shape_of_first_row(listed_request(tmp_path / name, cache_root=tmp_path)) is DataFormat.PROMPT_COMPLETION


def test_a_parquet_schema_tells_the_shape(tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]})
    parquet.write_table(table, tmp_path / "rows.parquet")
    assert shape_of_first_row(listed_request(tmp_path / "rows.parquet", cache_root=tmp_path)) is DataFormat.PREFERENCE


def test_columns_that_the_job_names_count(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "a", "a": "b"}))
    named = {"prompt": "q", "completion": "a"}
    request = listed_request(tmp_path / "rows.jsonl", cache_root=tmp_path, fields=named)
    assert shape_of_first_row(request) is DataFormat.PROMPT_COMPLETION


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff\xfe{}", b'["text"]', b"", b'{"text": "' + b"x" * 2**20 + b'"}'],
    ids=lambda value: str(value)[:12],
)
def test_what_cannot_be_read_is_left_to_preparation(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content or b"\n")
    assert shape_of_first_row(listed_request(tmp_path / "rows.jsonl", cache_root=tmp_path)) is None


def test_damaged_files_are_left_to_preparation(tmp_path: Path) -> None:
    for name in ("a.jsonl.gz", "b.parquet", "c.jsonl.xz"):
        (tmp_path / name).write_bytes(b"no such format")
        assert shape_of_first_row(listed_request(tmp_path / name, cache_root=tmp_path)) is None


def test_rows_that_a_function_makes_are_not_looked_at(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(CHAT))
    extension = Extension(path=str(tmp_path / "mine.py"), sha256="0" * 64, hooks=(Hook.FORMAT_ROW,))
    request = listed_request(tmp_path / "rows.jsonl", cache_root=tmp_path, extension=extension)
    assert shape_of_first_row(request) is None
