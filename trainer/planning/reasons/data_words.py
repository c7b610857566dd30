"""Sentences for the plan about the cost of row lengths."""

from collections.abc import Iterator

from trainer.planning.run.padding import padding_share, widths_at
from trainer.spec.data.profile import DataProfile
from trainer.spec.data.shapes import SHAPES

WORTH_SAYING = 0.005  # of the tokens


def data_words(data: DataProfile, micro_batch: int) -> tuple[str, ...]:
    """How long documents are, what padding costs or packing saves at `micro_batch`, and what sets the peak.

    Empty where nobody has counted the lengths yet.
    """
    if data.mean_document_tokens is None or data.mean_cut_tokens is None or not data.batch_widths:
        return ()
    return tuple(_words(data, data.mean_document_tokens, data.mean_cut_tokens, micro_batch))


def _words(data: DataProfile, mean_tokens: float, mean_cut: float, micro_batch: int) -> Iterator[str]:
    widths = widths_at(data, micro_batch)
    shuffled = padding_share(widths.mean_width, mean_cut)
    ordered = padding_share(widths.mean_width_sorted, mean_cut)
    lost = 1 - mean_cut / mean_tokens
    longest = data.documents.edges[-1] if data.documents is not None else data.longest_row
    yield f"{data.num_documents:,} documents of {mean_tokens:,.0f} tokens on average, the longest {longest:,}"
    batches = f"batches of {micro_batch}" if micro_batch > 1 else "single rows"
    if data.is_packed:
        saved = (
            f"packing saves {shuffled:.0%} of what padded {batches} would compute ({ordered:.0%} if sorted by length)"
        )
        kept = f", and keeps {lost:.0%} of the tokens, which would be cut off at the end of a row"
        yield saved + (kept if lost > WORTH_SAYING else "")
        return
    packing = "" if SHAPES[data.format].rows_per_example == 2 else "; data.packing=true has none"
    yield (
        f"{ordered:.0%} of the tokens of {batches} are padding, as rows of like length are learned together "
        f"({shuffled:.0%} in random order){packing}"
    )
    yield f"the longest row, {data.longest_row:,} tokens, sets the peak of memory"
