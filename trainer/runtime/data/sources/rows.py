"""Rows as examples: which columns hold what, which shape the rows of a job have, and the example that each row is.

Columns are found by our name, by other usual names, or by those in `data.fields` (trainer/spec/data/shapes.py). All
rows of a job are of one shape; within it, each may be of another dialect. What messages may look like: `messages`.
Columns that are not read are named with the example.

Prompts with a completion and preferences may have columns `tools`, `system` and `chat_template_kwargs`, as chats have;
of plain text with tools or a system message a chat is made. Preferences are read as one prompt and two answers:

| `prompt` | `chosen`, `rejected` | read as |
|---|---|---|
| text | text | itself |
| messages | messages | itself |
| messages | text | each answer one message of the assistant |
| text | messages of the assistant | the prompt as one message of the user |
| none, or text again | whole conversations | the prompt is the messages that both begin with |
| none | whole texts | the prompt is the shared beginning, up to `Assistant:` or the end of a line |
| `conversations` | one message each | LLaMA-Factory's form of ShareGPT |
| `instruction`, `input` | text | LLaMA-Factory's form of Alpaca |
| `input`, with messages and tools | `preferred_output`, `non_preferred_output` | OpenAI's form |

A row with `label: false` (KTO), with a key that excludes an answer (`train: false`, `weight: 0`; see `messages`), and
one whose every answer is excluded, is left out and counted: what the data exclude is never learned, and the other rows
are examples.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from os.path import commonprefix
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.trainer.runtime.data.sources import (
    TEMPLATE_KWARGS,
    Chat,
    Completion,
    Content,
    Message,
    Preference,
    TokenIds,
)
from shardwise.trainer.runtime.data.sources.files import BadRow, LeftOutRow, Row, holds_rows, read_rows
from shardwise.trainer.runtime.data.sources.messages import (
    UnusableRowError,
    excludes_naturally,
    flag,
    holds_messages,
    is_about_learning,
    learns_nothing,
    listed,
    number_of,
    parsed,
    read_messages,
    read_tools,
    require_assistant,
    states_learning,
)
from shardwise.trainer.spec.data.json_text import kind_of, without_nulls
from shardwise.trainer.spec.data.profile import SourceFile
from shardwise.trainer.spec.data.shapes import (
    BY_PRECEDENCE,
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
_OTHER_MASKS = ("attention_mask", "special_tokens_mask")  # of tokenizers; they state nothing about learning
_PADDED = "padding; give the tokens alone"
_PACKED = "several documents; give a row of each, which are packed here"
_WHOLE: tuple[tuple[str, str, Callable[[list[Any]], bool]], ...] = (  # columns of tokenised rows that other tools write
    ("attention_mask", _PADDED, all),
    ("position_ids", _PACKED, lambda places: places == list(range(places[0], places[0] + len(places)))),
    *((name, _PACKED, lambda lengths: len(lengths) == 1) for name in ("seq_lengths", "seq_lens")),
    *((name, _PACKED, lambda numbers: len(set(numbers)) == 1) for name in ("segment_ids", "sequence_ids")),
)
_ANSWER_MARK = "\n\nAssistant:"  # of Anthropic's hh-rlhf, whose rows have no prompt
_NO_PROMPT = 'has no field "prompt", and its two answers share no beginning that could be it'
_OF_APPLY_CHAT_TEMPLATE = frozenset({"messages", "conversation", "tools", "add_generation_prompt", "chat_template"})
LABELS = ("label", "kto_tag", "kto_label", "desirable", "is_desirable")  # of an answer, by KTO
TextOrMessages = str | list[Message]


class Cell(NamedTuple):
    """A column of a row and its value."""

    column: str
    value: Any


class LeaveOutError(Exception):
    """The row is marked as not to be learned; the text is the mark."""


class Columns:
    """A row, its columns by the names of fields, and which of them were read."""

    def __init__(self, row: Row, fields: Mapping[str, str]) -> None:
        self.row, self.fields = row, fields
        self._read = set[str]()
        self._inside = dict[str, Any]()  # of a column that holds an object with messages
        self._unread_inside: list[str] = []

    def find(self, field: str) -> Cell | None:
        """The field's cell where the row has one that is not null; columnar files write null for what is not there."""
        names = column_names(field, self.fields)
        for column in names if field != "system" else (*names, *column_names(field, {})):  # also the name of a role
            if self.row.get(column) is not None:
                self._read.add(column)
                return Cell(column, self.row[column])
        return None

    def require(self, field: str) -> Cell:
        """The field's cell, which is not null; UnusableRowError where there is none."""
        cell = self.find(field)
        if cell is not None:
            return cell
        columns = column_names(field, self.fields)
        null = next((column for column in columns if column in self.row), None)
        if null is not None:
            raise UnusableRowError(f'field "{null}" is null')
        raise UnusableRowError(f'has no field "{columns[0]}"; its fields: {listed(self.row)}')

    def require_text(self, field: str) -> str:
        """The field's text, which is more than blanks."""
        column, value = self.require(field)
        if not isinstance(value, str):
            raise UnusableRowError(f'field "{column}" is {kind_of(value)}, not text')
        if not value or value.isspace():
            raise UnusableRowError(f'field "{column}" is empty')
        return value

    def find_text(self, field: str) -> str:
        """The field's text, empty where there is none."""
        cell = self.find(field)
        if cell is not None and not isinstance(cell.value, str):
            raise UnusableRowError(f'field "{cell.column}" is {kind_of(cell.value)}, not text')
        return "" if cell is None or cell.value.isspace() else cell.value

    def messages(self, cell: Cell) -> list[Message]:
        """The messages of a column, also of an object that holds them with tools, as in OpenAI's form."""
        value = parsed(cell.value, cell.column)
        if isinstance(value, dict) and isinstance(value.get("messages"), list):
            self._inside |= {name: each for name, each in value.items() if name in ("tools", "system")}
            others = value.keys() - {"messages", "tools", "system"}
            self._unread_inside += [f"{cell.column}.{name}" for name in others if _holds_something(value[name])]
            value = value["messages"]
        return read_messages(value, cell.column, self.fields)

    def text_or_messages(self, cell: Cell) -> TextOrMessages:
        """Text that is not empty, or messages; text that is the JSON of messages is read as messages."""
        column, value = cell
        if not isinstance(value, str):
            if not isinstance(value, list | dict):
                raise UnusableRowError(f'field "{column}" is {kind_of(value)}, not text or a list of messages')
            return self.messages(cell)
        if holds_messages(value, self.fields):
            return self.messages(cell)
        if not value or value.isspace():
            raise UnusableRowError(f'field "{column}" is empty')
        return value

    @property
    def is_of_chat(self) -> bool:
        """True if the row has a system message, perhaps an empty one, or tools, which plain text cannot have."""
        tools = self.find("tools")
        return self.find("system") is not None or (tools is not None and tools.value not in ("", "null", "[]", []))

    def tools(self, messages: list[Message]) -> list[Any] | None:
        """The functions that a conversation may call, by a column, or inside the object or system message it has."""
        cell = self.find("tools")
        if cell is None and "tools" in self._inside:
            cell = Cell("tools", self._inside["tools"])
        if cell is None and messages and messages[0]["role"] == "system" and "tools" in messages[0]:
            cell = Cell("tools", messages[0].pop("tools"))
        return None if cell is None else read_tools(cell.value, cell.column)

    def with_system(self, messages: list[Message]) -> list[Message]:
        """The messages after the system message of a column; UnusableRowError where they have another one."""
        cell = self.find("system") or (Cell("system", self._inside["system"]) if "system" in self._inside else None)
        if cell is None:
            return messages
        if not isinstance(cell.value, str):
            raise UnusableRowError(f'field "{cell.column}" is {kind_of(cell.value)}, not text')
        if not cell.value.strip():
            return messages
        if not messages or messages[0]["role"] != "system":
            return [{"role": "system", "content": cell.value}, *messages]
        if messages[0]["content"] != cell.value:
            raise UnusableRowError(f'has two system messages, in field "{cell.column}" and in its messages')
        return messages

    def template_kwargs(self) -> dict[str, Any] | None:
        """Further arguments of the chat template, such as enable_thinking."""
        cell = self.find(TEMPLATE_KWARGS)
        value = None if cell is None else without_nulls(parsed(cell.value or None, cell.column))
        if value is not None and not isinstance(value, dict):
            raise UnusableRowError(f'field "{TEMPLATE_KWARGS}" is {kind_of(value)}, not an object')
        taken = _OF_APPLY_CHAT_TEMPLATE & (value or {}).keys()
        if taken:
            raise UnusableRowError(f'field "{TEMPLATE_KWARGS}" has {min(taken)}, which the row states in a column')
        return value or None

    def check_marks(self, *, is_answer: bool) -> None:
        """LeaveOutError where the row is marked as not to be learned; UnusableRowError for a mark that is not clear."""
        for column, value in self.row.items():
            if value is None or (column in LABELS and not is_answer):
                continue
            stated = _label(column, value) if column in LABELS else self._mark(column, value, is_answer=is_answer)
            if stated is not None:
                self._read.add(column)
            if stated is False:
                number = number_of(str(value))
                raise LeaveOutError(f"{column}: {f'{number:g}' if isinstance(number, float) else number}")

    def _mark(self, column: str, value: Any, *, is_answer: bool) -> bool | None:  # noqa: ANN401 - any row
        """Whether a column states that the row is learned; None for any other column."""
        if isinstance(value, list):
            is_mask = is_about_learning(column) and value and all(flag(each) is not None for each in value)
            if is_mask and self.find("tokens") is None:
                raise UnusableRowError(
                    f'has "{column}": a list, which nothing reads; give each answer "weight": 0 or 1'
                )
            return None
        try:
            return states_learning(column, value)
        except UnusableRowError:
            if is_answer and column.endswith("weight") and not isinstance(number_of(str(value)), str):
                raise UnusableRowError(
                    f'has "{column}": {value}; a row is learned (1) or not (0), a source has a weight'
                ) from None
            if isinstance(value, bool) and excludes_naturally(column, value=value):
                raise UnusableRowError(
                    f'has "{column}": {str(value).lower()}; make it "train": false if the row is not to be learned, '
                    "else rename it"
                ) from None
        return None

    def mark_read(self, *columns: str) -> None:
        """These hold nothing that the example lacks."""
        self._read.update(columns)

    def unread(self) -> tuple[str, ...]:
        """The columns with a value that were not read."""
        unread = [name for name in self.row if name not in self._read and _holds_something(self.row[name])]
        return (*unread, *self._unread_inside)


def _label(column: str, value: Any) -> bool | None:  # noqa: ANN401 - any row
    """Whether a label states that the answer is a good one; None for a number of a class, and for any other text."""
    number = value if isinstance(value, bool) else number_of(str(value))
    if not isinstance(number, float):
        return flag(value)
    if number <= 0:
        raise UnusableRowError(
            f'has "{column}": {number:g}; make it false if the answer is not to be learned (KTO), else rename it'
        )
    return None


def _holds_something(value: object) -> bool:
    return value not in (None, "", [], {})


FormatRow = Callable[[Row], Row | None]  # None: the row is skipped


class Example(NamedTuple):
    """The example that a row is, and the columns that are no part of it."""

    content: Content
    unread: tuple[str, ...]


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
    return Columns(row, fields).find(field) is not None


def _check_fields(shape: DataFormat, fields: Mapping[str, str]) -> None:
    legal = SHAPES[shape].fields
    unknown = next((name for name in fields if name not in legal), None)
    if unknown is not None:
        raise InputError(f"data.fields: {unknown} is not a field of {shape} rows; they have {', '.join(legal)}")


def read_example(
    row: Row, where: str, reading: RowReading, *, is_columnar: bool = False
) -> Example | BadRow | LeftOutRow | None:
    """The example that `row` is; a BadRow at `where` with the reason where it is none; None where it is skipped.

    With `is_columnar` a null in an object stands for a key that the row does not have.
    """
    if reading.format_row is not None:
        made = reading.format_row(row)
        if made is None:
            return None
        row = made
    if is_columnar:
        row = {column: without_nulls(value) for column, value in row.items()}
    columns = Columns(row, reading.fields)
    try:
        if reading.format not in (DataFormat.CHAT, DataFormat.PROMPT_COMPLETION):
            columns.check_marks(is_answer=False)
        content = READERS[reading.format](columns, reading)
    except UnusableRowError as fault:
        return BadRow(where, str(fault))
    except LeaveOutError as mark:
        return LeftOutRow(where, str(mark))
    return Example(content, columns.unread())


def _completion(columns: Columns, reading: RowReading) -> Content:
    columns.check_marks(is_answer=True)
    cells = columns.require("prompt"), columns.require("completion")
    prompt, completion = map(columns.text_or_messages, cells)
    if isinstance(prompt, str) is not isinstance(completion, str):
        raise UnusableRowError(
            f'"{cells[0].column}" and "{cells[1].column}" are of two kinds: one is text, the other messages'
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        if not columns.is_of_chat:
            return Completion(prompt, completion)
        prompt, completion = [_message("user", prompt)], [_message("assistant", completion)]
    assert isinstance(prompt, list) and isinstance(completion, list)
    require_assistant(completion, cells[1].column)
    _require_learned(completion)
    prompt = columns.with_system(prompt)
    return Completion(prompt, completion, columns.tools(prompt), columns.template_kwargs())


def _chat(columns: Columns, reading: RowReading) -> Content:
    columns.check_marks(is_answer=True)
    if _is_alpaca(columns):
        messages = [*_alpaca_prompt(columns), _message("assistant", columns.require_text("output"))]
    else:
        cell = columns.require("messages")
        messages = columns.messages(cell)
        require_assistant(messages, cell.column)
        _require_learned(messages)
    messages = columns.with_system(messages)
    return Chat(messages, columns.tools(messages), columns.template_kwargs())


def _require_learned(messages: list[Message]) -> None:
    if learns_nothing(messages):
        raise LeaveOutError("every answer is excluded")


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _is_alpaca(columns: Columns) -> bool:
    """True if the row has a column of Alpaca's form, and none of messages."""
    if "messages" in columns.fields or columns.find("messages") is not None:
        return False
    row = columns.row
    if any(name in row for name in column_names("messages", columns.fields)):
        return False
    return any(name in row for field in ("instruction", "output") for name in column_names(field, columns.fields))


def _alpaca_prompt(columns: Columns) -> list[Message]:
    """Instruction and input are one message, a line each, as LLaMA-Factory joins them."""
    question = [columns.require_text("instruction"), columns.find_text("input")]
    cell = columns.find("history")
    history = parsed([] if cell is None else cell.value or [], "history")
    messages = []
    for turn in history if isinstance(history, list) else [None]:
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise UnusableRowError('field "history" is not a list of pairs of texts')
        messages += [_message("user", turn[0]), _message("assistant", turn[1])]
    return [*messages, _message("user", "\n".join(filter(None, question)))]


def _tokens(columns: Columns, reading: RowReading) -> Content:
    column, value = columns.require("tokens")
    ids = _whole_numbers(value, column, "token ids")
    if len(ids) < 2:
        raise UnusableRowError(f'field "{column}" has {len(ids)} tokens; a row without a label teaches nothing')
    if not (min(ids) >= 0 and max(ids) < reading.vocab_size):
        wrong = min(ids) if min(ids) < 0 else max(ids)
        raise UnusableRowError(f"token {wrong} is not in the model's vocabulary of {reading.vocab_size}")
    _check_one_document(columns)
    is_learned = _learned(columns, ids)
    if is_learned is not None and not any(is_learned[1:]):
        raise UnusableRowError("no label is left; nothing would be learned")
    return TokenIds(ids, is_learned)


def _learned(columns: Columns, ids: list[int]) -> list[bool] | None:
    """Which ids are learned, by all columns that state it; None where the row has none: all of them."""
    stated = [_by_labels(cell, ids)] if (cell := columns.find("labels")) is not None else []
    for column in column_names("mask", columns.fields):
        if columns.row.get(column) is not None:
            columns.mark_read(column)
            marks = _marks(Cell(column, columns.row[column]), ids)
            if not set(marks) <= {0, 1}:
                raise UnusableRowError(f'field "{column}" is a mask, but has entries other than 0 and 1')
            stated.append([mark == 1 for mark in marks])
    other = next((name for name in columns.unread() if is_about_learning(name)), None)
    if other is not None and other not in _OTHER_MASKS and isinstance(columns.row[other], list):
        raise UnusableRowError(
            f'field "{other}" may state what is learned: name it (data.fields={{mask: {other}}}), or remove it'
        )
    return [all(marks) for marks in zip(*stated, strict=True)] if stated else None


def _marks(cell: Cell, ids: list[int]) -> list[int]:
    marks = _whole_numbers(cell.value, cell.column, "labels")
    if len(marks) != len(ids):
        raise UnusableRowError(f'field "{cell.column}" has {len(marks)} entries for {len(ids)} tokens')
    return marks


def _by_labels(cell: Cell, ids: list[int]) -> list[bool]:
    marks = _marks(cell, ids)
    for position, (mark, token) in enumerate(zip(marks, ids, strict=True), start=1):
        if mark not in (token, UNLEARNED_LABEL):
            raise UnusableRowError(
                f'label {mark} at position {position} of "{cell.column}" is neither its token, {token}, nor '
                f"{UNLEARNED_LABEL}; labels are not shifted"
            )
    return [mark != UNLEARNED_LABEL for mark in marks]


def _check_one_document(columns: Columns) -> None:
    """UnusableRowError for a row with padding, or that holds several documents: it would be learned as one."""
    for column, remedy, is_one in _WHOLE:
        value = columns.row.get(column)
        if isinstance(value, list) and value:
            if not is_one(value):
                raise UnusableRowError(f'field "{column}" shows that it holds {remedy}')
            columns.mark_read(column)


def _whole_numbers(value: object, column: str, what: str) -> list[int]:
    numbers = parsed(value, column)
    is_mask = what != "token ids"
    if not isinstance(numbers, list):
        raise UnusableRowError(f'field "{column}" is {kind_of(numbers)}, not a list of {what}')
    if is_mask:
        numbers = [int(number) if isinstance(number, float) and number in (0, 1) else number for number in numbers]
    if any(type(number) is not int and not (is_mask and type(number) is bool) for number in numbers):
        raise UnusableRowError(f'field "{column}" is not a list of {what}')
    return numbers


READERS: Mapping[DataFormat, Callable[[Columns, RowReading], Content]] = {
    DataFormat.TEXT: lambda columns, _: columns.require_text("text"),
    DataFormat.TOKENS: _tokens,
    DataFormat.PROMPT_COMPLETION: _completion,
    DataFormat.CHAT: _chat,
    DataFormat.PREFERENCE: lambda columns, _: _preference(columns),
}


def _preference(columns: Columns) -> Preference:
    """The pair in a row; UnusableRowError where it is none."""
    cells = columns.require("chosen"), columns.require("rejected")
    chosen, rejected = map(columns.text_or_messages, cells)
    if chosen == rejected:
        raise UnusableRowError(f'"{cells[0].column}" equals "{cells[1].column}"; nothing is preferred')
    if isinstance(chosen, list) and isinstance(rejected, list):
        pair = _of_conversations(chosen, rejected, cells)
        prompt = _prompt(columns) if pair is None else None
        if pair is None and prompt is None:
            raise UnusableRowError(_NO_PROMPT)
        if pair is None:
            pair = Preference([_message("user", prompt)] if isinstance(prompt, str) else prompt or [], chosen, rejected)
        elif (stated := columns.row.get("prompt")) is not None and any(
            stated in (message["content"], pair.prompt) for message in pair.prompt if isinstance(message, dict)
        ):
            columns.mark_read("prompt")
    elif isinstance(chosen, str) and isinstance(rejected, str):
        pair = _of_texts(_prompt(columns), chosen, rejected, is_of_chat=columns.is_of_chat)
    else:
        raise UnusableRowError(
            f'"{cells[0].column}" and "{cells[1].column}" are of two kinds: one is text, the other messages'
        )
    if isinstance(pair.prompt, str):
        return pair
    if any(learns_nothing(answer) for answer in (pair.chosen, pair.rejected) if isinstance(answer, list)):
        raise LeaveOutError("every answer is excluded")
    prompt = columns.with_system(pair.prompt)
    return pair._replace(prompt=prompt, tools=columns.tools(prompt), template_kwargs=columns.template_kwargs())


def _prompt(columns: Columns) -> TextOrMessages | None:
    cell = columns.find("prompt") or columns.find("messages")
    if cell is not None:
        return columns.text_or_messages(cell)
    if columns.find("instruction") is not None:
        return _alpaca_prompt(columns)
    cell = columns.find("input")
    return None if cell is None else columns.text_or_messages(cell)


def _of_texts(prompt: TextOrMessages | None, chosen: str, rejected: str, *, is_of_chat: bool) -> Preference:
    if isinstance(prompt, str) and is_of_chat:
        prompt = [_message("user", prompt)]
    if isinstance(prompt, str):
        return Preference(prompt, chosen, rejected)
    if prompt is not None:
        return Preference(prompt, [_message("assistant", chosen)], [_message("assistant", rejected)])
    if is_of_chat:
        raise UnusableRowError('has a system message or tools, and no field "prompt"')
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
