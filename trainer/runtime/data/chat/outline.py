"""Outlines: a conversation rendered with a sentinel in place of every string, which shows what its template writes.

A sentinel that does not come back from the rendered text stands for a string that the template drops:

    required   content, reasoning, calls of tools: the conversation is refused with the key's name. Of an earlier answer
               it suffices that the template writes the string while that answer is the last (Qwen3 and gpt-oss omit
               the reasoning of earlier answers, as at inference); such keys are counted
    other      ids, names, and keys that a template need not know: counted

An outline depends on the shape of a conversation (roles, keys, names of arguments), not on its strings and numbers,
so it is cached. Filled in again it must equal the text of the real conversation to the character, which proves that
nothing is cut off and that every place in the outline is a place in the text. A sentinel holds a quote, whose form in
the text shows if the template wrote the string as it is or inside JSON. Around sentinels stay outer white space and
strings that the template looks for in a message (`</think>`), so that it follows the same branches. Where it follows
others, as it compares names, or writes calls in a form of its own, a weaker sketch has these as they are.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from shardwise.trainer.runtime.data.chat.template import (
    CLOSES_SLOT,
    OPENS_SLOT,
    REASONING_NAMES,
    TemplateRefusalError,
)
from shardwise.trainer.runtime.data.sources import Message

_NUMBERS = 731_845_000_000  # sentinels of numbers are those above it
_SLOT = re.compile(
    rf"(?:{OPENS_SLOT}|\\+ufdd2)(\d{{6}})([^{OPENS_SLOT}{CLOSES_SLOT}]{{0,16}}?)(?:{CLOSES_SLOT}|\\+ufdd3)|731845(\d{{6}})"
)
_NEVER_SHOWN = frozenset({"id", "type", "index"})  # of a call: it is whole without them
_CLASSIFYING = frozenset({"role", "type"})  # decide what a template does, and stay as they are
_IDS = frozenset({"id", "tool_call_id"})
PROBE_NUMBER = 999_999  # of no string


class Sketch(IntEnum):
    """How many strings are replaced."""

    ALL = 0
    SPOKEN = 1  # content and reasoning; calls, ids and what else a message has stay
    ANSWERS = 2  # only content of the assistant; not of conversations with tools, whose results may be inside a turn


class Conversation(NamedTuple):
    """The arguments of a template: messages, tools, and those that a row names."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    arguments: Mapping[str, Any] = {}


class Stretch(NamedTuple):
    """A string of a message, without outer white space, or the piece of one between strings that the template tests."""

    message: int
    key: str  # as in tool_calls.function.name
    text: str
    is_required: bool


class Slot(NamedTuple):
    """Where a sentinel stands in an outline, and for which stretch."""

    begin: int
    end: int
    number: int
    message: int
    is_own: bool  # in the text of its message; names of functions and ids may also be written in later messages
    encode: Callable[[str], str]


def sentinel(number: int) -> str:
    """Of nine characters, as some templates accept no id of another length."""
    return f'{OPENS_SLOT}{number:06d}"{CLOSES_SLOT}'


def without_arguments(
    messages: Sequence[Message],
    value: Any,  # noqa: ANN401 - any JSON
) -> tuple[list[Message], str | None]:
    """The messages without arguments of calls that are `value`, and where the first was; None if there is none."""
    remaining, places = [], list[str]()
    for number, message in enumerate(messages):
        found: list[str] = []
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            message = {**message, "tool_calls": [_cut_call(call, value, "tool_calls", found) for call in calls]}
        places += [f"{path} of message {number + 1} ({message['role']})" for path in found]
        remaining.append(message)
    return remaining, places[0] if places else None


def _cut_call(call: Any, value: Any, path: str, found: list[str]) -> Any:  # noqa: ANN401 - any JSON
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _cut_call(call["function"], value, f"{path}.function", found)}
    if not isinstance(call.get("arguments"), dict):
        return call
    return {**call, "arguments": _cut(call["arguments"], value, f"{path}.arguments", found)}


def _cut(outer: Any, value: Any, path: str, found: list[str]) -> Any:  # noqa: ANN401 - any JSON
    """A copy without what is `value`; the keys that led to it are added to `found`."""
    if isinstance(outer, dict):
        found += [f"{path}.{name}" for name, each in outer.items() if _is(each, value)]
        return {
            name: _cut(each, value, f"{path}.{name}", found) for name, each in outer.items() if not _is(each, value)
        }
    if isinstance(outer, list):
        found += [path for each in outer if _is(each, value)]
        return [_cut(each, value, path, found) for each in outer if not _is(each, value)]
    return outer


def _is(one: Any, other: Any) -> bool:  # noqa: ANN401 - any JSON
    return type(one) is type(other) and one == other


def pattern_of_tested(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches the strings that stay as they are, the longest first."""
    return re.compile(f"({'|'.join(map(re.escape, sorted(texts, key=len, reverse=True)))})")


class Sketcher:
    """Replaces the strings of messages with sentinels; all sketches of a conversation number its stretches alike."""

    def __init__(self, tested: re.Pattern[str], kind: Sketch) -> None:
        self._tested, self._kind = tested, kind
        self.stretches: list[Stretch] = []
        self.replaced = set[int]()
        self.repeated: list[tuple[int, str]] = []  # stretches that are also the value of another key
        self.plain_keys = set[str]()  # of messages, whose values hold no string
        self._known: dict[tuple[int, str], str] = {}  # by message (ids: of all) and text
        self._number, self._role = 0, ""

    def sketch(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with sentinels."""
        return [self._message(number, message) for number, message in enumerate(messages)]

    def _message(self, number: int, message: Message) -> Message:
        self._number, self._role = number, message["role"]
        outlined = {}
        for key, value in message.items():
            num_before = len(self.stretches)
            outlined[key] = value if key == "role" else self._outlined(value, key, key)
            holds_something = key != "role" and value not in (None, "", [], {})
            if holds_something and len(self.stretches) == num_before and outlined[key] == value:
                self.plain_keys.add(key)
        return outlined

    def _outlined(self, value: Any, name: str, path: str) -> Any:  # noqa: ANN401 - any JSON
        if isinstance(value, str):
            return value if name in _CLASSIFYING or not value else self._text(value, name, path)
        if isinstance(value, dict):
            return {key: self._outlined(each, key, f"{path}.{key}") for key, each in value.items()}
        if isinstance(value, list):
            return [self._outlined(each, name, path) for each in value]
        if path.startswith("tool_calls.") and isinstance(value, int | float) and not isinstance(value, bool):
            return self._count(value, path)
        return value

    def _count(self, value: float, path: str) -> float:
        self.stretches.append(Stretch(self._number, path, json.dumps(value), is_required=_is_required(path)))
        if self._kind is not Sketch.ALL:
            return value
        self.replaced.add(len(self.stretches) - 1)
        return _NUMBERS + len(self.stretches) - 1

    def _text(self, value: str, name: str, path: str) -> str:
        group = -1 if name in _IDS else self._number if path in REASONING_NAMES else None
        if group is not None and (known := self._known.get((group, value))) is not None:
            self.repeated += [(number, path) for number in numbers_in(known)]
            return known
        pieces = self._tested.split(value) if self._tested.search(value) else [value]
        is_required = _is_required(path)
        is_replaced = self._replaces(path, is_required=is_required)
        for place in range(0, len(pieces), 2):
            core = pieces[place].strip()
            if core:
                self.stretches.append(Stretch(self._number, path, core, is_required))
                if is_replaced:
                    self.replaced.add(len(self.stretches) - 1)
                    begin = pieces[place].index(core)
                    mark = sentinel(len(self.stretches) - 1)
                    pieces[place] = f"{pieces[place][:begin]}{mark}{pieces[place][begin + len(core) :]}"
        outlined = "".join(pieces)
        if group is not None:
            self._known[group, value] = outlined
        return outlined

    def _replaces(self, path: str, *, is_required: bool) -> bool:
        if self._kind is Sketch.ALL:
            return True
        is_spoken = is_required and not path.startswith("tool_calls.")
        return is_spoken and (self._kind is Sketch.SPOKEN or self._role == "assistant")


def _is_required(path: str) -> bool:
    top, _, rest = path.partition(".")
    if top == "tool_calls":
        return rest.rpartition(".")[2] not in _NEVER_SHOWN
    return path in ("content", "content.text") or top in REASONING_NAMES


class Outline(NamedTuple):
    """A rendered sketch."""

    text: str
    slots: tuple[Slot, ...]  # in the order of the text

    def fill(self, stretches: Sequence[Stretch]) -> tuple[str, Callable[[int], int]]:
        """The text with its strings, and where a place of the outline is in it."""
        pieces: list[str] = []
        place = 0
        moves = []  # (where in the outline, how far what follows has moved)
        moved = 0
        for slot in self.slots:
            written = slot.encode(stretches[slot.number].text)
            pieces += (self.text[place : slot.begin], written)
            place = slot.end
            moved += len(written) - (slot.end - slot.begin)
            moves.append((slot.end, moved))
        pieces.append(self.text[place:])
        return "".join(pieces), lambda at: at + next((by for end, by in reversed(moves) if end <= at), 0)


def outline_of(text: str, stretches: Sequence[Stretch]) -> Outline:
    """The outline of a rendered sketch; TemplateRefusalError for a string of a message that is written twice."""
    slots, seen = [], set[int]()
    for found in _SLOT.finditer(text):
        number = _number(found)
        if number >= len(stretches):
            continue
        stretch = stretches[number]
        if number in seen and stretch.is_required and not stretch.key.endswith(".name"):
            raise TemplateRefusalError(
                f"the chat template writes the {stretch.key} of message {stretch.message + 1} twice"
            )
        is_own = number not in seen and stretch.key.rpartition(".")[2] not in _IDS
        slots.append(Slot(*found.span(), number, stretch.message, is_own, _encoder(found[2], text[found.start()])))
        seen.add(number)
    return Outline(text, tuple(slots))


def _encoder(quote: str | None, opening: str) -> Callable[[str], str]:
    """How the template wrote a string, by its form of the sentinel's quote: as it is, in JSON, or in JSON in JSON."""
    if quote is None or quote == '"':
        return str
    is_ascii = opening != OPENS_SLOT
    if quote == '\\"':
        return lambda text: json.dumps(text, ensure_ascii=is_ascii)[1:-1]
    if quote == '\\\\\\"':
        return lambda text: json.dumps(json.dumps(text, ensure_ascii=is_ascii)[1:-1], ensure_ascii=is_ascii)[1:-1]
    return str  # another form, which no text that is filled in equals


def numbers_in(text: str) -> set[int]:
    """The stretches whose sentinels stand in a text."""
    return {_number(found) for found in _SLOT.finditer(text)}


def begin_of_rest(text: str, number: int) -> int | None:
    """Where the text after the first sentinel of that number begins; None where it does not occur."""
    return next((found.end() for found in _SLOT.finditer(text) if _number(found) == number), None)


def _number(found: re.Match[str]) -> int:
    return int(found[1] or found[3])
