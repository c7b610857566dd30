"""Preparation from files to rows: the profile, the cache, and every refusal."""

import fcntl
import os
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from math import log
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from outcome_file import FAULTS
from prepare_request_factory import listed_request, numbered_text
from table_files import lines_of
from tokenizers import Tokenizer

from shardwise.launch.inputs.prepare_data import find_prepared, write_index
from shardwise.trainer.runtime.data.cache import TokenRows
from shardwise.trainer.runtime.data.prepare import prepare
from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.profile import DataProfile
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.sections import BadRows, LossOn

EOS_ID = 0  # of trained tokenizers


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
    return partial(listed_request, cache_root=tmp_path / "cache")


def profile_of(request):
    return prepare(request, lambda line: None)


def prepared(request):
    profile = profile_of(request)
    return profile, *([split.row(n).tolist() for n in range(len(split))] for split in splits(profile))


def splits(profile):
    return [TokenRows.open(Path(profile.cache_dir), split) for split in ("train", "eval")]


def tokenizer_of(profile):
    return Tokenizer.from_file(f"{profile.cache_dir}/tokenizer/tokenizer.json")


def jsonl(path, *rows):
    path.write_bytes(lines_of(rows))
    return path


def cache_folders(request):
    root = Path(request.cache_root, "data")
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


@pytest.mark.parametrize("way", ["belongs to another user", "can be written by anyone", "its index is another user's"])
def test_prepared_data_that_another_user_can_change_are_not_trained(way, request_of, text):
    if os.geteuid() != 0 and not way.startswith("can be"):
        pytest.skip("only root can give a file to another user")
    request = request_of(text)
    profile = profile_of(request)
    write_index(request, profile, time.time_ns() + 10**12)
    assert find_prepared(request) == profile
    folder = Path(profile.cache_dir)
    if way.startswith("can be"):
        folder.chmod(0o777)
    else:
        os.chown(folder if way.startswith("belongs") else next((folder.parent / "index").iterdir()), 65534, 65534)
    assert find_prepared(request) is None
    if way.startswith("its index"):
        assert profile_of(request) == profile
        return
    with pytest.raises(EnvironmentFaultError, match="SHARDWISE_CACHE"):
        profile_of(request)
    assert (folder / "profile.json").is_file(), "it is not removed either"


def test_a_lock_that_is_a_link_creates_no_file(request_of, text, tmp_path):
    """In a cache that several users share."""
    request = request_of(text)
    folder = Path(profile_of(request).cache_dir)
    lock = folder.parent / "locks" / folder.name
    lock.unlink()
    lock.symlink_to(tmp_path / "created")
    (folder / "tokens.bin").unlink()
    with pytest.raises(EnvironmentFaultError, match="cannot be opened"):
        profile_of(request)
    assert not (tmp_path / "created").exists()


def test_the_profile_counts_what_is_in_the_cache(request_of, text):
    profile, train, held_out = prepared(request_of(text, eval_share=0.05))
    assert (profile.source, profile.is_packed, profile.vocab_size) == ("prepared", True, 300)
    assert (profile.num_rows, profile.num_eval_rows) == (len(train), len(held_out))
    assert max(map(len, train)) == max(map(len, held_out)) == 16 == profile.longest_row == profile.lengths.edges[-1]
    assert (profile.num_tokens, profile.num_eval_tokens) == (sum(map(len, train)), sum(map(len, held_out)))
    assert profile.num_tokens > 0.99 * 16 * len(train)
    assert sum(profile.lengths.counts) == len(train)
    assert 0.05 < profile.num_eval_tokens / profile.num_tokens < 0.2
    split = splits(profile)[1]
    targets = [np.delete(split.row(n), [0, *split.document_starts(n)]).tolist() for n in range(len(split))]
    counts = Counter(token for row in targets for token in row)
    entropy = -sum(count / counts.total() * log(count / counts.total()) for count in counts.values())
    assert profile.eval_unigram_entropy_nats == pytest.approx(entropy)


def test_the_same_content_is_prepared_once_whatever_its_name_and_again_after_damage(request_of, text, tmp_path):
    profile, train, held_out = prepared(request_of(text))
    assert held_out == []
    assert (profile.num_eval_rows, profile.num_eval_tokens, profile.eval_unigram_entropy_nats) == (0, 0, None)
    tokens = Path(profile.cache_dir) / "tokens.bin"
    inode = tokens.stat().st_ino
    moved = text.rename(tmp_path / "moved.md")
    assert profile_of(request_of(moved)) == profile
    assert tokens.stat().st_ino == inode
    os.truncate(tokens, 10)
    assert prepared(request_of(moved)) == (profile, train, held_out)


def test_every_setting_and_the_content_are_part_of_the_fingerprint(request_of, text, tokenizer_folder):
    settings: list[dict[str, object]] = [
        {}, {"eval_share": 0.05}, {"eval_share": 0.02}, {"seq_len": 17}, {"vocab_size": 301}, {"packing": False},
        {"bad_rows": BadRows.SKIP}, {"bad_rows": BadRows.SKIP, "bad_rows_max": 0.5},
        {"tokenizer": str(tokenizer_folder)},
    ]  # fmt: skip
    requests = [*(request_of(text, **each) for each in settings), request_of((text, 2.0)), request_of(text, text)]
    found = {profile_of(request).fingerprint for request in requests}
    text.write_text(text.read_text() + "more\n")
    assert len(found | {profile_of(request_of(text)).fingerprint}) == len(requests) + 1


def test_tokens_are_taken_as_the_rows_they_are(request_of, tmp_path):
    path = jsonl(tmp_path / "a.jsonl", {"tokens": [1, 2, 3]}, {"input_ids": [4, 5]}, {"tokens": list(range(40))})
    profile, train, _ = prepared(request_of(path))
    assert train == [[1, 2, 3], [4, 5], list(range(16))]
    assert (profile.is_packed, profile.cut_rows, profile.vocab_size) == (False, 1, 300)
    assert profile.notes[0].startswith("1 documents were longer than 16 tokens")
    assert not (Path(profile.cache_dir) / "tokenizer").exists()


@pytest.mark.parametrize("vocab_size, dtype", [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_ids_take_as_little_room_as_the_vocabulary_lets_them(request_of, tmp_path, vocab_size, dtype):
    row = [vocab_size - 1, 0, vocab_size - 2]
    profile, train, _ = prepared(request_of(jsonl(tmp_path / "a.jsonl", {"tokens": row}), vocab_size=vocab_size))
    assert train == [row]
    assert splits(profile)[0].layout.dtype == dtype


def test_an_evaluation_source_is_scored_whole_and_unknown_to_the_tokenizer(request_of, text, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("zebra quagga\n" * 200)
    profile, train, held_out = prepared(request_of(text, eval_source=str(other)))
    ids = [*tokenizer_of(profile).encode(other.read_text()).ids, EOS_ID]
    assert sorted(held_out) == sorted(ids[first : first + 16] for first in range(0, len(ids), 16))
    assert "zebra" not in "".join(tokenizer_of(profile).decode_batch(train))
    without = profile_of(request_of(text))
    assert without.fingerprint != profile.fingerprint
    assert tokenizer_of(without).to_str() == tokenizer_of(profile).to_str()


@pytest.mark.parametrize(
    ("num_good", "num_bad", "settings", "facts"),
    [
        (10, 7, {}, ["7 of 17 rows", *(f"a.jsonl:{row}:" for row in range(11, 16)), "and 2 more"]),
        (98, 2, {"bad_rows": BadRows.SKIP, "bad_rows_max": 0.01}, ["2 of 100 rows", "1.000%"]),
        (99, 1, {"bad_rows": BadRows.FAIL, "bad_rows_max": 1.0}, ["1 of 100 rows", "data.bad_rows=skip"]),
        (1, 99, {"bad_rows": BadRows.FAIL}, ["99 of 100 rows", "too many to skip"]),
        (99, 1, {"bad_rows": BadRows.SKIP, "bad_rows_max": 0.01}, None),
    ],
)
def test_bad_rows_are_named_and_skipped_up_to_the_cap(request_of, tmp_path, num_good, num_bad, settings, facts):
    good = ({"text": f"a good row, number {number}"} for number in range(num_good))
    request = request_of(jsonl(tmp_path / "a.jsonl", *good, *[{"txt": "bad"}] * num_bad), **settings)
    if facts is None:
        profile = profile_of(request)
        assert profile.skipped_rows == 1 and "a.jsonl:100: " in profile.notes[0]
        return
    with pytest.raises(InputError) as caught:
        profile_of(request)
    assert all(fact in str(caught.value) for fact in facts)
    assert "a.jsonl:16:" not in str(caught.value) and len(str(caught.value).splitlines()) <= 3


GOOD = numbered_text(300).encode()
REFUSED = [
    ("blob.txt", b"text\0more", {}, ["blob.txt: ", "NUL byte at offset 4"]),
    ("blank.txt", b" \n \n", {}, ["data.train: ", "blank.txt"]),
    ("one.txt", b"line\n" * 20, {"eval_share": 0.01}, ["data.eval", "one piece"]),
    ("a.txt", GOOD, {"seq_len": 1}, ["train.seq_len", "no target"]),
    *(("a.txt", GOOD, {"eval_share": share}, [f"data.eval: {share:.0%} "]) for share in (0.0, 1.0, -0.1)),
    ("a.txt", GOOD, {"drop_copies": True, "window_bytes": 1000}, ["data.drop_copies"]),
    ("a.txt", GOOD, {"tokenizer": "/no/such"}, ["model.tokenizer: /no/such is not a folder"]),
    ("a.txt", GOOD, {"loss_on": LossOn.ASSISTANT}, ["data.loss_on: assistant", "rows are text"]),
    ("a.jsonl", b'{"chosen": "a b", "rejected": "a c"}\n', {"packing": True}, ["data.packing: pairs"]),
    ("a.jsonl", b'{"tokens": [1, 500]}\n', {}, ["a.jsonl:1: token 500 "]),
]


@pytest.mark.parametrize("name, content, settings, facts", REFUSED, ids=[f"{row[0]}-{row[3][0]}" for row in REFUSED])
def test_data_that_cannot_be_learned_are_refused_and_leave_none(request_of, tmp_path, name, content, settings, facts):
    (tmp_path / name).write_bytes(content)
    request = msgspec.structs.replace(request_of(tmp_path / name), **settings)
    with pytest.raises(InputError) as caught:
        profile_of(request)
    assert all(fact in str(caught.value) for fact in facts)
    assert len(str(caught.value).splitlines()) <= 3
    assert [folder for folder in cache_folders(request) if folder != "locks"] == []


def test_a_weight_that_takes_no_row_is_refused(request_of, tmp_path):
    (tmp_path / "tiny.txt").write_text("two words")
    with pytest.raises(InputError, match=r"data\.train: 1 documents give no row: .*\n.* a weight below 1"):
        profile_of(request_of((tmp_path / "tiny.txt", 0.1)))


def test_tokens_beyond_the_vocabulary_are_refused(request_of, text, tmp_path, tokenizer_folder):
    """An added token is one where the text holds it; ids of the vocabulary itself are, in any case."""
    with pytest.raises(InputError, match=r"\b299\b.* vocabulary of 290 ends at 289"):
        profile_of(request_of(text, tokenizer=str(tokenizer_folder), vocab_size=290))
    extended = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    extended.add_special_tokens(["<image>"])
    folder = tmp_path / "grown"
    folder.mkdir()
    extended.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    assert profile_of(request_of(text, tokenizer=str(folder))).num_rows > 0
    text.write_text(text.read_text() + "<image>")
    with pytest.raises(InputError, match=r"'<image>', id 300; .* vocabulary of 300 ends at 299"):
        profile_of(request_of(text, tokenizer=str(folder)))


def test_what_a_killed_preparation_left_is_removed_and_what_another_builds_is_not(request_of, text, tmp_path):
    profile = profile_of(request_of(text))
    root = tmp_path / "cache" / "data"
    left, building = (root / f".partial-{digit * 32}" for digit in "01")
    left.mkdir()
    building.mkdir()
    (left / "tokens.bin").write_bytes(b"half")
    with (root / "locks" / ("1" * 32)).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        profile_of(request_of(text, seq_len=20))
    assert not left.exists() and building.exists() and Path(profile.cache_dir).exists()


def test_two_processes_make_one_cache_between_them(request_of, tmp_path):
    path = tmp_path / "big.txt"
    path.write_text(numbered_text(5_000))
    request = request_of(path, eval_share=0.05)
    codec.write(tmp_path / "request.json", request)
    command = [sys.executable, "-m", "shardwise.trainer.runtime.data.prepare", tmp_path / "request.json"]
    answers = [tmp_path / f"{number}-answer.json" for number in range(2)]
    processes = [subprocess.Popen([*command, path], stdout=subprocess.PIPE, text=True) for path in answers]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    one, two = (codec.read(path, DataProfile) for path in answers)
    assert one == two
    assert len([output for output, _ in outputs if "making a tokenizer" in output]) == 1
    assert cache_folders(request) == sorted([one.fingerprint, "locks"])


def prepared_under(limit, max_bytes, request, folder):
    """A process that has prepared under this limit of its resources, ended."""
    codec.write(folder / "request.json", request)
    program = (
        "import resource, runpy\n"
        f"resource.setrlimit(resource.{limit}, ({max_bytes}, {max_bytes}))\n"
        "runpy.run_module('shardwise.trainer.runtime.data.prepare', run_name='__main__', alter_sys=True)"
    )
    command = [sys.executable, "-c", program, folder / "request.json", folder / "answer.json"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("max_bytes", [1000, 60_000], ids=["tokenizer", "tokens"])
def test_a_full_disk_is_an_environment_fault_and_leaves_nothing(request_of, tmp_path, max_bytes):
    """A limit on the size of files stands for it."""
    path = tmp_path / "a.txt"
    path.write_text(numbered_text(10_000))
    request = request_of(path)
    finished = prepared_under("RLIMIT_FSIZE", max_bytes, request, tmp_path)
    assert finished.returncode == 4, finished
    assert "File too large" in finished.stderr
    assert cache_folders(request) == ["locks"]


@pytest.mark.long
@pytest.mark.cold
@pytest.mark.timeout(7200)
def test_two_gigabytes_of_rows_are_prepared_in_a_quarter_of_their_memory(tmp_path, record_property):
    """The limit holds in each process of the preparation, for all that it allocates, used or not."""
    random, words = Random(0), [f"word{number}" for number in range(5000)]
    texts = [" ".join(random.choices(words, k=90)) for _ in range(4096)]
    path, num_rows = tmp_path / "a.jsonl", 0
    with path.open("w") as stream:
        while stream.tell() < 2e9:
            stream.writelines(f'{{"text": "{num_rows + number} {text}"}}\n' for number, text in enumerate(texts))
            num_rows += len(texts)
    request = listed_request(path, cache_root=tmp_path / "cache", seq_len=512, vocab_size=4096)
    finished = prepared_under("RLIMIT_DATA", 2**29, request, tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert codec.read(tmp_path / "answer.json", DataProfile).num_documents == num_rows
    record_property(FAULTS, {"2 GB of JSON lines under 512 MiB": {"tried": 1, "survived": 1}})
