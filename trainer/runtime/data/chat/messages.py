"""Brings messages into the form that chat templates read, as transformers does before it renders them.

Keys that hold nothing are left out, since many templates print "None" for them; reasoning is given under every name
that a template may read it by; and what is not plain JSON (a date of a Parquet file) becomes text, as a template from a
hub must not be handed objects with methods.

Beyond what transformers does: a list of parts that are all text becomes one text where the template reads no lists, and
the arguments of a tool call, which rows in OpenAI's form hold as JSON in a string, become the object that templates
print; for a template that puts strings together (DeepSeek's) they become the string.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.runtime.data.chat.template import RESERVED, ChatTemplate, TemplateRefusalError
from trainer.runtime.data.sources.examples import Message

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
_PROBE = "a part of a message"


def plain_messages(messages: Sequence[Message], *, takes_parts: bool) -> list[Message]:
    """Copies of the messages for a template; TemplateRefusalError where one is no message."""
    if not messages:
        raise TemplateRefusalError("has no messages")
    plain = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise TemplateRefusalError(f"message {number} has no role")
        copied = {key: _plain(value) for key, value in message.items() if value is not None}
        reasoning = next((copied[name] for name in _REASONING_NAMES if name in copied), None)
        if reasoning is not None:
            copied = {"thinking": reasoning, **copied, "reasoning_content": reasoning}
        content = copied.get("content")
        if isinstance(content, list) and not takes_parts:
            copied["content"] = _joined(content, number)
        plain.append(copied)
    return plain


def text_of(content: Any) -> str:  # noqa: ANN401 - any JSON
    """The text of a message's content, which is text or a list of parts."""
    if isinstance(content, list):
        return "".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))
    return content if isinstance(content, str) else ""


def with_arguments(messages: Sequence[Message], *, as_text: bool) -> list[Message]:
    """The messages with the arguments of tool calls as objects, or as JSON in a string."""
    return [
        {**message, "tool_calls": [_with_arguments(call, as_text=as_text) for call in message["tool_calls"]]}
        if isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def takes_parts(template: ChatTemplate) -> bool:
    """Whether the template reads content that is a list of parts."""
    try:
        text = template.render([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}]).text
    except TemplateRefusalError:
        return False
    return _PROBE in text and "'type'" not in text and '"type"' not in text  # printed as a list is not read


def _plain(value: Any) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(value, str):
        for character in RESERVED:
            if character in value:
                raise TemplateRefusalError(f"holds the noncharacter U+{ord(character):04X}, which no text has")
        return value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value)


def _joined(parts: Sequence[Any], number: int) -> str:
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        raise TemplateRefusalError(
            f"message {number} holds parts other than text, which the chat template does not read"
        )
    return text_of(list(parts))


def _with_arguments(call: Any, *, as_text: bool) -> Any:  # noqa: ANN401 - any JSON
    """One tool call, in OpenAI's form with a `function` or without."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_arguments(call["function"], as_text=as_text)}
    arguments = call.get("arguments")
    if as_text and isinstance(arguments, dict):
        return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)}
    if as_text or not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return call
    return {**call, "arguments": parsed} if isinstance(parsed, dict) else call
