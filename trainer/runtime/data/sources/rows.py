"""Rows as examples: which columns hold what, which shape the rows of a job have, and the example that each row is.

Columns are found by our name, by other usual names, or by those in `data.fields` (trainer/spec/data/shapes.py). All
rows of a job are of one shape; within it, each may be of another dialect.

Messages are brought into the form that chat templates read. Accepted are OpenAI's (`role`, `content`, `tool_calls`) and
ShareGPT's (`from`, `value`), each as a list of objects, as an object of lists (how some libraries store it in columns),
or as JSON in a column of text; other names of keys and roles are mapped by `data.fields`. Content may be a list of
parts if all are text. Nulls, which columnar files have where another row has a key, are removed.

Preferences are read as one prompt and two answers:

| `prompt` | `chosen`, `rejected` | read as |
|---|---|---|
| text | text | itself |
| messages | messages | itself |
| messages | text | each answer one message of the assistant |
| text | messages of the assistant | the prompt as one message of the user |
| none, or text again | whole conversations | the prompt is the messages that both begin with |
| none | whole texts | the prompt is the shared beginning, up to `Assistant:` or the end of a line |
| `conversations` | one message each | LLaMA-Factory's form of ShareGPT |
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.trainer.runtime.data.sources import Chat, Completion, Content, Message, Preference, TokenIds
from shardwise.trainer.runtime.data.sources.files import BadRow, Row, decode_json, holds_rows, kind_of, read_rows
from shardwise.trainer.spec.data.profile import SourceFile
from shardwise.trainer.spec.data.shapes import (
    BY_PRECEDENCE,
    ROLES,
    SHAPES,
    Encoding,
    column_names,
    fitting_shapes,
    shape_of_row,
)
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import DataFormat

NUM_ROWS_TO_DETECT = 100
UNLEARNED_LABEL = -100  # ignored by cross entropy in torch, and in everything built on it
_ANSWER_MARK = "\n\nAssistant:"  # of Anthropic's hh-rlhf, whose rows have no prompt
_ROLE_KEYS, _CONTENT_KEYS = ("role", "from"), ("content", "value")
_ALIASES = {
    **{role: role for role in ROLES},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
}
_NO_PROMPT = 'has no field "prompt", and its two answers share no beginning that could be it'
TextOrMessages = str | list[Message]


class UnusableRowError(ValueError):
    """Why a row cannot be used; its text completes "the row ..."."""


class Cell(NamedTuple):
    """A column of a row and its value."""

    column: str
    value: Any


def find_cell(row: Row, field: str, fields: Mapping[str, str]) -> Cell | None:
    """The field's cell where the row has one that is not null; columnar files write null for what is not there."""
    for column in column_names(field, fields):
        if row.get(column) is not None:
            return Cell(column, row[column])
    return None


def require_cell(row: Row, field: str, fields: Mapping[str, str]) -> Cell:
    """The field's cell, which is not null; UnusableRowError where there is none."""
    cell = find_cell(row, field, fields)
    if cell is not None:
        return cell
    columns = column_names(field, fields)
    null = next((column for column in columns if column in row), None)
    if null is not None:
        raise UnusableRowError(f'field "{null}" is null')
    raise UnusableRowError(f'has no field "{columns[0]}"; its fields: {listed(row)}')


def require_text(row: Row, field: str, fields: Mapping[str, str]) -> str:
    """The field's text, which is more than blanks."""
    column, value = require_cell(row, field, fields)
    if not isinstance(value, str):
        raise UnusableRowError(f'field "{column}" is {kind_of(value)}, not text')
    if not value or value.isspace():
        raise UnusableRowError(f'field "{column}" is empty')
    return value


def find_text(row: Row, field: str, fields: Mapping[str, str]) -> str:
    """The field's text, empty where there is none."""
    cell = find_cell(row, field, fields)
    if cell is not None and not isinstance(cell.value, str):
        raise UnusableRowError(f'field "{cell.column}" is {kind_of(cell.value)}, not text')
    return "" if cell is None or cell.value.isspace() else cell.value


def listed(row: Mapping[str, Any]) -> str:
    """The names of the columns, in one line."""
    return ", ".join(map(str, row)) or "none"


FormatRow = Callable[[Row], Row | None]  # None: the row is skipped


class RowReading(NamedTuple):
    """How rows are read: their shape, the columns that hold them, and the ids that the model knows."""

    format: DataFormat  # never AUTO
    fields: Mapping[str, str]
    vocab_size: int
    format_row: FormatRow | None = None  # a user's function that each row goes through first


def detect_shape(
    files: Sequence[SourceFile], requested: DataFormat, fields: Mapping[str, str], format_row: FormatRow | None = None
) -> DataFormat:
    """The shape of all rows: the requested one, or that of the columns of the first rows.

    InputError where two files differ, where no shape has such columns, and for fields that the shape does not have.
    """
    found, example = requested, None
    if requested is DataFormat.AUTO:
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
    encoding = SHAPES[found].encoding
    if encoding is not Encoding.TEXT and text_file is not None:
        what = f"{found} are" if encoding is Encoding.TOKENS else f"{found} rows are"
        raise InputError(f"data.format: {what} read from .jsonl, .csv, .parquet or .arrow files; {text_file} is text")
    _check_fields(found, fields)
    return found


def _one_of_each_kind(files: Sequence[SourceFile]) -> Sequence[SourceFile]:
    """The first file of rows of each folder and suffix: those of one data set alike, a thousand need not be opened."""
    by_kind = {(Path(each.path).parent, Path(each.path).suffix): each for each in reversed(files) if holds_rows(each)}
    return tuple(by_kind.values())[::-1]


def _shape_of_file(file: SourceFile, fields: Mapping[str, str], format_row: FormatRow | None) -> DataFormat:
    """The shape of the first row that has one; TEXT where there is no row at all."""
    fitting = fitting_shapes(fields)
    read = [row for _, row in islice(read_rows(file), NUM_ROWS_TO_DETECT) if isinstance(row, dict) and row]
    rows = read if format_row is None else [made for row in read if (made := format_row(row))]
    for allowed in (fitting, list(BY_PRECEDENCE)):  # the second finds a shape that then is refused for its fields
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
    legal = SHAPES[shape].fields
    unknown = next((name for name in fields if name not in legal), None)
    if unknown is not None:
        raise InputError(f"data.fields: {unknown} is not a field of {shape} rows; they have {', '.join(legal)}")


def example_of(row: Row, where: str, reading: RowReading) -> Content | BadRow | None:
    """The example that `row` is; a BadRow at `where` with the reason where it is none; None where it is skipped."""
    if reading.format_row is not None:
        made = reading.format_row(row)
        if made is None:
            return None
        row = made
    try:
        return READERS[reading.format](row, reading)
    except UnusableRowError as fault:
        return BadRow(where, str(fault))


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
    """True if the row has a column of Alpaca's form, and none of messages."""
    if "messages" in fields or any(name in row for name in column_names("messages", fields)):
        return False
    return any(name in row for field in ("instruction", "output") for name in column_names(field, fields))


def _alpaca(row: Row, fields: Mapping[str, str]) -> Chat:
    """Instruction and input are one message, a line each, as LLaMA-Factory joins them."""
    question = [require_text(row, "instruction", fields), find_text(row, "input", fields)]
    answer = require_text(row, "output", fields)
    system = find_text(row, "system", fields)
    messages = [{"role": "system", "content": system}] if system else []
    history = parsed(row.get("history") or [], "history")
    for turn in history if isinstance(history, list) else [None]:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise UnusableRowError('field "history" is not a list of pairs of texts')
        messages += _turn(*turn)
    return Chat([*messages, *_turn("\n".join(filter(None, question)), answer)])


def _turn(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


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
    """Which ids are learned; None where the row has no mask: all of them."""
    cell = find_cell(row, "labels", fields) or find_cell(row, "mask", fields)
    if cell is None:
        return None
    marks = _whole_numbers(cell.value, cell.column, "labels")
    if len(marks) != len(ids):
        raise UnusableRowError(f'field "{cell.column}" has {len(marks)} entries for {len(ids)} tokens')
    if cell.column in column_names("mask", fields):
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


READERS: Mapping[DataFormat, Callable[[Row, RowReading], Content]] = {
    DataFormat.TEXT: lambda row, reading: require_text(row, "text", reading.fields),
    DataFormat.TOKENS: _tokens,
    DataFormat.PROMPT_COMPLETION: _completion,
    DataFormat.CHAT: _chat,
    DataFormat.PREFERENCE: lambda row, reading: read_preference(row, reading.fields),
}


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
    """The value of JSON text; any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return decode_json(value)
    except ValueError as error:
        raise UnusableRowError(f'field "{column}" is text that {error}') from None


def text_or_messages(value: Any, column: str, fields: Mapping[str, str]) -> TextOrMessages:  # noqa: ANN401
    """Text that is not empty, or messages; text that is a JSON list of messages is read as messages."""
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
    calls = entry.get("tool_calls")
    if content_key is None and not calls:
        raise UnusableRowError(f'has no "{names.content_keys[0]}"; its fields: {listed(entry)}')
    content = "" if content_key is None else _checked_content(entry[content_key])
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    if role in ("user", "assistant") and not calls and not text.strip():
        raise UnusableRowError(f"({role}) is empty")
    message = {"role": role, "content": content}
    if len(entry) > 2:
        others = {key: other for key, other in entry.items() if key not in (role_key, content_key)}
        message |= _without_nulls(others)
    return message


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


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - any JSON
    """A copy in which no object has a key of null."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [_without_nulls(entry) for entry in value] if isinstance(value, list) else value


def read_preference(row: Row, fields: Mapping[str, str]) -> Preference:
    """The pair in `row`; UnusableRowError where it is none."""
    cells = require_cell(row, "chosen", fields), require_cell(row, "rejected", fields)
    chosen, rejected = (text_or_messages(cell.value, cell.column, fields) for cell in cells)
    if chosen == rejected:
        raise UnusableRowError(f'"{cells[0].column}" equals "{cells[1].column}"; nothing is preferred')
    if isinstance(chosen, list) and isinstance(rejected, list):
        pair = _of_conversations(chosen, rejected, cells)
        if pair is not None:
            return pair
        prompt = _prompt(row, fields)
        if prompt is None:
            raise UnusableRowError(_NO_PROMPT)
        return Preference(
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt, chosen, rejected
        )
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _of_texts(_prompt(row, fields), chosen, rejected)
    raise UnusableRowError(
        f'"{cells[0].column}" and "{cells[1].column}" are of two kinds: one is text, the other messages'
    )


def _prompt(row: Row, fields: Mapping[str, str]) -> TextOrMessages | None:
    cell = find_cell(row, "prompt", fields) or find_cell(row, "messages", fields)
    return None if cell is None else text_or_messages(cell.value, cell.column, fields)


def _of_texts(prompt: TextOrMessages | None, chosen: str, rejected: str) -> Preference:
    if isinstance(prompt, str):
        return Preference(prompt, chosen, rejected)
    if prompt is not None:
        return Preference(prompt, *([{"role": "assistant", "content": answer}] for answer in (chosen, rejected)))
    shared = commonprefix([chosen, rejected])  # noqa: RUF071 - of characters, which is what is meant
    mark = shared.rfind(_ANSWER_MARK)
    end = mark + len(_ANSWER_MARK) if mark >= 0 else shared.rfind("\n") + 1
    if not shared[:end].strip():
        raise UnusableRowError(_NO_PROMPT)
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


def _require_answers(chosen: TextOrMessages, rejected: TextOrMessages) -> None:
    if not chosen or not rejected:
        raise UnusableRowError("one of its answers is the beginning of the other; there is no prompt that both answer")
