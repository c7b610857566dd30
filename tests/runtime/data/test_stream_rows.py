"""A stream as ranks see it: windows of the producer, one order for any ranks, resuming in the middle, and its ends."""

import json
import os
import re
import signal
import time
from itertools import groupby
from pathlib import Path

import msgspec
import pytest
from stream_factory import paths_of, prepared_stream, stream_plan, write_files, write_rows
from table_files import lines_of
from tokenizers import Tokenizer

from shardwise.trainer.runtime.data.batches import step_micro_batches
from shardwise.trainer.runtime.data.cache import TokenRows, lock_folder
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
    """A rank's view of a run, closed at the end."""

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
    """Every step of a run on one rank, its index, and the seed of each step."""
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
    """What is dropped is the rest of each window, less than a step."""
    steps, index, _ = straight
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


def test_no_two_windows_are_shuffled_with_one_seed(straight):
    _, index, seeds = straight
    of_windows = [seed for seed, _ in groupby(seeds)]
    assert len(set(of_windows)) == len(of_windows) >= len(index.windows) - WINDOWS_AHEAD


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


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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

    def is_removed() -> bool:
        os.close(lock_folder(other))
        other.rmdir()
        return not left.exists()

    wait_until(is_removed)  # the kernel frees the lock when the last process that was killed has ended


def test_a_file_that_changes_while_it_is_read_ends_the_run_with_both_sizes(tmp_path):
    files = write_files(tmp_path / "rows")
    profile = prepared_stream(tmp_path / "rows", cache_root=tmp_path / "cache")
    before = files[2].stat().st_size
    files[2].write_text(files[2].read_text() + '{"text": "one more"}\n')
    with Reading(profile, tmp_path / "run") as reading, pytest.raises(InputError) as caught:
        ids_of(reading, range(NUM_STEPS))
    assert re.match(rf"{files[2]}: changed .*\b{before}\b.*\b{before + 21}\b", str(caught.value))


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
        wait_until(lambda: reading.rows.is_ready(steps))
        assert reading.batch(steps) == straight[0][steps]
