"""Checks that a template writes all that a conversation holds, and finds the assistant's turns in the text.

Both are read off outlines (see `outline`), which are cached by the shape of a conversation. Where no sketch follows the
real conversation, as in a template that writes a message in capitals, its strings are looked for in the text itself.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from shardwise.trainer.runtime.data.chat.outline import (
    Conversation,
    Outline,
    Sketch,
    Sketcher,
    Stretch,
    numbers_in,
    outline_of,
    pattern_of_tested,
    sentinel,
    without_arguments,
)
from shardwise.trainer.runtime.data.chat.template import ChatTemplate, TemplateRefusalError, prepared_messages
from shardwise.trainer.runtime.data.chat.turns import Turn, TurnSearch
from shardwise.trainer.runtime.data.sources import TEMPLATE_KWARGS, Message

_ANOTHER = "name another (data.chat_template)"
_REWRITTEN = "the chat template rewrites the content of messages, so that the learned part is not clear"
_REASONING_TAGS = ("<think>", "</think>")
_NUM_OUTLINES = 512  # those of conversations with many calls differ, and may be long
_ARGUMENTS_WITHOUT_TEXT: tuple[Any, ...] = (True, False, None, [], {})  # for which no sentinel stands
_SCHEMA_KEYWORDS = frozenset({"type", "required", "strict"})


class Examined(NamedTuple):
    """The turns of a conversation, and its keys that the text lacks, written as in `messages.tool_calls.id`."""

    turns: tuple[Turn, ...] | None  # of the assistant; None where they are not wanted
    unread: frozenset[str] = frozenset()  # keys that the template does not write, and need not
    shortened: frozenset[str] = frozenset()  # keys of earlier answers that it leaves out, as at inference


class _Case(NamedTuple):
    """One sketch of a conversation, rendered."""

    kind: Sketch
    outline: Outline
    sketch: Conversation
    replaced: frozenset[int]  # stretches
    missing: frozenset[int]  # required stretches that it replaces, and the template does not write
    shortened: frozenset[int]  # those of earlier answers, written while that answer is the last
    unread: frozenset[str]  # keys of other stretches
    omitted: str | None  # where an argument is that is neither text nor number, and that the template does not write


class _Sketched(NamedTuple):
    """One sketch of a conversation with its strings."""

    key: str  # of its shape
    case: "_Case | None"
    stretches: Sequence[Stretch]
    refusal: str  # why it has no case, or its text is not that of the conversation


class Examiner:
    """Examines conversations under one template; `special` are the tokenizer's special tokens."""

    def __init__(self, template: ChatTemplate, special: Sequence[str], *, supports_parts: bool) -> None:
        self._template, self._supports_parts = template, supports_parts
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
        self._tested = pattern_of_tested({*template.tested_text, *_REASONING_TAGS})
        self._cases: dict[str, _Case | str] = {}  # by shape; a str is why it has none
        self._turns: dict[str, tuple[Turn, ...] | str] = {}
        self._tools: dict[str, frozenset[str] | str] = {}

    def examine(self, conversation: Conversation, text: str, *, finds_turns: bool) -> Examined:
        """The conversation, of which the template made `text`; messages without aliases (see `prepared_messages`).

        TemplateRefusalError for a string that is not in the text, or a turn that is not clear.
        """
        unread = self._unread_tools(conversation, text)
        unread |= {
            f"{TEMPLATE_KWARGS}.{name}" for name in conversation.arguments if name not in self._template.variables
        }
        for name, value in conversation.arguments.items():
            strings = _strings_in(value, f"{TEMPLATE_KWARGS}.{name}") if isinstance(value, list | dict) else ()
            unread |= {path for path, each in strings if not _is_written(each.strip(), text)}
        tried, moved = self._sketch_until_alike(conversation, text)
        stretches, cases = tried[0].stretches, [each.case for each in tried if each.case is not None]
        written = frozenset[int]().union(*(case.replaced - case.missing for case in cases))
        missing = frozenset[int]().union(*(case.missing for case in cases)) - written
        if missing:
            raise _omitted(stretches[min(missing)], conversation)
        if cases and cases[0].omitted is not None:
            raise TemplateRefusalError(f"the chat template omits the {cases[0].omitted}; {_ANOTHER}, or remove it")
        shortened = frozenset[int]().union(*(case.shortened for case in cases))
        if moved is None or len(tried) > 1:
            _check_contained([each for number, each in enumerate(stretches) if number not in shortened], text)
        if not shortened:
            _check_argument_names(conversation.messages, text)
        if cases and cases[0].kind is Sketch.ALL:
            unread |= cases[0].unread
        else:
            unread |= {f"messages.{each.key}" for each in stretches if not each.is_required and each.text not in text}
        found = Examined(None, unread, frozenset(f"messages.{stretches[number].key}" for number in shortened))
        if not finds_turns:
            return found
        turns = tried[0].refusal if moved is None else self._turns_of(tried[-1])
        if isinstance(turns, str) or moved is None:
            raise TemplateRefusalError(str(turns))
        return found._replace(turns=tuple(Turn(turn.message, moved(turn.begin), moved(turn.end)) for turn in turns))

    def _sketch_until_alike(
        self, conversation: Conversation, text: str
    ) -> tuple[list[_Sketched], Callable[[int], int] | None]:
        """Sketches of it, up to one that is the text when filled in, and where its places are in the text; or None."""
        has_results = any(message["role"] == "tool" for message in conversation.messages)
        tried = []
        for kind in list(Sketch)[: -1 if has_results else None]:
            sketcher = Sketcher(self._tested, kind)
            sketch = conversation._replace(messages=sketcher.sketch(conversation.messages))
            key = repr(sketch)
            case = self._case(key, kind, sketch, sketcher)
            if isinstance(case, str):
                tried.append(_Sketched(key, None, sketcher.stretches, case))
            else:
                tried.append(_Sketched(key, case, sketcher.stretches, _REWRITTEN))
                filled, moved = case.outline.fill(sketcher.stretches)
                if filled == text:
                    return tried, moved
        return tried, None

    def _case(self, key: str, kind: Sketch, sketch: Conversation, sketcher: Sketcher) -> _Case | str:
        case = self._cases.get(key)
        if case is None:
            try:
                case = self._made(kind, sketch, sketcher)
            except TemplateRefusalError as error:
                case = str(error)
            for cache in (self._cases, self._turns):
                if len(cache) >= _NUM_OUTLINES:
                    cache.clear()
            self._cases[key] = case
        return case

    def _made(self, kind: Sketch, sketch: Conversation, sketcher: Sketcher) -> _Case:
        messages = prepared_messages(sketch.messages, supports_parts=self._supports_parts)
        sketch = sketch._replace(messages=messages)
        stretches = sketcher.stretches
        text = self._template.render(*sketch).text
        outline = outline_of(text, stretches)
        absent = sketcher.replaced - {slot.number for slot in outline.slots}
        required = {number for number in absent if stretches[number].is_required}
        unread = {stretches[number].key for number in absent - required}
        unread |= {key for number, key in sketcher.repeated if number in absent - required}
        unread |= {key for key in sketcher.plain_keys if key not in self._template.names}
        last = max((number for number, each in enumerate(messages) if each["role"] == "assistant"), default=0)
        earlier = {stretches[number].message for number in required}
        earlier = {number for number in earlier if number < last and messages[number]["role"] == "assistant"}
        shortened = {number for place in earlier for number in required & self._written_at_the_end(sketch, place)}
        return _Case(
            kind=kind,
            outline=outline,
            sketch=sketch,
            replaced=frozenset(sketcher.replaced),
            missing=frozenset(required - shortened),
            shortened=frozenset(shortened),
            unread=frozenset(f"messages.{key}" for key in unread),
            omitted=None if shortened else self._omitted_argument(sketch, text),
        )

    def _omitted_argument(self, sketch: Conversation, text: str) -> str | None:
        """Where an argument of a call is, such as one of true, without which the text is the same."""
        for value in _ARGUMENTS_WITHOUT_TEXT:
            messages, place = without_arguments(sketch.messages, value)
            try:
                if place and self._template.render(*sketch._replace(messages=messages)).text == text:
                    return place
            except TemplateRefusalError:
                continue
        return None

    def _written_at_the_end(self, sketch: Conversation, place: int) -> set[int]:
        """The stretches that the template writes where message `place` is the last."""
        try:
            return numbers_in(self._template.render(*sketch._replace(messages=sketch.messages[: place + 1])).text)
        except TemplateRefusalError:
            return set()

    def _turns_of(self, sketched: _Sketched) -> tuple[Turn, ...] | str:
        case = sketched.case
        assert case is not None
        if sketched.key not in self._turns:
            try:
                turns = TurnSearch(self._template, self._special, case.sketch, case.outline).turns()
                self._turns[sketched.key] = turns
            except TemplateRefusalError as error:
                self._turns[sketched.key] = str(error)
        return self._turns[sketched.key]

    def _unread_tools(self, conversation: Conversation, text: str) -> frozenset[str]:
        """Keys of the tools that the template does not write; TemplateRefusalError for a name or a description."""
        if not conversation.tools:
            return frozenset()
        key = repr(conversation.tools)
        if key not in self._tools:
            if len(self._tools) >= _NUM_OUTLINES:
                self._tools.clear()
            self._tools[key] = self._examined_tools(conversation)
        found = self._tools[key]
        if isinstance(found, str):
            raise TemplateRefusalError(found)
        for tool in conversation.tools:
            name = _function_of(tool).get("name")
            if isinstance(name, str) and name not in text:
                raise TemplateRefusalError(f"the chat template omits the tool {name}; {_ANOTHER}")
        return found

    def _examined_tools(self, conversation: Conversation) -> frozenset[str] | str:
        """As `_unread_tools`, of any conversation with these tools."""
        marked, stretches = _marked_tools(conversation.tools or ())
        messages = prepared_messages(conversation.messages, supports_parts=self._supports_parts)
        try:
            written = self._template.render(messages, marked, conversation.arguments).text
        except TemplateRefusalError:
            return frozenset()  # names are looked for in the text
        absent = [stretches[number] for number in sorted(set(range(len(stretches))) - numbers_in(written))]
        for stretch in absent:
            if stretch.is_required:
                return f"the chat template omits the {stretch.key} of tool {stretch.message + 1}; {_ANOTHER}"
        return frozenset(f"tools.{stretch.key}" for stretch in absent)


def _omitted(stretch: Stretch, conversation: Conversation) -> TemplateRefusalError:
    role = conversation.messages[stretch.message]["role"]
    where = f"{stretch.key} of message {stretch.message + 1} ({role})"
    return TemplateRefusalError(f"the chat template omits the {where}, or a part of it; {_ANOTHER}, or remove it")


def _check_contained(stretches: Sequence[Stretch], text: str) -> None:
    """TemplateRefusalError for a required string that is not in the text, however it is written."""
    letters = None
    for stretch in stretches:
        if not stretch.is_required or _is_written(stretch.text, text):
            continue
        letters = letters or _letters(text)
        if _letters(stretch.text) not in letters:
            where = f"the {stretch.key} of message {stretch.message + 1}"
            raise TemplateRefusalError(f"the chat template rewrites {where}, or omits a part of it; {_ANOTHER}")


def _check_argument_names(messages: Sequence[Message], text: str) -> None:
    """TemplateRefusalError for the name of an argument that is not in the text."""
    for number, message in enumerate(messages):
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            for name in _names_in(_function_of(call).get("arguments")):
                if not _is_written(name, text) and json.dumps(name)[1:-1] not in text:
                    raise TemplateRefusalError(
                        f"the chat template omits the name of the argument {name} of message {number + 1}; {_ANOTHER}"
                    )


def _names_in(arguments: Any) -> Iterator[str]:  # noqa: ANN401 - any JSON
    """Every key of an object and of the objects in it."""
    for name, each in arguments.items() if isinstance(arguments, dict) else ():
        yield name
        yield from _names_in(each)
    for each in arguments if isinstance(arguments, list) else ():
        yield from _names_in(each)


def _is_written(string: str, text: str) -> bool:
    """True if a text holds the string as it is, or as JSON."""
    return string in text or json.dumps(string, ensure_ascii=False)[1:-1] in text


def _strings_in(value: Any, path: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - any JSON
    """Every string with the keys that lead to it."""
    if isinstance(value, str):
        yield path, value
    for key, each in value.items() if isinstance(value, dict) else ():
        yield from _strings_in(each, f"{path}.{key}")
    for each in value if isinstance(value, list) else ():
        yield from _strings_in(each, path)


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text)).casefold()


def _function_of(tool: Any) -> Mapping[str, Any]:  # noqa: ANN401 - any JSON
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return function if isinstance(function, dict) else {}


def _marked_tools(tools: Sequence[Any]) -> tuple[list[Any], list[Stretch]]:
    """Tools with a sentinel in place of every string; a conversation needs names, descriptions and parameters."""
    stretches: list[Stretch] = []
    required = ("name", "description", "parameters.properties")

    def mark(text: str, path: str, number: int) -> str:
        stretches.append(Stretch(number, path, text, is_required=path in required))
        return sentinel(len(stretches) - 1)

    def marked(value: Any, name: str, path: str, number: int) -> Any:  # noqa: ANN401 - any JSON
        if isinstance(value, str):
            return value if name in _SCHEMA_KEYWORDS or not value.strip() else mark(value, path, number)
        if isinstance(value, list):
            return [marked(each, name, path, number) for each in value]
        if not isinstance(value, dict):
            return value
        if name == "properties":
            return {mark(key, path, number): marked(each, "", path, number) for key, each in value.items()}
        return {key: marked(each, key, f"{path}.{key}".lstrip("."), number) for key, each in value.items()}

    return [
        {**tool, "function": marked(tool["function"], "", "", number)}
        if isinstance(tool, dict) and isinstance(tool.get("function"), dict)
        else marked(tool, "", "", number)
        for number, tool in enumerate(tools)
    ], stretches
