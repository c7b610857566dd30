"""Estimate of the data from the size of its files, before tokenisation.

Tokenisers trained on the text they cut make tokens of roughly the lengths below; English prose and code lie within
about 20 % of them, other scripts and numbers can be far shorter. How long the rows are is not known: they are taken to
be full, which is right where they are packed and otherwise asks for memory and time that they may not need. A plan made
from this says so, and preparation replaces it.

Effect of unequal row lengths on memory and speed, from the lengths that preparation counted.

Without packing a micro batch is padded to its longest row. So the widest batch that can happen, the longest row of the
data, decides whether memory suffices, the mean width how long a step takes, and what is not padding how many tokens
were learned from. Packed rows are all `seq_len` long, and so is what nobody has counted yet.
"""

import math
from functools import lru_cache
from itertools import pairwise

from shardwise.trainer.planning.setting import RecipeChoices
from shardwise.trainer.spec.data.profile import BatchWidth, DataProfile, LengthHistogram, stream_note
from shardwise.trainer.spec.data.shapes import SHAPES
from shardwise.trainer.spec.job.sections import DataFormat

# (largest vocabulary, bytes of UTF-8 text a token). Small: byte-level BPEs trained on Python's standard library and
# measured on it (1k: 2.6, 2k: 3.0, 4k: 3.3). Larger: Llama 2's 32k and Llama 3's 128k on English, 3.17 and 3.94
# characters a token (arXiv:2407.21783, sec. 3.2).
_BYTES_PER_TOKEN = ((1024, 2.5), (4096, 3.1), (65536, 3.2), (math.inf, 3.9))


def bytes_per_token(vocab_size: int) -> float:
    """Bytes of text in an average token of a vocabulary of this size."""
    return next(length for largest, length in _BYTES_PER_TOKEN if vocab_size <= largest)


def estimate_data(
    *,
    num_bytes: int,
    seq_len: int,
    vocab_size: int,
    eval_share: float | None,
    is_packed: bool = True,
    shape: DataFormat = DataFormat.TEXT,
    window_bytes: int | None = None,
) -> DataProfile:
    """A profile of `num_bytes` of text, `eval_share` of it held out; preferences are pairs of rows, never packed.

    Of a stream, whose windows have `window_bytes`, that of the first window.
    """
    num_bytes = num_bytes if window_bytes is None else min(num_bytes, window_bytes)
    rows_per_example = SHAPES[shape].rows_per_example
    row_tokens = rows_per_example * seq_len
    length = bytes_per_token(vocab_size)
    num_tokens = int(num_bytes / length)
    num_eval_tokens = int(num_tokens * (eval_share or 0))
    num_train_tokens = num_tokens - num_eval_tokens
    return DataProfile(
        source="estimated",
        format=shape,
        num_rows=max(1, num_train_tokens // row_tokens),
        num_tokens=num_train_tokens,
        longest_row=seq_len,
        is_packed=is_packed and rows_per_example == 1,
        fingerprint="estimated",
        vocab_size=vocab_size,
        num_eval_rows=-(-num_eval_tokens // row_tokens),
        num_eval_tokens=num_eval_tokens,
        is_stream=window_bytes is not None,
        notes=(
            f"{num_bytes:,} bytes of text are taken as {num_tokens:,} tokens, {length} bytes each",
            *(() if window_bytes is None else (stream_note(window_bytes, eval_share=eval_share),)),
        ),
    )


# Batches are padded to a multiple of it where seq_len allows. No kernel that a rank runs is compiled for each width.
WIDTH_MULTIPLE = 8


def longest_row_decides(data: DataProfile) -> bool:
    """True where rows are padded, and counted."""
    return not data.is_packed and bool(data.batch_widths)


def longest_width(data: DataProfile | None, *, seq_len: int) -> int:
    """Tokens of the widest row a micro batch can have."""
    if data is None or not longest_row_decides(data):
        return seq_len
    return min(seq_len, -(-data.longest_row // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


def mean_width(data: DataProfile | None, micro_batch: int, *, seq_len: int) -> float:
    """Tokens of a row of an average micro batch, padding included."""
    if data is None or not longest_row_decides(data):
        return float(seq_len)
    return min(float(seq_len), widths_at(data, micro_batch).mean_width_sorted)  # the order that training takes


def row_recipe(data: DataProfile | None, *, seq_len: int) -> RecipeChoices:
    """Facts about the rows that the data determines."""
    return RecipeChoices(
        rows_per_example=1 if data is None else SHAPES[data.format].rows_per_example,
        document_tokens=document_tokens(data, seq_len=seq_len),
    )


def document_tokens(data: DataProfile | None, *, seq_len: int) -> float | None:
    """Tokens of the document that an average token of packed rows is in, `seq_len` where nobody counted them.

    None where a row is one document. What is longer than a row is cut into whole rows and a rest.
    """
    if data is None or not data.is_packed:
        return None
    return float(seq_len) if data.documents is None else _mean_over_tokens(data.documents, seq_len)


@lru_cache(maxsize=16)
def _mean_over_tokens(documents: LengthHistogram, seq_len: int) -> float:
    tokens = squares = 0.0
    lowest = documents.edges[0] * 2 // 3  # two bins an octave
    for lower, upper, count in zip((lowest, *documents.edges), documents.edges, documents.counts, strict=False):
        whole, rest = divmod((lower + 1 + upper) / 2, seq_len)
        tokens += count * (whole * seq_len + rest)
        squares += count * (whole * seq_len**2 + rest**2)
    return squares / tokens if tokens else float(seq_len)


def padding_share(width: float, mean_tokens: float) -> float:
    """Share of a batch that is padding, where its rows have `mean_tokens` tokens on average."""
    return max(0.0, 1 - mean_tokens / width)


def widths_at(data: DataProfile, micro_batch: int) -> BatchWidth:
    """The widths of batches of `micro_batch`, in a line between those that were counted."""
    widths = data.batch_widths
    if micro_batch >= widths[-1].micro_batch:
        return widths[-1]
    lower, upper = next(pair for pair in pairwise(widths) if pair[0].micro_batch <= micro_batch < pair[1].micro_batch)
    share = micro_batch / lower.micro_batch - 1  # counted sizes double
    return BatchWidth(
        micro_batch=micro_batch,
        mean_width=lower.mean_width + share * (upper.mean_width - lower.mean_width),
        mean_width_sorted=lower.mean_width_sorted + share * (upper.mean_width_sorted - lower.mean_width_sorted),
    )
