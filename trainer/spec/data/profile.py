"""The data as the planner sees it: number of tokens, lengths of rows, identity.

`source` is `prepared` if it was counted after tokenising, `estimated` if it was derived from file sizes.

The data preparation subprocess: `python -m shardwise.trainer.runtime.data.prepare REQUEST RESULT`.

It reads a DataRequest and writes a DataProfile to the file RESULT, or ends with one to three lines on stderr and the
error's exit code. Names of sources are resolved to files before the subprocess starts (launch/inputs/data_files.py), so
that a listing needs no heavy library; sizes and times are stored with the paths so that a change of a file is detected.

The name of a file determines its content: one of ROW_SUFFIXES is a file of rows, any other is one text; one of
COMPRESSIONS may follow either.
"""

from os.path import splitext

from shardwise.trainer.spec.job.sections import BadRows, DataFormat, LossOn
from shardwise.trainer.spec.job.sources import DataSource
from shardwise.trainer.spec.messages.extension import Extension
from shardwise.trainer.spec.units import format_bytes
from shardwise.trainer.spec.value import Value


class LengthHistogram(Value, frozen=True, kw_only=True, cache_hash=True):
    """Number of rows with a length in (edges[i-1], edges[i]] tokens; the first bin starts at 0."""

    edges: tuple[int, ...]
    counts: tuple[int, ...]


class BatchWidth(Value, frozen=True, kw_only=True):
    """Mean tokens of a row of padded batches, each as wide as its longest document."""

    micro_batch: int
    mean_width: float  # documents in random order
    mean_width_sorted: float  # grouped by length, as training draws rows that are not packed


class DataProfile(Value, frozen=True, kw_only=True):
    """The training data after tokenising, or an estimate of it."""

    source: str  # prepared | estimated
    num_rows: int  # rows of at most seq_len tokens that training draws from; of preferences, pairs of them
    num_tokens: int
    longest_row: int  # tokens
    is_packed: bool
    fingerprint: str  # of content, tokenizer and settings
    vocab_size: int  # of the tokenizer
    format: DataFormat = DataFormat.TEXT  # never auto
    num_targets: int | None = None  # tokens of an epoch that are learned
    packing_efficiency: float | None = None  # tokens of the rows, of as many rows of seq_len
    num_eval_rows: int = 0
    num_eval_tokens: int = 0
    num_eval_copies: int = 0  # held-out rows, of a source of their own, that are also training rows and learned
    eval_unigram_entropy_nats: float | None = None
    lengths: LengthHistogram | None = None  # of the rows: after packing, cutting and weights
    num_documents: int = 0  # of the training side
    mean_document_tokens: float | None = None  # of whole documents
    mean_cut_tokens: float | None = None  # of documents cut at seq_len
    documents: LengthHistogram | None = None  # before packing and cutting
    batch_widths: tuple[BatchWidth, ...] = ()  # of documents cut at seq_len, ascending micro batches
    cache_dir: str | None = None  # holds tokens, rows and the tokenizer
    skipped_rows: int = 0  # bad rows left out under data.bad_rows=skip
    cut_rows: int = 0  # documents truncated to seq_len; only without packing
    dropped_tokens: int = 0  # in remainders shorter than a row and in the ends of truncated rows
    is_stream: bool = False  # prepared while it is trained on: every count is of the first window, epochs are unknown
    notes: tuple[str, ...] = ()  # sentences for the user about skipped, truncated or split rows


def copies_note(num_copies: int, *, of: int) -> str:
    """Sentence about held-out rows that are learned."""
    return (
        f"{num_copies:,} of {of:,} held-out rows are also in data.train, so their loss is no held-out loss; "
        "data.drop_copies=true leaves them out of training"
    )


def stream_note(window_bytes: int, *, eval_share: float | None) -> str:
    """Sentence of the plan about the limits of a stream."""
    held_out = "" if eval_share is None else "held-out rows are those of the first window only; "
    return (
        f"streaming: rows are shuffled only within a window of about {format_bytes(window_bytes)} of text; "
        f"{held_out}--resume needs the same files"
    )


ROW_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".arrow"})
COMPRESSIONS = frozenset({".gz", ".bz2", ".xz", ".zst"})
LISTING_NAME = "listing.json"  # the PrepareRequest of a stream: with its first window, and in `stream/` of a run


class SourceFile(Value, frozen=True, kw_only=True):
    """One file of a source as it was when the sources were listed."""

    path: str  # absolute; equal to `hub` for a file that a stream downloads when it reaches it
    size_bytes: int
    mtime_ns: int
    # Time of the last change of content, name or permissions, which no program can set; None: not compared.
    ctime_ns: int | None = None
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
    drop_copies: bool = False  # training rows that `eval_source` has as well are not learned
    window_bytes: int | None = None  # text of a window of a stream; None: no stream, everything is prepared at once


def content_suffix(path: str) -> str:
    """The suffix of a file's content, in lower case, without that of a compression: `.csv` for `a.CSV.gz`."""
    stem, suffix = splitext(path.lower())  # noqa: PTH122 - thousands of paths at every start
    return splitext(stem)[1] if suffix in COMPRESSIONS else suffix  # noqa: PTH122


def compression(path: str) -> str | None:
    """The suffix of a file's compression, or None."""
    suffix = splitext(path.lower())[1]  # noqa: PTH122 - thousands of paths at every start
    return suffix if suffix in COMPRESSIONS else None
