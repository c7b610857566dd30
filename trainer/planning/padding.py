"""What rows of unequal length mean for memory and for speed, from the lengths that preparation counted.

Without packing a micro batch is padded to its longest row. So the widest batch that can happen, the longest row of the
data, decides whether memory suffices, the mean width how long a step takes, and what is not padding how many tokens
were learned from. Packed rows are all `seq_len` long, and so is what nobody has counted yet.
"""

from itertools import pairwise

from trainer.spec.data_profile import BatchWidth, DataProfile

WIDTH_MULTIPLE = 8  # batches are padded to a multiple of it where seq_len allows


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
    return min(float(seq_len), widths_at(data, micro_batch).mean_width)


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
