"""Estimate of the data from the size of its files, before tokenisation.

Tokenisers trained on the text they cut make tokens of roughly the lengths below; English prose and code lie within
about 20 % of them, other scripts and numbers can be far shorter. How long the rows are is not known: they are taken to
be full, which is right where they are packed and otherwise asks for memory and time that they may not need. A plan made
from this says so, and preparation replaces it.
"""

import math

from trainer.spec.data.profile import DataProfile, stream_note
from trainer.spec.data.shapes import SHAPES
from trainer.spec.job.sections import DataFormat

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
