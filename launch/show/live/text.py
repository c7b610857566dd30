"""Draws a view of a run: a block of lines for a terminal, one line for a log. Pure.

    quickstart: training, step 150 of 300
    progress   ██████████░░░░░░░░░░  50%, 1 min 10 s left
    loss       █▇▆▅▄▄▃▃▂▂▂▂▁▁▁▁▁▁▁▁  4.9513, held out 5.1943, learning rate 0.0003
    speed      ████████████████████  6.63k tokens/s, 114% of the predicted 5.84k
    memory     ░░░░░░░░░░░░░░░░░░░░  483 MiB of 23.5 GiB RAM, peak 244, predicted 244 MiB
    incidents  none

What does not fit is left out from the right, so a line never wraps: a terminal that wraps cannot be redrawn.
"""

import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.launch.show.live.view import LiveView, MemoryGauge, sparkline
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds


class Glyphs(NamedTuple):
    """Characters for bars and curves."""

    full: str
    empty: str
    mark: str  # of a prediction
    levels: str  # of a curve, the lowest first


UNICODE = Glyphs("█", "░", "│", "▁▂▃▄▅▆▇█")
ASCII = Glyphs("#", "-", "|", "_.-~=+*#")

_LABEL_WIDTH = 11
_GRAPHIC_WIDTHS = ((100, 32), (60, 20), (0, 6))  # for lines of at least so many columns
_LEAST_FOR_GRAPHIC = 30
_LEAST_OF_A_PART = 20
_LOG_BAR_WIDTH = 24
_FULL_SHARE = 0.9  # a fuller memory is shown as a warning
_BOLD, _DIM, _CYAN, _YELLOW, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[36m", "\x1b[33m", "\x1b[0m"


class _Row(NamedTuple):
    """A line of the block: a graphic, and parts of which the first are the most important."""

    label: str
    graphic: str
    parts: Sequence[str]
    is_warning: bool = False
    cuts_last: bool = False  # a part that does not fit is cut


def block_lines(view: LiveView, *, width: int, glyphs: Glyphs, has_color: bool = False) -> list[str]:
    """The block, the most important lines first; none is wider than `width` columns."""
    graphic = next(size for least, size in _GRAPHIC_WIDTHS if width >= least)
    if width < _LEAST_FOR_GRAPHIC:
        graphic = 0
    head = fitted([f"{view.title}: {view.state or 'starting'}", *_place(view)], width)
    rows = [_progress(view, graphic, glyphs), _loss(view, graphic, glyphs), _speed(view, graphic, glyphs)]
    rows += [_memory(view.memory, graphic, glyphs), _card(view), _incidents(view)]
    body = [_line(row, width, graphic, has_color=has_color) for row in rows if row is not None]
    return [f"{_BOLD}{head}{_PLAIN}" if has_color else head, *body]


def log_line(view: LiveView) -> str:
    """`[####----] 50/100  loss 4.1250  6.1k tokens/s (104% of predicted)  310 MiB  1 min 10 s left`, in ASCII."""
    step, num_steps = view.step or 0, view.num_steps
    parts = [f"step {step}"]
    if num_steps is not None:
        parts = [f"[{bar(step / max(1, num_steps), width=_LOG_BAR_WIDTH, glyphs=ASCII)}] {step}/{num_steps}"]
    parts += [f"loss {view.loss:.4f}"] if view.loss is not None else []
    parts += [f"lr {view.lr:.3g}"] if view.lr is not None else []
    share = _share_of_predicted(view)
    if view.tokens_per_s:
        of_predicted = "" if share is None else f" ({share:.0%} of predicted)"
        parts.append(f"{format_count(view.tokens_per_s)} tokens/s{of_predicted}")
    if view.memory is not None:
        used, total, peak = view.memory.used_bytes, view.memory.total_bytes, view.memory.peak_bytes
        if used is not None and total is not None and view.memory.place == "card":
            parts.append(_pair(used, " of ", total))
        elif peak is not None:
            parts.append(format_bytes(peak))
    parts += [f"{format_seconds(view.seconds_left)} left"] if view.seconds_left is not None else []
    parts += _counted(view)
    return "  ".join(parts)


def bar(share: float, *, width: int, glyphs: Glyphs, mark: float | None = None) -> str:
    """A bar of which `share` is filled, with a mark at the prediction."""
    filled = round(width * min(1.0, max(0.0, share)))
    if share < 1:
        filled = min(filled, width - 1)  # what looks complete is complete
    cells = [glyphs.full] * filled + [glyphs.empty] * (width - filled)
    if mark is not None and width:
        cells[min(width - 1, int(width * min(1.0, max(0.0, mark))))] = glyphs.mark
    return "".join(cells)


def fitted(parts: Sequence[str], width: int, *, cuts_last: bool = False) -> str:
    """As many parts as fit, joined by commas. The first, or with `cuts_last` the last, is cut to fit."""
    text = ""
    for number, part in enumerate(parts):
        longer = f"{text}, {printable(part)}" if number else printable(part)
        if num_columns(longer) > width:
            is_cut = not number or (cuts_last and width - num_columns(text) >= _LEAST_OF_A_PART)
            return _cut(longer, width) if is_cut else text
        text = longer
    return text


def num_columns(text: str) -> int:
    """Columns of the text in a terminal: two for wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(each) in "WF" for each in text)
    return len(text) + wide - sum(unicodedata.category(each) in ("Mn", "Me", "Cf") for each in text)


def _cut(text: str, width: int) -> str:
    """The beginning of the text, with two dots for the rest."""
    while num_columns(text) > max(0, width - 2):
        text = text[:-1]
    return (text.rstrip() + "..")[:width]


def printable(text: str) -> str:
    """The text in one line, without characters that move the cursor."""
    return "".join(each if each.isprintable() else " " for each in text)


def _line(row: _Row, width: int, graphic: int, *, has_color: bool) -> str:
    label = f"{row.label:<{_LABEL_WIDTH}}"[: max(0, width)]
    graph = f"{row.graphic:<{graphic}}  " if row.graphic and graphic else ""
    text = fitted(row.parts, max(0, width - len(label) - len(graph)), cuts_last=row.cuts_last)
    if not has_color:
        return f"{label}{graph}{text}".rstrip()
    color = _YELLOW if row.is_warning else _CYAN
    shown = f"{color}{graph}{_PLAIN}" if graph else ""
    colored = f"{_YELLOW}{text}{_PLAIN}" if row.is_warning and not graph else text
    return f"{_DIM}{label}{_PLAIN}{shown}{colored}"


def _place(view: LiveView) -> list[str]:
    of = "" if view.num_steps is None else f" of {view.num_steps}"
    step = [] if view.step is None and view.num_steps is None else [f"step {view.step or 0}{of}"]
    return step + ([f"attempt {view.attempt}"] if view.attempt > 1 else [])


def _progress(view: LiveView, width: int, glyphs: Glyphs) -> _Row | None:
    if not view.num_steps:
        return None
    share = (view.step or 0) / view.num_steps
    left = [f"{format_seconds(view.seconds_left)} left"] if view.seconds_left is not None else []
    return _Row("progress", bar(share, width=width, glyphs=glyphs), [f"{int(share * 100)}%", *left])


def _loss(view: LiveView, width: int, glyphs: Glyphs) -> _Row | None:
    if view.loss is None and not view.curve:
        return None
    parts = ["no number" if view.loss is None else f"{view.loss:.4f}"]
    parts += [f"held out {view.eval_loss:.4f}"] if view.eval_loss is not None else []
    parts += [f"learning rate {view.lr:.3g}"] if view.lr is not None else []
    curve = sparkline(view.curve, width=width, levels=glyphs.levels) if width else ""
    return _Row("loss", curve, parts)


def _speed(view: LiveView, width: int, glyphs: Glyphs) -> _Row | None:
    if not view.tokens_per_s:
        return None
    share = _share_of_predicted(view)
    parts = [f"{format_count(view.tokens_per_s)} tokens/s"]
    if share is not None and view.predicted_tokens_per_s is not None:
        parts.append(f"{share:.0%} of the predicted {format_count(view.predicted_tokens_per_s)}")
    parts += [f"MFU {view.mfu:.1%}"] if view.mfu is not None else []
    return _Row("speed", "" if share is None else bar(share, width=width, glyphs=glyphs), parts)


def _memory(gauge: MemoryGauge | None, width: int, glyphs: Glyphs) -> _Row | None:
    """Against the card or the RAM; if neither is known, against the prediction."""
    if gauge is None or (gauge.used_bytes is None and gauge.peak_bytes is None):
        return None
    used, total, mark = gauge.used_bytes, gauge.total_bytes, None
    parts = []
    if used is not None:
        parts.append(f"{_pair(used, ' of ', total)} {gauge.place}")
    if gauge.peak_bytes is not None:
        parts.append(f"peak {_pair(gauge.peak_bytes, ', predicted ', gauge.predicted_peak_bytes)}")
    if used is not None and total:
        mark = None if gauge.predicted_bytes is None else gauge.predicted_bytes / total
        share = used / total
    else:
        share = (gauge.peak_bytes or 0) / gauge.predicted_peak_bytes if gauge.predicted_peak_bytes else 0.0
    is_nearly_full = used is not None and bool(total) and share >= _FULL_SHARE
    return _Row("memory", bar(share, width=width, glyphs=glyphs, mark=mark), parts, is_nearly_full)


def _card(view: LiveView) -> _Row | None:
    card = view.card
    parts = [f"{card.utilization:.0%} busy"] if card.utilization is not None else []
    parts += [f"{card.power_w:.0f} W"] if card.power_w is not None else []
    parts += [f"{card.temperature_c} C"] if card.temperature_c is not None else []
    parts += [f"slowed by {card.throttle}"] if card.throttle else []
    return _Row("card", "", parts, bool(card.throttle)) if parts else None


def _incidents(view: LiveView) -> _Row:
    newest = [view.incidents[-1]] if view.incidents else []
    parts = [*_counted(view), *newest]
    return _Row("incidents", "", parts or ["none"], bool(parts), cuts_last=True)


def _counted(view: LiveView) -> list[str]:
    retries, skipped = view.attempt - 1, view.num_skipped
    parts = ["1 restart" if retries == 1 else f"{retries} restarts"] if retries > 0 else []
    return parts + (["1 step skipped" if skipped == 1 else f"{skipped} steps skipped"] if skipped else [])


def _pair(first: int, between: str, second: int | None) -> str:
    """`61 of 80 GiB`, `483 MiB of 23.5 GiB`: the first size has no unit if the second has the same."""
    if second is None:
        return format_bytes(first)
    (number, unit), rest = format_bytes(first).split(), format_bytes(second)
    return f"{number}{between}{rest}" if rest.endswith(f" {unit}") else f"{number} {unit}{between}{rest}"


def _share_of_predicted(view: LiveView) -> float | None:
    if not view.tokens_per_s or not view.predicted_tokens_per_s:
        return None
    return view.tokens_per_s / view.predicted_tokens_per_s
