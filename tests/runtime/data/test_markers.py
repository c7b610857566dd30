"""A marker in every string of a row: it is in the text, or the row is refused, or the key is listed; never silence."""

import re
from functools import cache

import pytest
from chat_tokenizers import byte_level_folder
from conversations import trl_template
from marked_rows import MarkedRow, markers_in

from shardwise.trainer.runtime.data.chat.rendering import PreferenceIds, Renderer
from shardwise.trainer.runtime.data.chat.template import ChatTemplate, load_chat_template
from shardwise.trainer.runtime.data.sources.files import BadRow, LeftOutRow
from shardwise.trainer.runtime.data.sources.rows import Example, RowReading, read_example
from shardwise.trainer.runtime.data.tokenizer import load_tokenizer, named_tokens
from shardwise.trainer.spec.data.shapes import BY_PRECEDENCE, column_names, shape_of_row
from shardwise.trainer.spec.job.sections import LossOn

TEMPLATES = (
    "our qwen", "our chatml", "qwen3", "gptoss", "llama3_1", "qwen3_6", "lfm2", "lfm2_v2", "glm4moe", "deepseekv3",
    "gemma4", "qwen3_training", "lfm2_2_5_v2",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_level_folder(tmp_path_factory.mktemp("tokenizers") / "bytes", bos="<s>", eos="<|endoftext|>")


@pytest.fixture(scope="module")
def renderer(folder):
    tokenizer, tokens = load_tokenizer(folder), named_tokens(folder)

    @cache
    def renderer(name):
        own = load_chat_template(name.removeprefix("our "), folder) if name.startswith("our ") else None
        return Renderer(tokenizer, own or ChatTemplate(trl_template(name), tokens), LossOn.AUTO, 10**6)

    return renderer


@pytest.fixture(scope="module")
def decode(folder):
    tokenizer = load_tokenizer(folder).tokenizer
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def fate_of(made, renderer, decode):
    """The outcome of a generated row as a word; AssertionError where a part of it is dropped without a line."""
    found = {name for name, value in made.row.items() if value is not None}
    shape = shape_of_row(lambda field: not found.isdisjoint(column_names(field, {})), BY_PRECEDENCE)
    assert shape is not None
    example = read_example(made.row, "rows.jsonl:1", RowReading(shape, {}, 10**6))
    if not isinstance(example, Example):
        assert isinstance(example, BadRow | LeftOutRow)
        assert isinstance(example, BadRow) or made.excluded
        return "left out" if isinstance(example, LeftOutRow) else "refused"
    rendered, unread = renderer.render(example.content), renderer.take_unread()
    if isinstance(rendered, str):
        return "refused"
    sequences = list(rendered) if isinstance(rendered, PreferenceIds) else [rendered]
    text = "\n".join(decode(sequence.ids) for sequence in sequences)
    learned = "\n".join(
        decode([token for token, yes in zip(sequence.ids, sequence.is_learned, strict=True) if yes])
        for sequence in sequences
    )
    listed = [set(re.split(r"\.", key)) for key in (*example.unread, *unread.keys, *unread.shortened)]
    for marker, keys in markers_in(made.row):
        is_listed = any(names & {*keys, "content" if keys & {"value", "history"} else ""} for names in listed)
        assert marker in text or is_listed, (marker, keys, listed, made.row)
        assert marker not in made.excluded or marker not in learned, (marker, made.row)
        assert marker not in made.learned or marker in learned or is_listed, (marker, made.row)
    return "listed" if listed else "rendered"


def check(num_rows, renderer, decode):
    fates: dict[str, set[str]] = {}
    for seed in range(num_rows):
        made = MarkedRow(seed)
        fate = fate_of(made, renderer(TEMPLATES[seed // 12 % len(TEMPLATES)]), decode)
        fates.setdefault(made.form, set()).add(fate)
    assert len(fates) == 12
    assert all(found & {"rendered", "listed"} for found in fates.values()), fates
    return fates


def test_no_string_of_a_row_is_dropped_and_nothing_excluded_is_learned(renderer, decode):
    check(12 * len(TEMPLATES), renderer, decode)


@pytest.mark.long
@pytest.mark.data
def test_no_string_of_2000_rows_is_dropped(renderer, decode):
    fates = check(2000, renderer, decode)
    assert fates["kto"] == {"rendered", "listed", "left out"}
