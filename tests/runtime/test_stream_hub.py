"""Files of a stream that are on a hub: fetched when they are read, removed when they were, and what goes wrong."""

import json
from typing import Any

import pytest
from hub_questions import ask_hub
from hub_server import COMMIT, Hub, serving

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
folder, names, sizes = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
files = [SourceFile(path=name, hub=name, size_bytes=size, mtime_ns=0) for name, size in zip(names, sizes)]
reader = StreamReader(files, 10**6, (), RowReading(DataFormat.TEXT, {}, 9), FileFetcher(folder))
try:
    window = reader.read_window()
    read = [[item.where, item.reason if hasattr(item, "reason") else item.content] for item in window]
except ShardwiseError as error:
    read = [int(error.exit_code), str(error)]
print(json.dumps([read, sorted(str(path) for path in folder.rglob("*"))]))
"""


def address(name: str) -> str:
    return f"hf://datasets/org/rows@{COMMIT}/{name}"


@pytest.fixture
def hub():
    with serving(Hub(files={"org/rows": FILES})) as served:
        yield served


def read(folder, url, *names, sizes=None):
    """What a pass over the files reads, or the exit code and words of its error; and what is left in the folder."""
    given = [json.dumps([*map(address, names)]), json.dumps(sizes or [len(FILES.get(name, b"")) for name in names])]
    found: list[Any] = ask_hub(PROGRAM, str(folder), *given, home=folder, endpoint=url)
    return found


def test_a_file_is_fetched_and_removed_and_its_rows_are_named_by_its_address(tmp_path, hub):
    items, left = read(tmp_path, hub.url, "data/a.jsonl", "data/b.jsonl")
    assert items == [
        [f"{address('data/a.jsonl')}:1", "one"],
        [f"{address('data/b.jsonl')}:1", 'field "text" is empty'],
    ]
    assert [path for path in left if path.endswith(".jsonl")] == []


def test_a_hub_that_stumbles_is_asked_again_and_one_that_is_down_ends_the_run(tmp_path, hub):
    hub.refuses["HEAD /datasets/org/rows/resolve"] = 503
    (code, words), _ = read(tmp_path, hub.url, "data/a.jsonl")
    assert code == 4 and words.startswith(f"data.train: org/rows@{COMMIT}: data/a.jsonl ") and "--resume" in words
    assert len([line for line in hub.requests if line.startswith("HEAD")]) >= 3 * 5


def test_a_file_that_is_gone_is_asked_for_once_and_one_of_another_size_is_refused(tmp_path, hub):
    (code, words), _ = read(tmp_path, hub.url, "data/gone.jsonl", sizes=[5])
    assert code == 4 and "data/gone.jsonl cannot be fetched: " in words
    assert len([line for line in hub.requests if "gone.jsonl" in line]) <= 2
    (code, words), _ = read(tmp_path, hub.url, "data/a.jsonl", sizes=[99])
    assert code == 4 and words.startswith(address("data/a.jsonl")) and "16" in words and "99" in words
