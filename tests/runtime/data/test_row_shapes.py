"""What rows are taken for, and the example each becomes. What is bad: test_bad_data."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwise.trainer.runtime.data.sources.examples import Chat, Completion, Preference, TokenIds
from shardwise.trainer.runtime.data.sources.files import read_rows
from shardwise.trainer.runtime.data.sources.rows import RowReading, detect_shape, example_of
from shardwise.trainer.spec.data.request import SourceFile
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.fields import BY_PATH
from shardwise.trainer.spec.job.sections import DataFormat

TEXT, TOKENS, CHAT = DataFormat.TEXT, DataFormat.TOKENS, DataFormat.CHAT
COMPLETION, PREFERENCE = DataFormat.PROMPT_COMPLETION, DataFormat.PREFERENCE
AUTO = DataFormat.AUTO

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = {"role": "user", "content": "2+2?"}
ANSWERED = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}
SAID = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]


def listed(path):
    status = path.stat()
    return SourceFile(path=str(path), size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def source(path, *rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return listed(path)


def example(row, shape, fields=None):
    return example_of(row, "a.jsonl:1", RowReading(shape, fields or {}, vocab_size=100))


SHAPES = [
    ({"text": "a"}, {}, TEXT),
    ({"text": "a", "tokens": [1]}, {}, TEXT),
    ({"tokens": [1, 2]}, {}, TOKENS),
    ({"input_ids": [1, 2], "attention_mask": [1, 1]}, {}, TOKENS),
    ({"ids": [1, 2]}, {"tokens": "ids"}, TOKENS),
    ({"prompt": "a", "completion": "b"}, {}, COMPLETION),
    ({"question": "a", "answer": "b"}, {"prompt": "question", "completion": "answer"}, COMPLETION),
    ({"messages": [], "prompt": "a", "prompt_id": "b"}, {}, CHAT),
    ({"conversations": [], "id": 1}, {}, CHAT),
    ({"talk": []}, {"messages": "talk"}, CHAT),
    ({"instruction": "a", "input": "", "output": "b", "text": "c"}, {}, CHAT),
    ({"instruction": "a", "context": "", "response": "b"}, {"input": "context", "output": "response"}, CHAT),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "messages": []}, {}, PREFERENCE),
    ({"chosen": [], "rejected": []}, {}, PREFERENCE),
    ({"good": "b", "bad": "c", "prompt": "a"}, {"chosen": "good", "rejected": "bad"}, PREFERENCE),
    ({"messages": [], "content": "a"}, {"text": "content"}, TEXT),
    ({"text": None, "messages": []}, {}, CHAT),
]


@pytest.mark.parametrize("row, fields, shape", SHAPES)
def test_the_shape_is_read_off_the_columns(tmp_path, row, fields, shape):
    assert detect_shape([source(tmp_path / "a.jsonl", row)], AUTO, fields) is shape


def test_rows_that_say_nothing_are_passed_over(tmp_path):
    file = source(tmp_path / "a.jsonl", "not json", "[1]", {}, {"id": 3}, {"messages": []})
    assert detect_shape([file], AUTO, {}) is CHAT


def test_a_file_without_rows_and_a_file_of_text_are_text(tmp_path):
    assert detect_shape([source(tmp_path / "a.jsonl", "not json")], AUTO, {}) is TEXT
    assert detect_shape([source(tmp_path / "a.txt", "text"), source(tmp_path / "b.jsonl", {"text": "a"})], AUTO, {})


def problem(files, shape=AUTO, fields=None):
    with pytest.raises(InputError) as caught:
        detect_shape(files, shape, fields or {})
    assert len(str(caught.value).splitlines()) <= 3
    return str(caught.value)


def test_columns_of_no_shape_are_listed_with_what_would_do(tmp_path):
    said = problem([source(tmp_path / "a.csv", "question,answer", "a,b")])
    assert said == (
        f"data.format: auto finds no shape in the columns of {tmp_path}/a.csv: question, answer;\n"
        "name them: data.fields={text: COLUMN}, {messages: COLUMN}, {prompt: COLUMN, completion: COLUMN}, ..."
    )


def test_two_sources_of_different_shapes_are_both_named(tmp_path):
    first = source(tmp_path / "one" / "a.jsonl", {"messages": []})
    second = source(tmp_path / "two" / "b.jsonl", {"text": "a"})
    assert problem([first, second]) == (
        f"data.train: {first.path} holds chat rows, {second.path} text rows; the rows of a job are of one shape:\n"
        "leave one out, or name the columns of both in data.fields"
    )


def test_dialects_of_one_shape_go_together(tmp_path):
    files = [
        source(tmp_path / "one" / "a.jsonl", {"messages": []}),
        source(tmp_path / "two" / "b.jsonl", {"instruction": "a", "output": "b"}),
        source(tmp_path / "three" / "c.json", {"conversations": SAID}),
    ]
    assert detect_shape(files, AUTO, {}) is CHAT


@pytest.mark.parametrize("shape", [TOKENS, CHAT])
def test_only_text_is_read_from_text_files(tmp_path, shape):
    said = problem([source(tmp_path / "a.txt", "text")], shape)
    assert "read from .jsonl, .csv, .parquet or .arrow files; " in said
    assert said.endswith("a.txt is text")


@pytest.mark.parametrize(
    "shape, fields, expected",
    [
        (AUTO, {"prompt": "q"}, "data.fields: prompt is not a field of text rows; they have text"),
        (TEXT, {"labels": "q"}, "data.fields: labels is not a field of text rows; they have text"),
        (TOKENS, {"text": "q"}, "data.fields: text is not a field of tokens rows; they have tokens, labels, mask"),
        (
            COMPLETION,
            {"chosen": "q"},
            "data.fields: chosen is not a field of prompt_completion rows; they have prompt, completion, role, "
            "content, system, user, assistant, tool",
        ),
    ],
)
def test_a_field_that_the_shape_has_not_is_refused_with_those_it_has(tmp_path, shape, fields, expected):
    assert problem([source(tmp_path / "a.jsonl", {"text": "a"})], shape, fields) == expected


def test_the_job_file_takes_the_fields_that_some_shape_has_and_no_others():
    """Each is met by naming it where no shape has it."""
    taken = set(BY_PATH["data.fields"].kind.schema["properties"])
    refusals = [str(example_problem(shape)) for shape in DataFormat if shape is not AUTO]
    assert taken == {name for said in refusals for name in said.partition("they have ")[2].split(", ")}


def example_problem(shape):
    with pytest.raises(InputError) as caught:
        detect_shape([], shape, {"no such field": "a"})
    return caught.value


EXAMPLES = [
    (TEXT, {"body": "one"}, {"text": "body"}, "one"),
    (TOKENS, {"tokens": [1, 2, 99]}, {}, TokenIds([1, 2, 99])),
    (TOKENS, {"tokens": "[1, 2]"}, {}, TokenIds([1, 2])),
    (TOKENS, {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {}, TokenIds([1, 2, 3], [False, True, True])),
    (TOKENS, {"ids": [1, 2, 3], "lm": [0, 1, 0]}, {"tokens": "ids", "mask": "lm"},
     TokenIds([1, 2, 3], [False, True, False])),
    (TOKENS, {"input_ids": [1, 2], "completion_mask": [False, True]}, {}, TokenIds([1, 2], [False, True])),
    (COMPLETION, {"prompt": "2+2?", "completion": "4"}, {}, Completion("2+2?", "4")),
    (COMPLETION, {"prompt": [ASKED], "completion": json.dumps([ANSWERED])}, {}, Completion([ASKED], [ANSWERED])),
    (COMPLETION, {"prompt": "[{1}]", "completion": "4"}, {}, Completion("[{1}]", "4")),
    (CHAT, {"messages": [SYSTEM, ASKED, ANSWERED], "text": "a"}, {}, Chat([SYSTEM, ASKED, ANSWERED])),
    (CHAT, {"messages": json.dumps([ASKED, ANSWERED])}, {}, Chat([ASKED, ANSWERED])),
    (CHAT, {"messages": {"role": ["user", "assistant"], "content": ["2+2?", "4"]}}, {}, Chat([ASKED, ANSWERED])),
    (CHAT, {"conversations": SAID}, {}, Chat([ASKED, ANSWERED])),
    (CHAT, {"conversations": SAID, "system": "Be brief."}, {}, Chat([SYSTEM, ASKED, ANSWERED])),
    (CHAT, {"conversations": SAID, "system": ""}, {}, Chat([ASKED, ANSWERED])),
    (CHAT, {"talk": [{"who": "me", "said": "2+2?"}, {"who": "bard", "said": "4"}]},
     {"messages": "talk", "role": "who", "content": "said", "user": "me", "assistant": "bard"},
     Chat([ASKED, ANSWERED])),
    (CHAT, {"instruction": "Add.", "input": "2+2", "output": "4"}, {},
     Chat([{"role": "user", "content": "Add.\n2+2"}, ANSWERED])),
    (CHAT, {"instruction": "2+2?", "input": "", "output": "4", "system": "Be brief."}, {},
     Chat([SYSTEM, ASKED, ANSWERED])),
    (CHAT, {"instruction": "2+2?", "output": "4", "history": [["Hi", "Ho"]]}, {},
     Chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, ASKED, ANSWERED])),
    (CHAT, {"instruction": "2+2?", "context": None, "response": "4"}, {"input": "context", "output": "response"},
     Chat([ASKED, ANSWERED])),
    (PREFERENCE, {"prompt": "2+2?", "chosen": "4", "rejected": "5"}, {}, Preference("2+2?", "4", "5")),
    (PREFERENCE, {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [WRONG]}, {},
     Preference([ASKED], [ANSWERED], [WRONG])),
    (PREFERENCE, {"prompt": [ASKED], "chosen": "4", "rejected": "5"}, {}, Preference([ASKED], [ANSWERED], [WRONG])),
    (PREFERENCE, {"prompt": "2+2?", "chosen": [ANSWERED], "rejected": [WRONG]}, {},
     Preference([ASKED], [ANSWERED], [WRONG])),
    (PREFERENCE, {"chosen": [SYSTEM, ASKED, ANSWERED], "rejected": [SYSTEM, ASKED, WRONG]}, {},
     Preference([SYSTEM, ASKED], [ANSWERED], [WRONG])),
    (PREFERENCE, {"prompt": "2+2?", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG], "messages": []}, {},
     Preference([ASKED], [ANSWERED], [WRONG])),
    (PREFERENCE, {"chosen": SAID, "rejected": [SAID[0], {"from": "gpt", "value": "5"}]}, {},
     Preference([ASKED], [ANSWERED], [WRONG])),
    (PREFERENCE, {"chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG], "messages": []}, {},
     Preference([ASKED], [ANSWERED], [WRONG])),
    (PREFERENCE, {"conversations": SAID[:1], "chosen": SAID[1], "rejected": {"from": "gpt", "value": "5"}}, {},
     Preference([ASKED], [ANSWERED], [WRONG])),
    (PREFERENCE, {"chosen": "\n\nHuman: 2+2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5"}, {},
     Preference("\n\nHuman: 2+2?\n\nAssistant:", " 4", " 5")),
    (PREFERENCE, {"chosen": "Q: 2+2?\nA: 4", "rejected": "Q: 2+2?\nA: 5"}, {},
     Preference("Q: 2+2?\n", "A: 4", "A: 5")),
]  # fmt: skip


@pytest.mark.parametrize("shape, row, fields, expected", EXAMPLES, ids=str)
def test_each_row_becomes_its_example(shape, row, fields, expected):
    found = example(row, shape, fields)
    assert found == expected
    assert type(found) is type(expected)


def test_what_else_a_message_holds_is_kept_and_nulls_are_not():
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}', "strict": None}}
    row = {
        "messages": [
            {"role": "user", "content": "2+2?", "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call], "weight": None},
            {"role": "function", "content": "4", "name": "add"},
            {"role": "assistant", "content": [{"type": "text", "text": "4", "image_url": None}]},
        ],
        "tools": json.dumps([{"type": "function", "function": {"name": "add"}}]),
    }
    assert example(row, CHAT) == Chat(
        [
            {"role": "user", "content": "2+2?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}],
            },
            {"role": "tool", "content": "4", "name": "add"},
            {"role": "assistant", "content": [{"type": "text", "text": "4"}]},
        ],
        [{"type": "function", "function": {"name": "add"}}],
    )


def test_no_tools_are_no_tools():
    empty: list[Any] = [None, "", "null", [], "[]"]
    for nothing in empty:
        assert example({"messages": [ASKED, ANSWERED], "tools": nothing}, CHAT) == Chat([ASKED, ANSWERED])


def test_a_row_is_left_as_it_was():
    row = {"conversations": SAID, "system": "Be brief."}
    before = json.dumps(row)
    example(row, CHAT)
    assert json.dumps(row) == before


def test_columns_of_nulls_do_not_make_a_parquet_row_another_shape(tmp_path):
    """Columnar files have every column in every row."""
    rows = [{"messages": [{**ASKED, "tool_calls": None}, ANSWERED], "text": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    file = listed(tmp_path / "a.parquet")
    shape = detect_shape([file], AUTO, {})
    assert [example(row, shape) for _, row in read_rows(file)] == [Chat([ASKED, ANSWERED])]
