"""Turns examples into token ids and marks which of them are learned, on all cores.

    text                 its ids and nothing around them: it may be a stretch of a long document
    prompt, completion   [bos] + prompt + completion + eos, cut into tokens at their border, as generation cuts them
    messages             the text of the chat template, bos included, tokenised once, as `apply_chat_template` does

Learned are (`data.loss_on`; auto: all of a text, the assistant of a chat, the completion otherwise):

    all          every token
    assistant    every turn of the assistant
    completion   the last of them; of a prompt with a completion, all of the completion

A turn is learned from after the generation prompt through the token that ends it; what the template puts between turns,
such as a newline, is not. {% generation %} marks of a template are used; for templates without them see `turns`. A
token belongs where its first character does: one that begins in the prompt and ends in the answer is not learned, as
generation never produces it. Where a template ends the last answer without a special token, eos is added, or the model
would never stop. A marker in a message (`<|im_end|>` typed by a user) becomes the special token, as in transformers; it
never ends a turn.

An example that cannot be used is rendered as its reason, a sentence for the list of bad rows.

Filling a template is Python, so many conversations are rendered by processes, each with its own tokenizer and template;
few are rendered here, as a process needs half a second to start. Results come in the order of the batches. A worker
ends with the process that started it.
"""

import multiprocessing
import os
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple, TypeVar

from tokenizers import Encoding

from shardwise.trainer.runtime.data.chat.coverage import Examined, Examiner
from shardwise.trainer.runtime.data.chat.outline import Conversation
from shardwise.trainer.runtime.data.chat.template import (
    TEMPLATE_NAMES,
    ChatTemplate,
    TemplateFaultError,
    TemplateRefusalError,
    load_chat_template,
    plain_messages,
    prepared_messages,
    supports_parts,
    with_arguments,
    with_functions,
)
from shardwise.trainer.runtime.data.chat.turns import Turn, num_shared
from shardwise.trainer.runtime.data.sources import (
    EXCLUDED,
    Chat,
    Completion,
    Content,
    Message,
    Preference,
    TokenIds,
    TooLong,
)
from shardwise.trainer.runtime.data.tokenizer import TextTokenizer, load_tokenizer, special_tokens, tokenizer_panics
from shardwise.trainer.runtime.run.process import end_with_parent
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.sections import LossOn

LEAST_EXAMPLES = 4000  # for which starting processes pays
LONG_CHARS = 2**19  # of a text whose beginning is counted first
CHARS_PER_TOKEN = 16  # four times those of English
END_TOKENS = 64  # more than those at the end of a beginning that the rest of the text can change
BATCHES_AHEAD = 4  # of each worker: bounds what is held in memory

T = TypeVar("T")


class PreferenceIds(NamedTuple):
    """Two answers to one prompt; of each the prompt comes first and is not learned."""

    chosen: TokenIds
    rejected: TokenIds


Rendered = TokenIds | PreferenceIds | str  # str: why the example cannot be used


class _Continued(NamedTuple):
    """A prompt and the same with its completion."""

    prompt: str
    whole: str
    learns_prompt: bool


class _Conversation(NamedTuple):
    """A conversation; `spans` are the characters [begin, end) that are learned, None: all."""

    text: str
    spans: Sequence[tuple[int, int]] | None
    adds_eos: bool
    found: Examined


_Draft = str | _Continued | _Conversation


class Unread(NamedTuple):
    """Keys that no part of an example's tokens came from, in how many examples each."""

    keys: Counter[str]  # that the template does not write, and need not
    shortened: Counter[str]  # of earlier answers, which the template shortens as at inference


class Renderer:
    """Renders examples of one job; `template` may be None where none of them holds messages."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate | None, loss_on: LossOn, seq_len: int) -> None:
        self._tokenizer, self._template, self._loss_on, self._seq_len = tokenizer, template, loss_on, seq_len
        self._special = special_tokens(tokenizer)
        self._supports_parts = template is not None and supports_parts(template)
        self._examiner = None
        if template is not None:
            self._examiner = Examiner(template, self._special, supports_parts=self._supports_parts)
        self._unread = Unread(Counter(), Counter())

    def take_unread(self) -> Unread:
        """What was not read of the examples since the last call."""
        taken, self._unread = self._unread, Unread(Counter(), Counter())
        return taken

    def render(self, content: Content) -> Rendered:
        """Token ids of one example, or why it cannot be used."""
        return self.render_many([content])[0]

    def render_many(self, contents: Sequence[Content]) -> list[Rendered]:
        """As `render`, in order; the tokenizer cuts all of them at once, on all cores.

        InputError where an example holds messages and there is no template.
        """
        drafts = [self._short_drafts(content) for content in contents]
        for drafted in drafts:
            found = [draft.found for draft in drafted if isinstance(draft, _Conversation)]
            self._unread.keys.update(frozenset[str]().union(*(each.unread for each in found)))
            self._unread.shortened.update(frozenset[str]().union(*(each.shortened for each in found)))
        texts = [text for drafted in drafts if isinstance(drafted, list) for draft in drafted for text in _texts(draft)]
        with tokenizer_panics():
            encodings = iter(self._tokenizer.tokenizer.encode_batch(texts, add_special_tokens=False))
        return [
            self._rendered(content, drafted, encodings) if isinstance(drafted, list) else drafted
            for content, drafted in zip(contents, drafts, strict=True)
        ]

    def _short_drafts(self, content: Content) -> list[_Draft] | str:
        """As `_drafts`; of a very long text the beginning shows that it is too long, in a fraction of the memory."""
        drafts = self._drafts(content)
        if isinstance(drafts, str) or isinstance(content, str):
            return drafts
        num_chars = max(LONG_CHARS, CHARS_PER_TOKEN * self._seq_len)
        for text in (_texts(draft)[-1] for draft in drafts):
            if (
                len(text) > num_chars
                and len(self._tokenizer.encode([text[:num_chars]])[0]) > self._seq_len + END_TOKENS
            ):
                return TooLong(f"too long: {len(text)} characters, train.seq_len is {self._seq_len} tokens")
        return drafts

    def _drafts(self, content: Content) -> list[_Draft] | str:
        """One sequence, two of a preference, none of token ids; or the reason why the example cannot be used."""
        try:
            if isinstance(content, TokenIds):
                return []
            if isinstance(content, str):
                return [self._text(content)]
            if isinstance(content, Chat):
                return [self._chat(content)]
            if isinstance(content, Completion):
                return [self._completion(content, self._loss_on)]
            return [
                self._completion(content.completion_of(answer), LossOn.COMPLETION)
                for answer in (content.chosen, content.rejected)
            ]
        except TemplateRefusalError as refusal:
            return str(refusal)

    def _text(self, text: str) -> str:
        if self._loss_on in (LossOn.ASSISTANT, LossOn.COMPLETION):
            raise TemplateRefusalError(f"is plain text, which has no {self._loss_on} to learn (data.loss_on)")
        return text

    def _completion(self, content: Completion, loss_on: LossOn) -> _Draft:
        prompt, completion = content.prompt, content.completion
        if isinstance(prompt, str) and isinstance(completion, str):
            return _Continued(prompt, prompt + completion, learns_prompt=loss_on is LossOn.ALL)
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        after = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        first = 0 if loss_on is LossOn.ASSISTANT else len(before)
        chat = Chat([*before, *after], content.tools, content.template_kwargs)
        return self._conversation(chat, None if loss_on is LossOn.ALL else first)

    def _chat(self, content: Chat) -> _Draft:
        if self._loss_on is LossOn.ALL:
            return self._conversation(content, None)
        roles = [message.get("role") for message in content.messages if isinstance(message, dict)]
        only_last = self._loss_on is LossOn.COMPLETION and "assistant" in roles
        return self._conversation(content, len(roles) - 1 - roles[::-1].index("assistant") if only_last else 0)

    def _conversation(self, chat: Chat, first: int | None) -> _Conversation:
        """A conversation in which the assistant is learned from message `first` on; None: everything is learned."""
        if self._template is None or self._examiner is None:
            raise InputError(
                "data.chat_template: the tokenizer has no chat template, and the rows hold messages;\n"
                f"name one ({', '.join(TEMPLATE_NAMES)}) or a file"
            )
        given = plain_messages(chat.messages)
        excluded = frozenset(number for number, message in enumerate(given) if message.pop(EXCLUDED, None) is not None)
        if excluded and first is None:
            raise TemplateRefusalError(
                f"data.loss_on=all learns every token, and message {min(excluded) + 1} is not to be learned; "
                "remove data.loss_on"
            )
        refusals = []
        for variant in _variants(given, chat):
            try:
                return self._conversation_as(self._template, self._examiner, variant, first, excluded)
            except TemplateRefusalError as refusal:
                refusals.append(refusal)
        raise next((each for each in refusals if not isinstance(each, TemplateFaultError)), refusals[0])

    def _conversation_as(
        self,
        template: ChatTemplate,
        examiner: Examiner,
        conversation: Conversation,
        first: int | None,
        excluded: frozenset[int],
    ) -> _Conversation:
        messages = prepared_messages(conversation.messages, supports_parts=self._supports_parts)
        text, marked = template.render(messages, conversation.tools, conversation.arguments)
        begin = _begin_of_marks(template, conversation._replace(messages=messages), text, first or 0)
        finds_turns = first is not None and (not template.marks_learned or bool(excluded) or begin is None)
        found = examiner.examine(conversation, text, finds_turns=finds_turns)
        adds_eos = messages[-1]["role"] == "assistant" and not text.rstrip().endswith(self._special)
        spans: Sequence[tuple[int, int]] | None = None
        if first is not None and not template.marks_learned:
            spans = [turn[1:] for turn in found.turns or () if turn.message >= first and turn.message not in excluded]
        elif first is not None:
            marked = tuple(span for span in marked if span[1] > (begin or 0))
            spans = _without(marked, found.turns or (), excluded.union(range(first) if begin is None else ()))
        adds_eos = adds_eos and len(messages) - 1 not in excluded
        return _Conversation(text, spans, adds_eos, found)

    def _rendered(self, content: Content, drafts: Sequence[_Draft], encodings: Iterator[Encoding]) -> Rendered:
        if isinstance(content, TokenIds):
            return _nothing_learned(content) or content
        sequences = [self._token_ids(draft, encodings) for draft in drafts]
        if isinstance(content, str):
            return sequences[0]  # a long text is cut or packed, never too long
        for sequence, name in zip(sequences, ("chosen: ", "rejected: ") if len(drafts) > 1 else ("",), strict=True):
            if len(sequence.ids) > self._seq_len:
                return TooLong(f"too long: {name}{len(sequence.ids)} tokens, train.seq_len is {self._seq_len}")
            if reason := _nothing_learned(sequence):
                return f"{name}{reason}"
        if not isinstance(content, Preference):
            return sequences[0]
        chosen, rejected = sequences
        return PreferenceIds(chosen, rejected) if chosen != rejected else "chosen and rejected are the same tokens"

    def _token_ids(self, draft: _Draft, encodings: Iterator[Encoding]) -> TokenIds:
        if isinstance(draft, str):
            return TokenIds(next(encodings).ids)
        if isinstance(draft, _Continued):
            return self._continued(draft, next(encodings).ids, next(encodings).ids)
        encoding = next(encodings)
        ids = encoding.ids
        is_learned = None if draft.spans is None else _are_within(encoding.offsets, draft.spans)
        if draft.adds_eos:
            ids.append(self._tokenizer.eos_id)
            if is_learned is not None:
                is_learned.append(True)
        return TokenIds(ids, is_learned)

    def _continued(self, draft: _Continued, prompt: list[int], whole: list[int]) -> TokenIds:
        """The prompt as generation is given it, and the rest in tokens that can follow it."""
        begins_alike = whole[: len(prompt)] == prompt
        answer = whole[len(prompt) :] if begins_alike else self._ids_inside(draft.whole[len(draft.prompt) :])
        if answer[-1:] != [self._tokenizer.eos_id]:
            answer.append(self._tokenizer.eos_id)
        before = [*self._tokenizer.document_prefix, *prompt]
        if draft.learns_prompt:
            return TokenIds(before + answer)
        return TokenIds(before + answer, [False] * len(before) + [True] * len(answer))

    def _ids_inside(self, text: str) -> list[int]:
        """Ids of a text that does not begin a document: without the space that sentencepiece puts before one."""
        line_end, after_line_end, alone = self._tokenizer.encode(["\n", "\n" + text, text])
        begins_alike = after_line_end[: len(line_end)] == line_end
        return after_line_end[len(line_end) :] if begins_alike else alone


def _texts(draft: _Draft) -> tuple[str, ...]:
    if isinstance(draft, _Continued):
        return draft.prompt, draft.whole
    return (draft if isinstance(draft, str) else draft.text,)


def _variants(messages: Sequence[Message], chat: Chat) -> Iterator[Conversation]:
    """The forms that templates read, each once: arguments as objects or as text, tools as they are or as OpenAI's."""
    tried: list[Conversation] = []
    for in_functions, as_text in ((False, False), (False, True), (True, False), (True, True)):
        tools = with_functions(chat.tools) if in_functions else chat.tools
        variant = Conversation(with_arguments(messages, as_text=as_text), tools, chat.template_kwargs or {})
        if variant not in tried:
            tried.append(variant)
            yield variant


def _begin_of_marks(template: ChatTemplate, conversation: Conversation, text: str, first: int) -> int | None:
    """Where message `first` begins; None where the text does not go on from that of the messages before it.

    A template may rewrite these: gpt-oss writes the text of a call only until an answer follows.
    """
    if first == 0 or not template.marks_learned:
        return 0
    before = conversation._replace(messages=conversation.messages[:first])
    try:
        if not text.startswith(template.render(*before).text):
            return None
        return num_shared(template.render(*before, add_generation_prompt=True).text, text)
    except TemplateRefusalError:  # of a conversation without a user, for one
        return None


def _without(
    marked: Sequence[tuple[int, int]], turns: Sequence[Turn], excluded: frozenset[int]
) -> Sequence[tuple[int, int]]:
    """The marked stretches outside the turns of excluded messages; TemplateRefusalError where one is in both."""
    remaining = []
    for begin, end in marked:
        overlapping = {turn.message for turn in turns if turn.begin < end and begin < turn.end}
        if not overlapping & excluded:
            remaining.append((begin, end))
        elif overlapping - excluded:
            raise TemplateRefusalError(
                f"the chat template marks message {min(overlapping & excluded) + 1}, which is not to be learned, "
                "together with another answer"
            )
    return remaining


def _are_within(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[bool]:
    """For each token whether its first character lies in a span."""
    begins = [begin for begin, _ in offsets]
    is_learned = [False] * len(begins)
    for begin, end in spans:
        first, stop = bisect_left(begins, begin), bisect_left(begins, end)
        is_learned[first:stop] = [True] * (stop - first)
    return is_learned


def _nothing_learned(sequence: TokenIds) -> str | None:
    """A reason where no token is learned; the first cannot be, as it has none before it."""
    if sequence.is_learned is None or any(sequence.is_learned[1:]):
        return None
    return "nothing of it is learned: no answer of the assistant is in it"


class RenderSettings(NamedTuple):
    """Settings from which a worker builds its renderer."""

    tokenizer_folder: str
    chat_template: str | None
    loss_on: LossOn
    seq_len: int

    def renderer(self) -> Renderer:
        folder = Path(self.tokenizer_folder)
        template = load_chat_template(self.chat_template, folder)
        return Renderer(load_tokenizer(folder), template, self.loss_on, self.seq_len)


class RenderedBatch(NamedTuple):
    """The examples of one batch in order, and what was not read of them."""

    examples: list[Rendered]
    unread: Unread


def rendered(
    batches: Iterable[tuple[T, Sequence[Content]]], settings: RenderSettings, *, num_workers: int
) -> Iterator[tuple[T, RenderedBatch]]:
    """Each batch's key with its examples rendered, in order; with one worker in this process."""
    if num_workers <= 1:
        renderer = settings.renderer()
        for key, contents in batches:
            yield key, RenderedBatch(renderer.render_many(contents), renderer.take_unread())
        return
    with ProcessPoolExecutor(
        num_workers, multiprocessing.get_context("spawn"), initializer=_start, initargs=(settings,)
    ) as pool:
        waiting: deque[tuple[T, Future[RenderedBatch]]] = deque()
        try:
            for key, contents in batches:
                waiting.append((key, pool.submit(_render, contents)))
                if len(waiting) >= num_workers * BATCHES_AHEAD:
                    yield _result_of(waiting.popleft())
            while waiting:
                yield _result_of(waiting.popleft())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def worker_count(num_examples: int) -> int:
    """Number of processes for so many examples: one for each core, or 1, this process, for few."""
    return len(os.sched_getaffinity(0)) if num_examples >= LEAST_EXAMPLES else 1


def _result_of(waited: tuple[T, "Future[RenderedBatch]"]) -> tuple[T, RenderedBatch]:
    key, future = waited
    try:
        return key, future.result()
    except BrokenProcessPool as error:
        raise EnvironmentFaultError(
            "a process that tokenises was ended from outside; SIGKILL often means that host memory ran out"
        ) from error


_RENDERER: list[Renderer] = []  # of this worker


def _start(settings: RenderSettings) -> None:
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a worker
    _RENDERER[:] = [settings.renderer()]


def _render(contents: Sequence[Content]) -> RenderedBatch:
    return RenderedBatch(_RENDERER[0].render_many(contents), _RENDERER[0].take_unread())
