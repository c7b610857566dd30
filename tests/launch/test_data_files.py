"""Which files a source is, on real folders, and the standard library of whatever Python runs the tests."""

import os
import sysconfig
from pathlib import Path

import pytest
from prepare_request_factory import listed_request, request_for

from launch.data_files import (
    PYTHON_STDLIB,
    STDLIB_LEFT_OUT,
    STDLIB_MAX_BYTES,
    STDLIB_MIN_BYTES,
    list_files,
    python_stdlib_files,
    source_bytes,
)
from trainer.spec.errors import InputError
from trainer.spec.job import DataFormat

STDLIB = Path(sysconfig.get_path("stdlib"))


def write(folder, *names, content="text\n"):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def listed(*sources, tmp_path, **settings):
    request = listed_request(*sources, cache_root=tmp_path / "cache", **settings)
    return [Path(file.path) for file in request.files]


def test_a_file_is_itself_whatever_its_name(tmp_path):
    write(tmp_path, "notes", 'odd name\'s "copy"\n.xyz')
    for path in tmp_path.iterdir():
        assert listed(path, tmp_path=tmp_path) == [path]


def test_sizes_times_and_weights_stand_beside_the_paths(tmp_path):
    write(tmp_path, "a.txt", "b.txt")
    os.utime(tmp_path / "a.txt", ns=(5, 7))
    first, second = listed_request((tmp_path / "a.txt", 2.0), tmp_path / "b.txt", cache_root=tmp_path).files
    assert (first.path, first.size_bytes, first.mtime_ns, first.weight) == (str(tmp_path / "a.txt"), 5, 7, 2.0)
    assert second.weight == 1.0


def test_a_relative_path_is_made_absolute(tmp_path, monkeypatch):
    write(tmp_path, "a.txt")
    monkeypatch.chdir(tmp_path)
    assert listed("a.txt", tmp_path=tmp_path) == [tmp_path / "a.txt"]


def test_a_folder_is_its_text_sorted_with_sub_folders_and_without_what_is_hidden_or_empty(tmp_path):
    write(tmp_path, "text/b.md", "text/a.TXT", "text/z.py", "text/sub/c.rst", "text/sub/rows.jsonl")
    write(tmp_path, "text/.hidden.txt", "text/.git/config.txt", "text/picture.png", "text/settings.json")
    write(tmp_path, "text/__init__.py", content="")
    found = listed(tmp_path / "text", tmp_path=tmp_path)
    assert [str(path.relative_to(tmp_path / "text")) for path in found] == [
        "a.TXT",
        "b.md",
        "z.py",
        "sub/c.rst",
        "sub/rows.jsonl",
    ]


def test_json_files_are_rows_only_where_a_folder_has_nothing_else(tmp_path):
    write(tmp_path, "rows/a.json", "rows/b.json")
    assert [path.name for path in listed(tmp_path / "rows", tmp_path=tmp_path)] == ["a.json", "b.json"]


def test_several_sources_keep_their_order(tmp_path):
    write(tmp_path, "b.txt", "a.txt")
    names = [path.name for path in listed(tmp_path / "b.txt", tmp_path / "a.txt", tmp_path=tmp_path)]
    assert names == ["b.txt", "a.txt"]


def test_the_evaluation_source_is_listed_beside(tmp_path):
    write(tmp_path, "a.txt", "b.txt")
    request = listed_request(tmp_path / "a.txt", cache_root=tmp_path, eval_source=str(tmp_path / "b.txt"))
    assert [Path(file.path).name for file in request.eval_files] == ["b.txt"]


def test_source_bytes_count_by_weight(tmp_path):
    write(tmp_path, "a.txt", content="x" * 100)
    write(tmp_path, "b.txt", content="x" * 10)
    request = listed_request((tmp_path / "a.txt", 2.0), (tmp_path / "b.txt", 0.5), cache_root=tmp_path)
    assert source_bytes(request) == 205


REFUSED = [
    ("none.txt", "data.train: {source} was not found: there is no {source}"),
    ("empty.txt", "data.train: {source} is empty (0 bytes)"),
    ("void", "data.train: {source} holds no text among its 0 non-empty files"),
    ("pictures", "data.train: {source} holds no text among its 1 non-empty files"),
    ("table.parquet", ".parquet files come with shardwise 0.4"),
    ("table.CSV", ".CSV files come with shardwise 0.4"),
    ("pipe", "is neither a file nor a folder"),
]


@pytest.mark.parametrize("name, message", REFUSED)
@pytest.mark.parametrize("setting", ["data.train", "data.eval"])
def test_a_source_that_cannot_be_read_is_refused_with_the_place_looked_at(tmp_path, name, message, setting):
    write(tmp_path, "table.parquet", "table.CSV", "pictures/a.png", "a.txt")
    write(tmp_path, "empty.txt", "void/a.txt", content="")
    os.mkfifo(tmp_path / "pipe")
    source = tmp_path / name
    request = (
        request_for(source, cache_root=tmp_path)
        if setting == "data.train"
        else request_for(tmp_path / "a.txt", cache_root=tmp_path, eval_source=str(source))
    )
    with pytest.raises(InputError) as caught:
        list_files(request)
    expected = message.format(source=source).replace("data.train", setting)
    assert expected in str(caught.value)
    assert str(caught.value).startswith(setting)


def test_a_missing_relative_path_is_named_in_full(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        listed("no/such.txt", tmp_path=tmp_path)
    assert f"there is no {tmp_path}/no/such.txt" in str(caught.value)
    assert "hub" not in str(caught.value)


def test_what_looks_like_a_data_set_of_the_hub_is_said_to_come_later(tmp_path):
    with pytest.raises(InputError, match=r"data sets of the hub come with shardwise 0\.4"):
        listed("roneneldan/TinyStories", tmp_path=tmp_path)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_that_draws_nothing_is_refused(tmp_path, weight):
    write(tmp_path, "a.txt")
    with pytest.raises(InputError, match="must be above 0"):
        listed((tmp_path / "a.txt", weight), tmp_path=tmp_path)


@pytest.mark.parametrize("shape", [DataFormat.CHAT, DataFormat.PREFERENCE, DataFormat.PROMPT_COMPLETION])
def test_a_shape_of_a_later_version_is_refused_before_anything_is_listed(tmp_path, shape):
    with pytest.raises(InputError, match=rf"data\.format: {shape} comes with shardwise 0\.4"):
        list_files(request_for("none.txt", cache_root=tmp_path, format=shape))


def test_the_standard_library_is_enough_text_and_not_too_much(tmp_path):
    request = listed_request(PYTHON_STDLIB, cache_root=tmp_path)
    assert STDLIB_MIN_BYTES < source_bytes(request) <= STDLIB_MAX_BYTES
    assert len(request.files) > 100


def test_the_standard_library_is_its_own_modules_as_text():
    paths = [Path(found.path).relative_to(STDLIB) for found in python_stdlib_files(STDLIB)]
    assert {"argparse.py", "json/decoder.py", "asyncio/events.py"} <= set(map(str, paths))
    assert all(path.suffix == ".py" for path in paths)
    assert not [path for path in paths if STDLIB_LEFT_OUT & set(path.parts)]
    assert len(set(paths)) == len(paths)
    for path in paths:
        content = (STDLIB / path).read_bytes()
        assert b"\0" not in content
        content.decode()


def test_the_order_does_not_depend_on_the_disk(tmp_path):
    content = "x" * 1000
    names = [f"module{number:03}.py" for number in range(600)]
    write(tmp_path, *reversed(names), "test/test_a.py", "site-packages/a.py", "config-3.11/a.py", content=content)
    assert [Path(found.path).name for found in python_stdlib_files(tmp_path)] == names


def test_a_large_standard_library_is_capped_at_whole_files(tmp_path):
    write(tmp_path, *(f"m{number:02}.py" for number in range(20)), content="x" * 1_000_000)
    assert len(python_stdlib_files(tmp_path)) == 8


def test_a_standard_library_without_sources_says_what_to_do(tmp_path):
    write(tmp_path, "os.py", content="x" * 120)
    with pytest.raises(InputError) as caught:
        python_stdlib_files(tmp_path)
    assert f"{tmp_path} holds 120 bytes of sources, 500000 needed" in str(caught.value)
    assert "libpython3-stdlib" in str(caught.value)
    assert "data.train=FILE" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3
