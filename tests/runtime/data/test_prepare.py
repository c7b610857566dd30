"""Preparation from files to rows: what the profile says, what lies in the cache, and every way to be refused."""

import fcntl
import json
import signal
import subprocess
import sys
import time
from collections import Counter
from math import log
from pathlib import Path

import msgspec
import numpy as np
import pytest
from prepare_request_factory import listed_request, numbered_text
from tokenizers import Tokenizer

from shardwise.trainer.runtime.data.prepare import prepare
from shardwise.trainer.runtime.data.token_rows import TokenRows, length_histogram
from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer
from shardwise.trainer.runtime.run.process import answer, report_progress
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.data.request import PrepareRequest
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.sections import BadRows, DataFormat, LossOn


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(numbered_text(3000))
    return path


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("given") / "tokenizer"
    write_trained_tokenizer(train_tokenizer([numbered_text(300)], vocab_size=300), folder)
    return folder


@pytest.fixture
def request_of(tmp_path):
    def make(*sources, **settings):
        return listed_request(*sources, cache_root=tmp_path / "cache", **settings)

    return make


def prepared(request):
    """(profile, train rows, held-out rows, lines of progress)"""
    lines: list[str] = []
    profile = prepare(request, lines.append)
    train, held_out = ([split.row(n).tolist() for n in range(len(split))] for split in splits(profile))
    return profile, train, held_out, lines


def folder_of(profile):
    return Path(profile.cache_dir)


def splits(profile):
    return [TokenRows.open(folder_of(profile), split) for split in ("train", "eval")]


def decoder(profile):
    tokenizer = Tokenizer.from_file(f"{profile.cache_dir}/tokenizer/tokenizer.json")
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def jsonl(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def cache_folders(request):
    root = Path(request.cache_root, "data")
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


def test_the_profile_counts_what_is_in_the_cache(request_of, text):
    profile, train, held_out, _ = prepared(request_of(text, eval_share=0.05))
    assert profile.source == "prepared"
    assert profile.is_packed
    assert (profile.num_rows, profile.num_eval_rows) == (len(train), len(held_out))
    assert max(len(row) for row in train) == max(len(row) for row in held_out) == 16 == profile.longest_row
    assert (profile.num_tokens, profile.num_eval_tokens) == (sum(map(len, train)), sum(map(len, held_out)))
    assert profile.num_tokens > 0.99 * 16 * len(train)
    assert profile.lengths.edges[-1] == 16
    assert sum(profile.lengths.counts) == len(train)
    assert 0.05 < profile.num_eval_tokens / profile.num_tokens < 0.2
    assert profile.vocab_size == 300
    assert profile.eval_unigram_entropy_nats == pytest.approx(entropy_of(targets_of(splits(profile)[1])))


def targets_of(split):
    return [np.delete(split.row(n), [0, *split.document_starts(n)]).tolist() for n in range(len(split))]


def entropy_of(rows):
    tokens = [token for row in rows for token in row]
    return -sum(tokens.count(token) / len(tokens) * log(tokens.count(token) / len(tokens)) for token in set(tokens))


def pieces_in(split):
    """How often each document or piece of one stands in the rows."""
    return Counter(
        tuple(part.tolist())
        for number in range(len(split))
        for part in np.split(split.row(number), split.document_starts(number))
    )


def pieces_of(texts, profile, *, seq_len=16):
    """The same of texts, each with its end, cut into rows; a piece of one token has no target."""
    tokenizer = Tokenizer.from_file(f"{profile.cache_dir}/tokenizer/tokenizer.json")
    documents = [[*tokenizer.encode(text).ids, EOS_ID] for text in texts]
    return Counter(
        tuple(ids[first : first + seq_len])
        for ids in documents
        for first in range(0, len(ids), seq_len)
        if len(ids) - first > 1
    )


EOS_ID = 0  # of the tokenizers that are made


def test_rows_are_the_text_with_an_end_after_each_document(request_of, tmp_path):
    texts = [numbered_text(60, word=f"w{number}") for number in range(3)]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    profile, train, _, _ = prepared(request_of(*(tmp_path / f"{number}.txt" for number in range(3))))
    assert pieces_in(splits(profile)[0]) == pieces_of(texts, profile)
    assert texts[0].startswith("".join(map(decoder(profile), train[:5])))
    assert profile.dropped_tokens <= 3


def test_packed_rows_know_where_the_documents_of_the_text_start(request_of, tmp_path):
    texts = [f"row {number} " * (number % 9 + 1) for number in range(200)]
    path = jsonl(tmp_path / "a.jsonl", *({"text": text} for text in texts))
    profile, _, _, _ = prepared(request_of(path, eval_share=0.2))
    train, held_out = map(pieces_in, splits(profile))
    assert train.total() > 100 and held_out.total() > 10
    assert train + held_out == pieces_of(texts, profile)
    assert profile.num_tokens > 0.97 * 16 * profile.num_rows


def test_each_list_of_tokens_is_a_document(request_of, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", *({"tokens": [number + 1] * 6} for number in range(20)))
    profile, train, _, _ = prepared(request_of(path, packing=True))
    split, _ = splits(profile)
    assert train[0] == [1] * 6 + [2] * 6
    assert [split.document_starts(number).tolist() for number in range(len(split))] == [[6]] * 10
    assert split.num_targets(0) == 12 - 2


def test_both_sides_together_are_the_whole_text(request_of, text):
    profile, train, held_out, _ = prepared(request_of(text, eval_share=0.1, packing=False, seq_len=100_000))
    assert profile.notes[-1].startswith("few documents: the held-out part is pieces of 4096 characters")
    text_of = decoder(profile)
    lines = [
        [line for row in side for line in text_of(row).removesuffix("<|endoftext|>").splitlines()]
        for side in (train, held_out)
    ]
    assert sorted(lines[0] + lines[1]) == sorted(text.read_text().splitlines())
    assert lines[1]
    assert not set(lines[0]) & set(lines[1])


def test_preparing_again_gives_the_same_bytes(request_of, text, tmp_path):
    first = prepare(request_of(text, eval_share=0.05), lambda line: None)
    again = listed_request(text, cache_root=tmp_path / "other", eval_share=0.05)
    second = prepare(again, lambda line: None)
    assert first.fingerprint == second.fingerprint
    for name in ("tokens.bin", "starts.bin", "train_rows.npy", "eval_rows.npy", "tokenizer/tokenizer.json"):
        contents = [(folder_of(profile) / name).read_bytes() for profile in (first, second)]
        assert contents[0] == contents[1], name


def test_what_was_prepared_is_not_prepared_again(request_of, text):
    profile, _, _, _ = prepared(request_of(text))
    inode = (folder_of(profile) / "tokens.bin").stat().st_ino
    again, _, _, _ = prepared(request_of(text))
    assert again == profile
    assert (folder_of(again) / "tokens.bin").stat().st_ino == inode


def test_the_same_content_under_another_name_is_the_same_data(request_of, text, tmp_path):
    before = prepare(request_of(text), lambda line: None)
    moved = text.rename(tmp_path / "moved.md")
    assert prepare(request_of(moved), lambda line: None) == before


@pytest.mark.parametrize(
    "settings",
    [
        {"seq_len": 17},
        {"vocab_size": 301},
        {"eval_share": 0.02},
        {"packing": False},
        {"bad_rows": BadRows.SKIP},
        {"bad_rows": BadRows.SKIP, "bad_rows_max": 0.5},
    ],
)
def test_every_setting_is_part_of_the_fingerprint(request_of, text, settings):
    plain = prepare(request_of(text, eval_share=0.05), lambda line: None)
    assert (
        prepare(request_of(text, **{"eval_share": 0.05} | settings), lambda line: None).fingerprint != plain.fingerprint
    )


def test_weight_and_tokenizer_and_content_are_part_of_the_fingerprint(request_of, text, tokenizer_folder):
    requests = [
        request_of(text),
        request_of((text, 2.0)),
        request_of(text, tokenizer=str(tokenizer_folder)),
        request_of(text, text),
    ]
    found = {prepare(request, lambda line: None).fingerprint for request in requests}
    text.write_text(text.read_text() + "more\n")
    found.add(prepare(request_of(text), lambda line: None).fingerprint)
    assert len(found) == 5


def test_a_given_tokenizer_is_used_and_kept(request_of, text, tokenizer_folder):
    profile, train, _, lines = prepared(request_of(text, tokenizer=str(tokenizer_folder)))
    given = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    assert train[0] == given.encode(text.read_text()).ids[:16]
    assert (profile.vocab_size, lines) == (300, [])
    assert (folder_of(profile) / "tokenizer/tokenizer_config.json").exists()


def test_without_packing_rows_are_documents_and_long_ones_are_cut(request_of, tmp_path):
    rows = [{"text": "short"}, {"text": numbered_text(20)}]
    profile, train, _, _ = prepared(request_of(jsonl(tmp_path / "a.jsonl", *rows), packing=False))
    text_of = decoder(profile)
    assert not profile.is_packed
    assert text_of(train[0]) == "short<|endoftext|>"
    assert len(train[1]) == 16
    assert numbered_text(20).startswith(text_of(train[1]))
    assert profile.cut_rows == 1
    assert "1 documents were longer than 16 tokens" in profile.notes[0]
    assert profile.longest_row == 16
    assert sum(profile.lengths.counts) == 2


def test_tokens_are_taken_as_the_rows_they_are(request_of, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"tokens": [1, 2, 3]}, {"input_ids": [4, 5]}, {"tokens": list(range(40))})
    profile, train, _, _ = prepared(request_of(path))
    assert train == [[1, 2, 3], [4, 5], list(range(16))]
    assert (profile.is_packed, profile.cut_rows, profile.vocab_size) == (False, 1, 300)
    assert not (folder_of(profile) / "tokenizer").exists()


def test_tokens_can_be_packed_with_the_end_of_the_given_tokenizer(request_of, tmp_path, tokenizer_folder):
    path = jsonl(tmp_path / "a.jsonl", {"tokens": [1, 2, 3]}, {"tokens": [4, 5, 0]})
    _, train, _, _ = prepared(request_of(path, packing=True, seq_len=7, tokenizer=str(tokenizer_folder)))
    assert train == [[1, 2, 3, 0, 4, 5, 0]]


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_ids_take_as_little_room_as_the_vocabulary_lets_them(request_of, tmp_path, vocab_size, dtype):
    row = [vocab_size - 1, 0, vocab_size - 2]
    path = jsonl(tmp_path / "a.jsonl", {"tokens": row})
    profile, train, _, _ = prepared(request_of(path, vocab_size=vocab_size))
    assert train == [row]
    assert splits(profile)[0].layout.dtype == dtype


def test_weights_decide_how_often_the_rows_of_a_source_come(request_of, tmp_path):
    paths = [
        jsonl(tmp_path / f"{name}.jsonl", *({"tokens": [name, number]} for number in range(8))) for name in (1, 2, 3)
    ]
    profile, train, _, _ = prepared(request_of((paths[0], 1.0), (paths[1], 2.0), (paths[2], 0.25)))
    assert [sum(row[0] == name for row in train) for name in (1, 2, 3)] == [8, 16, 2]
    assert (profile.num_rows, profile.num_tokens) == (26, 52)


def test_an_evaluation_source_of_its_own_is_scored_whole(request_of, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(numbered_text(30, word="other"))
    profile, train, _, _ = prepared(request_of(text, eval_source=str(other)))
    text_of = decoder(profile)
    assert pieces_in(splits(profile)[1]) == pieces_of([other.read_text()], profile)
    assert "other" not in "".join(map(text_of, train))
    assert profile.num_eval_rows > 0


def test_the_tokenizer_is_made_without_what_is_held_out(request_of, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("zebra quagga\n" * 2000)
    made = [prepare(request_of(text, eval_source=source), lambda line: None) for source in (None, str(other))]
    contents = [(folder_of(profile) / "tokenizer/tokenizer.json").read_bytes() for profile in made]
    assert made[0].fingerprint != made[1].fingerprint
    assert contents[0] == contents[1]


def test_no_evaluation_is_no_held_out_rows(request_of, text):
    profile, _, held_out, _ = prepared(request_of(text))
    assert held_out == []
    assert (profile.num_eval_rows, profile.num_eval_tokens, profile.eval_unigram_entropy_nats) == (0, 0, None)


def rows_with_bad(path, *, num_good, num_bad):
    good = [{"text": f"a good row, number {number}"} for number in range(num_good)]
    return jsonl(path, *good, *({"txt": "bad"} for _ in range(num_bad)))


def test_bad_rows_fail_with_the_first_five_and_their_number(request_of, tmp_path):
    request = request_of(rows_with_bad(tmp_path / "a.jsonl", num_good=10, num_bad=7))
    with pytest.raises(InputError) as caught:
        prepare(request, lambda line: None)
    message = str(caught.value)
    assert "7 of 17 rows cannot be used" in message
    assert [f"a.jsonl:{row}:" in message for row in range(10, 18)] == [False] + [True] * 5 + [False] * 2
    assert "and 2 more" in message
    assert "data.bad_rows=skip" in message
    assert len(message.splitlines()) <= 3


def test_a_few_bad_rows_are_left_out_and_counted_where_the_job_says_so(request_of, tmp_path):
    path = rows_with_bad(tmp_path / "a.jsonl", num_good=99, num_bad=1)
    profile, _, _, _ = prepared(request_of(path, bad_rows=BadRows.SKIP, bad_rows_max=0.01))
    assert profile.skipped_rows == 1
    assert "1 bad rows were left out: " in profile.notes[0]
    assert "a.jsonl:100: has no field" in profile.notes[0]


def test_more_bad_rows_than_the_cap_fail(request_of, tmp_path):
    path = rows_with_bad(tmp_path / "a.jsonl", num_good=98, num_bad=2)
    with pytest.raises(InputError, match=r"2 of 100 rows .*\ndata.bad_rows_max lets 1.000% pass, 1 rows"):
        prepare(request_of(path, bad_rows=BadRows.SKIP, bad_rows_max=0.01), lambda line: None)


def test_no_bad_row_passes_where_the_job_does_not_say_skip(request_of, tmp_path):
    path = rows_with_bad(tmp_path / "a.jsonl", num_good=99, num_bad=1)
    with pytest.raises(InputError, match="1 of 100 rows cannot be used"):
        prepare(request_of(path, bad_rows=BadRows.FAIL, bad_rows_max=1.0), lambda line: None)


def test_skipping_is_a_function_of_the_data(request_of, tmp_path):
    good = jsonl(tmp_path / "good.jsonl", *({"text": f"row {number} of many"} for number in range(200)))
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(
        "not json\n".join(good.read_text().splitlines(keepends=True)[:1])
        + "{}\n"
        + "".join(good.read_text().splitlines(keepends=True)[1:])
    )
    settings = {"bad_rows": BadRows.SKIP, "bad_rows_max": 0.5, "eval_share": 0.1}
    _, train, held_out, _ = prepared(request_of(good, **settings))
    assert prepared(request_of(mixed, **settings))[1:3] == (train, held_out)


REFUSED = [
    ("blob.txt", b"text\0more", {}, ["blob.txt is not text: NUL byte at offset 4".replace(" is", ": is")]),
    ("blob.txt", b"abc\xff", {}, ["blob.txt: is not text: byte 0xff at offset 3"]),
    ("blank.txt", b" \n \n", {}, ["data.train: holds nothing but blanks", "blank.txt"]),
    ("blank.jsonl", b"\n\n", {}, ["data.train: holds nothing but blanks"]),
    ("one.txt", b"line\n" * 20, {"eval_share": 0.01}, ["data.eval", "cannot be held out"]),
    ("a.txt", numbered_text(300).encode(), {"eval_share": 1.5}, ["data.eval: 150%"]),
    ("a.txt", numbered_text(300).encode(), {"seq_len": 1}, ["train.seq_len", "no target"]),
    ("a.txt", numbered_text(300).encode(), {"vocab_size": 100}, ["vocabulary of 100 is too small", "257"]),
    ("a.txt", numbered_text(300).encode(), {"tokenizer": "/no/such"}, ["model.tokenizer: /no/such is not a folder"]),
    ("a.txt", numbered_text(300).encode(), {"format": DataFormat.TOKENS}, ["tokens are read from .jsonl"]),
    ("a.jsonl", b'{"messages": []}\n', {}, ['a.jsonl:1: field "messages" is empty']),
    ("a.txt", numbered_text(300).encode(), {"loss_on": LossOn.ASSISTANT}, ["data.loss_on: assistant", "rows are text"]),
    ("a.jsonl", b'{"chosen": "a b", "rejected": "a c"}\n', {"packing": True}, ["data.packing: pairs"]),
    ("a.jsonl", b'{"tokens": [1, 500]}\n', {}, ["a.jsonl:1: token 500 is not in the model's vocabulary of 300"]),
]


@pytest.mark.parametrize("name, content, settings, expected", REFUSED, ids=[f"{row[0]}-{row[3][0]}" for row in REFUSED])
def test_data_that_cannot_be_learned_is_refused_and_leaves_nothing(
    request_of, tmp_path, name, content, settings, expected
):
    (tmp_path / name).write_bytes(content)
    request = request_of(tmp_path / name)
    with pytest.raises(InputError) as caught:
        prepare(msgspec.structs.replace(request, **settings), lambda line: None)
    for part in expected:
        assert part in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
    assert [folder for folder in cache_folders(request) if folder != "locks"] == []


def test_a_weight_that_takes_no_row_is_refused(request_of, tmp_path):
    (tmp_path / "tiny.txt").write_text("two words")
    with pytest.raises(InputError, match=r"data\.train: 1 documents give no row: .*\n.* a weight below 1"):
        prepare(request_of((tmp_path / "tiny.txt", 0.1)), lambda line: None)


def test_a_tokenizer_of_a_larger_model_is_refused_with_both_numbers(request_of, text, tokenizer_folder):
    request = request_of(text, tokenizer=str(tokenizer_folder), vocab_size=290)
    with pytest.raises(InputError, match="has ids up to 299, the model's vocabulary of 290 ends at 289"):
        prepare(request, lambda line: None)


def test_an_added_token_beyond_the_vocabulary_is_refused_where_the_text_holds_it(
    request_of, tmp_path, tokenizer_folder
):
    grown = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    grown.add_special_tokens(["<image>"])
    folder = tmp_path / "grown"
    folder.mkdir()
    grown.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    plain, with_image = tmp_path / "plain.txt", tmp_path / "image.txt"
    plain.write_text(numbered_text(50))
    with_image.write_text(numbered_text(50) + "<image>")
    assert prepare(request_of(plain, tokenizer=str(folder)), lambda line: None).num_rows > 0
    with pytest.raises(InputError, match="holds '<image>', id 300; the model's vocabulary of 300 ends at 299"):
        prepare(request_of(with_image, tokenizer=str(folder)), lambda line: None)


def test_a_damaged_cache_is_built_anew(request_of, text):
    profile, train, _, _ = prepared(request_of(text))
    with (folder_of(profile) / "tokens.bin").open("r+b") as stream:
        stream.truncate(10)
    assert prepared(request_of(text))[:2] == (profile, train)


def test_what_a_killed_preparation_left_is_removed(request_of, text, tmp_path):
    profile = prepare(request_of(text), lambda line: None)
    left = tmp_path / "cache" / "data" / f".partial-{'0' * 32}"
    left.mkdir()
    (left / "tokens.bin").write_bytes(b"half")
    prepare(request_of(text, seq_len=20), lambda line: None)
    assert not left.exists()
    assert folder_of(profile).exists()


def test_what_another_process_is_building_is_left_alone(request_of, text, tmp_path):
    prepare(request_of(text), lambda line: None)
    name = "0" * 32
    building = tmp_path / "cache" / "data" / f".partial-{name}"
    building.mkdir()
    with (tmp_path / "cache" / "data" / "locks" / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        prepare(request_of(text, seq_len=20), lambda line: None)
    assert building.exists()


def start(request, folder, name):
    request_path = folder / f"{name}.json"
    codec.write(request_path, request)
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise.trainer.runtime.data.prepare", request_path, folder / f"{name}-answer.json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_make_one_cache_between_them(request_of, tmp_path):
    path = tmp_path / "big.txt"
    path.write_text(numbered_text(30_000))
    request = request_of(path, eval_share=0.05)
    processes = [start(request, tmp_path, name) for name in ("one", "two")]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    answers = [codec.read(tmp_path / f"{name}-answer.json", DataProfile) for name in ("one", "two")]
    assert answers[0] == answers[1]
    made = [output for output, _ in outputs if "making a tokenizer" in output]
    assert len(made) == 1
    assert cache_folders(request) == sorted([answers[0].fingerprint, "locks"])


def test_a_process_asked_to_end_leaves_no_half_cache(request_of, tmp_path):
    path = tmp_path / "big.txt"
    path.write_text(numbered_text(200_000))
    request = request_of(path)
    process = start(request, tmp_path, "one")
    while not any(name.startswith(".partial") for name in cache_folders(request)):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert cache_folders(request) == ["locks"]


@pytest.mark.cold
def test_a_process_ends_when_the_one_that_started_it_is_killed():
    child = (
        "import time; from shardwise.trainer.runtime.run.process import end_with_parent\n"
        "end_with_parent(); print(1, flush=True); time.sleep(600)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "1\n"
    process.kill()
    process.communicate(timeout=60)  # the pipe ends when the child, which has it too, has ended


def command(folder):
    files = [str(folder / "request.json"), str(folder / "answer.json")]
    return answer(files, PrepareRequest, lambda request: prepare(request, report_progress))


def test_the_command_answers_in_a_file(request_of, text, tmp_path, capsys):
    codec.write(tmp_path / "request.json", request_of(text))
    assert command(tmp_path) == 0
    assert codec.read(tmp_path / "answer.json", DataProfile).num_rows > 0
    assert capsys.readouterr().out == "making a tokenizer of 300 tokens\n"


def test_the_command_explains_on_stderr_with_the_code_of_the_error(request_of, tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"a\0")
    codec.write(tmp_path / "request.json", request_of(tmp_path / "a.txt"))
    assert command(tmp_path) == 2
    assert "NUL byte at offset 1" in capsys.readouterr().err
    assert not (tmp_path / "answer.json").exists()
    assert "NUL byte at offset 1" in (tmp_path / "answer.error").read_text()


def test_a_cache_that_cannot_be_made_is_an_environment_fault(text, tmp_path):
    (tmp_path / "file").write_text("")
    request = listed_request(text, cache_root=tmp_path / "file")
    with pytest.raises(EnvironmentFaultError, match=r"file/data: cannot be made: Not a directory"):
        prepare(request, lambda line: None)


@pytest.mark.parametrize("max_bytes", [1000, 20_000, 60_000])
def test_a_file_that_cannot_be_written_whole_is_an_environment_fault_and_leaves_nothing(
    request_of, tmp_path, max_bytes
):
    """A limit on the size of files stands for a full disk: it refuses the tokenizer or the tokens."""
    path = tmp_path / "a.txt"
    path.write_text(numbered_text(10_000))
    request = request_of(path)
    codec.write(tmp_path / "request.json", request)
    program = (
        "import resource, runpy, sys\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({max_bytes}, {max_bytes}))\n"
        "runpy.run_module('shardwise.trainer.runtime.data.prepare', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, tmp_path / "request.json", tmp_path / "answer.json"]
    finished = subprocess.run(command, capture_output=True, text=True)
    assert finished.returncode == 4, finished
    assert finished.stderr.endswith("File too large; name another cache folder\n")
    assert cache_folders(request) == ["locks"]


def test_documents_are_counted_as_they_were_before_packing(request_of, tmp_path):
    lengths = (3, 9, 30, 5)  # with the end that packing adds: 4, 10, 31, 6
    path = jsonl(tmp_path / "a.jsonl", *({"tokens": [7] * length} for length in lengths))
    plain, packed = (prepare(request_of(path, packing=packing), lambda line: None) for packing in (False, True))
    assert (plain.num_documents, plain.mean_document_tokens) == (4, (3 + 9 + 30 + 5) / 4)
    assert plain.mean_cut_tokens == packed.mean_cut_tokens == (3 + 9 + 16 + 5) / 4
    assert plain.documents == length_histogram(np.array(lengths))
    assert (plain.longest_row, packed.longest_row) == (16, 16)
    assert packed.documents == plain.documents  # data that came without a tokenizer has no end to add
    assert plain.batch_widths[0].mean_width == (8 + 16 + 16 + 8) / 4
    assert packed.batch_widths == plain.batch_widths
    assert [width.micro_batch for width in plain.batch_widths] == [1, 2, 4]


def test_the_end_of_a_document_counts_and_what_is_held_out_does_not(request_of, tmp_path, tokenizer_folder):
    path, other = (jsonl(tmp_path / f"{n}.jsonl", {"tokens": [7] * 3}, {"tokens": [8] * 5}) for n in "ab")
    request = request_of(path, eval_source=str(other), packing=True, seq_len=4, tokenizer=str(tokenizer_folder))
    profile = prepare(request, lambda line: None)
    assert profile.documents == length_histogram(np.array([4, 6]))
