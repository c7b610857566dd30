"""One training example as its row states it, before any tokenizer has seen it.

`row_shapes` makes these out of rows of any file; `rendering` turns them into token ids and says which are learned.

    str          plain text, or a stretch of a long one
    TokenIds     a row that came tokenised
    Completion   a prompt and what follows it, both text, or both messages
    Chat         messages, from the system's to the assistant's; ShareGPT's and Alpaca's rows are brought into this form
    Preference   one prompt with a better and a worse answer

A message is what chat templates read: a `role`, its `content`, and whatever else the row held (`tool_calls`, `name`).
"""

from typing import Any, NamedTuple

Message = dict[str, Any]


class TokenIds(NamedTuple):
    """Token ids of one sequence, and which of them are learned; None: all that have a token before them."""

    ids: list[int]
    is_learned: list[bool] | None = None


class Completion(NamedTuple):
    """A prompt, which is read, and a completion, which is learned."""

    prompt: str | list[Message]
    completion: str | list[Message]


class Chat(NamedTuple):
    """A conversation; `tools` are the functions it may call, as a template is told of them."""

    messages: list[Message]
    tools: list[Any] | None = None


class Preference(NamedTuple):
    """Two answers to one prompt; the chosen one is preferred."""

    prompt: str | list[Message]
    chosen: str | list[Message]
    rejected: str | list[Message]


Content = str | TokenIds | Completion | Chat | Preference
