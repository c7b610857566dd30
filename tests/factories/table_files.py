"""Bytes of files of rows: JSON lines, tables as Parquet and Arrow have them, and every compression that is read."""

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": lambda content: pa.compress(content, codec="zstd", asbytes=True),
}


def lines_of(rows: Iterable[object]) -> bytes:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


def parquet_of(table: pa.Table, **settings: Any) -> bytes:
    stream = io.BytesIO()
    pq.write_table(table, stream, **settings)
    return stream.getvalue()


def arrow_of(table: pa.Table, chunk_rows: int, *, open_writer: Callable[..., Any] = pa.ipc.new_stream) -> bytes:
    stream = io.BytesIO()
    with open_writer(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=chunk_rows)
    return stream.getvalue()
