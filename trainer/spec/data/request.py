"""Request to the data preparation subprocess: `python -m shardwise.trainer.runtime.data.prepare REQUEST ANSWER`.

It returns a DataProfile in the file ANSWER, or with one to three lines on stderr and the error's exit code.
Names of sources are resolved to files before the subprocess starts (launch/inputs/data_files.py), so that a listing
needs no heavy library; sizes and times are beside the paths so that a change of a file is detected.

The name of a file determines its content: one of ROW_SUFFIXES is a file of rows, any other is one text; one of
COMPRESSIONS may follow either.
"""

from os.path import splitext

from shardwise.trainer.spec.job.sections import BadRows, DataFormat, LossOn
from shardwise.trainer.spec.job.sources import DataSource
from shardwise.trainer.spec.messages.extension import Extension
from shardwise.trainer.spec.value import Value

ROW_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow"})
COMPRESSIONS = frozenset({".gz", ".bz2", ".xz", ".zst"})
LISTING_NAME = "listing.json"  # the PrepareRequest of a stream: beside its first window, and in `stream/` of a run


class SourceFile(Value, frozen=True, kw_only=True):
    """One file of a source as it was when the sources were listed."""

    path: str  # absolute; equal to `hub` for a file that a stream downloads when it reaches it
    size_bytes: int
    mtime_ns: int
    weight: float = 1.0  # of its source: how often its rows appear in one epoch
    source: int = 0  # index of its source in the request
    hub: str | None = None  # hf://datasets/ORG/NAME@COMMIT/FILE, which never changes; None: not from the hub

    @property
    def is_remote(self) -> bool:
        """True if the file is not on this machine yet."""
        return self.path == self.hub


class PrepareRequest(Value, frozen=True, kw_only=True):
    """Request to tokenise sources into rows of at most `seq_len` tokens, in a cache keyed by content and settings."""

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
    chat_template: str | None = None  # of chats: a name or a file; None: the tokenizer's own
    loss_on: LossOn = LossOn.AUTO
    extension: Extension | None = None  # its format_row makes rows of a known shape
    hub_home: str | None = None  # Hugging Face's home folder; None: where huggingface_hub would look
    eval_subset: str | None = None  # of `eval_source`
    eval_split: str | None = None  # of `eval_source`
    files: tuple[SourceFile, ...] = ()  # of `sources`, on disk
    eval_files: tuple[SourceFile, ...] = ()  # of `eval_source`, on disk
    revisions: tuple[str, ...] = ()  # ORG/NAME@COMMIT of every source that is from the hub
    window_bytes: int | None = None  # text of a window of a stream; None: no stream, everything is prepared at once


def content_suffix(path: str) -> str:
    """The suffix of a file's content, in lower case, without that of a compression: `.csv` for `a.CSV.gz`."""
    stem, suffix = splitext(path.lower())  # noqa: PTH122 - thousands of paths at every start
    return splitext(stem)[1] if suffix in COMPRESSIONS else suffix  # noqa: PTH122


def compression(path: str) -> str | None:
    """The suffix of a file's compression, or None."""
    suffix = splitext(path.lower())[1]  # noqa: PTH122 - thousands of paths at every start
    return suffix if suffix in COMPRESSIONS else None
