"""`shardwise cache`: what is listed, what `--rm` removes, and what stays."""

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

import pytest
from prepare_request_factory import listed_request, make_old, numbered_text
from report_factory import record_of as calibration_record

from shardwise.launch.commands.cache import read_entries, read_places, remove_entries, run_cache
from shardwise.launch.inputs.prepare_data import prepare_data
from shardwise.launch.options import CacheOptions, parse_command_line
from shardwise.launch.plan.calibration_store import append_calibration
from shardwise.launch.rundir.process_record import ProcessRecord, record_of, write_record
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


@pytest.fixture
def environment(home):
    places = {"SHARDWISE_CACHE": "cache", "XDG_STATE_HOME": "state", "XDG_CONFIG_HOME": "config", "HF_HOME": "hf"}
    return {name: str(home / place) for name, place in places.items()} | {"HOME": str(home), "PATH": "/usr/bin:/bin"}


def run(environment, *remove: str, as_json: bool = False) -> str:
    out = io.StringIO()
    options = CacheOptions(remove=remove, as_json=as_json)
    assert run_cache(options, Console(out), environment=environment) is ExitCode.DONE
    return out.getvalue()


def stays(environment, folder: str, why: str) -> bool:
    """True if the one entry of a folder is listed as in use for this reason and is not removed."""
    (entry,) = (entry for entry in read_entries(read_places(environment)) if entry.folder == folder)
    with pytest.raises(EnvironmentFaultError, match=why):
        run(environment, folder)
    return why in (entry.in_use or "") and Path(entry.path).exists()


def write_file(path: Path, size: int = 1000) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def age(path: Path, days: float) -> None:
    """Read and written so long ago, with everything below it."""
    moment = time.time() - days * 86400
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


def test_what_is_named_is_removed_and_made_again(environment, prepared, tmp_path, home):
    other = write_file(home / "cache" / "operators" / "a\x1b[2Kb" / "cpu_adam.so", 3000)
    age(prepared, 31)
    listed = run(environment)
    assert f"31 days ago  data/{prepared.name}" in listed and "\x1b" not in listed and "prepared data" in listed
    assert "2.93 KiB     used today  operators/a" in listed
    for name in ("data/..", "data/locks", "models/x", "data/x", "../cache", f"{prepared}", "config"):
        with pytest.raises(InputError, match=r"--rm .*`shardwise cache` lists"):
            run(environment, name)
    assert run(environment, "models", f"data/{prepared.name}").splitlines()[0].endswith(f"data/{prepared.name}")
    assert not prepared.exists() and other.is_file() and not (prepared.parent / "locks" / prepared.name).exists()
    assert prepare(tmp_path / "again", home / "cache") == prepared and prepared.is_dir()
    removed = json.loads(run(environment, "data", "operators", as_json=True))["removed"]
    assert removed == [str(prepared), str(other.parent)]
    assert not prepared.exists() and not other.parent.exists() and run(environment) == "nothing is stored\n"


def test_an_option_of_the_last_version_names_what_replaces_it():
    for option in ("--prune", "--older-than=3", "--dry-run"):
        with pytest.raises(InputError, match=f"{option.partition('=')[0]} is replaced: .*cache --rm NAME"):
            parse_command_line(["cache", option])


def test_data_that_a_process_reads_stays_also_if_it_was_listed_before(environment, prepared):
    listed = read_entries(read_places(environment))
    with (prepared / "tokens.bin").open("rb") as stream:
        rows = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    assert stays(environment, "data", "a process has it open")
    removed, (problem,) = remove_entries(listed)
    assert removed == () and "a process has it open" in problem and prepared.is_dir()
    rows.close()
    assert remove_entries(listed) == (listed, ()) and not prepared.exists()


@pytest.mark.parametrize(
    ("entry", "lock"),
    [
        ("cache/data/.partial-cafe", "cache/data/locks/cafe"),
        ("cache/operators/torch", "cache/operators/torch/.builder"),
        ("cache/streams/first-1", "cache/streams/locks/first-1"),
        ("scratch/shardwise/staged/0123", "scratch/shardwise/staged/0123/.lock"),
    ],
)
def test_what_a_process_makes_stays_until_its_lock_is_free(environment, home, entry, lock):
    write_file(home / "config" / "shardwise" / "config.yaml").write_text(f"folders: {{scratch: {home}/scratch}}\n")
    write_file(home / entry / "file")
    (listed,) = read_entries(read_places(environment))
    with write_file(home / lock, 0).open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert stays(environment, listed.folder, "a process makes or uses it")
        assert remove_entries([listed])[0] == () and (home / entry / "file").is_file()
    run(environment, listed.folder)
    assert not (home / entry).exists()


def test_a_model_that_is_being_written_stays_and_one_that_was_cut_off_goes(environment, home):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    cut_off, writing = (home / "cache" / "models" / f".{'b' * 32}.{pid}" for pid in (int(ended.stdout), os.getpid()))
    write_file(cut_off / "model.safetensors")
    run(environment, "models")
    write_file(writing / "model.safetensors")
    assert not cut_off.exists() and stays(environment, "models", "it is being written")


def test_a_trial_at_work_stays(environment, home):
    record = home / "cache" / "trials" / "tmpabc" / "1" / "attempts" / "1" / "pids" / "launcher.json"
    me = record_of(os.getpid())
    assert me is not None
    write_record(record, me)
    assert stays(environment, "trials", "it is at work")
    write_record(record, ProcessRecord(me.pid, me.start_time + 1))
    run(environment, "trials")
    assert not record.exists()


@pytest.mark.parametrize(
    ("days", "keeps_reads", "why"), [(0, True, "30 days"), (31, False, "no times"), (31, True, "")]
)
def test_an_entry_on_a_shared_disk_may_be_in_use_on_another_machine(environment, prepared, days, keeps_reads, why):
    age(prepared, days)
    (entry,) = read_entries(read_places(environment)._replace(is_shared=True, keeps_reads=keeps_reads))
    assert bool(entry.in_use) is bool(why) and why in (entry.in_use or "")
    remove_entries([entry])
    assert prepared.exists() is bool(why)


def test_what_belongs_to_others_is_listed_and_never_removed(environment, home):
    append_calibration(home / "state" / "shardwise", calibration_record(), on_line=print)
    write_file(home / "cache" / "notes.txt")
    write_file(home / "hf" / "hub" / "models--org--name" / "blobs" / "c0ffee", 5000)
    assert "4.88 KiB" in (text := run(environment)) and "hf cache prune" in text and "notes.txt" in text
    for name in ("calibration", "hub", "other/notes.txt"):
        with pytest.raises(InputError, match="does not remove"):
            run(environment, name)


def test_links_are_removed_and_not_followed(environment, home, tmp_path):
    outside = write_file(tmp_path / "outside" / "file", 9000)
    for name in ("data/link", "operators/torch/link"):
        (home / "cache" / name).parent.mkdir(parents=True)
        (home / "cache" / name).symlink_to(outside.parent)
    assert "8.79 KiB" not in run(environment)
    run(environment, "data", "operators")
    assert outside.is_file() and run(environment) == "nothing is stored\n"
