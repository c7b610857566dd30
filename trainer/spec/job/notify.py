"""The setting `log.notify`: who is told how a run ends, a URL, the variable that holds one, or a command.

A URL is kept as one word, as is `$NAME`: the variable of the environment that holds a URL which no file may show. A
command is kept as its words, so that no shell ever reads them: text is cut as a shell would cut it, a list is taken as
it is.
"""

import re

from trainer.spec.job.kinds import HintError, Kind, read_text

_SCHEMES = ("http://", "https://")
_VARIABLE = re.compile(r"\$(?:([A-Za-z_][A-Za-z0-9_]*)|\{([A-Za-z_][A-Za-z0-9_]*)\})")


def is_url(notify: tuple[str, ...]) -> bool:
    """Whether it is a URL that is told; else it is a command."""
    return len(notify) == 1 and notify[0].startswith(_SCHEMES)


def variable_of(notify: tuple[str, ...]) -> str | None:
    """The name of the variable whose URL is told, for `$NAME`; None of a URL or a command."""
    match = _VARIABLE.fullmatch(notify[0]) if len(notify) == 1 else None
    return None if match is None else match[1]


def check_url(url: str) -> None:
    """HintError where it is no URL of http or https, or names no host."""
    if not url.startswith(_SCHEMES):
        raise HintError("a URL begins with http:// or https://")
    host = url.partition("://")[2].partition("/")[0].rpartition("@")[2]
    if not host or not host.strip(":") or any(letter.isspace() or not letter.isprintable() for letter in url):
        raise HintError("it names no host, or holds a space")


def notification() -> Kind:
    """A URL of http or https, `$NAME`, a command as text, or a command as a list of its words."""

    def read(value: object) -> tuple[str, ...]:
        if isinstance(value, list | tuple):
            words = tuple(read_text(word) for word in value)
        else:
            words = _words_of(read_text(value))
        if not words:
            raise ValueError
        if is_url(words):
            check_url(words[0])
        elif "://" in words[0]:
            raise HintError("a URL begins with http:// or https://")
        return words

    one = {"type": "string", "minLength": 1}
    return Kind(
        expected="a URL, $NAME of a variable that holds one, a command or a list of its words",
        read=read,
        write=lambda words: words[0] if is_url(words) or variable_of(words) else list(words),
        schema={"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]},
        is_text=True,
    )


def _words_of(text: str) -> tuple[str, ...]:
    text = text.strip()
    if text.startswith(_SCHEMES):
        return (text,)
    variable = _VARIABLE.fullmatch(text)
    if variable is not None:
        return (f"${variable[1] or variable[2]}",)
    from shlex import split  # where a job has such a command, and only there

    try:
        return tuple(split(text))
    except ValueError as error:
        raise HintError(f"the command cannot be cut into words: {str(error).lower()}") from None
