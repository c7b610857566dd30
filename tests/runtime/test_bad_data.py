"""Every way we know in which people's data is bad; the files are real, and each complaint names the place and why."""

import bz2
import gzip
import json
import lzma
import re

import pyarrow as pa
import pytest
from conversations import assistant, system, user
from prepare_request_factory import written_source
from table_files import arrow_of, parquet_of

from shardwise.trainer.runtime.data.sources.files import BadRow, read_rows
from shardwise.trainer.runtime.data.sources.rows import RowReading, detect_shape, read_example
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import DataFormat

TEXT, TOKENS, CHAT = DataFormat.TEXT, DataFormat.TOKENS, DataFormat.CHAT
COMPLETION, PREFERENCE = DataFormat.PROMPT_COMPLETION, DataFormat.PREFERENCE
ASKED, ANSWERED, WRONG = user("2+2?"), assistant("4"), assistant("5")


def complaints(file, shape, fields):
    reading = RowReading(detect_shape([file], shape, fields), fields, vocab_size=100)
    folder = file.path.rpartition("/")[0] + "/"
    said = []
    for number, row in read_rows(file):
        example = row if isinstance(row, BadRow) else read_example(row, f"{file.path}:{number}", reading)
        said += [str(example).replace(folder, "")] if isinstance(example, BadRow) else []
    return said


def row(**columns):
    return json.dumps(columns)


def parquet(**columns):
    return parquet_of(pa.table(columns))


def arrow(**columns):
    return arrow_of(pa.table(columns), 100)


BAD_ROWS = [  # of each what its complaint must name, as a regular expression
    # not rows at all
    (TEXT, '{"text": "ab"', "JSON.*truncated"),
    (TEXT, b'{"text": "\xff"}', "UTF-8"),
    (TEXT, r'{"text": "\ud800 and more"}', r"JSON.*surrogate.*byte 16\b"),
    (TEXT, '{"text": NaN}', r"JSON.*byte 9\b.*write null"),
    (TEXT, '{"text": "a", "score": 1e400}', "JSON.*out of range"),
    (TEXT, "{", r"JSON.*jq -c \. FILE"),
    (TEXT, '{"text": "a"}'.encode("utf-16"), "UTF-16, save it as UTF-8"),
    (TEXT, "[" * 100_000, "nested"),
    (TEXT, "[1]", "list.*object"),
    (TEXT, '"text"', "text.*object"),
    # text
    (TEXT, "{}", '"text".*fields: none$'),
    (TEXT, row(body="a", id=1), '"text".*fields: body, id$'),
    (TEXT, row(text=3), '"text".*number'),
    (TEXT, row(text=None), '"text".*null'),
    (TEXT, row(text=""), '"text".*empty'),
    (TEXT, row(text=" \n"), '"text".*empty'),
    # tokens
    (TOKENS, row(tokens=[1, 2.0]), '"tokens".*list of token ids'),
    (TOKENS, row(tokens=[1, True]), '"tokens".*list of token ids'),
    (TOKENS, row(tokens="1 2"), r'"tokens".*JSON.*byte 3\b'),
    (TOKENS, row(tokens={"a": 1}), '"tokens".*object'),
    (TOKENS, row(tokens=[1]), '"tokens" .*1 tokens'),
    (TOKENS, row(tokens=[1, 100]), "token 100 .*vocabulary of 100"),
    (TOKENS, row(input_ids=[1, -1]), "token -1 .*vocabulary of 100"),
    (TOKENS, row(tokens=[1, 2, 3], labels=[1, 2]), '"labels".* 2 .* 3 '),
    (TOKENS, row(tokens=[1, 2, 3], labels=[2, 3, -100]), 'label 2 at position 1 of "labels".* 1,.*shifted'),
    (TOKENS, row(tokens=[1, 2], labels=[1, -100]), "label"),
    (TOKENS, row(tokens=[1, 2], loss_mask=[0, 2]), '"loss_mask".* 0 and 1'),
    (TOKENS, row(tokens=[1, 2], loss_mask=[1, 0]), "label"),
    (TOKENS, row(tokens=[1, 2, 0], attention_mask=[1, 1, 0]), '"attention_mask".*padding'),
    (TOKENS, row(tokens=[1, 2, 1], position_ids=[0, 1, 0]), '"position_ids".*several documents'),
    (TOKENS, row(tokens=[1, 2, 1], seq_lengths=[2, 1]), '"seq_lengths".*several documents'),
    (TOKENS, row(tokens=[1, 2], assistant_mask=[0, 1]), r'"assistant_mask".*data\.fields={mask: assistant_mask}'),
    # prompt and completion
    (COMPLETION, row(prompt="a", completion=""), '"completion".*empty'),
    (COMPLETION, row(prompt=3, completion="b"), '"prompt".*number'),
    (COMPLETION, row(prompt="a", completion=[ANSWERED]), '"prompt" and "completion".*text.*messages'),
    (COMPLETION, row(prompt=[ASKED], completion=[ASKED]), '"completion".*assistant'),
    # chat
    (CHAT, row(messages=[]), '"messages".*empty'),
    (CHAT, row(messages=["hello"]), 'message 1 of "messages".*text'),
    (CHAT, row(messages=[ASKED]), '"messages".*assistant'),
    (CHAT, row(messages=[ASKED, {"role": "bard", "content": "4"}]),
     'message 2 of "messages".*"bard".*system, user, assistant, tool;.*data.fields={assistant: gpt}'),
    (CHAT, row(messages=[{"content": "4"}]), 'message 1 of "messages".*"role".*fields: content$'),
    (CHAT, row(conversations=[{"from": "human"}]), 'message 1 of "conversations".*"content".*fields: from$'),
    (CHAT, row(messages=[ASKED, assistant(" ")]), 'message 2 of "messages".*assistant.*empty'),
    (CHAT, row(messages=[{"role": "user", "content": 4}]), 'message 1 of "messages".*content.*number'),
    (CHAT, row(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
     'message 1 of "messages".*content.*image_url'),
    (CHAT, row(messages=[ASKED, ANSWERED], tools="search"), r'"tools".*JSON.*byte 0\b'),
    (CHAT, row(messages=[ASKED, ANSWERED], tools={"a": 1}), '"tools".*object.*list'),
    (CHAT, row(messages=[ASKED, {**ANSWERED, "weight": 0.5}]), 'message 2 .*"weight": 0.5.*"weight": 0 or 1'),
    (CHAT, row(messages=[ASKED, {**ANSWERED, "mask": 1}]), 'message 2 of "messages".*"mask": 1'),
    (CHAT, row(messages=[ASKED, {**ANSWERED, "no_loss": True}]), 'message 2 of "messages".*"no_loss": true'),
    (CHAT, row(messages=[ASKED, {**ANSWERED, "train_detail": [{"begin_offset": 0}]}]), '"train_detail": a list'),
    (CHAT, row(messages=[ASKED, assistant([{"type": "text", "text": "4", "weight": 0}])]), "message 2 .*a part"),
    (CHAT, row(messages=[ASKED, assistant([{"type": "text", "text": "4", "masked": True}])]), "message 2 .*a part"),
    (CHAT, row(messages=[ASKED, assistant([{"type": "text", "text": "4", "is_masked": 1}])]), '"is_masked": 1'),
    (CHAT, row(messages=[ASKED, assistant([{"type": "reasoning", "text": "so"}])]), 'reasoning.*"reasoning_content"'),
    (CHAT, row(messages=[ASKED, {**ANSWERED, "channel": "analysis"}]), 'channel "analysis".*"reasoning_content"'),
    (CHAT, row(messages=[ASKED, assistant("", tool_calls=["add"])]), '"tool_calls".*JSON'),
    (CHAT, row(messages=[ASKED, ANSWERED], is_trainable=False), '"is_trainable": false; make it "train": false'),
    (CHAT, row(messages=[ASKED, ANSWERED], train_mask=[0, 1]), '"train_mask": a list.*"weight": 0 or 1'),
    (COMPLETION, row(prompt="a", completion="b", label=-1), '"label": -1; make it false'),
    (CHAT, row(messages=[ASKED, ANSWERED], weight=0.3), '"weight": 0.3'),
    (COMPLETION, row(prompt="a", completion="b", label=0), '"label": 0; make it false'),
    (CHAT, row(messages=[system("a"), ASKED, ANSWERED], system="b"), 'two system messages.*"system"'),
    (CHAT, row(messages=[ASKED, ANSWERED], system=["b"]), '"system".*list'),
    (CHAT, row(messages=[ASKED, ANSWERED], chat_template_kwargs={"tools": []}), '"chat_template_kwargs".*tools'),
    (CHAT, row(messages=[ASKED, ANSWERED], chat_template_kwargs=[1]), '"chat_template_kwargs".*list'),
    (CHAT, row(conversations=[{"from": "function_call", "value": "add(2)"}]), "message 1 .*call.*JSON"),
    (CHAT, row(messages=[ASKED, assistant(None, function_call={"arguments": "{}"})]), "message 2 .*call.*name"),
    (PREFERENCE, row(chosen="Q: a\nb", rejected="Q: a\nc", system="s"), 'system message or tools.*"prompt"'),
    (CHAT, row(instruction="", output="4"), '"instruction".*empty'),
    (CHAT, row(instruction="Add", output="4", history=[["a"]]), '"history".*pairs'),
    # preference
    (PREFERENCE, row(prompt="2+2?", chosen="4", rejected="4"), '"chosen".*"rejected"'),
    (PREFERENCE, row(prompt="2+2?", chosen="4", rejected=[WRONG]), '"chosen" and "rejected".*text.*messages'),
    (PREFERENCE, row(chosen="4", rejected="5"), '"prompt"'),
    (PREFERENCE, row(chosen=[ANSWERED], rejected=[WRONG]), '"prompt"'),
    (PREFERENCE, row(chosen=[ASKED, ANSWERED], rejected=[ASKED, WRONG, ASKED]), "last message.*\"rejected\".*user"),
    (PREFERENCE, row(chosen=[ASKED, ANSWERED], rejected=[{"role": "user", "content": "3+3?"}, WRONG]),
     '"chosen" and "rejected".*same prompt'),
    (PREFERENCE, row(chosen=[ASKED, ANSWERED], rejected=[ASKED, ANSWERED, ASKED, WRONG]), "beginning of the other"),
]  # fmt: skip


@pytest.mark.parametrize("shape, bad, fact", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_row_with_its_reason(tmp_path, shape, bad, fact):
    bad = bad if isinstance(bad, bytes) else bad.encode()
    (complaint,) = complaints(written_source(tmp_path / "a.jsonl", b"\n" + bad + b"\n"), shape, {})
    assert re.search(rf"^a\.jsonl:2: .*{fact}", complaint)


BAD_ROWS_OF_FILES = [  # functions make what takes a while where tests are collected
    ("a.csv", "text,id\na,1\nb\n", [r"a.csv:2: .* 1 .* 2 .*line 3\b"]),
    ("a.csv", 'text,id\n"a\nb",1\nc,2,3\n', [r"a.csv:2: .* 3 .* 2 .*line 4\b"]),
    ("a.csv", 'text\n"a" b\nc\n', [r"a.csv:1: .*CSV.*line 2\b"]),
    ("a.csv", 'text\na\n"b\nc\n', [r"a.csv:2: .*CSV.*quote.*line 4\b"]),
    ("a.csv", b"text\ncaf\xe9\nb\n", ["a.csv:1: .*UTF-8.*0xe9, line 2"]),
    ("a.tsv", "text\tid\n \t1\n", ['a.tsv:1: .*"text".*empty']),
    ("a.json", '[{"text": "one"}, {"text": 2}, 3]', ['a.json:2: .*"text".*number', "a.json:3: .*number"]),
    ("a.json", '[{"text": "one"}, ', ["a.json: .*JSON.*truncated"]),
    ("a.jsonl.gz", lambda: gzip.compress(b'{"text": ""}\n'), ['a.jsonl.gz:1: .*"text".*empty']),
    ("a.parquet", lambda: parquet(text=[None, ""]), ['a.parquet:1: .*"text".*null', 'a.parquet:2: .*"text".*empty']),
    ("a.parquet", lambda: parquet(text=pa.array([b"one", b"\xff"]).view(pa.string())), ["a.parquet:2: .*UTF-8"]),
    ("a.arrow", lambda: arrow(text=pa.array([b"\xc3", b"two"]).view(pa.string())), ["a.arrow:1: .*UTF-8"]),
    ("a.arrow", lambda: arrow(text=[b"one"]), ['a.arrow:1: .*"text".*bytes']),
]


@pytest.mark.parametrize("name, content, facts", BAD_ROWS_OF_FILES)
def test_a_bad_row_of_any_file_is_named_by_its_number(tmp_path, name, content, facts):
    file = written_source(tmp_path / name, content() if callable(content) else content)
    found = complaints(file, TEXT, {})
    assert len(found) == len(facts)
    assert all(re.match(fact, complaint) for fact, complaint in zip(facts, found, strict=True)), found


def whole_parquet():
    return parquet(text=[f"row {number}" for number in range(1000)])


def whole_arrow():
    return arrow(text=[f"row {number}" for number in range(1000)])


def rows():
    return b"".join(b'{"text": "row %d"}\n' % number for number in range(100_000))


def damaged_offsets():
    """Arrow would follow them, and end the process."""
    whole = whole_arrow()
    place = whole.index(b"row 0row 1") - 64
    return whole[:place] + b"\x7f" * 32 + whole[place + 32 :]


DAMAGED = [
    ("a.jsonl.gz", b"text", r"gzip.*data\.train"),
    ("a.jsonl.gz", lambda: gzip.compress(rows())[:-1000], r"after \d{5,} bytes .*gzip.*data\.train"),
    ("a.jsonl.bz2", lambda: bz2.compress(rows())[:500], r"bzip2.*data\.train"),
    ("a.jsonl.xz", b"text" * 9, r"xz.*data\.train"),
    ("a.jsonl.xz", lambda: lzma.compress(rows())[:-20], r"after \d{5,} bytes .*xz.*data\.train"),
    ("a.jsonl.zst", b"text" * 9, r"Zstandard.*data\.train"),
    ("a.jsonl.zst", lambda: pa.compress(rows(), "zstd", asbytes=True)[:-20], r"after \d{5,} bytes .*Zstandard"),
    ("a.parquet", lambda: whole_parquet()[:-100], r"\.parquet file.*data\.train"),
    ("a.parquet", lambda: whole_parquet()[:100] + b"\xff" * 200 + whole_parquet()[300:], r"\.parquet file"),
    ("a.arrow", damaged_offsets, r"\.arrow file"),
    ("a.arrow", b"text" * 30, r"\.arrow file.*data\.train"),
    ("a.arrow", lambda: whole_arrow()[: len(whole_arrow()) // 2], r"after row \d{3}\b.*\.arrow file.*data\.train"),
    ("a.csv", "text,text\na,b\n", '"text" twice'),
    ("a.csv", b"caf\xe9\na\n", "header.*UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize("name, content, fact", DAMAGED)
def test_a_damaged_file_ends_the_reading_with_the_place(tmp_path, name, content, fact):
    file = written_source(tmp_path / name, content() if callable(content) else content)
    with pytest.raises(InputError, match=rf"(?s)^{re.escape(file.path)}: .*{fact}") as caught:
        list(read_rows(file))
    assert len(str(caught.value).splitlines()) <= 3
