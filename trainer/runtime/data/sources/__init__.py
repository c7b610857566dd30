"""Readers of text and of rows, and the examples that they read: as a row states them, before any tokenizer.

`rows` makes these out of rows of any file; `rendering` turns them into token ids and marks which are learned.

    str          plain text, or a stretch of a long one
    TokenIds     a row that came tokenised
    Completion   a prompt and what follows it, both text, or both messages
    Chat         messages, from the system's to the assistant's; ShareGPT's and Alpaca's rows are brought into this form
    Preference   one prompt with a better and a worse answer

A message is what chat templates read: a `role`, its `content`, and other keys of the row (`tool_calls`, `name`).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

Message = dict[str, Any]
TEMPLATE_KWARGS = "chat_template_kwargs"  # column of further arguments of a template
EXCLUDED = "not learned"  # key of a message that is not to be learned, however the row states it


class TokenIds(NamedTuple):
    """Token ids of one sequence, and which of them are learned; None: all that have a token before them."""

    ids: list[int]
    is_learned: list[bool] | None = None


class TooLong(str):
    """Why an example that needs more tokens than train.seq_len cannot be used."""

    __slots__ = ()


class Completion(NamedTuple):
    """A prompt, which is read, and a completion, which is learned."""

    prompt: str | list[Message]
    completion: str | list[Message]
    tools: list[Any] | None = None  # as those of a Chat
    template_kwargs: dict[str, Any] | None = None


class Chat(NamedTuple):
    """A conversation."""

    messages: list[Message]
    tools: list[Any] | None = None  # functions that it may call, as a template reads them
    template_kwargs: dict[str, Any] | None = None  # further arguments of the template, such as enable_thinking


class Preference(NamedTuple):
    """Two answers to one prompt; the chosen one is preferred."""

    prompt: str | list[Message]
    chosen: str | list[Message]
    rejected: str | list[Message]
    tools: list[Any] | None = None
    template_kwargs: dict[str, Any] | None = None

    def completion_of(self, answer: str | list[Message]) -> Completion:
        """The prompt with one of the answers."""
        return Completion(self.prompt, answer, self.tools, self.template_kwargs)


Content = str | TokenIds | Completion | Chat | Preference


def is_plain_pair(content: Content) -> bool:
    """True for a prompt and answers of plain text, which no chat template formats."""
    return (
        isinstance(content, Completion | Preference) and isinstance(content.prompt, str) and isinstance(content[1], str)
    )


def size_of(content: Content) -> int:
    """Characters of all text, or tokens of token ids."""
    return len(content.ids) if isinstance(content, TokenIds) else sum(map(len, texts_of(content)))


def texts_of(content: Content) -> Iterator[str]:
    """Every piece of text in it, in order; nothing of what came tokenised."""
    if isinstance(content, str):
        yield content
    elif not isinstance(content, TokenIds):
        for part in content:
            if isinstance(part, str | list):
                yield from _texts_in(part)


def identity_of(content: Content) -> bytes:
    """Bytes that are the same for the same content, in any row and with any order of keys."""
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, TokenIds):
        return np.asarray(content.ids, np.int64).tobytes()
    num_parts = len(content)
    while content[num_parts - 1] is None and num_parts > 2:
        num_parts -= 1
    return msgspec.json.encode(content[:num_parts], order="sorted")


def _texts_in(part: str | Sequence[Any]) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    for message in part if not isinstance(part, str) else ():
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            yield content
        elif isinstance(content, list):  # parts, as chat templates for pictures have them
            yield from (piece["text"] for piece in content if isinstance(piece, dict) and "text" in piece)
