"""What the first rows of a job's data are, for a plan of data that nobody has prepared yet.

Only their columns are looked at, and little is read: the first row of a file of JSON lines, the header of a CSV, the
schema of a Parquet file. Preparation looks again, at more rows, and has the last word.
"""

from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from contextlib import closing
from importlib import import_module
from typing import IO

import msgspec

from trainer.spec.data.request import ROW_SUFFIXES, PrepareRequest, SourceFile, compression, content_suffix
from trainer.spec.data.shapes import column_names, fitting_shapes, shape_of_row
from trainer.spec.job.sections import DataFormat

_LONGEST_ROW = 2**20  # bytes; a longer one is not looked at
_MODULES: Mapping[str, str] = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}  # milliseconds each, so only where needed


def shape_of_first_row(listed: PrepareRequest) -> DataFormat | None:
    """The shape that the first row of the listed files speaks of; None where they are text, or it is not to be seen."""
    file = next((file for file in listed.files if content_suffix(file.path) in ROW_SUFFIXES), None)
    if file is None or listed.extension is not None:  # a user's format_row makes other rows of these
        return None
    columns = _columns(file)
    fields = listed.fields
    return shape_of_row(
        lambda field: any(name in columns for name in column_names(field, fields)), fitting_shapes(fields)
    )


def _columns(file: SourceFile) -> Sequence[str]:
    """The columns that hold something in the first row, or those of all rows; none where they cannot be read."""
    suffix = content_suffix(file.path)
    try:
        if suffix == ".parquet" and compression(file.path) is None:
            from pyarrow.parquet import read_schema  # 0.1 s that no other kind of file costs

            return list(read_schema(file.path).names)
        if suffix in (".parquet", ".arrow") or compression(file.path) not in (None, *_MODULES):
            return ()
        with closing(_open(file.path)) as stream:
            line = _first_line(stream).decode("utf-8-sig")
        if suffix in (".csv", ".tsv"):
            return _header(line, is_tabbed=suffix == ".tsv")
        row = msgspec.json.decode(line)
    except Exception:  # noqa: BLE001 - damaged, and every format has errors of its own: preparation says how
        return ()
    return [name for name, value in row.items() if value is not None] if isinstance(row, dict) else ()


def _open(path: str) -> IO[bytes]:
    name = compression(path)
    found: IO[bytes] = open(path, "rb") if name is None else import_module(_MODULES[name]).open(path)  # noqa: SIM115, PTH123
    return found


def _first_line(stream: IO[bytes]) -> bytes:
    """The first line that holds something; of one too long its beginning, which is no row."""
    line = stream.readline(_LONGEST_ROW)
    while line and not line.removeprefix(BOM_UTF8).strip():
        line = stream.readline(_LONGEST_ROW)
    return line


def _header(line: str, *, is_tabbed: bool) -> Sequence[str]:
    from csv import reader

    delimiters = "\t" if is_tabbed else ",;\t|"
    delimiter = max(delimiters, key=line.count)
    return next(reader([line], delimiter=delimiter), [])
