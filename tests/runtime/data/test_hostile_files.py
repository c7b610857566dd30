"""Files that change or vanish while they are prepared, and files made to do harm: an InputError names each."""

import gzip
import io
import json
import os
import re
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from prepare_request_factory import listed_request, written_source
from table_files import COMPRESSORS, arrow_of, lines_of, parquet_of

from shardwise.trainer.runtime.data.chat.rendering import Renderer
from shardwise.trainer.runtime.data.prepare import prepare
from shardwise.trainer.runtime.data.sources import Completion, files
from shardwise.trainer.runtime.data.sources.scan import ALL_TRAIN, check_sources, scan_rows, units_of
from shardwise.trainer.runtime.data.tokenizer import load_tokenizer, train_tokenizer, write_trained_tokenizer
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import LossOn

TEXTS = [f"text {number} of many, which is one row\n" for number in range(300)]


def jsonl(texts):
    return lines_of({"text": text} for text in texts)


KINDS = {
    "a.txt": lambda texts: "".join(texts).encode(),
    "a.jsonl": jsonl,
    "a.json": lambda texts: json.dumps([{"text": text} for text in texts]).encode(),
    "a.csv": lambda texts: b"text\n" + b"".join(b'"%s"\n' % text.encode() for text in texts),
    "a.parquet": lambda texts: parquet_of(pa.table({"text": texts}), row_group_size=50),
    "a.arrow": lambda texts: arrow_of(pa.table({"text": texts}), 50),
    "a.jsonl.gz": lambda texts: gzip.compress(jsonl(texts)),
}


def replace_unseen(path, content):
    """Other bytes of the same number with the same time of writing."""
    status = path.stat()
    path.write_bytes(content[: status.st_size].ljust(status.st_size, b"\0"))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


FAULTS = {
    "replaced": (replace_unseen, "changed since"),
    "truncated": (lambda path, _: os.truncate(path, path.stat().st_size // 2), "changed since"),
    "extended": (lambda path, content: path.write_bytes(path.read_bytes() + content), "changed since"),
    "removed": (lambda path, _: path.unlink(), "is missing"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", KINDS)
def test_a_file_that_changes_or_vanishes_while_it_is_prepared_is_refused(tmp_path, name, fault):
    path = tmp_path / name
    change, reason = FAULTS[fault]
    for moment in ("after its digest", "within the last pass"):
        path.write_bytes(KINDS[name](TEXTS))
        request = listed_request(path, cache_root=tmp_path / "cache")
        sources = check_sources(request, lambda _: None)
        with pytest.raises(InputError, match=rf"{path}: {reason}"):
            if moment == "after its digest":
                change(path, KINDS[name](TEXTS[::-1]))
                scan_rows(request, sources)
            else:
                units = units_of(sources, ALL_TRAIN, "reading")
                next(units)
                change(path, KINDS[name](TEXTS[::-1]))
                list(units)


@pytest.fixture
def small_limits(monkeypatch):
    """The limits of files of rows, a thousandth of themselves."""
    monkeypatch.setattr(files, "ROW_BYTES", 2**16)
    monkeypatch.setattr(files, "ARRAY_BYTES", 2**20)
    monkeypatch.setattr(files, "EXPANSION_BYTES", 2**18)
    monkeypatch.setattr(files, "BATCH_BYTES", 2**14)


def prepared(path, **settings):
    prepare(listed_request(path, cache_root=path.parent / "cache", **settings), lambda _: None)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_a_compression_bomb_is_refused(tmp_path, small_limits, name, suffix):
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(COMPRESSORS[suffix](b"a" * 2**21))
    with pytest.raises(InputError, match=rf"{path}: its {path.stat().st_size} bytes expand to more than"):
        prepared(path)


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_much_text_of_one_kind_is_no_bomb(tmp_path, small_limits, suffix):
    content = "".join(f"line {number}: the same again\n" for number in range(12_000)).encode()
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(COMPRESSORS[suffix](content))
    assert len(content) > files.EXPANSION_BYTES
    prepared(path)


def test_one_text_that_a_table_repeats_without_end_is_refused(tmp_path, small_limits):
    """Parquet stores it once. Batches of it are small."""
    stream = io.BytesIO(parquet_of(pa.table({"text": ["a " * 2**12] * 200, "number": range(200)})))
    batches = list(files._parquet_batches(stream))
    assert sum(batch.num_rows for batch in batches) == 200
    assert max(batch.nbytes for batch in batches) <= 2**15
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet_of(pa.table({"text": ["a " * 2**12] * 2000})))
    with pytest.raises(InputError, match=rf"{path}: its {path.stat().st_size} bytes expand to more than"):
        prepared(path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_a_row_above_the_limit_is_a_bad_row_and_the_others_are_used(tmp_path, small_limits, name):
    texts = [f"text {number}" for number in range(40)]
    path = tmp_path / name
    path.write_bytes(KINDS[name]([*texts[:20], "long " * 2**14, *texts[20:]]))
    file = listed_request(path, cache_root=tmp_path).files[0]
    rows: dict[int, Any] = dict(files.read_rows(file))
    assert [number for number, row in rows.items() if isinstance(row, files.BadRow)] == [21]
    assert rows[21].where == f"{path}:21" and "MiB" in rows[21].reason
    assert [row["text"] for number, row in rows.items() if number != 21] == texts


def traced(call):
    """What a function returns, and the most bytes that Python held meanwhile."""
    tracemalloc.start()
    try:
        return call(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_line_above_the_limit_is_never_held_as_a_whole(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("wb") as stream:
        stream.writelines(b"x" * 2**20 for _ in range(200))
        stream.write(b'\n{"text": "a"}\n')
    file = listed_request(path, cache_root=tmp_path).files[0]
    rows, peak_bytes = traced(lambda: list(files.read_rows(file)))
    assert isinstance(rows[0][1], files.BadRow) and rows[1] == (2, {"text": "a"})
    assert peak_bytes < 2.5 * files.ROW_BYTES


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_a_record_above_the_limit_is_refused_by_name(tmp_path, small_limits, name):
    path = tmp_path / name
    path.write_bytes(b"text\nshort\n" + b"long " * 2**15 + b"\n")
    with pytest.raises(InputError, match=rf"{path}: one of its lines is longer than"):
        prepared(path)


def test_an_array_above_the_limit_is_refused_with_the_command_that_makes_lines(tmp_path, small_limits):
    path = tmp_path / "a.json"
    path.write_bytes(KINDS["a.json"](TEXTS * 100))
    with pytest.raises(InputError, match=rf"{path}: is one JSON value .*\n.*jq -c '\.\[\]' {path} > "):
        prepared(path)


def test_an_answer_far_above_the_length_of_a_row_is_refused_by_its_beginning():
    renderer = Renderer(train_tokenizer(TEXTS, vocab_size=300), None, LossOn.AUTO, 64)
    content = Completion("a few words " * 2**20, "yes")
    reason, peak_bytes = traced(lambda: renderer.render(content))
    assert reason == f"too long: {12 * 2**20 + 3} characters, train.seq_len is 64 tokens"
    assert peak_bytes < 2 * 12 * 2**20, "two copies of the text; all of its tokens take nine times as much"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.zst"])
def test_random_damage_ends_in_a_message(tmp_path, name):
    damage(tmp_path, name, num_tries=40)


@pytest.mark.long
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.gz", "a.jsonl.zst", "a.json", "a.csv"])
def test_much_random_damage_ends_in_a_message(tmp_path, name):
    damage(tmp_path, name, num_tries=2000)


def damage(folder, name, *, num_tries):
    """Cut off, or with bytes changed: an InputError of at most three lines, or rows."""
    suffix = Path(name).suffix
    compress = COMPRESSORS.get(suffix, bytes)
    content = compress(KINDS[name.removesuffix(suffix) if suffix in COMPRESSORS else name](TEXTS))
    random = Random(13)
    path = folder / name
    for number in range(num_tries):
        damaged = bytearray(content[: random.randrange(len(content))] if number % 4 == 0 else content)
        for _ in range(random.randrange(1, 9) if number % 4 and damaged else 0):
            near = min(len(damaged), 400) if number % 4 > 1 else len(damaged)  # where formats keep their descriptions
            place = random.randrange(near)
            damaged[-1 - place if number % 4 == 3 else place] = random.randrange(256)
        file = written_source(path, bytes(damaged))
        try:
            list(files.read_rows(file))
        except InputError as error:
            assert len(str(error).splitlines()) <= 3


@pytest.fixture
def folder(tmp_path):
    write_trained_tokenizer(train_tokenizer(TEXTS, vocab_size=300), tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", '{"a":' * 100_000),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"eos_token": {"content": ["x"]}}'),
        ("tokenizer_config.json", '{"eos_token": 7}'),
    ],
)
def test_a_hostile_tokenizer_is_refused(folder, name, content):
    (folder / name).write_text(content)
    with pytest.raises(InputError, match=re.escape(str(folder))):
        load_tokenizer(folder)


def test_a_pattern_that_never_ends_on_a_text_is_refused(folder):
    settings = json.loads((folder / "tokenizer.json").read_text())
    settings["pre_tokenizer"] = {
        "type": "Split", "pattern": {"Regex": "(a+)+b"}, "behavior": "Isolated", "invert": False
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(folder)
    renderer = Renderer(tokenizer, None, LossOn.AUTO, 64)
    for tokenize in (lambda: tokenizer.encode(["a" * 40]), lambda: renderer.render(Completion("a" * 40, "!"))):
        with pytest.raises(InputError, match=r"model\.tokenizer: "):
            tokenize()
