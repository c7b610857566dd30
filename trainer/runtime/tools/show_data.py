"""A worker that writes out the first example of prepared data.

The first of the rows as they lie on disk, not of the run: the same whatever the seed. A packed row is shown up to the
end of its first documents, as a person reads one example and not two thousand tokens.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from shardwise.trainer.runtime.data.token_rows import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.data.tokenizer import TextTokenizer, load_tokenizer
from shardwise.trainer.runtime.run.answering import answer_and_exit
from shardwise.trainer.runtime.tools.show_example import show
from shardwise.trainer.spec.messages.worker_requests import ExampleRequest, Lines

SHOWN_DOCUMENTS = 2  # of a packed row
SHOWN_TOKENS = 600


def first_example(cache_dir: Path, *, width: int, colour: bool) -> str:
    """The first training example as the model will see it; of a preference its chosen and its rejected row."""
    rows = TokenRows.open(cache_dir, "train")
    folder = cache_dir / "tokenizer"
    if not folder.is_dir():
        return "the rows came tokenised, and no tokenizer was named to write them out with"
    tokenizer = load_tokenizer(folder)
    return "\n\n".join(_shown(rows, tokenizer, width=width, colour=colour))


def _shown(rows: TokenRows, tokenizer: TextTokenizer, *, width: int, colour: bool) -> Iterator[str]:
    numbers = rows.rows_of(0)
    for name, number in zip(("chosen", "rejected") if len(numbers) > 1 else ("",), numbers, strict=True):
        ids, labels, starts = rows.row(number), rows.labels(number), rows.document_starts(number).tolist()
        end = min(_end(starts, len(ids)), SHOWN_TOKENS)
        text = show(
            ids[:end].tolist(),
            (labels[:end] != IGNORED_LABEL).tolist(),
            tokenizer,
            width=width,
            colour=colour,
            document_starts=[start for start in starts if start < end],
        )
        left = f"\n... and {len(ids) - end} tokens more in this row" if end < len(ids) else ""
        yield f"{name}: {text}{left}" if name else text + left


def _end(starts: Sequence[int], length: int) -> int:
    """Where the first documents of a row end."""
    return starts[SHOWN_DOCUMENTS - 1] if len(starts) >= SHOWN_DOCUMENTS else length


def _answer(request: ExampleRequest) -> Lines:
    return Lines(lines=(first_example(Path(request.cache_dir), width=request.width, colour=request.colour),))


if __name__ == "__main__":
    answer_and_exit(ExampleRequest, _answer)
