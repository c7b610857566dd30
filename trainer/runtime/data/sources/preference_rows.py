"""Rows of a better and a worse answer, in the forms in which people publish them, as one prompt and two answers.

| `prompt` | `chosen`, `rejected` | read as |
|---|---|---|
| text | text | what it says |
| messages | messages | what it says |
| messages | text | each answer one message of the assistant's |
| text | messages of the assistant's | the prompt as one message of the user's |
| none, or text again | whole conversations | the prompt is the messages that both begin with |
| none | whole texts | the prompt is the shared beginning, up to `Assistant:` or the end of a line |
| `conversations` | one message each | LLaMA-Factory's form of ShareGPT |
"""

from collections.abc import Mapping
from os.path import commonprefix

from trainer.runtime.data.sources.examples import Message, Preference
from trainer.runtime.data.sources.message_rows import text_or_messages
from trainer.runtime.data.sources.row_columns import Cell, UnusableRowError, find_cell, require_cell
from trainer.runtime.data.sources.row_files import Row

_ANSWER_MARK = "\n\nAssistant:"  # of Anthropic's hh-rlhf, whose rows have no prompt

Said = str | list[Message]


def read_preference(row: Row, fields: Mapping[str, str]) -> Preference:
    """The pair in `row`; UnusableRowError where it is none."""
    cells = require_cell(row, "chosen", fields), require_cell(row, "rejected", fields)
    chosen, rejected = (text_or_messages(cell.value, cell.column, fields) for cell in cells)
    if chosen == rejected:
        raise UnusableRowError(f'"{cells[0].column}" equals "{cells[1].column}"; nothing is preferred')
    if isinstance(chosen, list) and isinstance(rejected, list):
        return _of_conversations(chosen, rejected, cells) or _of_messages(_prompt(row, fields), chosen, rejected)
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _of_texts(_prompt(row, fields), chosen, rejected)
    raise UnusableRowError(
        f'"{cells[0].column}" and "{cells[1].column}" are of two kinds: one is text, the other messages'
    )


def _prompt(row: Row, fields: Mapping[str, str]) -> Said | None:
    cell = find_cell(row, "prompt", fields) or find_cell(row, "messages", fields)
    return None if cell is None else text_or_messages(cell.value, cell.column, fields)


def _of_texts(prompt: Said | None, chosen: str, rejected: str) -> Preference:
    if isinstance(prompt, str):
        return Preference(prompt, chosen, rejected)
    if prompt is not None:
        return Preference(prompt, *([{"role": "assistant", "content": answer}] for answer in (chosen, rejected)))
    shared = commonprefix([chosen, rejected])  # noqa: RUF071 - of characters, which is what is meant
    mark = shared.rfind(_ANSWER_MARK)
    end = mark + len(_ANSWER_MARK) if mark >= 0 else shared.rfind("\n") + 1
    if not shared[:end].strip():
        raise UnusableRowError('has no field "prompt", and its two answers share no beginning that could be it')
    _require_answers(chosen[end:].strip(), rejected[end:].strip())
    return Preference(shared[:end], chosen[end:], rejected[end:])


def _of_conversations(chosen: list[Message], rejected: list[Message], cells: tuple[Cell, Cell]) -> Preference | None:
    """The pair of two conversations with one beginning; None where both are answers alone."""
    for messages, cell in zip((chosen, rejected), cells, strict=True):
        role = messages[-1]["role"]
        if role != "assistant":
            raise UnusableRowError(f"the last message of \"{cell.column}\" is the {role}'s, not the assistant's")
    if chosen[0]["role"] == "assistant" and rejected[0]["role"] == "assistant":
        return None
    same = [one == other for one, other in zip(chosen, rejected, strict=False)]
    num_shared = same.index(False) if False in same else len(same)
    if not num_shared:
        raise UnusableRowError(f'"{cells[0].column}" and "{cells[1].column}" do not answer the same prompt')
    _require_answers(chosen[num_shared:], rejected[num_shared:])
    return Preference(chosen[:num_shared], chosen[num_shared:], rejected[num_shared:])


def _of_messages(prompt: Said | None, chosen: list[Message], rejected: list[Message]) -> Preference:
    if prompt is None:
        raise UnusableRowError('has no field "prompt", and its two answers share no beginning that could be it')
    return Preference([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, chosen, rejected)


def _require_answers(chosen: Said, rejected: Said) -> None:
    if not chosen or not rejected:
        raise UnusableRowError("one of its answers is the beginning of the other; there is no prompt that both answer")
