"""Finds the assistant's turns in a rendered conversation, for templates that do not mark them.

The conversation is rendered a second time with a sentinel in place of every stretch of content: an outline, in which no
message can be taken for a part of the template. The outline, filled in again, must equal the text of the real
conversation to the character; then every place in the outline is a place in the text. A template that strips or moves
content does it to the sentinels too. Around the sentinels stay the outer white space and the strings that the template
looks for in a message (`</think>`), so that the template follows the same branches.

In the outline a turn of the assistant

    begins  where the conversation before it ends when rendered with the generation prompt
    ends    after the special token that ends the turn: the last one in the text that follows the content for every
            continuation, found by rendering the conversation with another continuation. White space after it is not
            learned. Where the template writes none, a turn ends with the token that opens the next (GLM), as the model
            stops with that token; the last turn ends with the content

Both are checked: a turn holds its own content and no other's. An outline depends on the shape of a conversation (roles,
keys of its messages, which contents are empty), not on its content, so it is cached. A conversation whose turns are not
clear is refused with the reason.
"""

import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from shardwise.trainer.runtime.data.chat.template import (
    CLOSES_SLOT,
    OPENS_SLOT,
    ChatTemplate,
    TemplateRefusalError,
    text_of,
)
from shardwise.trainer.runtime.data.sources import Message

_SLOT = re.compile(f"{OPENS_SLOT}(\\d+)\\.(\\d+){CLOSES_SLOT}")
_REASONING_TAGS = ("<think>", "</think>")
_OPENED_REASONING = re.compile(r"<think>\s*(?:</think>\s*)?\Z")
_SPOKEN = frozenset({"system", "developer", "user", "assistant"})
_NUM_OUTLINES = 512  # of conversations with tools each is new, and may be long


def _sentinel(message: int, chunk: int) -> str:
    return f"{OPENS_SLOT}{message}.{chunk}{CLOSES_SLOT}"


_PROBE = _sentinel(10**6, 0)  # of no message


class Turn(NamedTuple):
    """Characters [begin, end) of a text, which the message of that number contributes for the model to write."""

    message: int
    begin: int
    end: int


class _Slot(NamedTuple):
    """Where a sentinel stands in the outline, and for what: a chunk of a message's content."""

    begin: int
    end: int
    message: int
    chunk: int


class _Outline(NamedTuple):
    """A rendered conversation without its content, or the reason why its turns are unclear."""

    text: str
    slots: tuple[_Slot, ...]  # in the order of the text
    turns: tuple[Turn, ...]
    refusal: str | None = None

    def fill(self, chunks: Sequence[Sequence[str]]) -> tuple[str, tuple[Turn, ...]]:
        """The text with its content, and the turns in it."""
        pieces: list[str] = []
        place = 0
        moves = []  # (where in the outline, how far what follows has moved)
        moved = 0
        for slot in self.slots:
            chunk = chunks[slot.message][slot.chunk]
            pieces += (self.text[place : slot.begin], chunk)
            place = slot.end
            moved += len(chunk) - (slot.end - slot.begin)
            moves.append((slot.end, moved))
        pieces.append(self.text[place:])
        return "".join(pieces), tuple(Turn(t.message, _at(t.begin, moves), _at(t.end, moves)) for t in self.turns)


def _at(place: int, moves: Sequence[tuple[int, int]]) -> int:
    return place + next((moved for end, moved in reversed(moves) if end <= place), 0)


class TurnFinder:
    """Finds the assistant's turns in conversations of one template; `special` are the tokenizer's special tokens."""

    def __init__(self, template: ChatTemplate, special: Sequence[str]) -> None:
        self._template = template
        self._special = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
        texts = sorted({*template.tested_text, *_REASONING_TAGS}, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, texts))})")
        self._outlines: dict[str, _Outline] = {}

    def turns(self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str) -> tuple[Turn, ...]:
        """The assistant's turns in `text`, which the template made of the messages; TemplateRefusalError if unclear."""
        sketch, chunks = self._sketch(messages, _SPOKEN)
        key = f"{sketch!r}{tools!r}"
        outline = self._outlines.get(key)
        if outline is None:
            outline = self._build_outline(sketch, tools)
            if len(self._outlines) >= _NUM_OUTLINES:
                self._outlines.clear()
            self._outlines[key] = outline
        if outline.refusal is None:
            filled, turns = outline.fill(chunks)
            if filled == text:
                return turns
        if outline.refusal and any(chunk not in text for spoken in chunks for chunk in spoken):
            raise TemplateRefusalError(outline.refusal)
        return self._turns_among_real_text(messages, tools, text, outline.refusal)

    def _turns_among_real_text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str, refusal: str | None
    ) -> tuple[Turn, ...]:
        """For a template that depends on the other messages, or rewrites them: only answers become sentinels."""
        sketch, chunks = self._sketch(messages, frozenset({"assistant"}))
        outline = self._build_outline(sketch, tools)
        if outline.refusal is not None:
            raise TemplateRefusalError(refusal or outline.refusal)
        filled, turns = outline.fill(chunks)
        if filled != text:
            raise TemplateRefusalError(
                refusal or "the chat template rewrites the content of messages, so that the learned part is not clear"
            )
        return turns

    def _sketch(self, messages: Sequence[Message], roles: frozenset[str]) -> tuple[list[Message], list[list[str]]]:
        """The messages with sentinels for the content of these roles, and that content by message."""
        sketch, chunks = [], []
        for number, message in enumerate(messages):
            texts: list[str] = []
            content = message.get("content")
            if content and message.get("role") in roles:
                message = {**message, "content": self._outlined(content, number, texts)}
            sketch.append(message)
            chunks.append(texts)
        return sketch, chunks

    def _outlined(self, content: Any, number: int, texts: list[str]) -> Any:  # noqa: ANN401 - any JSON
        if isinstance(content, list):
            return [
                {**part, "text": self._outlined(part["text"], number, texts)}
                if isinstance(part, dict) and isinstance(part.get("text"), str)
                else part
                for part in content
            ]
        if not isinstance(content, str):
            return content
        pieces = self._cut.split(content) if self._cut.search(content) else [content]
        for place in range(0, len(pieces), 2):
            pieces[place] = _with_sentinel(pieces[place], number, texts)
        return "".join(pieces)

    def _build_outline(self, sketch: Sequence[Message], tools: Sequence[Any] | None) -> _Outline:
        try:
            return _OutlineBuilder(self._template, self._special, sketch, tools).outline()
        except TemplateRefusalError as error:
            return _Outline("", (), (), str(error))


def _with_sentinel(piece: str, number: int, texts: list[str]) -> str:
    core = piece.strip()
    if not core:
        return piece
    begin = piece.index(core)
    texts.append(core)
    return f"{piece[:begin]}{_sentinel(number, len(texts) - 1)}{piece[begin + len(core) :]}"


class _OutlineBuilder:
    """Builds one outline."""

    def __init__(
        self,
        template: ChatTemplate,
        special: re.Pattern[str],
        sketch: Sequence[Message],
        tools: Sequence[Any] | None,
    ) -> None:
        self.template, self.special, self.sketch, self.tools = template, special, sketch, tools
        self.text = self._rendered(sketch)
        self.slots = tuple(
            _Slot(found.start(), found.end(), int(found[1]), int(found[2])) for found in _SLOT.finditer(self.text)
        )

    def outline(self) -> _Outline:
        self._check_nothing_is_missing()
        turns = [self._turn(number) for number, message in enumerate(self.sketch) if message["role"] == "assistant"]
        for earlier, later in pairwise(turns):
            if later.begin < earlier.end:
                raise _unclear(later.message)
        return _Outline(self.text, self.slots, tuple(turns))

    def _rendered(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        return self.template.render(messages, self.tools, add_generation_prompt=add_generation_prompt).text

    def _check_nothing_is_missing(self) -> None:
        """Checks that the question and the learned answer occur exactly once; earlier answers may be shortened."""
        found = [(slot.message, slot.chunk) for slot in self.slots]
        last_answer = max((number for number, each in enumerate(self.sketch) if each["role"] == "assistant"), default=0)
        for number, message in enumerate(self.sketch):
            expected = {(number, int(chunk)) for _, chunk in _SLOT.findall(text_of(message.get("content")))}
            present = [place for place in found if place[0] == number]
            if len(set(present)) < len(present):
                raise TemplateRefusalError(f"the chat template writes message {number + 1} twice")
            if expected - set(present) and (message["role"] != "assistant" or number == last_answer):
                raise TemplateRefusalError(
                    f"the chat template omits the content of message {number + 1} ({message['role']}), or a part "
                    "of it; name another (data.chat_template)"
                )

    def _turn(self, number: int) -> Turn:
        own = [slot for slot in self.slots if slot.message == number]
        begin = self._begin(number, own)
        end = self._end(number, begin, own[-1] if own else None)
        inside = [slot for slot in self.slots if begin <= slot.begin and slot.end <= end]
        if inside != own or any(slot.begin < end and begin < slot.end for slot in self.slots if slot not in own):
            raise _unclear(number)
        return Turn(number, begin, end)

    def _begin(self, number: int, own: Sequence[_Slot]) -> int:
        """After the generation prompt, as far as the text has one."""
        try:
            prompt = self._rendered(self.sketch[:number], add_generation_prompt=True)
        except TemplateRefusalError:  # of a conversation without a user, for one
            return self._begin_after_header(number, own)
        before = [slot for slot in self.slots if slot.message == number - 1]
        tail = _after(prompt, before[-1]) if before else None
        # A prompt that opens the reasoning is not that of a turn without: it begins where the reasoning would.
        for cut in (len(prompt), len(_OPENED_REASONING.sub("", prompt))):
            if self.text.startswith(prompt[:cut]):
                return cut
            header = tail[: len(tail) - len(prompt) + cut] if tail else ""
            if tail is not None and self.text.startswith(header, before[-1].end):
                return before[-1].end + len(header)
        return self._begin_after_header(number, own)

    def _begin_after_header(self, number: int, own: Sequence[_Slot]) -> int:
        """After the generation prompt by its own text, the last before the answer."""
        probe = [{"role": "user", "content": _PROBE}]
        ended = self._rendered(probe)
        prompt = self._rendered(probe, add_generation_prompt=True)
        header = prompt.removeprefix(ended) if prompt.startswith(ended) else ""
        lowest = max((slot.end for slot in self.slots if slot.message < number), default=0)
        place = self.text.rfind(header, lowest, own[0].begin) if header and own else -1
        if place < 0:
            raise _unclear(number)
        return place + len(header)

    def _end(self, number: int, begin: int, last: _Slot | None) -> int:
        """After the special token that ends the turn."""
        place = last.end if last else begin
        tail = self.text[place:]
        is_last = number == len(self.sketch) - 1
        others = [*self.sketch, {"role": "user", "content": _PROBE}] if is_last else self.sketch[: number + 1]
        try:
            other = self._rendered(others)
        except TemplateRefusalError:
            other = ""
        other_tail = _after(other, last) if last else self._after_begin(other, number, begin)
        if other_tail is not None:
            shared = tail[: num_shared(tail, other_tail)]
            if shared == (tail if is_last else other_tail):  # all that the template writes after an answer
                end = place + len(shared.rstrip())
                next_opens = None if self.special.search(shared) else self.special.match(self.text, end)
                return next_opens.end() if next_opens else end
            for found in [*self.special.finditer(shared)][-1:]:
                if self._ends_a_turn(found[0], number, last):
                    return place + found.end()
        next_slot = next((slot.begin for slot in self.slots if slot.begin >= place), len(self.text))
        first = self.special.search(self.text[place:next_slot])
        if first is None or not self._ends_a_turn(first[0], number, last):
            raise _unclear(number)
        return place + first.end()

    def _ends_a_turn(self, token: str, number: int, last: _Slot | None) -> bool:
        """True if a special token ends the turn: always after content; else only if it ends answers."""
        calls = self.sketch[number].get("tool_calls")
        if last and not calls:
            return True
        exchange = [{"role": role, "content": _sentinel(place, 0)} for place, role in enumerate(("user", "assistant"))]
        plain = _OutlineBuilder(self.template, self.special, exchange, None)
        [turn] = plain.outline().turns
        return plain.text[: turn.end].endswith(token) and token not in json.dumps(calls, ensure_ascii=False)

    def _after_begin(self, other: str, number: int, begin: int) -> str | None:
        """The text of another rendering from the start of this turn."""
        before = [slot for slot in self.slots if slot.end <= begin and slot.message == number - 1]
        if not before:
            return other[begin:] if other.startswith(self.text[:begin]) else None
        header = self.text[before[-1].end : begin]
        after = _after(other, before[-1])
        return after[len(header) :] if after is not None and after.startswith(header) else None


def num_shared(one: str, other: str) -> int:
    """Number of characters with which both begin."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _after(text: str, slot: _Slot) -> str | None:
    """The text after the slot's sentinel in another rendering; None unless the sentinel occurs exactly once."""
    pieces = text.split(_sentinel(slot.message, slot.chunk))
    return pieces[1] if len(pieces) == 2 else None


def _unclear(number: int) -> TemplateRefusalError:
    return TemplateRefusalError(
        f"where the answer of message {number + 1} begins and ends are not clear from the chat template; "
        "put {% generation %} marks into it, or name another (data.chat_template)"
    )
