"""What the rows of a job are, seen from their columns (trainer/spec/data/row_fields.py), and one row as an example.

All rows of a job are of one shape; within it, each may be of another dialect.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from trainer.runtime.data.sources.examples import Chat, Completion, Content, TokenIds
from trainer.runtime.data.sources.message_rows import (
    parsed,
    read_messages,
    read_tools,
    require_assistant,
    text_or_messages,
)
from trainer.runtime.data.sources.preference_rows import read_preference
from trainer.runtime.data.sources.row_columns import (
    UnusableRowError,
    find_cell,
    find_text,
    listed,
    require_cell,
    require_text,
)
from trainer.runtime.data.sources.row_files import Row, holds_rows, kind_of, read_rows
from trainer.runtime.data.sources.source_streams import BadRow
from trainer.spec.data.request import SourceFile
from trainer.spec.data.row_fields import FIELDS_OF_SHAPE, fitting_shapes, names_of, shape_of_row
from trainer.spec.errors import InputError
from trainer.spec.job.sections import DataFormat

NUM_ROWS_TO_DETECT = 100
UNLEARNED_LABEL = -100  # what cross entropy leaves out in torch, and in everything built on it


FormatRow = Callable[[Row], Row | None]  # None: the row is left out


class RowReading(NamedTuple):
    """How rows are read: their shape, the columns that hold them, and the ids that the model knows."""

    format: DataFormat  # never AUTO
    fields: Mapping[str, str]
    vocab_size: int
    format_row: FormatRow | None = None  # a user's function that each row goes through first


def detect_shape(
    files: Sequence[SourceFile], asked: DataFormat, fields: Mapping[str, str], format_row: FormatRow | None = None
) -> DataFormat:
    """The shape of all rows: what was asked for, or what the columns of the first rows say.

    InputError where two files differ, where no shape has such columns, and for fields that the shape does not have.
    """
    found, example = asked, None
    if asked is DataFormat.AUTO:
        for file in _one_of_each_kind(files):
            shape = _shape_of_file(file, fields, format_row)
            if example is not None and shape is not found:
                raise InputError(
                    f"data.train: {example} holds {found} rows, {file.path} {shape} rows; the rows of a job are of one "
                    "shape:\nleave one out, or name the columns of both in data.fields"
                )
            found, example = shape, file.path
        found = DataFormat.TEXT if example is None else found
    text_file = next((file.path for file in files if not holds_rows(file)), None)
    if found is not DataFormat.TEXT and text_file is not None:
        what = f"{found} are" if found is DataFormat.TOKENS else f"{found} rows are"
        raise InputError(f"data.format: {what} read from .jsonl, .csv, .parquet or .arrow files; {text_file} is text")
    _check_fields(found, fields)
    return found


def _one_of_each_kind(files: Sequence[SourceFile]) -> Sequence[SourceFile]:
    """The first file of rows of each folder and suffix: those of one data set alike, a thousand need not be opened."""
    return tuple({_kind_of_file(file): file for file in reversed(files) if holds_rows(file)}.values())[::-1]


def _kind_of_file(file: SourceFile) -> tuple[str, str]:
    path = Path(file.path)
    return str(path.parent), path.suffix


def _shape_of_file(file: SourceFile, fields: Mapping[str, str], format_row: FormatRow | None) -> DataFormat:
    """The shape of the first row that has one; TEXT where there is no row at all."""
    fitting = fitting_shapes(fields)
    read = [row for _, row in islice(read_rows(file), NUM_ROWS_TO_DETECT) if isinstance(row, dict) and row]
    rows = read if format_row is None else [made for row in read if (made := format_row(row))]
    for allowed in (fitting, list(FIELDS_OF_SHAPE)):  # the second finds what is then said not to have such fields
        for row in rows:
            shape = shape_of_row(partial(_has, row, fields), allowed)
            if shape is not None:
                return shape
        if fields and len(allowed) == 1:
            return allowed[0]
    if not rows:
        return fitting[0] if fields and fitting else DataFormat.TEXT
    raise InputError(
        f"data.format: auto finds no shape in the columns of {file.path}: {listed(rows[0])};\n"
        "name them: data.fields={text: COLUMN}, {messages: COLUMN}, {prompt: COLUMN, completion: COLUMN}, ..."
    )


def _has(row: Row, fields: Mapping[str, str], field: str) -> bool:
    return find_cell(row, field, fields) is not None


def _check_fields(shape: DataFormat, fields: Mapping[str, str]) -> None:
    legal = FIELDS_OF_SHAPE[shape]
    unknown = next((name for name in fields if name not in legal), None)
    if unknown is not None:
        raise InputError(f"data.fields: {unknown} is not a field of {shape} rows; they have {', '.join(legal)}")


def example_of(row: Row, where: str, reading: RowReading) -> Content | BadRow | None:
    """The example that `row` is; a BadRow at `where` with the reason where it is none; None where it is left out."""
    if reading.format_row is not None:
        made = reading.format_row(row)
        if made is None:
            return None
        row = made
    try:
        return _READERS[reading.format](row, reading)
    except UnusableRowError as fault:
        return BadRow(where, str(fault))


def _text(row: Row, reading: RowReading) -> Content:
    return require_text(row, "text", reading.fields)


def _completion(row: Row, reading: RowReading) -> Content:
    cells = require_cell(row, "prompt", reading.fields), require_cell(row, "completion", reading.fields)
    prompt, completion = (text_or_messages(cell.value, cell.column, reading.fields) for cell in cells)
    if isinstance(prompt, str) is not isinstance(completion, str):
        raise UnusableRowError(
            f'"{cells[0].column}" and "{cells[1].column}" are of two kinds: one is text, the other messages'
        )
    if not isinstance(completion, str):
        require_assistant(completion, cells[1].column)
    return Completion(prompt, completion)


def _chat(row: Row, reading: RowReading) -> Content:
    fields = reading.fields
    cell = find_cell(row, "messages", fields)
    if cell is None and _is_alpaca(row, fields):
        return _alpaca(row, fields)
    column, value = cell or require_cell(row, "messages", fields)
    messages = read_messages(value, column, fields)
    require_assistant(messages, column)
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools = find_cell(row, "tools", fields)
    return Chat(messages, None if tools is None else read_tools(tools.value, tools.column))


def _is_alpaca(row: Row, fields: Mapping[str, str]) -> bool:
    """Whether the row is meant so, whole or not."""
    if "messages" in fields or any(name in row for name in names_of("messages", fields)):
        return False
    return any(name in row for field in ("instruction", "output") for name in names_of(field, fields))


def _alpaca(row: Row, fields: Mapping[str, str]) -> Chat:
    """Instruction and input are one message, a line each, as LLaMA-Factory joins them."""
    asked = [require_text(row, "instruction", fields), find_text(row, "input", fields)]
    answer = require_text(row, "output", fields)
    system = find_text(row, "system", fields)
    messages = [{"role": "system", "content": system}] if system else []
    for turn in _history(row):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(said, str) for said in turn):
            raise UnusableRowError('field "history" is not a list of pairs of texts')
        messages += _turn(*turn)
    return Chat([*messages, *_turn("\n".join(filter(None, asked)), answer)])


def _history(row: Row) -> list[object]:
    history = parsed(row.get("history") or [], "history")
    if not isinstance(history, list):
        raise UnusableRowError('field "history" is not a list of pairs of texts')
    return history


def _turn(asked: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _preference(row: Row, reading: RowReading) -> Content:
    return read_preference(row, reading.fields)


def _tokens(row: Row, reading: RowReading) -> Content:
    column, value = require_cell(row, "tokens", reading.fields)
    ids = _whole_numbers(value, column, "token ids")
    if len(ids) < 2:
        raise UnusableRowError(f'field "{column}" has {len(ids)} tokens; a row without a label teaches nothing')
    if not (min(ids) >= 0 and max(ids) < reading.vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise UnusableRowError(f"token {wrong} is not in the model's vocabulary of {reading.vocab_size}")
    is_learned = _learned(row, ids, reading.fields)
    if is_learned is not None and not any(is_learned[1:]):
        raise UnusableRowError("no label is left; nothing would be learned")
    return TokenIds(ids, is_learned)


def _learned(row: Row, ids: list[int], fields: Mapping[str, str]) -> list[bool] | None:
    """Which ids are learned; None where the row does not say, which is all of them."""
    cell = find_cell(row, "labels", fields) or find_cell(row, "mask", fields)
    if cell is None:
        return None
    marks = _whole_numbers(cell.value, cell.column, "labels")
    if len(marks) != len(ids):
        raise UnusableRowError(f'field "{cell.column}" has {len(marks)} entries for {len(ids)} tokens')
    if cell.column in names_of("mask", fields):
        if not set(marks) <= {0, 1}:
            raise UnusableRowError(f'field "{cell.column}" is a mask, but has entries other than 0 and 1')
        return [mark == 1 for mark in marks]
    for position, (mark, token) in enumerate(zip(marks, ids, strict=True), start=1):
        if mark not in (token, UNLEARNED_LABEL):
            raise UnusableRowError(
                f'label {mark} at position {position} of "{cell.column}" is neither its token, {token}, nor '
                f"{UNLEARNED_LABEL}; labels are not shifted"
            )
    return [mark != UNLEARNED_LABEL for mark in marks]


def _whole_numbers(value: object, column: str, what: str) -> list[int]:
    numbers = parsed(value, column)
    is_mask = what != "token ids"
    if not isinstance(numbers, list):
        raise UnusableRowError(f'field "{column}" is {kind_of(numbers)}, not a list of {what}')
    if any(type(number) is not int and not (is_mask and type(number) is bool) for number in numbers):
        raise UnusableRowError(f'field "{column}" is not a list of {what}')
    return numbers


_READERS = {
    DataFormat.TEXT: _text,
    DataFormat.TOKENS: _tokens,
    DataFormat.PROMPT_COMPLETION: _completion,
    DataFormat.CHAT: _chat,
    DataFormat.PREFERENCE: _preference,
}
