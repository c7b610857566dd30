"""Chats, completions, preferences and rows of one's own, from a file to the rows and masks that are trained on."""

import multiprocessing
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from chat_tokenizers import byte_level_folder
from conversations import assistant, user
from prepare_request_factory import extension_of, listed_request
from table_files import lines_of

from shardwise.trainer.runtime.data.cache import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.data.chat import rendering
from shardwise.trainer.runtime.data.chat.rendering import RenderSettings, rendered
from shardwise.trainer.runtime.data.prepare import prepare
from shardwise.trainer.runtime.data.sources import Chat, Content
from shardwise.trainer.runtime.data.tokenizer import load_tokenizer
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.sections import BadRows, DataFormat, LossOn
from shardwise.trainer.spec.messages.extension import Hook

SETTINGS = {"seq_len": 128, "vocab_size": 1024, "chat_template": "chatml"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("words") / "tokenizer"
    return str(byte_level_folder(folder, bos=None, eos="<|endoftext|>", special=("<|endoftext|>",)))


def chat(number):
    return {"messages": [user(f"what is {number} plus one"), assistant(f"it is {number + 1}")]}


def completion(number):
    return {"prompt": f"{number} and one make ", "completion": f"{number + 1}"}


def prepared(tmp_path, rows, tokenizer, **settings):
    (tmp_path / "rows.jsonl").write_bytes(lines_of(rows))
    return prepared_from(tmp_path, [tmp_path / "rows.jsonl"], tokenizer, **settings)


def prepared_from(tmp_path, sources, tokenizer, **settings):
    request = listed_request(*sources, cache_root=tmp_path / "cache", tokenizer=tokenizer, **{**SETTINGS, **settings})
    profile = prepare(request, lambda _: None)
    return profile, TokenRows.open(Path(profile.cache_dir), "train")


def learned_text(profile, rows, number):
    loaded = load_tokenizer(Path(profile.cache_dir) / "tokenizer").tokenizer
    return loaded.decode([label for label in rows.labels(number) if label != IGNORED_LABEL], skip_special_tokens=False)


def test_the_tokens_of_a_template_are_given_to_the_tokenizer_and_the_template_kept(tmp_path, tokenizer):
    """Where they have no room it is refused with both numbers."""
    profile, _ = prepared(tmp_path, [chat(1)], tokenizer)
    folder, size = Path(profile.cache_dir) / "tokenizer", load_tokenizer(Path(tokenizer)).vocab_size
    loaded = load_tokenizer(folder)
    assert loaded.vocab_size == size + 2
    assert loaded.tokenizer.encode("<|im_start|>user").ids[0] == loaded.vocab_size - 2
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()
    with pytest.raises(InputError, match=rf"\b{size + 2}\b(?s:.*)\b{size + 1}\b"):
        prepared(tmp_path, [chat(1)], tokenizer, vocab_size=size + 1)


def test_a_tokenizer_made_from_chats_learns_what_is_said_and_has_the_templates_tokens(tmp_path):
    profile, rows = prepared(tmp_path, [chat(number) for number in range(200)], None, vocab_size=300)
    loaded = load_tokenizer(Path(profile.cache_dir) / "tokenizer")
    assert loaded.vocab_size <= 300
    assert {"<|im_start|>", "<|im_end|>"} <= set(loaded.tokenizer.get_vocab())
    assert learned_text(profile, rows, 0).startswith("it is ")


def test_plain_prompts_without_the_template_are_stated_with_the_setting_that_applies_it(tmp_path, tokenizer):
    rows = [completion(number) for number in range(20)]
    plain, _ = prepared(tmp_path, rows, tokenizer)
    (note,) = plain.notes
    assert "20 prompts" in note and "the chat template is not applied" in note
    assert "data.fields={instruction: prompt, output: completion}" in note
    as_chat, found = prepared(tmp_path, rows, tokenizer, fields={"instruction": "prompt", "output": "completion"})
    assert as_chat.notes == () and as_chat.format is DataFormat.CHAT
    assert learned_text(as_chat, found, 0).endswith("<|im_end|>")
    without, _ = prepared(tmp_path, rows, tokenizer, chat_template=None)
    assert without.notes == ()
    pairs = [{"prompt": f"{number}?", "chosen": "yes", "rejected": "no"} for number in range(20)]
    (note,) = prepared(tmp_path, pairs, tokenizer)[0].notes
    assert "the chat template is not applied" in note and "messages" in note


def test_what_of_the_rows_is_no_part_of_what_is_learned_is_counted(tmp_path, tokenizer):
    """Rows and answers that the data exclude, and keys that nothing reads."""
    rows = []
    for number in range(20):
        asked, answered = chat(number)["messages"]
        bad = {**assistant("no"), "weight": 0}
        rows += [{"messages": [{**asked, "name": "Al"}, bad, asked, answered], "score": 1}]
        rows += [{"messages": [asked, bad]}, {"messages": [asked, answered], "label": number % 2 == 0}]
    profile, found = prepared(tmp_path, rows, tokenizer, packing=False)
    assert profile.num_documents == 30
    texts = [learned_text(profile, found, number) for number in range(len(found))]
    assert all(text.startswith("it is ") and text.count("<|im_end|>") == 1 for text in texts)
    left_out, unread = profile.notes
    assert "every answer is excluded (20 rows), label: false (10 rows)" in left_out and "KTO" in left_out
    assert "score (20 rows), messages.name (20 rows)" in unread
    with pytest.raises(InputError, match=r"every row is excluded \(label: false\)"):
        prepared(tmp_path, [{**chat(1), "label": False}], tokenizer)


def test_rows_that_turn_out_unusable_are_named_and_skipped_where_the_job_says_so(tmp_path, tokenizer):
    rows = [*(chat(number) for number in range(10)), {"messages": [user("x " * 200), assistant("y")]}]
    ways_out = r"raise train\.seq_len, or skip them with data\.bad_rows=skip data\.bad_rows_max=0\.1$"
    with pytest.raises(InputError, match=rf"1 of 11 rows .*rows\.jsonl:11: too long: (?s:.*)\n{ways_out}"):
        prepared(tmp_path, rows, tokenizer)
    with pytest.raises(InputError, match=r"2 of 2 rows .*: too long: (?s:.*)\nraise train\.seq_len, or cut them"):
        prepared(tmp_path, rows[-1:] * 2, tokenizer)
    profile, _ = prepared(tmp_path, rows, tokenizer, bad_rows=BadRows.SKIP, bad_rows_max=0.1)
    assert (profile.skipped_rows, profile.num_documents) == (1, 10)
    assert any("rows.jsonl:11" in note for note in profile.notes)


def test_rows_of_ones_own_go_through_format_row_and_none_leaves_one_out(tmp_path, tokenizer):
    """What goes wrong in it is an error of the input."""

    def formatted(returned):
        extension = extension_of(tmp_path, f"def format_row(row):\n    return {returned}\n", Hook.FORMAT_ROW)
        return prepared(tmp_path, [{"n": number} for number in range(20)], tokenizer, extension=extension)[0]

    returned = "None if row['n'] % 2 else {'prompt': 'say ', 'completion': str(row['n'])}"
    profile = formatted(returned)
    assert (profile.format, profile.num_documents) == (DataFormat.PROMPT_COMPLETION, 10)
    assert formatted(returned.replace("say", "tell")).fingerprint != profile.fingerprint
    with pytest.raises(InputError, match=r"format_row raised KeyError: 'no' \(mine\.py, line 2\)"):
        formatted("row['no']")
    with pytest.raises(InputError, match="format_row returned text"):
        formatted("'text'")


@pytest.mark.parametrize(
    ("row", "weights", "settings"),
    [(chat, (1.0,), {"eval_share": 0.1}), (completion, (1.0, 2.0, 0.25), {"packing": False})],
)
def test_any_number_of_workers_writes_the_same_bytes(row, weights, settings, tokenizer, tmp_path, monkeypatch):
    """And of a source of twice the weight every example stands twice."""
    num_rows = 240
    sources = [(tmp_path / f"{number}.jsonl", weight) for number, weight in enumerate(weights)]
    for number, (path, _) in enumerate(sources):
        path.write_bytes(lines_of(map(row, range(number, num_rows, len(weights)))))
    (tmp_path / "one").mkdir()
    expected, rows = prepared_from(tmp_path / "one", sources, tokenizer, **settings)
    if len(weights) > 1:
        copies = Counter(Counter(rows.row(number).tobytes() for number in range(len(rows))).values())
        assert copies == {1: num_rows // 3 + num_rows // 12, 2: num_rows // 3}
    monkeypatch.setattr(rendering, "LEAST_EXAMPLES", 1)
    monkeypatch.setattr("shardwise.trainer.runtime.data.prepare.BATCH_UNITS", 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})  # a machine of three cores
    (tmp_path / "three").mkdir()
    found, _ = prepared_from(tmp_path / "three", sources, tokenizer, **settings)
    assert found.fingerprint == expected.fingerprint
    contents = [
        {path.name: path.read_bytes() for path in Path(profile.cache_dir).iterdir() if path.suffix in (".bin", ".npy")}
        for profile in (expected, found)
    ]
    assert contents[0] == contents[1] and {"tokens.bin", "train_rows.npy"} <= contents[0].keys()


def test_a_worker_that_is_killed_ends_the_preparation_with_a_reason(tokenizer):
    examples: list[Content] = [Chat([user("a question"), assistant("an answer")])] * 10
    settings = RenderSettings(tokenizer, "chatml", LossOn.AUTO, 256)
    found = rendered(((number, examples) for number in range(2000)), settings, num_workers=2)
    next(found)
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFaultError, match="SIGKILL"):
        list(found)
