"""A worker that writes out the first example of prepared data: which tokens are learned, and which are only read.

The first row on disk is shown, for every seed of the run; a packed row up to the end of its first documents. In a
terminal the learned text is bold and the rest dim, in place. Without one, each stretch is printed on lines of its own
behind a margin that names it, since marks inside the text are hard to distinguish from it:

    read    | <|im_start|>user\\n
            | What is 2+2?<|im_end|>\\n
            | <|im_start|>assistant\\n
    learned | It is four.<|im_end|>
    read    | \\n

A line end of the text is shown as \\n before the line ends, for a stretch may end in the middle of a line. Special
tokens are shown as they are spelt. Of a long stretch that is only read, such as the definitions of tools, beginning and
end are shown, so that the first turns that are learned are shown.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import NamedTuple

from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.data.tokenizer import TextTokenizer, load_tokenizer
from shardwise.trainer.runtime.run.process import run_request_and_exit
from shardwise.trainer.spec.messages.worker_requests import ExampleRequest, Lines

SHOWN_DOCUMENTS = 2  # of a packed row
SHOWN_TOKENS = 900
READ_BEGIN, READ_END = 400, 200  # shown tokens of a long stretch that is only read


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
        end = _end(starts, len(ids))
        flags = (labels[:end] != IGNORED_LABEL).tolist()
        num_shown = _num_shown(flags)
        text = show(
            ids[:end].tolist(),
            flags,
            tokenizer,
            width=width,
            colour=colour,
            document_starts=[start for start in starts if start < end],
            num_shown=num_shown,
        )
        left = f"\n... and {len(ids) - num_shown} tokens more in this row" if num_shown < len(ids) else ""
        yield f"{name}: {text}{left}" if name else text + left


def _end(starts: Sequence[int], length: int) -> int:
    """Where the first documents of a row end."""
    return starts[SHOWN_DOCUMENTS - 1] if len(starts) >= SHOWN_DOCUMENTS else length


def _num_shown(flags: Sequence[bool]) -> int:
    """Number of tokens up to the one with which SHOWN_TOKENS are shown."""
    place, remaining = 0, SHOWN_TOKENS
    for is_learned, run in groupby(flags):
        length = len(list(run))
        shown = length if is_learned or length <= READ_BEGIN + READ_END else READ_BEGIN + READ_END
        if shown > remaining:
            return place + remaining
        place, remaining = place + length, remaining - shown
    return place


def _example_lines(request: ExampleRequest) -> Lines:
    return Lines(lines=(first_example(Path(request.cache_dir), width=request.width, colour=request.colour),))


_BOLD, _DIM, _RESET = "\x1b[1m", "\x1b[2m", "\x1b[0m"
_MARGINS = {True: "learned | ", False: "read    | "}
_MORE = "        | "


class _Stretch(NamedTuple):
    """Neighbouring tokens of one document that are all learned or all not."""

    text: str
    is_learned: bool
    document: int
    num_left_out: int = 0  # tokens before it that are not shown


def show(
    token_ids: Sequence[int],
    is_learned: Sequence[bool] | None,
    tokenizer: TextTokenizer,
    *,
    width: int,
    colour: bool,
    document_starts: Sequence[int] = (),
    num_shown: int | None = None,
) -> str:
    """The row and, first, how much of it is learned; `is_learned` None: every token but the first of each document.

    `num_shown` is the number of tokens up to the last that is shown, None: all. `document_starts` are the places in the
    row where a document starts, of a packed row. `width` counts columns; with `colour` the terminal breaks the lines
    itself.
    """
    starts = sorted({0, *document_starts} - {len(token_ids)})
    flags = [place not in starts for place in range(len(token_ids))] if is_learned is None else list(is_learned)
    num_learned = sum(flags)
    count = f"{len(token_ids)} tokens: {num_learned} learned, {len(token_ids) - num_learned} only read"
    lines = [count if len(starts) < 2 else f"{count}; {len(starts)} documents"]
    ends = [*starts, len(token_ids)]
    for document, stretches in groupby(
        _stretches(token_ids[:num_shown], flags, tokenizer, starts), lambda each: each.document
    ):
        if len(starts) > 1:
            lines.append(_rule(document, ends, width))
        pieces: list[str] = []
        for stretch in stretches:
            if stretch.num_left_out:
                lines += ["".join(pieces)] if pieces else []
                lines.append(f"... {stretch.num_left_out} tokens that are only read ...")
                pieces = []
            if colour:
                pieces.append(_in_place(stretch))
            else:
                lines += _in_margin(stretch, width)
        lines += ["".join(pieces)] if pieces else []
    return "\n".join(lines)


def _stretches(
    token_ids: Sequence[int], flags: Sequence[bool], tokenizer: TextTokenizer, starts: Sequence[int]
) -> Iterator[_Stretch]:
    """In order; each document is decoded from its start, as sentencepiece drops the first space of a decoded text."""
    starts = [start for start in starts if start < len(token_ids)]
    for document, (begin, end) in enumerate(pairwise([*starts, len(token_ids)])):
        shown, first = "", begin

        def text_up_to(place: int, begin: int = begin) -> str:
            return tokenizer.tokenizer.decode(list(token_ids[begin:place]), skip_special_tokens=False)

        for place in range(begin + 1, end + 1):
            if place < end and flags[place] == flags[place - 1]:
                continue
            is_learned, num_left_out = flags[place - 1], 0
            if not is_learned and place - first > READ_BEGIN + READ_END:
                yield _Stretch(text_up_to(first + READ_BEGIN)[len(shown) :], is_learned, document)
                shown, num_left_out = text_up_to(place - READ_END), place - first - READ_BEGIN - READ_END
            text = text_up_to(place)
            yield _Stretch(text[len(shown) :], is_learned, document, num_left_out)
            shown, first = text, place


def _rule(document: int, starts: Sequence[int], width: int) -> str:
    title = f"--- document {document + 1}, {starts[document + 1] - starts[document]} tokens "
    return title + "-" * max(3, width - len(title))


def _in_margin(stretch: _Stretch, width: int) -> Iterator[str]:
    margin = _MARGINS[stretch.is_learned]
    room = max(20, width - len(margin))
    for line in stretch.text.splitlines(keepends=True):
        shown = _printable(line)
        for begin in range(0, len(shown), room):
            yield margin + shown[begin : begin + room]
            margin = _MORE


def _in_place(stretch: _Stretch) -> str:
    style = _BOLD if stretch.is_learned else _DIM
    return "\n".join(f"{style}{_visible(line)}{_RESET}" if line else "" for line in stretch.text.split("\n"))


def _printable(line: str) -> str:
    return "".join(_visible(character) if character != "\n" else "\\n" for character in line)


def _visible(text: str) -> str:
    """Control characters, which a terminal would obey, by their escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


if __name__ == "__main__":
    run_request_and_exit(ExampleRequest, _example_lines)
