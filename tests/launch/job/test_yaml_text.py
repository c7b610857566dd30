"""YAML as people mean it, and one line with its place for whatever is wrong."""

import re

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shardwise.launch.job.yaml_text import LARGEST_FILE_BYTES, read_yaml, read_yaml_file, write_scalar
from shardwise.trainer.spec.errors import InputError

TEXTS = ["off", "no", "on", "0x10", "0o17", "24:00:00", "2024-01-01", "1%", "none", "1e5 steps", "1e999999999",
         "9" * 40, "="]  # fmt: skip
VALUES = {
    "true": True, "False": False, "1e-4": 1e-4, "1.5e3": 1500.0, "3E+2": 300.0, ".5": 0.5, "2.": 2.0, "010": 10,
    "1_000": 1000, "-7": -7, "null": None, "~": None, "": None, ".inf": float("inf"), "'5'": "5",
}  # fmt: skip


def test_scalars_are_what_they_look_like_and_merge_keys_and_anchors_work():
    for written, value in (VALUES | {text: text for text in TEXTS}).items():
        found = read_yaml(written, origin="x")
        assert (found, type(found)) == (value, type(value)), written
    text = "base: &base {a: 1, b: 2}\nother: {<<: *base, b: 3}\n"
    assert read_yaml(text, origin="x") == {"base": {"a": 1, "b": 2}, "other": {"a": 1, "b": 3}}


@pytest.mark.parametrize(
    ("text", "place", "fact"),
    [
        ("a: [1, 2", "line 1, column 9: ", "']'"),
        ("a: 1\nb: 2\na: 3\n", "line 3, column 1: ", "'a'"),
        ("a: !!python/object:os.system x", "line 1, column 4: ", "constructor"),
        ("a: !!int many", "line 1, column 4: ", "'many'"),
        ("--- a\n--- b", "line 2, column 1: ", "another document"),
        ("{[1]: 2, ? [3] : 4}", "", "unhashable"),
        ("a\0: 1", "line 1: ", "character"),
        pytest.param("[" * 1000, "", "nested", id="depth"),
    ],
)
def test_each_fault_is_one_line_with_its_place(text, place, fact):
    with pytest.raises(InputError) as caught:
        read_yaml(text, origin="job.yaml")
    assert str(caught.value).startswith(f"job.yaml: {place}") and fact in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_a_folder_and_other_bytes_are_one_line(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"a: 1\nb: caf\xe9\n")
    (tmp_path / "marked.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml_file(tmp_path / "marked.yaml") == {"a": 1}, "a byte order mark is no part of the first key"
    (tmp_path / "model.safetensors").write_bytes(b"\0" * (LARGEST_FILE_BYTES + 1))
    cases = {
        tmp_path / "gone.yaml": "no such file", tmp_path: "folder", tmp_path / "latin.yaml": "line 2: .*UTF-8",
        tmp_path / "model.safetensors": "1 MiB", tmp_path / "latin.yaml" / "x": "Not a directory",
        tmp_path / ("n" * 300): "File name too long",
    }  # fmt: skip
    for path, fact in cases.items():
        with pytest.raises(InputError, match=f"{re.escape(path.name)}: .*{fact}"):
            read_yaml_file(path)


PLAIN = st.text(st.characters(codec="utf-8"), max_size=20)
VALUES_OF_A_LINE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PLAIN, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)  # a busy machine is no fault
@given(VALUES_OF_A_LINE)
@example({"source": "x", "weight": 1.0})
def test_what_is_written_on_one_line_reads_back(value):
    written = write_scalar(value)
    assert "\n" not in written
    assert read_yaml(f"key: {written}  # from: somewhere\n", origin="x") == {"key": value}


@settings(deadline=None)
@given(PLAIN)
@example("off")
@example("1e-4")
@example("2024-01-01")
@example("")
def test_text_that_is_written_means_the_same_to_a_reader_of_yaml_1_1(value):
    assert yaml.safe_load(write_scalar(value)) == value
