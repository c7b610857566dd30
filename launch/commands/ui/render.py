"""Pages from the templates of `templates/`, which escape every value but `Markup`: HTML that was made here."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from shardwise.launch.show.run_page import setting_text
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds

_FOLDER = Path(__file__).parent / "templates"


class Content(NamedTuple):
    """A page: what is fixed, and its parts by name, which `ui.js` replaces where they changed."""

    title: str
    head: str
    parts: dict[str, str]
    place: str = ""  # of the navigation
    api: str = ""  # where `ui.js` gets the parts again
    every_s: float = 0.0  # 0: when a form changed only


class Tile(NamedTuple):
    """A figure with its label."""

    label: str
    figure: str
    notes: Sequence[str] = ()
    share: float | None = None  # of a bar below the figure
    mark: float | None = None  # on the bar: the prediction
    is_full: bool = False
    tone: str = ""  # of a figure that is a word


def document(content: Content) -> str:
    """The whole page."""
    safe = content._replace(
        head=Markup(content.head),  # noqa: S704 - the blocks of a template, as are the parts
        parts={name: Markup(html) for name, html in content.parts.items()},  # noqa: S704
    )
    return _environment().get_template("page.html").render(page=safe)


def forwarding(address: str) -> str:
    """A page that goes on to another one by itself."""
    return _environment().get_template("forwarding.html").render(address=address)


def content_of(
    template: str, title: str, *, place: str = "", api: str = "", every_s: float = 0.0, **values: object
) -> Content:
    """A page of which the head and the parts are the blocks of a template."""
    head, *parts = blocks_of(template, title=title, **values).items()
    return Content(title, head[1], dict(parts), place, api, every_s)


def blocks_of(template: str, **values: object) -> dict[str, str]:
    """The blocks of a template by name, in its order."""
    found = _environment().get_template(template)
    context = found.new_context(values)
    return {name: Markup("".join(block(context)).strip()) for name, block in found.blocks.items()}  # noqa: S704


def message(title: str, text: str, *, name: str = "", place: str = "") -> Content:
    """A page of one text: why there is no other, or what was done to the run `name`, with the way back."""
    return content_of("message.html", title, place=place, text=text, name=name)


@cache
def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "address": address,
        "by": lambda value: "" if value is None else f"{value:.9g}",  # what ui.js sorts a cell by
        "bytes": format_bytes,
        "count": format_count,
        "figure": lambda value, form: "-" if value is None else form % value,
        "lines": lines,
        "percent": lambda share: f"{100 * min(1.0, max(0.0, share)):.2f}%",
        "seconds": format_seconds,
        "setting": setting_text,
    }
    made.globals["ui"] = made.get_template("macros.html").module
    return made


def address(path: str, **query: Any) -> str:  # noqa: ANN401 - texts, or sequences of them
    """An address with a query."""
    return f"{path}?{urlencode(query, doseq=True, errors='surrogateescape')}"


def lines(text: str) -> Markup:
    """Escaped text with its line breaks."""
    return Markup("<br>").join(text.splitlines())
