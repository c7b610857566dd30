"""The data as the planner sees it: number of tokens, lengths of rows, identity.

`source` is `prepared` if it was counted after tokenising, `estimated` if it was derived from file sizes.
"""

from shardwise.trainer.spec.job.sections import DataFormat
from shardwise.trainer.spec.units import format_bytes
from shardwise.trainer.spec.value import Value


class LengthHistogram(Value, frozen=True, kw_only=True):
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


def stream_note(window_bytes: int, *, eval_share: float | None) -> str:
    """Sentence of the plan about the limits of a stream."""
    held_out = "" if eval_share is None else "held-out rows are those of the first window only; "
    return (
        f"streaming: rows are shuffled only within a window of about {format_bytes(window_bytes)} of text; "
        f"{held_out}--resume needs the same files"
    )
