"""Messages as rows hold them, brought into the one form that chat templates read: `role`, `content` and what else is.

Read are OpenAI's form (`role`, `content`, `tool_calls`) and ShareGPT's (`from`, `value`), each as a list of objects, as
an object of lists (how some libraries store it in columns), or as JSON in a column of text. Names of keys and of roles
that are neither are mapped by `data.fields`. Content may be a list of parts, if all are text, as these models read
text. Nulls, which columnar files put where another row has a key, are taken out.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.runtime.data.sources.examples import Message
from trainer.runtime.data.sources.row_columns import UnusableRowError, listed
from trainer.runtime.data.sources.row_files import decode_json, kind_of
from trainer.spec.data.row_fields import ROLES

_ALIASES = {
    **{role: role for role in ROLES},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
}
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from"), ("content", "value")


def read_messages(value: Any, column: str, fields: Mapping[str, str]) -> list[Message]:  # noqa: ANN401 - any row
    """The messages in `value`, at least one; UnusableRowError where they are none."""
    value = parsed(value, column)
    if isinstance(value, dict):
        value = _of_columns(value)
    if not isinstance(value, list):
        raise UnusableRowError(f'field "{column}" is {kind_of(value)}, not a list of messages')
    if not value:
        raise UnusableRowError(f'field "{column}" is empty')
    names = _names(fields)
    messages: list[Message] = []
    for entry in value:
        try:
            messages.append(_message(entry, names))
        except UnusableRowError as error:
            raise UnusableRowError(f'message {len(messages) + 1} of "{column}" {error}') from None
    return messages


def read_tools(value: Any, column: str) -> list[Any] | None:  # noqa: ANN401 - any row
    """The functions that a conversation may call; None where there is none."""
    if value in (None, "", "null"):
        return None
    tools = parsed(value, column)
    if not isinstance(tools, list):
        raise UnusableRowError(f'field "{column}" is {kind_of(tools)}, not a list of functions')
    return [_without_nulls(tool) for tool in tools] or None


def parsed(value: Any, column: str) -> Any:  # noqa: ANN401 - any row
    """What a column of JSON text says; anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        return decode_json(value)
    except ValueError as error:
        raise UnusableRowError(f'field "{column}" is text that {error}') from None


def text_or_messages(value: Any, column: str, fields: Mapping[str, str]) -> str | list[Message]:  # noqa: ANN401
    """Text that is not empty, or messages; text that is a JSON list of messages is taken for them."""
    if not isinstance(value, str):
        if not isinstance(value, list | dict):
            raise UnusableRowError(f'field "{column}" is {kind_of(value)}, not text or a list of messages')
        return read_messages(value, column, fields)
    if value.startswith("[{"):
        try:
            return read_messages(value, column, fields)
        except UnusableRowError:
            return value
    if not value or value.isspace():
        raise UnusableRowError(f'field "{column}" is empty')
    return value


def require_assistant(messages: list[Message], column: str) -> None:
    """UnusableRowError where nothing would be learned."""
    if not any(message["role"] == "assistant" for message in messages):
        raise UnusableRowError(f'no message of "{column}" is the assistant\'s; nothing would be learned')


def _of_columns(value: dict[str, Any]) -> Any:  # noqa: ANN401 - any row
    """A list of messages from an object of lists, or from one message; what is neither as it is."""
    entries = list(value.values())
    if entries and all(isinstance(entry, list) for entry in entries):
        if len({len(entry) for entry in entries}) == 1:
            return [dict(zip(value, message, strict=True)) for message in zip(*entries, strict=True)]
        return value
    return [value]


class _Names(NamedTuple):
    """Keys of a message and words for roles, ours or those of `data.fields`."""

    role_keys: tuple[str, ...]
    content_keys: tuple[str, ...]
    roles: Mapping[str, str]  # from the row's word to ours


def _names(fields: Mapping[str, str]) -> _Names:
    return _Names(
        role_keys=(fields["role"],) if "role" in fields else _ROLE_KEYS,
        content_keys=(fields["content"],) if "content" in fields else _CONTENT_KEYS,
        roles=_ALIASES | {fields[role]: role for role in ROLES if role in fields} if fields else _ALIASES,
    )


def _message(entry: Any, names: _Names) -> Message:  # noqa: ANN401 - any row
    """The message; UnusableRowError, whose text completes "message 3 ...", where it is none."""
    if not isinstance(entry, dict):
        raise UnusableRowError(f"is {kind_of(entry)}, not an object")
    role_key, content_key = _key(entry, names.role_keys), _key(entry, names.content_keys)
    if role_key is None:
        raise UnusableRowError(f'has no "{names.role_keys[0]}"; its fields: {listed(entry)}')
    role = _role(entry[role_key], names)
    calls = entry.get("tool_calls")
    if content_key is None and not calls:
        raise UnusableRowError(f'has no "{names.content_keys[0]}"; its fields: {listed(entry)}')
    content = "" if content_key is None else _checked_content(entry[content_key])
    if role in ("user", "assistant") and not calls and _is_blank(content):
        raise UnusableRowError(f"({role}) is empty")
    message = {"role": role, "content": content}
    if len(entry) > 2:
        others = {key: other for key, other in entry.items() if key not in (role_key, content_key)}
        message |= _without_nulls(others)
    return message


def _key(entry: dict[str, Any], keys: tuple[str, ...]) -> str | None:
    for key in keys:
        if entry.get(key) is not None:
            return key
    return None


def _role(value: object, names: _Names) -> str:
    role = names.roles.get(value) if isinstance(value, str) else None
    if role is None:
        shown = f'"{value}"' if isinstance(value, str) else kind_of(value)
        raise UnusableRowError(
            f"has the role {shown}, none of {', '.join(ROLES)}; name it, as in data.fields={{assistant: gpt}}"
        )
    return role


def _checked_content(content: Any) -> str | list[Any]:  # noqa: ANN401 - any row
    """The content if it is text or parts of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnusableRowError(f"has content that is {kind_of(content)}, not text")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else kind_of(part)
            raise UnusableRowError(f"has content with a part that is not text ({kind})")
    return [_without_nulls(part) for part in content]


def _is_blank(content: str | list[Any]) -> bool:
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return not text or text.isspace()


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """A copy in which no object has a key of null."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value
