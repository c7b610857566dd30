"""Reads messages and tools of rows into the form that chat templates read.

Accepted are OpenAI's messages (`role`, `content`, `tool_calls`, `function_call`), ShareGPT's (`from`, `value`; calls of
tools as JSON in a message of `function_call`) and pairs (`human`, `assistant`), each as a list of objects, as an object
of lists (how some libraries store it in columns), or as JSON in a column of text; other names of keys and roles are
mapped by `data.fields`. Content may be a list of parts if all are text. Keys of null of messages, tools and calls are
removed; a null inside the arguments of a call, or as `default` or `const` of a parameter, is a value and stays.

A message that is not to be learned is marked with EXCLUDED. Rows state it in several ways, in any case (`lossMask`):

| key of an answer | not learned | from |
|---|---|---|
| `weight`, `loss_weight`, `sample_weight` | 0 | OpenAI, Mistral, Axolotl |
| `train`, `training`, `trainable`, `learn` | false | Axolotl |
| `loss`, `loss_scale` | false, 0 | ms-swift, XTuner |
| `loss_mask`, `step_loss_mask` | 0 | verl, slime |
| `masked`, `ignore`, `exclude`, `skip` | true | torchtune |

Other values, such as 0.5, and other keys of that kind make the row unusable, as nothing is rounded or guessed. So do
such keys of a part of an answer, as only whole messages can be excluded.
"""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from shardwise.trainer.runtime.data.sources import EXCLUDED, Message
from shardwise.trainer.spec.data.json_text import decode_json, kind_of, without_nulls
from shardwise.trainer.spec.data.shapes import ROLES

_ROLE_KEYS, _CONTENT_KEYS = ("role", "from"), ("content", "value")
_CALL_ROLES = frozenset({"function_call", "tool_call"})  # whose content is the JSON of one call, or of several
_ALIASES = {
    **{role: role for role in ROLES},
    "developer": "system",
    "human": "user",
    **dict.fromkeys(("gpt", "model", "chatgpt", "bot", "ai", *_CALL_ROLES), "assistant"),
    **dict.fromkeys(("function", "observation", "tool_response", "function_response", "ipython"), "tool"),
}
_LEARNED = ("weight", "loss_weight", "sample_weight", "train", "training", "trainable", "learn", "loss", "loss_scale",
            "loss_mask", "step_loss_mask")  # fmt: skip
_NOT_LEARNED = ("masked", "ignore", "ignored", "exclude", "excluded", "skip", "skipped")
_ABOUT_LEARNING = re.compile(
    r"(?:^|_)(?:loss|masks?|train|trainable|weights?|learned|learnable|supervised?|"
    rf"{'|'.join((*_LEARNED, *_NOT_LEARNED))})(?:_|$)"
)
_NEGATIVE = re.compile(r"(?:^|_)(?:masks?|masked|ignored?|excluded?|skip|skipped|no|not|without)(?:_|$)")
_FLAGS: Mapping[Any, bool] = {0: False, 1: True, "false": False, "true": True}
_PART_TYPES = (None, "text", "input_text", "output_text")  # the last two: OpenAI's Responses
_REMEDIES = {
    **dict.fromkeys(("thinking", "reasoning"), 'put it into the key "reasoning_content" of the message'),
    **dict.fromkeys(("tool_use", "tool_call", "function_call"), 'put it into the key "tool_calls" of the message'),
    "tool_result": 'make it the content of a message of the role "tool"',
}
_OF_CHANNELS = {  # keys of gpt-oss's own messages
    "channel": 'put its content into "reasoning_content" of the answer that follows',
    "recipient": 'put the call into "tool_calls"',
}
_FIRST_OF_PAIR = {"system": 0, "user": 1}  # the keys of an object have no order
_NULL_IN_SCHEMA = ("default", "const")  # keys of JSON Schema of which null is a value
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)


class UnusableRowError(ValueError):
    """Why a row cannot be used; its text completes "the row ..."."""


def listed(row: Mapping[str, Any]) -> str:
    """The names of the columns, in one line."""
    return ", ".join(map(str, row)) or "none"


def parsed(value: Any, column: str) -> Any:  # noqa: ANN401 - any row
    """The value of JSON text; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return decode_json(value)
    except ValueError as error:
        raise UnusableRowError(f'field "{column}" is text that {error}') from None


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
    for number, entry in enumerate(value, 1):
        try:
            messages += _pair(entry, names) or [_message(entry, names)]
        except UnusableRowError as error:
            raise UnusableRowError(f'message {number} of "{column}" {error}') from None
    return messages


def holds_messages(text: str, fields: Mapping[str, str]) -> bool:
    """True for the JSON of messages: a list of objects with role and content or calls, or one whose role is known."""
    if not text.lstrip().startswith(("[", "{")):
        return False
    try:
        value = decode_json(text)
    except ValueError:
        return False
    names = _names(fields)
    entries = value if isinstance(value, list) else [value]
    return bool(entries) and all(_is_message(entry, names, knows_role=isinstance(value, dict)) for entry in entries)


def _is_message(entry: Any, names: "_Names", *, knows_role: bool) -> bool:  # noqa: ANN401 - any JSON
    if not isinstance(entry, dict):
        return False
    role = next((entry[key] for key in names.role_keys if isinstance(entry.get(key), str)), None)
    has_role = role is not None and (not knows_role or role in names.roles)
    return has_role and any(key in entry for key in (*names.content_keys, "tool_calls", "function_call"))


def read_tools(value: Any, column: str) -> list[Any] | None:  # noqa: ANN401 - any row
    """The functions that a conversation may call; None where there is none."""
    if value in (None, "", "null"):
        return None
    tools = parsed(value, column)
    if not isinstance(tools, list):
        raise UnusableRowError(f'field "{column}" is {kind_of(tools)}, not a list of functions')
    return [without_nulls(parsed(tool, column), but=_NULL_IN_SCHEMA) for tool in tools] or None


def require_assistant(messages: list[Message], column: str) -> None:
    """UnusableRowError where nothing would be learned."""
    if not any(message["role"] == "assistant" for message in messages):
        raise UnusableRowError(f'no message of "{column}" is the assistant\'s; nothing would be learned')


def learns_nothing(messages: list[Message]) -> bool:
    """True if every answer in the messages is excluded."""
    return all(EXCLUDED in message for message in messages if message["role"] == "assistant")


def flag(value: Any) -> bool | None:  # noqa: ANN401 - any JSON
    """True or false, also as 0 or 1 and as text; None for any other value."""
    if isinstance(value, str):
        value = number_of(value)
    return _FLAGS.get(value) if isinstance(value, str | bool | int | float) else None


def number_of(text: str) -> float | str:
    """The number in a cell of text, as those of CSV files; else the text in lower case, without outer blanks."""
    try:
        return float(text)
    except ValueError:
        return text.strip().lower()


def states_learning(key: str, value: Any) -> bool | None:  # noqa: ANN401 - any JSON
    """Whether a key of an answer states that it is learned (True) or not (False); None for any other key.

    UnusableRowError for a key of that kind that leaves it open.
    """
    name = _about_learning(key)
    if name is None:
        return None
    stated, is_known = flag(value), name in _LEARNED or name in _NOT_LEARNED
    if not is_known and stated is None and isinstance(value, str):
        return None
    if stated is None or not is_known:
        raise UnusableRowError(
            f'has "{key}": {_shown(value)}, which does not state whether it is learned; give an answer "weight": 0 or 1'
        )
    return stated is (name in _LEARNED)


def excludes_naturally(key: str, *, value: bool) -> bool:
    """True if a key of any name that is about learning reads as an exclusion, such as is_trainable: false."""
    name = _about_learning(key)
    return name is not None and value is bool(_NEGATIVE.search(name))


def is_about_learning(key: str) -> bool:
    """True for a key whose name states what is learned, or may."""
    return _about_learning(key) is not None


@lru_cache(maxsize=1024)
def _about_learning(key: str) -> str | None:
    """The name of a key that is about learning, as loss_mask for lossMask, Loss-Mask and LOSS_MASK; else None."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[-. ]+", "_", key).lower()
    return name if _ABOUT_LEARNING.search(name) else None


def _of_columns(value: dict[str, Any]) -> Any:  # noqa: ANN401 - any row
    """A list of messages from an object of lists, or from one message; any other value unchanged."""
    entries = list(value.values())
    if entries and all(isinstance(entry, list) for entry in entries):
        if len({len(entry) for entry in entries}) == 1:
            return [dict(zip(value, message, strict=True)) for message in zip(*entries, strict=True)]
        return value
    return [value]


class _Names(NamedTuple):
    """Keys of a message and names of roles, ours or those of `data.fields`."""

    role_keys: tuple[str, ...]
    content_keys: tuple[str, ...]
    roles: Mapping[str, str]  # from the row's name to ours


def _names(fields: Mapping[str, str]) -> _Names:
    return _Names(
        role_keys=(fields["role"],) if "role" in fields else _ROLE_KEYS,
        content_keys=(fields["content"],) if "content" in fields else _CONTENT_KEYS,
        roles=_ALIASES | {fields[role]: role for role in ROLES if role in fields} if fields else _ALIASES,
    )


def _pair(entry: Any, names: _Names) -> list[Message]:  # noqa: ANN401 - any row
    """The messages of an object whose keys are roles, such as {human: ..., assistant: ...}; none of any other."""
    if not isinstance(entry, dict) or not all(
        key in names.roles and isinstance(text, str | None) for key, text in entry.items()
    ):
        return []
    role_key, content_key = names.role_keys[0], names.content_keys[0]
    turns = [_message({role_key: key, content_key: text}, names) for key, text in entry.items() if text]
    return sorted(turns, key=lambda turn: _FIRST_OF_PAIR.get(turn["role"], len(_FIRST_OF_PAIR)))


def _message(entry: Any, names: _Names) -> Message:  # noqa: ANN401 - any row
    """The message; UnusableRowError, whose text completes "message 3 ...", where it is none."""
    if not isinstance(entry, dict):
        raise UnusableRowError(f"is {kind_of(entry)}, not an object")
    role_key, content_key = (
        next((key for key in keys if entry.get(key) is not None), None)
        for keys in (names.role_keys, names.content_keys)
    )
    if role_key is None:
        raise UnusableRowError(f'has no "{names.role_keys[0]}"; its fields: {listed(entry)}')
    role = _role(entry[role_key], names)
    content = None if content_key is None else _checked_content(entry[content_key], role)
    others = {key: other for key, other in entry.items() if key not in (role_key, content_key) and other is not None}
    message = {"role": role, "content": content, **(_others(others, role) if others else {})}
    if entry[role_key] in _CALL_ROLES and isinstance(content, str) and not message.get("tool_calls"):
        message |= _calls_in(content)
    calls = message.get("tool_calls")
    if message["content"] is None:
        if not calls:
            raise UnusableRowError(f'has no "{names.content_keys[0]}"; its fields: {listed(entry)}')
        message["content"] = ""
    if role in ("user", "assistant") and not calls and not _has_text(message["content"]):
        raise UnusableRowError(f"({role}) is empty")
    return message


def _role(value: object, names: _Names) -> str:
    role = names.roles.get(value) if isinstance(value, str) else None
    if role is None:
        shown = f'"{value}"' if isinstance(value, str) else kind_of(value)
        raise UnusableRowError(
            f"has the role {shown}, none of {', '.join(ROLES)}; name it, as in data.fields={{assistant: gpt}}"
        )
    return role


def _checked_content(content: Any, role: str) -> str | list[Any]:  # noqa: ANN401 - any row
    """The content if it is text or parts of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnusableRowError(f"has content that is {kind_of(content)}, not text; write it as text, perhaps of JSON")
    return [_checked_part(part, role) for part in content]


def _checked_part(part: Any, role: str) -> Message:  # noqa: ANN401 - any row
    """A part of content in OpenAI's form, without what states that it is learned."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else kind_of(part)
    if kind not in _PART_TYPES or not isinstance(part.get("text"), str):
        remedy = _REMEDIES.get(str(kind), "only text is learned; data.bad_rows=skip omits such rows")
        raise UnusableRowError(f"has content with a part that is not text ({kind}); {remedy}")
    checked: Message = {"type": "text"}
    for key, value in part.items():
        stated = None if value is None or role != "assistant" else states_learning(key, value)
        if stated is False:
            raise UnusableRowError("has a part of its content that is not to be learned; only whole messages can be")
        if value is not None and stated is None and key != "type":
            checked[key] = value
    return checked


def _has_text(content: str | list[Any]) -> bool:
    return bool((content if isinstance(content, str) else "".join(part["text"] for part in content)).strip())


def _others(others: Mapping[str, Any], role: str) -> Message:
    """Further keys of a message: calls in one form, and EXCLUDED in place of all that states what is learned."""
    remaining: Message = dict(others)
    for key, remedy in _OF_CHANNELS.items() if role == "assistant" else ():
        if remaining.get(key, "final") != "final":
            raise UnusableRowError(f'has the {key} "{remaining[key]}", which templates do not read; {remedy}')
    if "tool_calls" in remaining:
        remaining["tool_calls"] = _calls(remaining["tool_calls"])
    call = parsed(remaining.get("function_call"), "function_call")
    if call is not None and not remaining.get("tool_calls"):
        remaining["tool_calls"] = [_function_call(call)]
    if call is None or any(_whole_call(call) in (each, each.get("function")) for each in remaining["tool_calls"]):
        remaining.pop("function_call", None)
    if not remaining.get("tool_calls", True):
        del remaining["tool_calls"]  # templates ask whether the key is there
    for key, value in tuple(remaining.items()):
        try:
            stated = states_learning(key, value)
        except UnusableRowError:
            if role == "assistant":
                raise
            continue  # other messages are not learned anyway
        if stated is not None and (role == "assistant" or not stated):
            del remaining[key]
        if stated is False:
            remaining[EXCLUDED] = True
    return remaining


def _shown(value: Any) -> str:  # noqa: ANN401 - any JSON
    return str(value).lower() if isinstance(value, bool | int | float) else kind_of(value)


def _calls_in(content: str) -> Message:
    """Content and calls of a message whose content is the JSON of its calls, perhaps behind a thought."""
    thought = _THOUGHT.match(content)
    text = content[thought.end() :] if thought else content
    try:
        calls = decode_json(text)
    except ValueError as error:
        raise UnusableRowError(f"is a call of a tool that {error}") from None
    calls = calls if isinstance(calls, list) else [calls]
    return {"content": thought[0] if thought else "", "tool_calls": [_function_call(call) for call in calls]}


def _calls(value: Any) -> list[Message]:  # noqa: ANN401 - any JSON
    """A list of calls, also from JSON in text, as a whole or of each."""
    value = parsed(value or [], "tool_calls")
    calls = [parsed(each, "tool_calls") for each in (value if isinstance(value, list) else [value])]
    if not all(isinstance(call, dict) for call in calls):
        raise UnusableRowError('has "tool_calls" that are not a list of calls of tools')
    return [_whole_call(call) for call in calls]


def _function_call(call: Any) -> Message:  # noqa: ANN401 - any JSON
    """One call in OpenAI's form."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise UnusableRowError('has a call of a tool that is not {"name": ..., "arguments": ...}')
    return {"type": "function", "function": _whole_call(call)}


def _whole_call(call: Message) -> Message:
    """A call, or its function, without keys of null; arguments are as the row has them."""
    whole = {key: each for key, each in call.items() if each is not None}
    function = whole.get("function")
    return {**whole, "function": _whole_call(function)} if isinstance(function, dict) else whole
