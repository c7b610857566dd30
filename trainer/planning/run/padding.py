"""Effect of unequal row lengths on memory and speed, from the lengths that preparation counted.

Without packing a micro batch is padded to its longest row. So the widest batch that can happen, the longest row of the
data, decides whether memory suffices, the mean width how long a step takes, and what is not padding how many tokens
were learned from. Packed rows are all `seq_len` long, and so is what nobody has counted yet.
"""

from functools import lru_cache
from itertools import pairwise

from trainer.planning.setting import RecipeChoices
from trainer.spec.data.profile import BatchWidth, DataProfile, LengthHistogram
from trainer.spec.data.shapes import SHAPES

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
