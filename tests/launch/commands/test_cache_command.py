"""`shardwise cache`: what is listed, what is freed, and what never is."""

import fcntl
import io
import json
import mmap
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from prepare_request_factory import listed_request, make_old, numbered_text
from report_factory import record_of as calibration_record

from shardwise.launch.commands.cache import Kind, State, Storage, prune, read_entries, read_extent, read_scan, run_cache
from shardwise.launch.engine.operators import extensions_dir
from shardwise.launch.inputs.prepare_data import prepare_data
from shardwise.launch.options import CacheOptions
from shardwise.launch.plan.calibration_store import append_calibration
from shardwise.launch.plan.gather import recorded_versions
from shardwise.launch.probe.host import read_host
from shardwise.launch.rundir.process_record import ProcessRecord, record_of, write_record
from shardwise.launch.terminal import Console
from shardwise.trainer.runtime.data.cache import lock_folder
from shardwise.trainer.spec.errors import ExitCode, InputError

DAY_S = 86400
NOTHING_STALE = "nothing is stale\n"


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def environment(home):
    places = {"SHARDWISE_CACHE": "cache", "XDG_STATE_HOME": "state", "XDG_CONFIG_HOME": "config", "HF_HOME": "hf"}
    return {name: str(home / place) for name, place in places.items()} | {"HOME": str(home), "PATH": "/usr/bin:/bin"}


def run(environment, **options) -> str:
    out = io.StringIO()
    assert run_cache(CacheOptions(**options), Console(out), environment=environment) is ExitCode.DONE
    return out.getvalue()


def entries(environment, *, storage: Storage | None = None, **options):
    scan = read_scan(CacheOptions(**options), environment)
    return read_entries(msgspec.structs.replace(scan, storage=storage or scan.storage))


def write_file(path: Path, size: int = 1000, *, days_old: float = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    age(path, days_old)
    return path


def age(path: Path, days: float) -> None:
    """Read and written so long ago, with everything below it."""
    moment = time.time() - days * DAY_S
    for each in [path, *path.rglob("*")]:
        os.utime(each, (moment, moment))


def prepare(folder: Path, cache: Path) -> Path:
    """A folder of rows, made as every run makes it."""
    folder.mkdir(exist_ok=True)
    text = folder / "text.txt"
    text.write_text(numbered_text(60))
    make_old(text)
    profile = prepare_data(listed_request(text, cache_root=cache), on_progress=lambda _line: None)
    assert profile.cache_dir is not None
    return Path(profile.cache_dir)


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory):
    """The same for all tests, which take a copy of its cache."""
    folder = tmp_path_factory.mktemp("prepared")
    return prepare(folder / "text", folder / "cache")


@pytest.fixture
def prepared(prepared_once, home):
    shutil.copytree(prepared_once.parents[1], home / "cache")
    return home / "cache" / "data" / prepared_once.name


def operators(environment, **versions: str) -> Path:
    """The folder of the operators for other versions than those here."""
    cache = Path(environment["SHARDWISE_CACHE"])
    return extensions_dir(cache, recorded_versions() | versions, read_host().cpu_flags)


def is_in_use(environment, why: str) -> bool:
    """Whether the one entry is in use, for this reason, and stays."""
    (entry,) = entries(environment)
    assert run(environment, prune=True) == NOTHING_STALE
    return entry.state is State.HELD and why in entry.why


def test_prepared_data_goes_by_its_last_use(environment, prepared, tmp_path, home):
    assert f"today  {prepared}" in run(environment) and run(environment, prune=True) == NOTHING_STALE
    age(prepared, 31)
    listed = run(environment)
    assert "30 days" in listed and "1 entry" in listed and "shardwise cache --prune" in listed
    with pytest.raises(InputError, match=r"--dry-run .*--prune"):
        run(environment, dry_run=True)
    shown = run(environment, prune=True, dry_run=True)
    assert str(prepared) in shown and "would" in shown and prepared.is_dir()
    freed = run(environment, prune=True).splitlines()[-1]
    assert "freed" in freed and "1 entry" in freed and not prepared.exists()
    assert run(environment, prune=True) == NOTHING_STALE  # the second time there is nothing to do
    assert prepare(tmp_path / "again", home / "cache") == prepared and prepared.is_dir()  # it is made again


def test_data_that_a_process_reads_is_never_freed(environment, prepared):
    with (prepared / "tokens.bin").open("rb") as stream:
        rows = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    age(prepared, 100)
    assert is_in_use(environment, "process") and prepared.is_dir()
    rows.close()
    run(environment, prune=True)
    assert not prepared.exists()


def test_a_preparation_that_was_killed_is_a_leftover_and_one_at_work_is_not(environment, home):
    partial = home / "cache" / "data" / ".partial-cafe"
    write_file(partial / "tokens.bin")
    lock = write_file(home / "cache" / "data" / "locks" / "cafe", 0)
    with lock.open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert is_in_use(environment, "prepared") and partial.is_dir()
    assert "cut off" in run(environment, prune=True)
    assert not partial.exists() and run(environment, prune=True) == NOTHING_STALE


def test_a_disk_that_keeps_no_times_of_reading_frees_nothing_by_age(environment, prepared):
    age(prepared, 100)
    noatime = Storage(is_shared=False, keeps_reads=False)
    (retained,) = (entry for entry in entries(environment, storage=noatime) if entry.kind is Kind.DATA)
    assert retained.state is State.RETAINED and "noatime" in retained.why
    (stale,) = (entry for entry in entries(environment, storage=noatime, older_than_days=30) if entry.kind is Kind.DATA)
    assert stale.state is State.STALE


def test_a_stream_is_its_runs_until_that_ends(environment, home):
    folder = home / "cache" / "streams" / "first-1"
    folder.parent.mkdir(parents=True)
    descriptor = lock_folder(folder)
    write_file(folder / "window")
    assert is_in_use(environment, "run") and folder.is_dir()
    os.close(descriptor)
    assert str(folder) in run(environment, prune=True)
    assert not folder.exists() and not (folder.parent / "locks" / folder.name).exists()
    assert run(environment, prune=True) == NOTHING_STALE


def test_operators_of_other_versions_go_and_those_in_use_stay(environment):
    assert run(environment) == "nothing is stored\n"
    mine, older = operators(environment), operators(environment, torch="2.0.0")
    other_python, being_built = operators(environment, python="3.9.1"), operators(environment, torch="2.1.0")
    for folder in (mine, older, other_python, being_built):
        write_file(folder / "cpu_adam" / "cpu_adam.so")
    with (being_built / ".builder").open("w") as builder:
        fcntl.flock(builder, fcntl.LOCK_EX)
        states = {Path(entry.path): entry.state for entry in entries(environment)}
        freed = run(environment, prune=True)
    assert [states[folder] for folder in (mine, older, being_built)] == [State.RETAINED, State.STALE, State.HELD]
    assert "2 entries" in freed.splitlines()[-1]
    assert [folder.is_dir() for folder in (mine, older, other_python, being_built)] == [True, False, False, True]
    elsewhere = mine.with_name(f"{mine.name[:-1]}_")  # for the same versions in another installation
    write_file(elsewhere / "cpu_adam" / "cpu_adam.so")
    age(elsewhere, 31)
    assert "30 days" in run(environment, prune=True) and not elsewhere.exists()


def test_operators_on_a_shared_disk_may_be_another_machines_of_today(environment):
    older = operators(environment, torch="2.0.0")
    write_file(older / "cpu_adam" / "cpu_adam.so")
    shared = Storage(is_shared=True, keeps_reads=True)
    assert [entry.state for entry in entries(environment, storage=shared)] == [State.RETAINED]
    age(older, 2)
    assert [entry.state for entry in entries(environment, storage=shared)] == [State.STALE]


def test_the_lock_of_a_killed_build_goes_and_its_operator_stays(environment):
    library = write_file(operators(environment) / "cpu_adam" / "cpu_adam.so")
    lock = library.with_name("lock")
    with lock.open("w"):
        assert run(environment, prune=True) == NOTHING_STALE
    assert str(lock) in run(environment, prune=True)
    assert library.is_file() and not lock.exists()


def test_a_model_that_is_being_written_stays_and_one_that_was_cut_off_goes(environment, home):
    models = home / "cache" / "models"
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    writing, cut_off = models / f".{'a' * 32}.{os.getpid()}", models / f".{'b' * 32}.{int(ended.stdout)}"
    for folder in (writing, cut_off):
        write_file(folder / "model.safetensors")
    run(environment, prune=True)
    assert writing.is_dir() and not cut_off.exists()
    write_file(models / ("c" * 32) / "model.safetensors", days_old=31)
    assert "30 days" in run(environment, prune=True)


def test_a_trial_at_work_stays_however_old_its_files_are(environment, home):
    folder = home / "cache" / "trials" / "tmpabc"
    me = record_of(os.getpid())
    assert me is not None
    write_record(folder / "1" / "attempts" / "1" / "pids" / "launcher.json", me)
    age(folder, 100)
    assert is_in_use(environment, "at work")
    write_record(folder / "1" / "attempts" / "1" / "pids" / "launcher.json", ProcessRecord(me.pid, me.start_time + 1))
    age(folder, 100)
    run(environment, prune=True)
    assert not folder.exists()


def test_copies_on_a_scratch_disk_go_by_their_age(environment, home):
    config = home / "config" / "shardwise" / "config.yaml"
    config.parent.mkdir(parents=True)
    config.write_text(f"folders: {{scratch: {home}/scratch}}\n")
    staged = home / "scratch" / "shardwise" / "staged" / "0123"
    write_file(staged / "model" / "model.safetensors")
    write_file(staged / ".lock", 0)
    age(staged, 31)
    with (staged / ".lock").open("r+") as copier:
        fcntl.flock(copier, fcntl.LOCK_EX)
        assert run(environment, prune=True) == NOTHING_STALE
    age(staged, 31)
    run(environment, prune=True)
    assert not staged.exists()


def test_what_is_measured_and_what_belongs_to_others_is_never_freed(environment, home):
    append_calibration(home / "state" / "shardwise", calibration_record(), on_line=print)
    write_file(home / "cache" / "fp8" / "0123456789abcdef.json")
    write_file(home / "cache" / "notes.txt")
    write_file(home / "hf" / "hub" / "models--org--name" / "blobs" / "c0ffee", 5000)
    for folder in ("state", "cache", "hf"):
        age(home / folder, 1000)
    text = run(environment)
    assert "4.88 KiB   1000 days ago" in text and "hf cache prune" in text and text.endswith(NOTHING_STALE)
    assert run(environment, prune=True, older_than_days=0) == NOTHING_STALE


def test_files_whose_writing_was_cut_off_are_leftovers_after_a_day(environment, home):
    young = write_file(home / "state" / "shardwise" / ".calibration.jsonl.0123abcd")
    old = write_file(home / "cache" / "fp8" / ".aa.json.0123abcd", days_old=2)
    orphan = write_file(home / "cache" / "data" / "locks" / "cafe", 0, days_old=2)
    run(environment, prune=True)
    assert young.is_file() and not old.exists() and not orphan.exists()


def stale_entries(environment, kind: Kind = Kind.DATA):
    return tuple(entry for entry in entries(environment) if entry.state is State.STALE and entry.kind is kind)


def test_what_was_used_since_it_was_listed_stays(environment, prepared):
    """An open file keeps its times until something is read."""
    age(prepared, 31)
    stale = stale_entries(environment)
    assert [entry.path for entry in stale] == [str(prepared)]
    with (prepared / "tokens.bin").open("rb"):
        assert prune(stale) == ((), ()) and prepared.is_dir()
    age(prepared, 0)
    assert prune(stale) == ((), ()) and prepared.is_dir()
    age(prepared, 31)
    assert prune(stale_entries(environment))[1] == () and not prepared.exists()


@pytest.mark.parametrize("kind", [Kind.DATA, Kind.STREAM])
def test_what_is_locked_once_it_was_listed_stays(environment, prepared, home, kind):
    if kind is Kind.STREAM:
        os.close(lock_folder(home / "cache" / "streams" / "first-1"))
        write_file(home / "cache" / "streams" / "first-1" / "window")
    age(prepared, 31)
    (stale,) = stale_entries(environment, kind)
    with Path(stale.lock).open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert prune((stale,)) == ((), ()) and Path(stale.path).is_dir()
    assert prune((stale,)) == ((stale,), ()) and not Path(stale.path).exists()


def test_json_names_what_there_was_and_what_was_freed(environment, prepared):
    age(prepared, 31)
    size = read_extent(prepared).num_bytes
    (row,) = json.loads(run(environment, as_json=True))["entries"]
    assert (row["kind"], row["state"], row["num_bytes"]) == ("prepared data", "stale", size)
    after = json.loads(run(environment, as_json=True, prune=True))
    assert (after["freed"], after["freed_bytes"]) == ([str(prepared)], size)
