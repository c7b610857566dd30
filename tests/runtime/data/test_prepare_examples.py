"""Chats, completions, preferences and rows of one's own, from a file to the rows and masks that are trained on."""

import json
from hashlib import sha256
from pathlib import Path

import pytest
from chat_tokenizers import byte_level_folder
from prepare_request_factory import listed_request

from shardwise.trainer.runtime.data.prepare import prepare
from shardwise.trainer.runtime.data.token_rows import IGNORED_LABEL, TokenRows
from shardwise.trainer.runtime.data.tokenizer import load_tokenizer
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import BadRows, DataFormat, LossOn
from shardwise.trainer.spec.messages.extension import Extension, Hook

SETTINGS = {"seq_len": 128, "vocab_size": 1024, "chat_template": "chatml"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = byte_level_folder(
        tmp_path_factory.mktemp("words") / "tokenizer", bos=None, eos="<|endoftext|>", special=("<|endoftext|>",)
    )
    return str(folder)


def written(folder, rows, name="rows.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(number):
    return {
        "messages": [
            {"role": "user", "content": f"what is {number} plus one"},
            {"role": "assistant", "content": f"it is {number + 1}"},
        ]
    }


def prepared(tmp_path, rows, tokenizer, **settings):
    path = written(tmp_path, rows)
    request = listed_request(path, cache_root=tmp_path / "cache", tokenizer=tokenizer, **{**SETTINGS, **settings})
    profile = prepare(request, lambda _: None)
    return profile, TokenRows.open(Path(profile.cache_dir), "train")


def learned_texts(profile, rows, number):
    """The stretches of a row that are learned."""
    words = load_tokenizer(Path(profile.cache_dir) / "tokenizer").tokenizer
    runs, run = [], []
    for token, label in zip(rows.row(number).tolist(), rows.labels(number).tolist(), strict=True):
        if label != IGNORED_LABEL:
            run.append(token)
        elif run:
            runs.append(run)
            run = []
    return [words.decode(each, skip_special_tokens=False) for each in [*runs, *([run] if run else [])]]


def test_chats_are_packed_and_only_the_assistant_is_learned(tmp_path, tokenizer):
    profile, rows = prepared(tmp_path, [chat(number) for number in range(40)], tokenizer)
    assert (profile.format, profile.is_packed, profile.num_documents) == (DataFormat.CHAT, True, 40)
    assert profile.packing_efficiency > 0.8
    found = [text for number in range(len(rows)) for text in learned_texts(profile, rows, number)]
    assert sorted(found) == sorted(f"it is {number + 1}<|im_end|>" for number in range(40))
    assert profile.num_targets == sum(rows.num_targets(number) for number in range(len(rows)))


def test_the_tokens_of_a_template_are_given_to_the_tokenizer_and_the_template_kept(tmp_path, tokenizer):
    profile, _ = prepared(tmp_path, [chat(1)], tokenizer)
    folder = Path(profile.cache_dir) / "tokenizer"
    words = load_tokenizer(folder)
    assert words.vocab_size == load_tokenizer(Path(tokenizer)).vocab_size + 2
    assert words.tokenizer.encode("<|im_start|>user").ids[0] == words.vocab_size - 2
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()


def test_a_tokenizer_made_from_chats_learns_what_is_said_and_has_the_templates_tokens(tmp_path):
    profile, rows = prepared(tmp_path, [chat(number) for number in range(200)], None, vocab_size=300)
    words = load_tokenizer(Path(profile.cache_dir) / "tokenizer")
    assert words.vocab_size <= 300
    assert {"<|im_start|>", "<|im_end|>"} <= set(words.tokenizer.get_vocab())
    assert learned_texts(profile, rows, 0)[0].startswith("it is ")


def test_another_choice_of_what_is_learned_is_other_data(tmp_path, tokenizer):
    rows = [chat(number) for number in range(20)]
    profile, _ = prepared(tmp_path, rows, tokenizer)
    everything, _ = prepared(tmp_path, rows, tokenizer, loss_on=LossOn.ALL)
    plain, _ = prepared(tmp_path, rows, tokenizer, chat_template="plain")
    assert len({profile.fingerprint, everything.fingerprint, plain.fingerprint}) == 3
    assert everything.num_targets > profile.num_targets


def test_a_completion_is_learned_and_its_prompt_is_not(tmp_path, tokenizer):
    rows = [{"prompt": f"{number} and one make ", "completion": f"{number + 1}"} for number in range(10)]
    profile, found = prepared(tmp_path, rows, tokenizer, packing=False)
    assert (profile.format, profile.is_packed, profile.num_rows) == (DataFormat.PROMPT_COMPLETION, False, 10)
    texts = {text for number in range(10) for text in learned_texts(profile, found, number)}
    assert texts == {f"{number + 1}<|endoftext|>" for number in range(10)}


def test_a_preference_is_two_rows_that_share_a_prompt(tmp_path, tokenizer):
    rows = [
        {"prompt": chat(number)["messages"][:1], "chosen": chat(number)["messages"][1:],
         "rejected": [{"role": "assistant", "content": "no"}]} for number in range(30)
    ]  # fmt: skip
    profile, found = prepared(tmp_path, rows, tokenizer, eval_share=0.2)
    assert (profile.format, profile.is_packed) == (DataFormat.PREFERENCE, False)
    assert profile.num_rows == len(found) == 30 - profile.num_eval_rows
    assert profile.eval_unigram_entropy_nats is None
    chosen, rejected = (learned_texts(profile, found, number) for number in found.rows_of(0))
    assert chosen[0].startswith("it is ") and rejected == ["no<|im_end|>"]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "user", "content": "x " * 200}, {"role": "assistant", "content": "y"}]}, "too long: "),
        ({"messages": [{"role": "user", "content": "only asked"}]}, ""),
    ],
)
def test_rows_that_turn_out_unusable_are_told_by_number_and_skipped_where_the_job_says_so(
    tmp_path, tokenizer, row, reason
):
    rows = [*(chat(number) for number in range(10)), row]
    with pytest.raises(InputError) as caught:
        prepared(tmp_path, rows, tokenizer)
    assert f"data: 1 of 11 rows cannot be used: {tmp_path / 'rows.jsonl'}:11: {reason}" in str(caught.value)
    profile, _ = prepared(tmp_path, rows, tokenizer, bad_rows=BadRows.SKIP, bad_rows_max=0.1)
    assert (profile.skipped_rows, profile.num_documents) == (1, 10)
    assert any("rows.jsonl:11" in note for note in profile.notes)


def extension_of(folder, body):
    path = folder / "mine.py"
    path.write_text(body)
    return Extension(path=str(path), sha256=sha256(body.encode()).hexdigest(), hooks=(Hook.FORMAT_ROW,))


def test_rows_of_ones_own_go_through_format_row_and_none_leaves_one_out(tmp_path, tokenizer):
    body = (
        "def format_row(row):\n    if row['n'] % 2:\n        return None\n"
        "    return {'prompt': 'say ', 'completion': str(row['n'])}\n"
    )
    extension = extension_of(tmp_path, body)
    profile, _ = prepared(tmp_path, [{"n": number} for number in range(20)], tokenizer, extension=extension)
    assert (profile.format, profile.num_documents) == (DataFormat.PROMPT_COMPLETION, 10)
    other = extension_of(tmp_path, body.replace("say", "tell"))
    assert prepared(tmp_path, [{"n": number} for number in range(20)], tokenizer, extension=other)[0].fingerprint != (
        profile.fingerprint
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def format_row(row):\n    return row['no']\n", r"format_row raised KeyError: 'no' \(mine\.py, line 2\)"),
        (
            "def format_row(row):\n    return 'text'\n",
            "format_row returned text; a row is a dict, and None leaves it out",
        ),
    ],
)
def test_what_goes_wrong_in_format_row_is_told(tmp_path, tokenizer, body, message):
    with pytest.raises(InputError, match=message):
        prepared(tmp_path, [{"n": 1}], tokenizer, extension=extension_of(tmp_path, body))


def test_a_template_whose_tokens_have_no_room_is_refused_with_both_numbers(tmp_path, tokenizer):
    size = load_tokenizer(Path(tokenizer)).vocab_size
    with pytest.raises(InputError, match=rf"then has {size + 2};\n.*has room for {size + 1}"):
        prepared(tmp_path, [chat(1)], tokenizer, vocab_size=size + 1)


def test_messages_without_a_template_name_those_there_are(tmp_path, tokenizer):
    with pytest.raises(InputError, match=r"the tokenizer has no chat template.*\n.*chatml"):
        prepared(tmp_path, [chat(1)], tokenizer, chat_template=None)
