"""What the data preparation subprocess is asked: `python -m trainer.runtime.prepare REQUEST ANSWER`.

It answers with a DataProfile in the file ANSWER, or with one to three lines on stderr and the error's exit code.
Names of sources are resolved to files before the subprocess starts (launch/data_files.py), so that asking what there
is needs nothing heavy; the sizes and times stand beside the paths so that a file which changes meanwhile is noticed.
"""

from trainer.spec.errors import InputError
from trainer.spec.job import BadRows, DataFormat, DataSource
from trainer.spec.value import Value

SERVED_FORMATS = (DataFormat.AUTO, DataFormat.TEXT, DataFormat.TOKENS)


class SourceFile(Value, frozen=True, kw_only=True):
    """One file of a source as it was when the sources were listed."""

    path: str  # absolute
    size_bytes: int
    mtime_ns: int
    weight: float = 1.0  # of its source: how often its rows stand in one epoch


class PrepareRequest(Value, frozen=True, kw_only=True):
    """Tokenise these sources into rows of at most `seq_len` tokens, once, in a cache keyed by content and settings."""

    sources: tuple[DataSource, ...]
    eval_share: float | None
    eval_source: str | None
    format: DataFormat
    fields: dict[str, str]
    packing: bool | None
    bad_rows: BadRows
    bad_rows_max: float
    seq_len: int
    vocab_size: int  # of the model
    tokenizer: str | None  # a folder; None: train a byte-level BPE of `vocab_size` from the data
    cache_root: str
    files: tuple[SourceFile, ...] = ()  # what `sources` are on disk
    eval_files: tuple[SourceFile, ...] = ()  # what `eval_source` is on disk


def check_format_is_served(shape: DataFormat) -> None:
    """InputError for a shape of rows that this version does not read."""
    if shape not in SERVED_FORMATS:
        served = ", ".join(SERVED_FORMATS)
        raise InputError(f"data.format: {shape} comes with shardwise 0.4; this version reads {served}")
