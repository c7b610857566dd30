"""Streams: how they are cut into windows and fetched, one order for any ranks, resuming, and how they end."""

import json
import os
import re
import signal
import time
from collections import Counter
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hub_server import COMMIT, Hub, ask_hub, serving
from prepare_request_factory import listed_request
from stream_factory import paths_of, prepared_stream, reader_of, stream_plan, write_files, write_rows
from table_files import lines_of
from tokenizers import Tokenizer

from shardwise.trainer.runtime.data.batches import step_micro_batches
from shardwise.trainer.runtime.data.cache import TokenRows, lock_folder
from shardwise.trainer.runtime.data.sources.files import BadRow
from shardwise.trainer.runtime.data.sources.scan import BLOCK_CHARS, Block
from shardwise.trainer.runtime.data.stream.rows import WINDOWS_AHEAD, NodePlace, StreamIndex, StreamRows
from shardwise.trainer.runtime.run.state import IncidentLog, RunPaths
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.sections import BadRows, DataFormat

NUM_STEPS = 40


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    write_files(folder / "rows")
    return folder


@pytest.fixture(scope="module")
def profile(workplace):
    return prepared_stream(workplace / "rows", cache_root=workplace / "cache")


class Reading:
    paths: RunPaths  # of the node, which its first rank sets

    def __init__(self, profile, run_dir, *, attempt=1, local_rank=0, num_local_ranks=1, **settings):
        self.incidents = IncidentLog()
        self.waits: list[str] = []
        resume = settings.pop("resume", False)
        plan = msgspec.structs.replace(stream_plan(profile, **settings), resume=resume)
        paths = paths_of(run_dir, attempt=attempt) if local_rank == 0 else self.paths
        Reading.paths = paths
        self.cache_root = Path(profile.cache_dir).parent.parent
        self.rows = StreamRows(
            plan, paths, on_wait=self.waits.append, incidents=self.incidents, is_first=local_rank == 0,
            node=NodePlace(local_rank, num_local_ranks),
        )  # fmt: skip
        self.sequences = plan.schedule.sequences_per_step

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.rows.close()

    def batch(self, step, *, rank=0, num_ranks=1, micro_batch=4):
        """The ids of this rank's rows of a step, padding left out, and the terms of all ranks."""
        rows, place, seed = self.rows.at(step)
        batches, num_terms = step_micro_batches(
            rows, step=place, seed=seed, sequences_per_step=self.sequences, rank=rank, num_ranks=num_ranks,
            micro_batch=micro_batch, accumulation=self.sequences // (num_ranks * micro_batch),
        )  # fmt: skip
        return [tuple(row[row != 0].tolist()) for batch in batches for row in batch.input_ids], num_terms


def ids_of(reading, steps, **arrangement):
    return [reading.batch(step, **arrangement) for step in steps]


@pytest.fixture(scope="module")
def straight(profile, workplace):
    run_dir, folder = workplace / "straight", workplace / "cache" / "streams"
    most, steps, seeds = 0, [], []
    with Reading(profile, run_dir) as reading:
        for step in range(NUM_STEPS):
            steps.append(reading.batch(step))
            seeds.append(reading.rows.at(step).seed)
            most = max(most, len(list(folder.glob("run-*/window-*"))))
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/streams/run-" in line]
        assert len({line.rpartition("/window-")[2][:8] for line in maps}) <= 1, "what was removed takes room still"
    index = codec.read(run_dir / "stream" / "index.json", StreamIndex)
    assert [path.name for path in folder.iterdir()] == ["locks"] and not list((folder / "locks").iterdir())
    assert most <= WINDOWS_AHEAD + 1, f"{most} windows on disk"
    assert len(index.windows) > 6, "too few windows to test anything"
    return steps, index, seeds


def rows_in(profile, steps):
    tokenizer = Tokenizer.from_file(f"{profile.cache_dir}/tokenizer/tokenizer.json")
    text = " ".join(tokenizer.decode(list(ids)) for rows, _ in steps for ids in rows)
    return re.findall(r"(\d\.\d+) is a row", text)


def test_no_document_of_a_pass_is_learned_twice_and_none_that_is_held_out(profile, straight):
    """What is dropped is the rest of each window, less than a step; no two windows are shuffled with one seed."""
    steps, index, seeds = straight
    of_windows = [seed for seed, _ in groupby(seeds)]
    assert len(set(of_windows)) == len(of_windows) >= len(index.windows) - WINDOWS_AHEAD
    of_first_pass = [window for window in index.windows if window.end[0].num_passes == 0]
    num_steps = sum(window.num_examples // 4 for window in of_first_pass)
    learned = rows_in(profile, steps[:num_steps])
    assert len(set(learned)) == len(learned)
    in_order = sorted(learned, key=lambda name: [int(number) for number in name.split(".")])
    assert learned != in_order, "rows are shuffled within a window"
    assert set(learned) <= {f"{file}.{row}" for file in range(3) for row in range(60)}
    held_out = TokenRows.open(Path(profile.cache_dir), "eval")
    scored = rows_in(profile, [([tuple(held_out.row(n).tolist()) for n in range(len(held_out))], 0)])
    assert scored and not set(scored) & set(rows_in(profile, steps))


def test_two_ranks_of_a_machine_share_windows_and_the_slower_one_loses_none(profile, straight, tmp_path):
    with (
        Reading(profile, tmp_path, num_local_ranks=2) as first,
        Reading(profile, tmp_path, local_rank=1, num_local_ranks=2) as second,
    ):
        place = {"num_ranks": 2, "micro_batch": 2}
        ahead = [first.batch(step, rank=0, **place)[0] for step in range(8)]
        behind = [second.batch(step, rank=1, **place)[0] for step in range(8)]
        for mine, its, (expected, _) in zip(ahead, behind, straight[0], strict=False):
            assert sorted(mine + its) == sorted(expected)


@pytest.mark.parametrize("step", [3, 14, 39])
def test_a_resumption_goes_on_with_the_same_rows_and_reads_no_window_before_its_own(profile, straight, workplace, step):
    with Reading(profile, workplace / "straight", attempt=2 + step, resume=True) as reading:
        assert reading.batch(step) == straight[0][step]
        assert reading.incidents.texts == []
        request = json.loads(next((reading.cache_root / "streams").glob("run-*/producer.json")).read_text())
    number = request["number"]
    assert step < 26 or number > 2
    assert request["begin"] == list(map(msgspec.to_builtins, straight[1].windows[number].begin))


def test_without_its_index_a_run_reads_the_stream_again_and_says_so(profile, straight, tmp_path):
    with Reading(profile, tmp_path, resume=True) as reading:
        assert ids_of(reading, range(13, 20)) == straight[0][13:20]
        assert reading.incidents.texts[0].startswith(f"{tmp_path}/stream/index.json ")
    codec.write(tmp_path / "stream" / "index.json", msgspec.structs.replace(straight[1], fingerprint="f" * 32))
    with pytest.raises(InputError, match="is of another stream"):
        Reading(profile, tmp_path, attempt=2, resume=True)


def test_a_killed_producer_ends_the_run_with_a_sentence_and_leaves_nothing_for_the_next(profile, straight, tmp_path):
    reading = Reading(profile, tmp_path)
    reading.batch(0)
    os.kill(reading.rows._producer._process.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFaultError) as caught:
        ids_of(reading, range(NUM_STEPS))
    assert "SIGKILL" in str(caught.value)
    (left,) = (reading.cache_root / "streams").glob("run-*")
    os.close(reading.rows._producer._lock)
    other = reading.cache_root / "streams" / "other"

    deadline = time.monotonic() + 60
    while left.exists():  # the kernel frees the lock when the last process that was killed has ended
        assert time.monotonic() < deadline
        os.close(lock_folder(other))
        other.rmdir()


def test_bad_rows_of_later_windows_stop_the_run_or_are_counted_in_one_incident(tmp_path):
    path = write_files(tmp_path / "rows")[2]
    path.write_text(path.read_text().replace('"2.50 is a row of text"', '""'))
    profile = prepared_stream(tmp_path / "rows", cache_root=tmp_path / "cache")
    with Reading(profile, tmp_path / "run") as reading, pytest.raises(InputError) as caught:
        ids_of(reading, range(NUM_STEPS))
    assert re.match(rf"data: 1 of \d+ rows .*{path}:51: .*\n.*data\.bad_rows=skip", str(caught.value))
    settings = {"bad_rows": BadRows.SKIP, "bad_rows_max": 0.1}
    profile = prepared_stream(tmp_path / "rows", cache_root=tmp_path / "cache", **settings)
    with Reading(profile, tmp_path / "skipping") as reading:
        ids_of(reading, range(NUM_STEPS))
    bad, again = sorted(reading.incidents.texts)
    assert re.search(r"began again in the window of step \d+", again)
    assert re.match(rf"\d bad rows .*{path}:51: .*in \d windows", bad)  # once a pass


def test_a_window_without_a_step_is_refused_with_both_numbers(tmp_path):
    path = write_rows(tmp_path / "few.jsonl", [f"0.{row}" for row in range(30)])
    profile = prepared_stream(path, cache_root=tmp_path / "cache")
    with pytest.raises(InputError, match=rf"window 0 of the stream has {profile.num_rows} rows, .* 64\b"):
        Reading(profile, tmp_path / "run", sequences_per_step=64)


def test_pairs_and_rows_that_are_not_packed_stream_as_well(tmp_path):
    path = tmp_path / "pairs.jsonl"
    rows = ({"prompt": f"row {n}: ", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(120))
    path.write_bytes(lines_of(rows))
    profile = prepared_stream(path, cache_root=tmp_path / "cache", window_bytes=600)
    assert (profile.format, profile.is_packed, profile.longest_row) == (DataFormat.PREFERENCE, False, 48)
    tokenizer = Tokenizer.from_file(f"{profile.cache_dir}/tokenizer/tokenizer.json")
    with Reading(profile, tmp_path / "run") as reading:
        seen = []
        for step in range(12):
            ids, num_terms = reading.batch(step)
            texts = [tokenizer.decode(list(row)) for row in ids]
            assert num_terms == 4 and len(texts) == 8
            for chosen, rejected in zip(texts[:4], texts[4:], strict=True):
                assert rejected == chosen.replace("yes", "no")
            seen += texts[:4]
    assert len(set(seen)) == len(seen) == 48


def test_a_rank_can_ask_whether_a_window_is_there_without_waiting(profile, straight, tmp_path):
    with Reading(profile, tmp_path) as reading:
        steps = straight[1].windows[0].num_examples // 4
        assert reading.rows.is_next_window(0) and reading.rows.is_ready(0)
        reading.batch(0)
        assert not reading.rows.is_next_window(steps - 1) and reading.rows.is_next_window(steps)
        was_there = reading.rows.is_ready(steps)  # the producer has only just been started
        assert was_there or reading.waits == ["waiting for window 1 of the stream"]
        while not reading.rows.is_ready(steps):
            time.sleep(0.02)
        assert reading.batch(steps) == straight[0][steps]


@pytest.fixture
def request_of(tmp_path):
    return partial(listed_request, cache_root=tmp_path / "cache", window_bytes=1000)


def names_of(items):
    return [item.content.split()[0] for item in items]


def windows(reader, count):
    return [names_of(reader.read_window()) for _ in range(count)]


def test_a_pass_is_every_row_once_in_the_order_of_the_files_and_each_later_pass_is_in_another(request_of, tmp_path):
    write_files(tmp_path / "rows", num_files=5)
    reader = reader_of(request_of(tmp_path / "rows"), tmp_path)
    listed = [f"{file}.{row}" for file in range(5) for row in range(60)]
    items: list[list[Any]] = [reader.read_window() for _ in range(24)]
    sizes = [[len(item.content) for item in window] for window in items]
    assert all(sum(window) >= 1000 > sum(window[:-1]) for window in sizes), "a document that reaches the size ends it"
    read = names_of(chain(*items))
    first, second, third = (read[start : start + len(listed)] for start in range(0, 3 * len(listed), len(listed)))
    assert first == listed
    assert second != listed and third not in (listed, second)
    assert sorted(second) == sorted(third) == sorted(listed)
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
        share = Counter(name[0] for name in names_of(window))
        assert abs(share["a"] - share["b"]) <= 1 and abs(share["c"] - 2 * share["b"]) <= 2
        assert {item.weight for item in window if isinstance(item, Block)} == {1.0}, "rows are learned once each"


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
    names_of = ("short.txt", "cut.txt", "long.txt", "rows.jsonl")
    request = request_of(*(tmp_path / name for name in names_of), window_bytes=10**8)
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
