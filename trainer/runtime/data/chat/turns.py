"""Finds the assistant's turns in an outline of a conversation, for templates that do not mark them.

In the outline a turn of the assistant

    begins  where the conversation before it ends when rendered with the generation prompt
    ends    after the special token that ends the turn: the last one in the text that follows the content for every
            continuation, found by rendering the conversation with another continuation. White space after it is not
            learned. Where the template writes none, a turn ends with the token that opens the next (GLM), as the model
            stops with that token; the last turn ends with the content

Both are checked: a turn holds the strings of its own message (content, reasoning, calls) and no other's. A conversation
whose turns are not clear is refused with the reason.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from shardwise.trainer.runtime.data.chat.outline import (
    PROBE_NUMBER,
    Conversation,
    Outline,
    Slot,
    Stretch,
    begin_of_rest,
    outline_of,
    sentinel,
)
from shardwise.trainer.runtime.data.chat.template import ChatTemplate, TemplateRefusalError
from shardwise.trainer.runtime.data.sources import Message

_OPENED_REASONING = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
_QUESTION: Message = {"role": "user", "content": sentinel(PROBE_NUMBER)}
_ANSWER: Message = {"role": "assistant", "content": sentinel(PROBE_NUMBER - 1)}


class Turn(NamedTuple):
    """Characters [begin, end) of a text, which the message of that number contributes for the model to write."""

    message: int
    begin: int
    end: int


class TurnSearch:
    """The search in one outline of a sketch; `special` matches the tokenizer's special tokens."""

    def __init__(
        self, template: ChatTemplate, special: re.Pattern[str], sketch: Conversation, outline: Outline
    ) -> None:
        self._template, self._special, self._sketch = template, special, sketch
        self._text, self._slots = outline.text, [slot for slot in outline.slots if slot.is_own]

    def turns(self) -> tuple[Turn, ...]:
        """The turns, in order; TemplateRefusalError where one is not clear."""
        messages = self._sketch.messages
        turns = [self._turn(number) for number, message in enumerate(messages) if message["role"] == "assistant"]
        for earlier, later in pairwise(turns):
            if later.begin < earlier.end:
                raise _unclear(later.message)
        return tuple(turns)

    def _rendered(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        conversation = self._sketch._replace(messages=messages)
        return self._template.render(*conversation, add_generation_prompt=add_generation_prompt).text

    def _turn(self, number: int) -> Turn:
        own = [slot for slot in self._slots if slot.message == number]
        begin = self._begin(number, own)
        end = self._end(number, begin, own[-1] if own else None)
        inside = [slot for slot in self._slots if slot.begin < end and begin < slot.end]
        if inside != own or (own and not begin <= own[0].begin):
            raise _unclear(number)
        return Turn(number, begin, end)

    def _begin(self, number: int, own: Sequence[Slot]) -> int:
        """After the generation prompt, as far as the text has one."""
        try:
            prompt = self._rendered(self._sketch.messages[:number], add_generation_prompt=True)
        except TemplateRefusalError:  # of a conversation without a user, for one
            return self._begin_after_header(number, own)
        before = [slot for slot in self._slots if slot.message < number]
        rest = begin_of_rest(prompt, before[-1].number) if before else None
        for cut in self._cuts(prompt):
            if self._text.startswith(prompt[:cut]):
                return cut
            header = prompt[rest:cut] if rest is not None else None
            if header is not None and self._text.startswith(header, before[-1].end):
                return before[-1].end + len(header)
        return self._begin_after_header(number, own)

    def _begin_after_header(self, number: int, own: Sequence[Slot]) -> int:
        """After the generation prompt by its own text, the last before the answer."""
        ended = self._rendered([_QUESTION])
        prompt = self._rendered([_QUESTION], add_generation_prompt=True)
        header = prompt.removeprefix(ended) if prompt.startswith(ended) else ""
        lowest = max((slot.end for slot in self._slots if slot.message < number), default=0)
        for cut in self._cuts(header):
            place = self._text.rfind(header[:cut], lowest, own[0].begin) if cut and own else -1
            if place >= 0:
                return place + cut
        raise _unclear(number)

    def _cuts(self, prompt: str) -> Iterator[int]:
        """Where the answer may begin in a prompt: at its end, or where it opens reasoning, which that turn may lack."""
        yield len(prompt)
        yield len(_OPENED_REASONING.sub("", prompt))
        yield from (len(prompt) - len(opener) for opener in self._openers if prompt.endswith(opener))

    @cached_property
    def _openers(self) -> tuple[str, ...]:
        """Ends of a generation prompt that a plain answer does not have, as the last message or before another."""
        prompt = self._header([_QUESTION], add_generation_prompt=True)
        openers = []
        for after in ([], [_QUESTION]):
            shared = prompt[: num_shared(prompt, self._header([_QUESTION, _ANSWER, *after]))]
            ends = [found.end() for found in re.finditer(rf"{self._special.pattern}|\n", prompt)]
            end = max((end for end in ends if end <= len(shared)), default=0)
            openers += [prompt[end:]] if 0 < end < len(prompt) else []
        return tuple(sorted(openers, key=len))

    def _header(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """The text between a question and the answer; empty where the template refuses these messages."""
        try:
            text = self._rendered(messages, add_generation_prompt=add_generation_prompt)
        except TemplateRefusalError:
            return ""
        begin = begin_of_rest(text, PROBE_NUMBER)
        return "" if begin is None else text[begin:].partition(_ANSWER["content"])[0]

    def _end(self, number: int, begin: int, last: Slot | None) -> int:
        """After the special token that ends the turn."""
        place = last.end if last else begin
        tail = self._text[place:]
        messages = self._sketch.messages
        is_last = number == len(messages) - 1
        try:
            other = self._rendered([*messages, _QUESTION] if is_last else messages[: number + 1])
        except TemplateRefusalError:
            other = ""
        other_tail = _after(other, last) if last else self._after_begin(other, number, begin)
        if other_tail is not None:
            shared = tail[: num_shared(tail, other_tail)]
            if shared == (tail if is_last else other_tail):  # all that the template writes after an answer
                end = place + len(shared.rstrip())
                if self._special.search(shared):
                    return end
                rest = self._text[end:]
                opens = self._special.match(rest, len(rest) - len(rest.lstrip()))
                return end + opens.end() if opens else end
            for found in [*self._special.finditer(shared)][-1:]:
                if self._ends_a_turn(found[0], number, last):
                    return place + found.end()
        next_slot = next((slot.begin for slot in self._slots if slot.begin >= place), len(self._text))
        first = self._special.search(self._text[place:next_slot])
        if first is None or not self._ends_a_turn(first[0], number, last):
            raise _unclear(number)
        return place + first.end()

    def _ends_a_turn(self, token: str, number: int, last: Slot | None) -> bool:
        """True if a special token ends the turn: always after content; else only if it ends answers."""
        calls = self._sketch.messages[number].get("tool_calls")
        if last and not calls:
            return True
        exchange = [{"role": role, "content": sentinel(place)} for place, role in enumerate(("user", "assistant"))]
        plain = Conversation(exchange, None, self._sketch.arguments)
        text = self._template.render(*plain).text
        outline = outline_of(text, [Stretch(place, "content", "", is_required=True) for place in (0, 1)])
        [turn] = TurnSearch(self._template, self._special, plain, outline).turns()
        return text[: turn.end].endswith(token) and token not in json.dumps(calls, ensure_ascii=False)

    def _after_begin(self, other: str, number: int, begin: int) -> str | None:
        """The text of another rendering from the start of this turn."""
        before = [slot for slot in self._slots if slot.end <= begin and slot.message < number]
        if not before:
            return other[begin:] if other.startswith(self._text[:begin]) else None
        header = self._text[before[-1].end : begin]
        after = _after(other, before[-1])
        return after[len(header) :] if after is not None and after.startswith(header) else None


def num_shared(one: str, other: str) -> int:
    """Number of characters with which both begin."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _after(text: str, slot: Slot) -> str | None:
    """The text after the slot's sentinel in another rendering; None where it does not occur."""
    begin = begin_of_rest(text, slot.number)
    return None if begin is None else text[begin:]


def _unclear(number: int) -> TemplateRefusalError:
    return TemplateRefusalError(
        f"where the answer of message {number + 1} begins and ends are not clear from the chat template; "
        "put {% generation %} marks into it, or name another (data.chat_template)"
    )
