"""What rows are taken for, and the example each becomes. What is bad: test_bad_data."""

import json
from typing import Any

import pyarrow as pa
import pytest
from conversations import assistant, system, user
from prepare_request_factory import listed_request, written_source
from table_files import COMPRESSORS, lines_of, parquet_of

from shardwise.launch.inputs.data_files import shape_of_first_row
from shardwise.trainer.runtime.data.sources import EXCLUDED, Chat, Completion, Preference, TokenIds
from shardwise.trainer.runtime.data.sources.files import BadRow, LeftOutRow
from shardwise.trainer.runtime.data.sources.rows import Example, RowReading, detect_shape, read_example
from shardwise.trainer.runtime.data.sources.scan import Block, read_blocks
from shardwise.trainer.spec.data import shapes
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.fields import BY_PATH
from shardwise.trainer.spec.job.sections import DataFormat

TEXT, TOKENS, CHAT, AUTO = DataFormat.TEXT, DataFormat.TOKENS, DataFormat.CHAT, DataFormat.AUTO
COMPLETION, PREFERENCE = DataFormat.PROMPT_COMPLETION, DataFormat.PREFERENCE

SYSTEM, ASKED = system("Be brief."), user("2+2?")
ANSWERED, WRONG = assistant("4"), assistant("5")
SAID = [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]


def example(row, shape, fields=None):
    found = read_example(row, "a.jsonl:1", RowReading(shape, fields or {}, vocab_size=100))
    return found.content if isinstance(found, Example) else found


TOOLS = [{"name": "add", "description": "sums"}]
CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CALL_TEXT = json.dumps([CALL["function"]])


SHAPES = [
    ({"text": "a", "tokens": [1]}, {}, TEXT),
    ({"input_ids": [1, 2], "attention_mask": [1, 1]}, {}, TOKENS),
    ({"ids": [1, 2]}, {"tokens": "ids"}, TOKENS),
    ({"question": "a", "answer": "b"}, {"prompt": "question", "completion": "answer"}, COMPLETION),
    ({"messages": [], "prompt": "a", "prompt_id": "b"}, {}, CHAT),
    ({"talk": []}, {"messages": "talk"}, CHAT),
    ({"instruction": "a", "input": "", "output": "b", "text": "c"}, {}, CHAT),
    ({"instruction": "a", "context": "", "response": "b"}, {"input": "context", "output": "response"}, CHAT),
    ({"instruction": "a", "context": "b", "response": "c", "category": "d"}, {}, CHAT),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "messages": []}, {}, PREFERENCE),
    ({"input": {}, "preferred_output": [], "non_preferred_output": []}, {}, PREFERENCE),
    ({"chosen": [], "rejected": []}, {}, PREFERENCE),
    ({"good": "b", "bad": "c", "prompt": "a"}, {"chosen": "good", "rejected": "bad"}, PREFERENCE),
    ({"messages": [], "content": "a"}, {"text": "content"}, TEXT),
    ({"text": None, "messages": []}, {}, CHAT),
]


@pytest.mark.parametrize("row, fields, shape", SHAPES)
def test_the_shape_is_read_off_the_columns(tmp_path, row, fields, shape):
    assert detect_shape([written_source(tmp_path / "a.jsonl", lines_of([row]))], AUTO, fields) is shape


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.bz2", ".jsonl.xz", ".parquet"])
def test_a_plan_finds_the_shape_of_the_first_row_before_preparation_does(tmp_path, suffix):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "text": "d"}
    path = tmp_path / f"rows{suffix}"
    lines = COMPRESSORS.get(path.suffix, bytes)(lines_of([row, "not JSON"]))
    path.write_bytes(parquet_of(pa.Table.from_pylist([row])) if suffix == ".parquet" else lines)
    request = listed_request(path, cache_root=tmp_path)
    assert shape_of_first_row(request) is detect_shape(request.files, AUTO, {}) is PREFERENCE


FILES: dict[str, list[Any]] = {
    "one/chat.jsonl": [{"messages": []}],
    "two/alpaca.jsonl": [{"instruction": "a", "output": "b"}],
    "three/sharegpt.json": [{"conversations": SAID}],
    "late.jsonl": ["not json", "[1]", {}, {"id": 3}, {"messages": []}],
    "none.jsonl": ["not json"],
    "text.jsonl": [{"text": "a"}],
    "text.txt": ["text"],
    "question.csv": ["question,answer", "a,b"],
}
DETECTED: list[Any] = [
    (["one/chat.jsonl", "two/alpaca.jsonl", "three/sharegpt.json"], AUTO, {}, CHAT),
    (["late.jsonl"], AUTO, {}, CHAT),
    (["none.jsonl"], AUTO, {}, TEXT),
    (["text.txt", "text.jsonl"], AUTO, {}, TEXT),
    (["question.csv"], AUTO, {}, r"question\.csv: question, answer;(?s:.*)data\.fields="),
    (["one/chat.jsonl", "text.jsonl"], AUTO, {}, r"one/chat\.jsonl holds chat rows, .*/text\.jsonl text rows"),
    (["text.txt"], TOKENS, {}, r"tokens are read from .*text\.txt is text"),
    (["text.txt"], CHAT, {}, r"chat rows are read from .*text\.txt is text"),
    (["text.jsonl"], AUTO, {"prompt": "q"}, "prompt is not a field of text rows; they have text$"),
    (["text.jsonl"], TOKENS, {"text": "q"}, "text is not a field of tokens rows; they have tokens, labels, mask$"),
]


@pytest.mark.parametrize("names, shape, fields, expected", DETECTED)
def test_the_rows_of_all_files_are_of_one_shape(tmp_path, names, shape, fields, expected):
    files = [written_source(tmp_path / name, lines_of(FILES[name])) for name in names]
    if isinstance(expected, DataFormat):
        assert detect_shape(files, shape, fields) is expected
        return
    with pytest.raises(InputError, match=expected) as caught:
        detect_shape(files, shape, fields)
    assert len(str(caught.value).splitlines()) <= 3


def test_the_job_file_takes_the_fields_that_some_shape_has_and_no_others():
    taken = set(BY_PATH["data.fields"].kind.schema["properties"])
    assert taken == {name for facts in shapes.SHAPES.values() for name in facts.fields}


EXAMPLES = [
    (TEXT, {"body": "one"}, {"text": "body"}, "one"),
    (TOKENS, {"tokens": [1, 2, 99]}, {}, TokenIds([1, 2, 99])),
    (TOKENS, {"tokens": "[1, 2]"}, {}, TokenIds([1, 2])),
    (TOKENS, {"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}, {}, TokenIds([1, 2, 3], [False, True, True])),
    (TOKENS, {"ids": [1, 2, 3], "lm": [0, 1, 0]}, {"tokens": "ids", "mask": "lm"},
     TokenIds([1, 2, 3], [False, True, False])),
    (TOKENS, {"input_ids": [1, 2], "completion_mask": [False, True]}, {}, TokenIds([1, 2], [False, True])),
    (TOKENS, {"input_ids": [1, 2, 3, 4], "labels": [-100, 2, 3, 4], "assistant_masks": [1, 1, 0, 1],
              "loss_mask": [1.0, 1.0, 1.0, 1.0], "attention_mask": [1] * 4, "position_ids": [0, 1, 2, 3]}, {},
     TokenIds([1, 2, 3, 4], [False, True, False, True])),
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
     Chat([user("Add.\n2+2"), ANSWERED])),
    (CHAT, {"instruction": "2+2?", "input": "", "output": "4", "system": "Be brief."}, {},
     Chat([SYSTEM, ASKED, ANSWERED])),
    (CHAT, {"instruction": "2+2?", "output": "4", "history": [["Hi", "Ho"]]}, {},
     Chat([user("Hi"), assistant("Ho"), ASKED, ANSWERED])),
    (CHAT, {"instruction": "2+2?", "context": None, "response": "4"}, {"input": "context", "output": "response"},
     Chat([ASKED, ANSWERED])),
    (CHAT, {"instruction": "2+2?", "context": "Add.", "response": "4"}, {}, Chat([user("2+2?\nAdd."), ANSWERED])),
    (CHAT, {"conversation": [{"system": "Be brief.", "human": "2+2?", "assistant": "4"},
                             {"human": "Hi", "assistant": "Ho"}]}, {},
     Chat([SYSTEM, ASKED, ANSWERED, user("Hi"), assistant("Ho")])),
    (CHAT, {"conversations": [SAID[0], {"from": "function_call", "value": CALL_TEXT[1:-1]},
                              {"from": "observation", "value": "4"}, SAID[1]], "tools": json.dumps(TOOLS)}, {},
     Chat([ASKED, assistant("", tool_calls=[CALL]), {"role": "tool", "content": "4"}, ANSWERED], TOOLS)),
    (CHAT, {"messages": [ASKED, {"role": "tool_call", "content": f"<think>so</think>{CALL_TEXT}"}]}, {},
     Chat([ASKED, assistant("<think>so</think>", tool_calls=[CALL])])),
    (CHAT, {"messages": [ASKED, assistant(None, function_call=CALL["function"])], "functions": TOOLS}, {},
     Chat([ASKED, assistant("", tool_calls=[CALL])], TOOLS)),
    (CHAT, {"messages": [ASKED, assistant("", tool_calls=json.dumps([CALL])), ANSWERED]}, {},
     Chat([ASKED, assistant("", tool_calls=[CALL]), ANSWERED])),
    (CHAT, {"messages": [ASKED, assistant("", tool_calls=[json.dumps(CALL)], function_call=CALL["function"])]}, {},
     Chat([ASKED, assistant("", tool_calls=[CALL])])),
    (CHAT, {"messages": [ASKED, assistant("", tool_calls=[CALL], function_call={"name": "sub"})]}, {},
     Chat([ASKED, assistant("", tool_calls=[CALL], function_call={"name": "sub"})])),
    (CHAT, {"messages": [user(["2+", {"text": "2?"}]), assistant([{"type": "output_text", "text": "4", "train": 1}])]},
     {}, Chat([user([{"type": "text", "text": each} for each in ("2+", "2?")]),
               assistant([{"type": "text", "text": "4"}])])),
    (CHAT, {"messages": [{**SYSTEM, "tools": TOOLS}, ASKED, ANSWERED]}, {}, Chat([SYSTEM, ASKED, ANSWERED], TOOLS)),
    (CHAT, {"messages": [ASKED, ANSWERED], "chat_template_kwargs": {"enable_thinking": False, "none": None}}, {},
     Chat([ASKED, ANSWERED], None, {"enable_thinking": False})),
    (COMPLETION, {"prompt": [ASKED], "completion": [ANSWERED], "system": "Be brief.", "tools": TOOLS,
                  "chat_template_kwargs": '{"a": 1}'}, {},
     Completion([SYSTEM, ASKED], [ANSWERED], TOOLS, {"a": 1})),
    (COMPLETION, {"prompt": "2+2?", "completion": "4", "system_prompt": "Be brief."}, {},
     Completion([SYSTEM, ASKED], [ANSWERED])),
    (COMPLETION, {"prompt": "2+2?", "completion": "4", "system": None, "tools": []}, {}, Completion("2+2?", "4")),
    (PREFERENCE, {"input": {"messages": [ASKED], "tools": TOOLS, "parallel_tool_calls": True},
                  "preferred_output": [ANSWERED], "non_preferred_output": [WRONG]}, {},
     Preference([ASKED], [ANSWERED], [WRONG], TOOLS)),
    (PREFERENCE, {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [WRONG], "system": "Be brief.", "tools": TOOLS,
                  "chat_template_kwargs": {"a": 1}}, {},
     Preference([SYSTEM, ASKED], [ANSWERED], [WRONG], TOOLS, {"a": 1})),
    (PREFERENCE, {"system": "Be brief.", "question": "2+2?", "chosen": "4", "rejected": "5"}, {"prompt": "question"},
     Preference([SYSTEM, ASKED], [ANSWERED], [WRONG])),
    (PREFERENCE, {"instruction": "2+2?", "input": "Add.", "chosen": "4", "rejected": "5"}, {},
     Preference([user("2+2?\nAdd.")], [ANSWERED], [WRONG])),
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


def test_an_empty_list_of_calls_or_of_tools_is_none():
    every: tuple[object, ...] = ([], "[]", None)
    for nothing in every:
        assert example({"messages": [ASKED, {**ANSWERED, "tool_calls": nothing}]}, CHAT) == Chat([ASKED, ANSWERED])
    for nothing in (*every, "", "null"):
        assert example({"messages": [ASKED, ANSWERED], "tools": nothing}, CHAT) == Chat([ASKED, ANSWERED])


def called(arguments):
    return assistant("", tool_calls=[{"type": "function", "function": {"name": "add", "arguments": arguments}}])


def test_a_null_is_kept_where_it_is_a_value():
    arguments = {"a": 2, "b": None, "more": [{"c": None}]}
    unit = {"type": ["string", "null"], "default": None}
    tool = {"name": "add", "parameters": {"type": "object", "properties": {"b": {**unit, "enum": None}}}}
    whole = {"name": "add", "parameters": {"type": "object", "properties": {"b": unit}}}
    row = {"messages": [ASKED, called(arguments)], "tools": [tool]}
    assert example(row, CHAT) == Chat([ASKED, called(arguments)], [whole])
    said = {"role": "function_call", "content": json.dumps({"name": "add", "arguments": arguments})}
    assert example({"messages": [ASKED, said]}, CHAT) == Chat([ASKED, called(arguments)])
    asks = {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": arguments}}
    assert example({"messages": [ASKED, asks]}, CHAT) == Chat([ASKED, called(arguments)])


def test_a_null_of_a_table_is_a_key_that_another_row_has(tmp_path):
    table = pa.Table.from_pylist([{"messages": [ASKED, called({"a": 2})]}, {"messages": [ASKED, called({"b": 3})]}])
    file = written_source(tmp_path / "a.parquet", parquet_of(table))
    found = [
        each.content for each in read_blocks(file, RowReading(CHAT, {}, vocab_size=100)) if isinstance(each, Block)
    ]
    assert found == [Chat([ASKED, called({"a": 2})]), Chat([ASKED, called({"b": 3})])]


# Messages of an answer as JSON, and what is read: messages, None if the row is unusable, or text.
IN_TEXT: list[Any] = [
    ("[ %s ]", ANSWERED, [ANSWERED]),
    ("\n[%s]", ANSWERED, [ANSWERED]),
    ("%s", ANSWERED, [ANSWERED]),
    ("[%s]", {"from": "gpt", "value": "4"}, [ANSWERED]),
    ("[%s]", {**ANSWERED, "weight": 0.5}, None),
    ("[%s]", {"role": "bard", "content": "4"}, None),
    ("[%s]", {"role": "assistant", "content": 4}, None),
    ("[%s]", {"role": "cook"}, "text"),
    ("%s", {"role": "cook", "content": "4"}, "text"),
    ("[1, %s]", ANSWERED, "text"),
]


@pytest.mark.parametrize("form, message, expected", IN_TEXT)
def test_messages_in_a_column_of_text_are_never_learned_as_text(form, message, expected):
    text = form % json.dumps(message)
    is_text = expected == "text"
    prompt = "2+2?" if is_text else json.dumps([ASKED])
    found = example({"prompt": prompt, "completion": text}, COMPLETION)
    if expected is None:
        assert isinstance(found, BadRow) and 'message 1 of "completion"' in found.reason
    else:
        assert found == Completion(prompt if is_text else [ASKED], text if is_text else expected)
    pair = example({"prompt": prompt, "chosen": text, "rejected": "6" if is_text else json.dumps([WRONG])}, PREFERENCE)
    assert isinstance(pair, BadRow if expected is None else Preference)


EXCLUSIONS = [  # of an answer: the key, what excludes it, what does not
    ("weight", [0, 0.0, "0"], [1, 1.0, None]), ("train", [False], [True]), ("training", [False, 0], [True]),
    ("loss", [False, "false"], [True]), ("loss_scale", [0.0], [1.0]), ("loss_mask", [0], [1]),
    ("step_loss_mask", [0], [1]), ("trainable", [False], ["True"]), ("masked", [True], [False]),
    ("lossMask", [0, "0.0"], [1]), ("Loss-Weight", [0], [1]), ("WEIGHT", [0], [1]), ("learn", [False], [True]),
    ("ignore", [True], [False]), ("skip", [1], [0]),
]  # fmt: skip


@pytest.mark.parametrize("key, excluding, including", EXCLUSIONS)
def test_an_answer_that_a_row_excludes_is_marked_whatever_the_key_is_called(key, excluding, including):
    for value in excluding + including:
        found = example({"messages": [ASKED, {**WRONG, key: value}, ASKED, ANSWERED]}, CHAT)
        marked = {**WRONG, EXCLUDED: True} if value in excluding else WRONG
        assert found == Chat([ASKED, marked, ASKED, ANSWERED]), value


EVERY = "every answer is excluded"
LEFT_OUT: list[Any] = [
    (COMPLETION, {"prompt": "2+2?", "completion": "5", "label": False}, "label: false"),
    (COMPLETION, {"prompt": "2+2?", "completion": "5", "label": "False"}, "label: false"),
    (CHAT, {"conversations": SAID, "kto_tag": False}, "kto_tag: false"),
    (COMPLETION, {"prompt": "2+2?", "completion": "5", "kto_label": "false"}, "kto_label: false"),
    (CHAT, {"messages": [ASKED, WRONG], "desirable": False}, "desirable: false"),
    (CHAT, {"messages": [ASKED, WRONG], "weight": 0}, "weight: 0"),
    (TEXT, {"text": "a", "train": False}, "train: false"),
    (CHAT, {"messages": [ASKED, WRONG], "loss": 0}, "loss: 0"),
    (COMPLETION, {"prompt": "2+2?", "completion": "5", "weight": "0.0"}, "weight: 0"),  # a cell of a CSV file
    (PREFERENCE, {"prompt": "2+2?", "chosen": "4", "rejected": "5", "isMasked": None, "masked": True}, "masked: true"),
    (TEXT, {"text": "a", "lossMask": 0}, "lossMask: 0"),
    (CHAT, {"messages": [ASKED, {**WRONG, "loss": False}]}, EVERY),
    (COMPLETION, {"prompt": [ASKED], "completion": [{**WRONG, "weight": 0}]}, EVERY),
    (PREFERENCE, {"prompt": [ASKED], "chosen": [ANSWERED], "rejected": [{**WRONG, "weight": 0}]}, EVERY),
]


@pytest.mark.parametrize("shape, row, mark", LEFT_OUT)
def test_a_row_that_its_data_exclude_is_left_out_with_the_mark(shape, row, mark):
    assert example(row, shape) == LeftOutRow("a.jsonl:1", mark)


def test_columns_that_are_no_part_of_the_example_are_named():
    row = {"messages": [ASKED, ANSWERED], "prompt": "2+2?", "score": 3, "label": 2, "label2": None, "tags": []}
    found = read_example(row, "a.jsonl:1", RowReading(CHAT, {}, 100))
    assert isinstance(found, Example) and found.unread == ("prompt", "score", "label")
    pair = {"prompt": "2+2?", "chosen": [ASKED, ANSWERED], "rejected": [ASKED, WRONG], "label": True}
    found = read_example(pair, "a.jsonl:1", RowReading(PREFERENCE, {}, 100))
    assert isinstance(found, Example) and found.unread == ("label",)
