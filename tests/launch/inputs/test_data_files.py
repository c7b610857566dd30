"""Which files a source is, on real folders, and the standard library of whatever Python runs the tests."""

import gzip
import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import msgspec
import pytest
from prepare_request_factory import listed_request, request_for

from shardwise.launch.inputs import data_files
from shardwise.launch.inputs.data_files import (
    STDLIB_EXCLUDED,
    RowSizes,
    list_files,
    python_stdlib_files,
    refuse_first_row,
    row_sizes,
    sampled_row_sizes,
    shape_of_first_row,
)
from shardwise.trainer.runtime.data.sources.files import BadRow, read_rows
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import DataFormat
from shardwise.trainer.spec.job.sources import DataSource


def write(folder, *names, content="text\n"):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def listed(*sources, tmp_path, **settings):
    request = listed_request(*sources, cache_root=tmp_path / "cache", **settings)
    return [Path(file.path) for file in request.files]


def names(*sources, tmp_path):
    return [path.name for path in listed(*sources, tmp_path=tmp_path)]


def test_a_folder_is_its_text_sorted_with_sub_folders_and_without_what_is_hidden_or_empty(tmp_path):
    write(tmp_path, "text/b.md", "text/a.TXT", "text/z.py", "text/sub/c.rst", "text/sub/rows.jsonl")
    write(tmp_path, "text/.hidden.txt", "text/.git/config.txt", "text/picture.png", "text/settings.json")
    write(tmp_path, "text/__init__.py", content="")
    found = listed(tmp_path / "text", tmp_path=tmp_path)
    expected = ["a.TXT", "b.md", "z.py", "sub/c.rst", "sub/rows.jsonl"]
    assert [str(path.relative_to(tmp_path / "text")) for path in found] == expected
    write(tmp_path, "rows/a.json", "rows/b.json")
    assert names(tmp_path / "rows", tmp_path=tmp_path) == ["a.json", "b.json"], "where there is nothing else"


@pytest.mark.parametrize(
    ("name", "fact"),
    [
        ("none.txt", "no"), ("empty.txt", "0 bytes"), ("void", "0 "), ("pictures", "1 "), ("model.PT", ".arrow, .csv"),
        ("pipe", "file"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("setting", ["data.train", "data.eval"])
def test_a_source_that_cannot_be_read_is_refused_with_the_place_looked_at(tmp_path, name, fact, setting):
    write(tmp_path, "model.PT", "pictures/a.png", "a.txt")
    write(tmp_path, "empty.txt", "void/a.txt", content="")
    os.mkfifo(tmp_path / "pipe")
    source = tmp_path / name
    request = request_for(source, cache_root=tmp_path)
    if setting == "data.eval":
        request = request_for(tmp_path / "a.txt", cache_root=tmp_path, eval_source=str(source))
    with pytest.raises(InputError) as caught:
        list_files(request)
    head, _, reason = str(caught.value).partition(str(source))
    assert head == f"{setting}: " and fact in reason


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_that_draws_nothing_is_refused(tmp_path, weight):
    write(tmp_path, "a.txt")
    with pytest.raises(InputError, match=r"weight.*above 0"):
        listed((tmp_path / "a.txt", weight), tmp_path=tmp_path)


def test_a_folder_of_rows_is_its_training_split_as_on_the_hub_or_the_one_asked_for(tmp_path):
    write(tmp_path, "set/data/train-00000-of-00002.parquet", "set/data/train-00001-of-00002.parquet")
    write(tmp_path, "set/data/test-00000-of-00001.parquet", "set/README.md", "set/dataset_info.json")
    expected = ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"]
    assert names(tmp_path / "set", tmp_path=tmp_path) == expected
    write(tmp_path, "splits/train.jsonl", "splits/dev.jsonl.gz", "splits/test.csv")
    source = DataSource(source=str(tmp_path / "splits"), split="test")
    request = request_for(cache_root=tmp_path, eval_source=source.source, eval_split="validation")
    found = list_files(msgspec.structs.replace(request, sources=(source,)))
    assert [Path(file.path).name for file in (*found.files, *found.eval_files)] == ["test.csv", "dev.jsonl.gz"]


@pytest.fixture(scope="module")
def saved_once(tmp_path_factory):
    from datasets import Dataset, DatasetDict

    folder = tmp_path_factory.mktemp("saved")
    train = Dataset.from_dict({"text": ["one", "two", "three"]})
    DatasetDict({"train": train, "test": train.select([0])}).save_to_disk(folder / "both", num_proc=None)
    train.save_to_disk(folder / "alone", num_shards=2)
    return folder


@pytest.fixture
def saved(tmp_path, saved_once):
    """Folders as the library itself writes them, where a test may change them."""
    return shutil.copytree(saved_once, tmp_path, dirs_exist_ok=True)


def test_what_datasets_saved_is_the_files_that_it_lists(saved, tmp_path):
    write(tmp_path, "alone/left-behind.arrow")
    expected = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    assert names(tmp_path / "alone", tmp_path=tmp_path) == expected
    both = saved / "both"
    assert listed(both, tmp_path=tmp_path) == [both / "train" / "data-00000-of-00001.arrow"]


def part_problem(tmp_path, name, **part):
    request = request_for(cache_root=tmp_path)
    with pytest.raises(InputError) as caught:
        list_files(msgspec.structs.replace(request, sources=(DataSource(source=str(tmp_path / name), **part),)))
    return str(caught.value)


def test_a_part_that_a_source_has_not_is_named_with_what_it_has_and_a_lost_file_is_refused(saved, tmp_path):
    write(saved, "a.jsonl", "set/train.jsonl", "set/test.jsonl")
    for name, part, facts in (
        ("both", {"split": "dev"}, ("split dev", "test, train")),
        ("set", {"split": "dev"}, ("split dev", "test, train")),
        ("set", {"subset": "en"}, ("subset en", "none")),
        ("alone", {"split": "dev"}, ("split dev", "one data set")),
        ("a.jsonl", {"split": "dev"}, ("split dev", "only folders and data sets")),
    ):
        head, _, reason = part_problem(tmp_path, name, **part).partition(f"{tmp_path}/{name} ")
        assert head == "data.train: " and all(fact in reason for fact in facts), reason
    (saved / "alone" / "data-00001-of-00002.arrow").unlink()
    assert "2 files" in part_problem(tmp_path, "alone") and "state.json" in part_problem(tmp_path, "alone")
    (saved / "alone" / "state.json").write_text("{")
    assert "damaged" in part_problem(tmp_path, "alone")


CHAT = {"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]}
ROWS = [
    ({"text": "a"}, DataFormat.TEXT),
    (CHAT, DataFormat.CHAT),
    ({"conversations": CHAT["messages"], "text": "a"}, DataFormat.CHAT),
    ({"instruction": "a", "input": "", "output": "b"}, DataFormat.CHAT),
    ({"prompt": "a", "completion": "b"}, DataFormat.PROMPT_COMPLETION),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, DataFormat.PREFERENCE),
    ({"input_ids": [1, 2]}, DataFormat.TOKENS),
    ({"chosen": None, "rejected": None, "text": "a"}, DataFormat.TEXT),
    ({"title": "a"}, None),
]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("as_array", [True, False])
@pytest.mark.parametrize(("row", "shape"), ROWS, ids=lambda value: str(value)[:30])
def test_the_first_row_of_a_json_file_tells_the_shape_and_its_rows_are_counted(row, shape, as_array, indent, tmp_path):
    other = {**row, "note": "é" * 3000}
    text = json.dumps([row, other] if as_array else row, indent=indent)
    (tmp_path / "rows.json").write_text(f"\ufeff\n {text}\n")
    (tmp_path / "rows.jsonl").write_text(f"\ufeff\n  \n{json.dumps(row)}\nnot JSON\n")
    of_lines, listed = (listed_request(tmp_path / name, cache_root=tmp_path) for name in ("rows.jsonl", "rows.json"))
    assert shape_of_first_row(listed) is shape_of_first_row(of_lines) is shape
    if shape is None:
        with pytest.raises(InputError, match=r"in the columns of .*rows\.json: title"):
            refuse_first_row(listed)
    else:
        assert refuse_first_row(listed) is refuse_first_row(of_lines) is shape
    if as_array and indent is None:
        assert row_sizes(listed) == RowSizes(2, len(json.dumps(other)))


@pytest.mark.parametrize("num_files", [1, 3, 40])
@pytest.mark.parametrize("header", ["", "text\n"])
def test_the_number_of_rows_is_estimated_from_lines_at_places_all_over_the_files(num_files, header, tmp_path):
    """Also of files whose rows become longer from the first to the last."""
    suffix = ".csv" if header else ".jsonl"
    for number in range(num_files):
        lines = (json.dumps({"text": "a" * (50 + row // 100)}) + "\n" for row in range(20_000 // num_files))
        (tmp_path / f"rows-{number}{suffix}").write_text(header + "".join(lines))
    sizes = sampled_row_sizes(listed_request(tmp_path, cache_root=tmp_path))
    assert sizes is not None and sizes.longest_bytes is None
    assert sizes.num_rows == pytest.approx(20_000, rel=0.1)


def test_rows_that_are_no_lines_are_not_sampled(tmp_path):
    contents = {"rows.json": b"[]", "rows.jsonl.gz": gzip.compress(b'{"text": "a"}\n')}
    for name, content in contents.items():
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / name).write_bytes(content)
        assert sampled_row_sizes(listed_request(folder / name, cache_root=tmp_path)) is None


@pytest.mark.parametrize(
    "content", ['[{"text": "a"}, {"text": NaN}', '[{"text": "a"', "[1, 2", json.dumps([{"text": "a" * 10**5}] * 9)]
)
def test_rows_of_a_damaged_array_or_one_above_the_limit_are_not_counted(content, tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "_LARGEST_ARRAY", 100)
    (tmp_path / "rows.json.gz").write_bytes(gzip.compress(content.encode()))
    assert row_sizes(listed_request(tmp_path / "rows.json.gz", cache_root=tmp_path)) is None


def test_a_header_tells_the_shape_and_a_character_that_is_cut_is_no_fault(tmp_path: Path) -> None:
    tables = {"a.csv": "id;prompt;completion\n1;a;b\n", "b.tsv": "prompt\tcompletion\n"}
    for name, content in (tables | {"c.csv": '"prompt","completion"\n'}).items():
        (tmp_path / name).write_text(content)
        assert shape_of_first_row(listed_request(tmp_path / name, cache_root=tmp_path)) is DataFormat.PROMPT_COMPLETION
    (tmp_path / "text.txt").write_text("a" * 4095 + LETTER[-2])
    refuse_first_row(listed_request(tmp_path / "text.txt", cache_root=tmp_path))


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff\xfe{}", b'["text"]', b"", b'{"text": "' + b"x" * 2**20 + b'"}'],
    ids=lambda value: str(value)[:12],
)
def test_what_cannot_be_read_is_left_to_preparation(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content or b"\n")
    assert shape_of_first_row(listed_request(tmp_path / "rows.jsonl", cache_root=tmp_path)) is None


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'{"text": "a", "score": NaN}\n', "is not valid JSON: .*byte 23.*write null"),
        (b'{"text": "a", "score": 1e400}\n', "is not valid JSON: Number out of range"),
        (b'{"text": "\\ud800"}\n', r"is not valid JSON: .*ud800 is half a character"),
        (b'{"text": "' + b"a" * 5000 + b'\xff"}\n', "is not UTF-8"),
        (b'{\n  "text": "a"\n}\n', r"is not valid JSON: .*jq -c \. FILE"),
        (b"[1]\n", "is a list, not an object"),
        (b"{}\n", "has no columns"),
        (b"[" * 5000 + b"\n", ".*nested too deep"),
    ],
)
def test_a_bad_first_row_is_refused_with_the_reason_that_preparation_gives(content, reason, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(content)
    request = listed_request(tmp_path / "rows.jsonl", cache_root=tmp_path)
    with pytest.raises(InputError, match=rf"rows\.jsonl: its first row {reason}"):
        refuse_first_row(request)
    (row,) = [row for _, row in read_rows(request.files[0])][:1]
    assert isinstance(row, BadRow) is (content != b"{}\n")


LETTER = "sch\u00f6n"


@pytest.mark.parametrize("encoding", ["latin1", "utf-16"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", f'{{"text": "{LETTER}"}}\n'),
        ("rows.json", f'[{{"text": "{LETTER}"}}]'),
        ("rows.csv", f"{LETTER},text\na,b\n"),
        ("below its header.csv", f"text\n{LETTER}\n"),
        ("text.txt", LETTER),
    ],
)
def test_a_file_in_another_encoding_is_refused_with_the_command_that_converts_it(name, text, encoding, tmp_path):
    (tmp_path / name).write_bytes(text.encode(encoding))
    with pytest.raises(InputError, match=r"is not UTF-8 \(byte 0x") as caught:
        refuse_first_row(listed_request(tmp_path / name, cache_root=tmp_path))
    (line,) = str(caught.value).splitlines()
    command = line[line.index("iconv") :].partition("; data.bad_rows=skip")[0]
    subprocess.run(["sh", "-c", command], check=True)
    assert (tmp_path / f"utf8-{name}").read_text() == text
    refuse_first_row(listed_request(tmp_path / f"utf8-{name}", cache_root=tmp_path))


def test_the_standard_library_is_its_own_modules_and_one_without_sources_is_refused(tmp_path: Path) -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    paths = [Path(found.path).relative_to(folder) for found in python_stdlib_files(folder)]
    assert {"argparse.py", "ast.py"} <= set(map(str, paths)) and all(path.suffix == ".py" for path in paths)
    assert not [path for path in paths if STDLIB_EXCLUDED & set(path.parts)]
    write(tmp_path, "os.py", content="x" * 120)
    with pytest.raises(InputError, match=r"120 bytes.* 500000(?s:.*)libpython3-stdlib"):
        python_stdlib_files(tmp_path)
