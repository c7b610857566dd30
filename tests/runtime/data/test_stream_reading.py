"""How a stream is cut into windows, from any place, and how its files are fetched from a hub."""

import json
from collections import Counter
from itertools import chain
from typing import Any

import pytest
from hub_server import COMMIT, Hub, ask_hub, serving
from prepare_request_factory import listed_request
from stream_factory import reader_of, write_files, write_rows

from shardwise.trainer.runtime.data.sources.files import BadRow
from shardwise.trainer.runtime.data.sources.scan import BLOCK_CHARS, Block


@pytest.fixture
def request_of(tmp_path):
    def make(*sources, window_bytes=1000):
        return listed_request(*sources, cache_root=tmp_path / "cache", window_bytes=window_bytes)

    return make


def names(items):
    """`F.R` of each row."""
    return [item.content.split()[0] for item in items]


def windows(reader, count):
    return [names(reader.read_window()) for _ in range(count)]


def test_a_pass_is_every_row_once_in_the_order_of_the_files_and_each_later_pass_is_in_another(request_of, tmp_path):
    write_files(tmp_path / "rows", num_files=5)
    listed = [f"{file}.{row}" for file in range(5) for row in range(60)]
    read = list(chain(*windows(reader_of(request_of(tmp_path / "rows"), tmp_path), 24)))
    first, second, third = (read[start : start + len(listed)] for start in range(0, 3 * len(listed), len(listed)))
    assert first == listed
    assert second != listed and third not in (listed, second)
    assert sorted(second) == sorted(third) == sorted(listed)


def test_a_window_ends_with_the_document_that_reaches_its_size(request_of, tmp_path):
    write_files(tmp_path / "rows")
    reader = reader_of(request_of(tmp_path / "rows"), tmp_path)
    items: list[list[Any]] = [reader.read_window() for _ in range(4)]
    sizes = [[len(item.content) for item in window] for window in items]
    assert all(sum(window) >= 1000 > sum(window[:-1]) for window in sizes)
    write_rows(tmp_path / "few.jsonl", [f"0.{row}" for row in range(9)])
    assert [len(window) for window in windows(reader_of(request_of(tmp_path / "few.jsonl"), tmp_path), 3)] == [9, 9, 9]


@pytest.mark.parametrize("after", [1, 4, 9])
def test_reading_goes_on_at_a_place_as_if_it_had_never_stopped(request_of, tmp_path, after):
    write_files(tmp_path / "rows")
    request = request_of(tmp_path / "rows")
    straight = reader_of(request, tmp_path)
    windows(straight, after)
    again = reader_of(request, tmp_path, straight.places)
    assert windows(again, 8) == windows(straight, 8)


def test_each_source_gives_every_window_its_weight_times_its_bytes(request_of, tmp_path):
    """Rows of one length; b has a third of the rows of a, and counts three times as much, half of c's weight."""
    for letter, count in (("a", 300), ("b", 100), ("c", 100)):
        write_rows(tmp_path / f"{letter}.jsonl", [f"{letter}.{row:03}" for row in range(count)])
    sources = [(tmp_path / "a.jsonl", 1.0), (tmp_path / "b.jsonl", 3.0), (tmp_path / "c.jsonl", 6.0)]
    reader = reader_of(request_of(*sources, window_bytes=4000), tmp_path)
    for window in (reader.read_window() for _ in range(8)):
        share = Counter(name[0] for name in names(window))
        assert abs(share["a"] - share["b"]) <= 1 and abs(share["c"] - 2 * share["b"]) <= 2
        assert {item.weight for item in window if isinstance(item, Block)} == {1.0}, "rows are learned once each"


def test_a_source_that_ends_begins_again_while_the_others_go_on(request_of, tmp_path):
    write_rows(tmp_path / "a.jsonl", [f"a.{row:03}" for row in range(400)])
    write_rows(tmp_path / "b.jsonl", [f"b.{row:03}" for row in range(20)])
    request = request_of((tmp_path / "a.jsonl", 1.0), (tmp_path / "b.jsonl", 10.0), window_bytes=3000)
    reader = reader_of(request, tmp_path)
    read = Counter(chain(*windows(reader, 3)))
    places = reader.places
    assert {read[f"a.{row:03}"] for row in range(200)} == {1}
    assert min(read[f"b.{row:03}"] for row in range(20)) >= 6
    assert places[0].num_passes == 0 and places[1].num_passes >= 6


def test_a_text_longer_than_a_window_goes_on_in_the_next_as_another_document(request_of, tmp_path):
    line = "a line of a very long text\n"
    (tmp_path / "long.txt").write_text(line * (3 * BLOCK_CHARS // len(line)))
    reader = reader_of(request_of(tmp_path / "long.txt"), tmp_path)
    first, second, third = (reader.read_window() for _ in range(3))
    assert [len(window) for window in (first, second, third)] == [1, 1, 1]
    blocks = [item for item in (*first, *second) if isinstance(item, Block)]
    assert len(blocks) == 2 and all(each.opens_document and str(each.content).endswith("\n") for each in blocks)


def test_bad_rows_have_their_place_and_a_text_is_bad_from_its_defect_on(request_of, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", ["0.0", "0.1", "0.2"])
    rows.write_text(rows.read_text().replace("0.1 is a row of text", ""))
    (tmp_path / "short.txt").write_bytes(b"one\ntwo\xff\n")
    (tmp_path / "cut.txt").write_bytes("was cut off: é".encode()[:-1])
    (tmp_path / "long.txt").write_bytes(b"a line of text\n" * 200_000 + b"\xff")
    names = ("short.txt", "cut.txt", "long.txt", "rows.jsonl")
    request = request_of(*(tmp_path / name for name in names), window_bytes=10**8)
    items = reader_of(request, tmp_path).read_window()
    bad = [item for item in items if isinstance(item, BadRow)]
    assert [bad_row.where.rpartition("/")[2] for bad_row in bad] == ["short.txt", "cut.txt", "long.txt", "rows.jsonl:2"]
    assert "byte 0xff at offset 7 is not UTF-8" in bad[0].reason
    good = [item for item in items if isinstance(item, Block)]
    assert 0 < sum(len(item.content) for item in good) < 3_000_000
    assert {item.where.rpartition("/")[2] for item in good} == {"long.txt", "rows.jsonl:1", "rows.jsonl:3"}


FILES = {"data/a.jsonl": b'{"text": "one"}\n', "data/b.jsonl": b'{"text": ""}\n'}

PROGRAM = """
import json, sys, time
from pathlib import Path
from shardwise.trainer.runtime.data.sources.rows import RowReading
from shardwise.trainer.runtime.data.stream.windows import FileFetcher, StreamReader
from shardwise.trainer.spec.data.profile import SourceFile
from shardwise.trainer.spec.errors import ShardwiseError
from shardwise.trainer.spec.job.sections import DataFormat

time.sleep = lambda seconds: None  # the library and we wait for minutes between questions
folder, found = Path(sys.argv[1]), []
for sizes in json.loads(sys.argv[2]):
    files = [SourceFile(path=name, hub=name, size_bytes=size, mtime_ns=0) for name, size in sizes.items()]
    reader = StreamReader(files, 10**6, (), RowReading(DataFormat.TEXT, {}, 9), FileFetcher(folder))
    try:
        window = reader.read_window()
        found.append([[item.where, item.reason if hasattr(item, "reason") else item.content] for item in window])
    except ShardwiseError as error:
        found.append([int(error.exit_code), str(error)])
print(json.dumps([found, sorted(str(path) for path in folder.rglob("*"))]))
"""


def address(name: str) -> str:
    return f"hf://datasets/org/rows@{COMMIT}/data/{name}.jsonl"


def test_files_of_a_hub_are_fetched_removed_and_named_by_their_address_and_what_goes_wrong_ends_the_run(tmp_path):
    """Each in a pass of its own: two files; one that the hub refuses; one that is gone; one of another size."""
    passes = [{"a": 16, "b": 13}, {"down": 16}, {"gone": 5}, {"a": 99}]
    with serving(Hub(files={"org/rows": FILES})) as hub:
        hub.refuses[f"HEAD /datasets/org/rows/resolve/{COMMIT}/data/down"] = 503
        given = json.dumps([{address(name): size for name, size in sizes.items()} for sizes in passes])
        found, left = ask_hub(PROGRAM, str(tmp_path), given, home=tmp_path, endpoint=hub.url)
    items, *errors = found
    assert items == [[f"{address('a')}:1", "one"], [f"{address('b')}:1", 'field "text" is empty']]
    assert [path for path in left if path.endswith(".jsonl")] == []
    assert [code for code, _ in errors] == [4, 4, 4]
    down, gone, changed = (words for _, words in errors)
    assert down.startswith(f"data.train: org/rows@{COMMIT}: data/down.jsonl ") and "--resume" in down
    assert len([line for line in hub.requests if line.startswith("HEAD") and "down" in line]) >= 3 * 5
    assert "data/gone.jsonl cannot be fetched: " in gone
    assert len([line for line in hub.requests if "gone.jsonl" in line]) <= 2
    assert changed.startswith(address("a")) and "16" in changed and "99" in changed
