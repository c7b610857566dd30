"""Every way we know in which people's data is bad, and the exact sentence that each of them gets.

The files are real, and what is said is compared whole, so that a message that changes is seen here.
"""

import bz2
import gzip
import io
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.runtime.row_files import read_rows
from trainer.runtime.row_shapes import RowReading, detect_shape, example_of
from trainer.runtime.source_streams import BadRow
from trainer.runtime.text_sources import read_blocks, survey
from trainer.spec.data_request import SourceFile
from trainer.spec.errors import InputError
from trainer.spec.job import DataFormat

TEXT, TOKENS, CHAT = DataFormat.TEXT, DataFormat.TOKENS, DataFormat.CHAT
COMPLETION, PREFERENCE = DataFormat.PROMPT_COMPLETION, DataFormat.PREFERENCE
ASKED = {"role": "user", "content": "2+2?"}
ANSWERED = {"role": "assistant", "content": "4"}
WRONG = {"role": "assistant", "content": "5"}


def source(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    status = path.stat()
    return SourceFile(path=str(path), size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)


def complaints(file, shape, fields):
    """What is said of the rows of `file`, without the folder."""
    reading = RowReading(detect_shape([file], shape, fields), fields, vocab_size=100)
    folder = file.path.rpartition("/")[0] + "/"
    said = []
    for number, row in read_rows(file):
        example = row if isinstance(row, BadRow) else example_of(row, f"{file.path}:{number}", reading)
        said += [str(example).replace(folder, "")] if isinstance(example, BadRow) else []
    return said


def row(**columns):
    return json.dumps(columns)


def parquet(**columns):
    stream = io.BytesIO()
    pq.write_table(pa.table(columns), stream)
    return stream.getvalue()


def arrow(**columns):
    stream = io.BytesIO()
    table = pa.table(columns)
    with pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    return stream.getvalue()


BAD_ROWS = [
    # not rows at all
    (TEXT, '{"text": "ab"', "is not valid JSON: Input data was truncated"),
    (TEXT, b'{"text": "\xff"}', "is not UTF-8 (invalid start byte)"),
    (TEXT, r'{"text": "\ud800 and more"}',
     "is not valid JSON: unexpected end of escaped utf-16 surrogate pair (byte 16)"),
    (TEXT, '{"text": NaN}', "is not valid JSON: invalid character (byte 9)"),
    (TEXT, "[" * 100_000, "is not a row of data: nested too deep"),
    (TEXT, "[1]", "is a list, not an object"),
    (TEXT, "3", "is a number, not an object"),
    (TEXT, '"text"', "is text, not an object"),
    (TEXT, "null", "is null, not an object"),
    # text
    (TEXT, "{}", 'has no field "text"; its fields: none'),
    (TEXT, row(body="a", id=1), 'has no field "text"; its fields: body, id'),
    (TEXT, row(text=3), 'field "text" is a number, not text'),
    (TEXT, row(text=None), 'field "text" is null'),
    (TEXT, row(text=["a"]), 'field "text" is a list, not text'),
    (TEXT, row(text=""), 'field "text" is empty'),
    (TEXT, row(text=" \n"), 'field "text" is empty'),
    # tokens
    (TOKENS, row(text="a"), 'has no field "tokens"; its fields: text'),
    (TOKENS, row(tokens=[1, 2.0]), 'field "tokens" is not a list of token ids'),
    (TOKENS, row(tokens=[1, True]), 'field "tokens" is not a list of token ids'),
    (TOKENS, row(tokens="1 2"), 'field "tokens" is text that is not valid JSON: '
     "trailing characters (byte 3)"),
    (TOKENS, row(tokens={"a": 1}), 'field "tokens" is an object, not a list of token ids'),
    (TOKENS, row(tokens=[1]), 'field "tokens" has 1 tokens; a row without a label teaches nothing'),
    (TOKENS, row(tokens=[]), 'field "tokens" has 0 tokens; a row without a label teaches nothing'),
    (TOKENS, row(tokens=[1, 100]), "token 100 is not in the model's vocabulary of 100"),
    (TOKENS, row(input_ids=[1, -1]), "token -1 is not in the model's vocabulary of 100"),
    (TOKENS, row(tokens=[1, 2, 3], labels=[1, 2]), 'field "labels" has 2 entries for 3 tokens'),
    (TOKENS, row(tokens=[1, 2, 3], labels=[2, 3, -100]),
     'label 2 at position 1 of "labels" is neither its token, 1, nor -100; labels are not shifted'),
    (TOKENS, row(tokens=[1, 2], labels=[1, -100]), "no label is left; nothing would be learned"),
    (TOKENS, row(tokens=[1, 2], loss_mask=[0, 2]), 'field "loss_mask" is a mask, but has entries other than 0 and 1'),
    (TOKENS, row(tokens=[1, 2], loss_mask=[1, 0]), "no label is left; nothing would be learned"),
    # prompt and completion
    (COMPLETION, row(prompt="a"), 'has no field "completion"; its fields: prompt'),
    (COMPLETION, row(prompt="a", completion=""), 'field "completion" is empty'),
    (COMPLETION, row(prompt=3, completion="b"), 'field "prompt" is a number, not text or a list of messages'),
    (COMPLETION, row(prompt="a", completion=[ANSWERED]),
     '"prompt" and "completion" are of two kinds: one is text, the other messages'),
    (COMPLETION, row(prompt=[ASKED], completion=[ASKED]),
     'no message of "completion" is the assistant\'s; nothing would be learned'),
    # chat
    (CHAT, row(text="a"), 'has no field "messages"; its fields: text'),
    (CHAT, row(messages=[]), 'field "messages" is empty'),
    (CHAT, row(messages=3), 'field "messages" is a number, not a list of messages'),
    (CHAT, row(messages="hello"), 'field "messages" is text that is not valid JSON: '
     "invalid character (byte 0)"),
    (CHAT, row(messages=["hello"]), 'message 1 of "messages" is text, not an object'),
    (CHAT, row(messages=[ASKED]), 'no message of "messages" is the assistant\'s; nothing would be learned'),
    (CHAT, row(messages=[ASKED, {"role": "bard", "content": "4"}]),
     'message 2 of "messages" has the role "bard", none of system, user, assistant, tool; '
     "name it, as in data.fields={assistant: gpt}"),
    (CHAT, row(messages=[{"content": "4"}]), 'message 1 of "messages" has no "role"; its fields: content'),
    (CHAT, row(conversations=[{"from": "human"}]), 'message 1 of "conversations" has no "content"; its fields: from'),
    (CHAT, row(messages=[ASKED, {"role": "assistant", "content": " "}]),
     'message 2 of "messages" (assistant) is empty'),
    (CHAT, row(messages=[{"role": "user", "content": 4}]),
     'message 1 of "messages" has content that is a number, not text'),
    (CHAT, row(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]),
     'message 1 of "messages" has content with a part that is not text (image_url)'),
    (CHAT, row(messages=[ASKED, ANSWERED], tools="search"), 'field "tools" is text that is not valid JSON: '
     "invalid character (byte 0)"),
    (CHAT, row(messages=[ASKED, ANSWERED], tools={"a": 1}), 'field "tools" is an object, not a list of functions'),
    (CHAT, row(instruction="Add", input="2+2"), 'has no field "output"; its fields: instruction, input'),
    (CHAT, row(instruction="", output="4"), 'field "instruction" is empty'),
    (CHAT, row(instruction="Add", output="4", history=[["a"]]), 'field "history" is not a list of pairs of texts'),
    # preference
    (PREFERENCE, row(prompt="2+2?", chosen="4"), 'has no field "rejected"; its fields: prompt, chosen'),
    (PREFERENCE, row(prompt="2+2?", chosen="4", rejected="4"), '"chosen" equals "rejected"; nothing is preferred'),
    (PREFERENCE, row(prompt="2+2?", chosen="4", rejected=[WRONG]),
     '"chosen" and "rejected" are of two kinds: one is text, the other messages'),
    (PREFERENCE, row(chosen="4", rejected="5"),
     'has no field "prompt", and its two answers share no beginning that could be it'),
    (PREFERENCE, row(chosen=[ANSWERED], rejected=[WRONG]),
     'has no field "prompt", and its two answers share no beginning that could be it'),
    (PREFERENCE, row(chosen=[ASKED, ANSWERED], rejected=[ASKED, WRONG, ASKED]),
     "the last message of \"rejected\" is the user's, not the assistant's"),
    (PREFERENCE, row(chosen=[ASKED, ANSWERED], rejected=[{"role": "user", "content": "3+3?"}, WRONG]),
     '"chosen" and "rejected" do not answer the same prompt'),
    (PREFERENCE, row(chosen=[ASKED, ANSWERED], rejected=[ASKED, ANSWERED, ASKED, WRONG]),
     "one of its answers is the beginning of the other; there is no prompt that both answer"),
]  # fmt: skip


@pytest.mark.parametrize("shape, bad, reason", BAD_ROWS, ids=[reason[:60] for _, _, reason in BAD_ROWS])
def test_a_bad_row_is_named_by_file_and_row_with_its_reason(tmp_path, shape, bad, reason):
    bad = bad if isinstance(bad, bytes) else bad.encode()
    file = source(tmp_path / "a.jsonl", b"\n" + bad + b"\n")
    assert complaints(file, shape, {}) == [f"a.jsonl:2: {reason}"]


BAD_ROWS_OF_FILES = [
    ("a.csv", "text,id\na,1\nb\n", ["a.csv:2: has 1 cells, the header names 2 (line 3)"]),
    ("a.csv", 'text,id\n"a\nb",1\nc,2,3\n', ["a.csv:2: has 3 cells, the header names 2 (line 4)"]),
    ("a.csv", 'text\n"a" b\nc\n', ["a.csv:1: is not CSV: ',' expected after '\"' (line 2)"]),
    ("a.csv", 'text\na\n"b\nc\n', ["a.csv:2: is not CSV: a quote is left open (line 4)"]),
    ("a.csv", b"text\ncaf\xe9\nb\n", ["a.csv:1: is not UTF-8 (byte 0xe9, line 2)"]),
    ("a.tsv", "text\tid\n \t1\n", ['a.tsv:1: field "text" is empty']),
    ("a.json", '[{"text": "one"}, {"text": 2}, 3]', [
        'a.json:2: field "text" is a number, not text', "a.json:3: is a number, not an object",
    ]),
    ("a.json", '[{"text": "one"}, ', ["a.json: is not valid JSON: Input data was truncated"]),
    ("a.jsonl.gz", gzip.compress(b'{"text": ""}\n'), ['a.jsonl.gz:1: field "text" is empty']),
    ("a.parquet", parquet(text=["one", None, ""]), [
        'a.parquet:2: field "text" is null', 'a.parquet:3: field "text" is empty',
    ]),
    ("a.parquet", parquet(text=pa.array([b"one", b"\xff"]).view(pa.string())), [
        "a.parquet:2: is not UTF-8 (invalid start byte)"
    ]),
    ("a.arrow", arrow(text=pa.array([b"\xc3", b"two"]).view(pa.string())), [
        "a.arrow:1: is not UTF-8 (unexpected end of data)"
    ]),
    ("a.arrow", arrow(text=[b"one"]), ['a.arrow:1: field "text" is bytes, not text']),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, content, expected", BAD_ROWS_OF_FILES, ids=[f"{name} {said[0][-40:]}" for name, _, said in BAD_ROWS_OF_FILES]
)
def test_a_bad_row_of_any_file_is_named_by_its_number(tmp_path, name, content, expected):
    assert complaints(source(tmp_path / name, content), TEXT, {}) == expected


WHOLE_PARQUET = parquet(text=[f"row {number}" for number in range(1000)])
WHOLE_ARROW = arrow(text=[f"row {number}" for number in range(1000)])
ROWS = b"".join(b'{"text": "row %d"}\n' % number for number in range(100_000))
AGAIN = ";\nfetch it again, or leave it out of data.train"
DAMAGED = [
    ("a.jsonl.gz", b"text", "cannot be decompressed: not a whole gzip file (Not a gzipped file (b'te'))" + AGAIN),
    ("a.jsonl.gz", gzip.compress(ROWS)[:-1000], "is damaged after {} bytes of content: not a whole gzip file "
     "(Compressed file ended before the end-of-stream marker was reached)" + AGAIN),
    ("a.jsonl.bz2", bz2.compress(ROWS)[:500], "cannot be decompressed: not a whole bzip2 file "
     "(Compressed file ended before the end-of-stream marker was reached)" + AGAIN),
    ("a.jsonl.xz", b"text" * 9, "cannot be decompressed: not a whole xz file (Input format not supported by decoder)"
     + AGAIN),
    ("a.jsonl.xz", lzma.compress(ROWS)[:-20], "is damaged after {} bytes of content: not a whole xz file "
     "(Compressed file ended before the end-of-stream marker was reached)" + AGAIN),
    ("a.jsonl.zst", b"text" * 9, "cannot be decompressed: not a whole Zstandard file "
     "(ZSTD decompress failed: Unknown frame descriptor)" + AGAIN),
    ("a.jsonl.zst", pa.compress(ROWS, codec="zstd", asbytes=True)[:-20], "is damaged after {} bytes of content: "
     "not a whole Zstandard file (Truncated compressed stream)" + AGAIN),
    ("a.parquet", WHOLE_PARQUET[:-100], "cannot be read: not a whole .parquet file (Parquet magic bytes not found in "
     "footer. Either the file is corrupted or this is not a parquet file)" + AGAIN),
    ("a.parquet", b"PAR1", "cannot be read: not a whole .parquet file "
     "(Parquet file size is 4 bytes, smaller than the minimum file footer (8 bytes))" + AGAIN),
    ("a.arrow", b"text" * 30, "cannot be read: not a whole .arrow file "
     "(Expected to read 1954047348 metadata bytes, but only read 116)" + AGAIN),
    ("a.arrow", WHOLE_ARROW[: len(WHOLE_ARROW) // 2], "is damaged after row {}: not a whole .arrow file "
     "(Expected to be able to read {} bytes for message body, got {})" + AGAIN),
    ("a.csv", "text,text\na,b\n", 'its header names "text" twice; the first line of a CSV file names its columns'),
    ("a.csv", b"caf\xe9\na\n", "its header is not UTF-8; save the file as UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize("name, content, expected", DAMAGED, ids=[f"{row[0]} {row[2][:30]}" for row in DAMAGED])
def test_a_damaged_file_ends_the_reading_with_the_place(tmp_path, name, content, expected):
    file = source(tmp_path / name, content)
    with pytest.raises(InputError) as caught:
        list(read_rows(file))
    said = str(caught.value)
    assert said.startswith(f"{file.path}: ")
    assert len(said.splitlines()) <= 3
    numbers_left_out = "".join("{}" if part.isdigit() else part for part in _words(said.removeprefix(f"{file.path}: ")))
    assert numbers_left_out == "".join("{}" if part.isdigit() else part for part in _words(expected))


def _words(sentence):
    word = ""
    for character in sentence:
        if character.isdigit() != word.isdigit() and word:
            yield word
            word = ""
        word += character
    yield word


def test_a_parquet_file_with_a_damaged_page_is_refused(tmp_path):
    damaged = WHOLE_PARQUET[:100] + b"\xff" * 200 + WHOLE_PARQUET[300:]
    with pytest.raises(InputError, match=r"a\.parquet: cannot be read: not a whole \.parquet file"):
        list(read_rows(source(tmp_path / "a.parquet", damaged)))


def test_an_arrow_file_whose_offsets_are_damaged_does_not_end_the_process(tmp_path):
    place = WHOLE_ARROW.index(b"row 0row 1") - 64
    damaged = WHOLE_ARROW[:place] + b"\x7f" * 32 + WHOLE_ARROW[place + 32 :]
    with pytest.raises(InputError, match=r"a\.arrow: cannot be read: not a whole \.arrow file"):
        list(read_rows(source(tmp_path / "a.arrow", damaged)))


TEXTS = [
    ("a.txt", b"ab\xff", "is not text: byte 0xff at offset 2 is not UTF-8 (invalid start byte)"),
    ("a.txt.gz", gzip.compress(b"ab\0"), "is not text: NUL byte at offset 2"),
]


@pytest.mark.parametrize("name, content, reason", TEXTS)
def test_a_text_file_that_is_no_text_is_one_bad_row(tmp_path, name, content, reason):
    file = source(tmp_path / name, content)
    reading = RowReading(TEXT, {}, vocab_size=100)
    assert list(read_blocks(file, survey(file).defect, reading)) == [BadRow(file.path, reason)]


def test_compressed_text_that_is_damaged_is_refused(tmp_path):
    file = source(tmp_path / "a.txt.gz", gzip.compress(b"text" * 1000)[:-10])
    with pytest.raises(InputError, match="not a whole gzip file"):
        survey(file)
