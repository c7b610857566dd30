"""The subprocess that prepares data: its answers, its errors, its end, and the index that saves it."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from hanging_programs import wait_until_gone
from msgspec.structs import replace
from prepare_request_factory import REQUEST, make_old, numbered_text, request_for

from shardwise.launch.commands.data import describe_data
from shardwise.launch.inputs.data_files import list_files
from shardwise.launch.inputs.prepare_data import find_prepared, prepare_data, refuse_other_stream
from shardwise.trainer.planning.schedule import estimate_data
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.data.profile import LISTING_NAME, SourceFile
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.sections import BadRows, Job


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(numbered_text(3000))
    make_old(path)
    return path


@pytest.fixture
def request_of(tmp_path):
    return partial(request_for, cache_root=tmp_path / "cache")


def prepare(request, **settings):
    lines: list[str] = []
    return prepare_data(request, on_progress=lines.append, **settings), lines


def find(request):
    """What a start finds of the files as they are now."""
    return find_prepared(list_files(request))


def test_what_was_prepared_is_found_without_starting_anything(request_of, text):
    request = request_of(text, eval_share=0.1)
    assert find(request) is None
    profile, _ = prepare(request)
    assert find(request) == profile
    assert prepare(request, python="/no/such/python") == (profile, [])
    for name in ("tokens.bin", "starts.bin", "profile.json", "train_rows.npy"):
        Path(profile.cache_dir, name).unlink()
        assert find(request) is None
        assert prepare(request)[0] == profile, "made again"


@pytest.mark.parametrize("change", ["content", "size", "time", "place", "another file", "a setting", "a weight"])
def test_a_change_is_not_overlooked(request_of, text, tmp_path, change):
    folder = tmp_path / "text"
    folder.mkdir()
    path = text.rename(folder / "a.txt")
    request = request_of(folder)
    prepare(request)
    if change == "content":
        rewrite_unseen(path)
    elif change == "size":
        path.write_text("row 0 of 3333, which is 0\n" * 3000)
    elif change == "place":  # as rsync -t does it
        other = tmp_path / "other.txt"
        other.write_bytes(path.read_bytes())
        rewrite_unseen(other)
        status = path.stat()
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.replace(path)
    elif change == "time":
        os.utime(path, ns=(0, path.stat().st_mtime_ns - 1))
    elif change == "another file":
        (folder / "b.txt").write_text("more")
    elif change == "a setting":
        request = request_of(folder, seq_len=17)
    else:
        request = request_of((folder, 2.0))
    assert find(request) is None


def test_other_content_of_the_same_size_and_time_is_prepared(request_of, text):
    then, _ = prepare(request_of(text))
    rewrite_unseen(text)
    now, _ = prepare(request_of(text))
    assert now.fingerprint != then.fingerprint


def test_a_touched_file_is_read_and_not_tokenised(request_of, text):
    then, _ = prepare(request_of(text))
    text.chmod(0o600)
    assert find(request_of(text)) is None
    now, lines = prepare(request_of(text))
    assert now == then and not [line for line in lines if "tokenis" in line]
    now_ns = time.time_ns()
    os.utime(text, ns=(now_ns, now_ns))
    prepare(request_of(text))
    assert find(request_of(text)) is None, "it may still be changing"


def rewrite_unseen(path):
    """Other bytes under the same name, of the same number and with the same time of writing, as cp -p leaves them."""
    status = path.stat()
    path.write_bytes(path.read_bytes().replace(b"o", b"a", 1))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)


@pytest.mark.parametrize("seen", [False, True])
def test_a_change_of_the_tokenizer_is_not_overlooked(request_of, text, tmp_path, seen):
    made, _ = prepare(request_of(text))
    folder = Path(made.cache_dir, "tokenizer")
    request = request_of(text, tokenizer=str(folder))
    profile, _ = prepare(request)
    assert profile.fingerprint != made.fingerprint
    assert find(request) == profile
    settings = folder / "tokenizer_config.json"
    if seen:
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"model_max_length": 7}))
    else:
        rewrite_unseen(settings)
    assert find(request) is None


def test_a_problem_with_the_data_has_its_lines_and_a_lost_tokenizer_or_cache_is_named(request_of, text, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' * 50 + "{}\n")
    with pytest.raises(InputError) as caught:
        prepare(request_of(path))
    assert "1 of 51 rows" in str(caught.value) and f"{path}:51: " in str(caught.value)
    with pytest.raises(InputError, match=r"data\.bad_rows_max"):
        prepare(request_of(path, bad_rows=BadRows.SKIP))
    with pytest.raises(InputError, match=f"model.tokenizer: {tmp_path}/gone"):
        find(replace(list_files(request_of(text)), tokenizer=f"{tmp_path}/gone"))
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(EnvironmentFaultError, match=f"{tmp_path}/taken.*Not a directory"):
        prepare(request_of(text, cache_root=tmp_path / "taken"))


def start_preparing(folder):
    """A process that prepares a large text and has begun to, with everything it writes in `folder`."""
    path = folder / "big.txt"
    path.write_text(numbered_text(300_000))
    program = (
        "import signal, sys; from pathlib import Path; sys.path.append(sys.argv[3])\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored where a shell runs the tests behind it
        "from shardwise.launch.inputs.prepare_data import prepare_data\n"
        "from prepare_request_factory import request_for\n"
        "request = request_for(sys.argv[1], cache_root=Path(sys.argv[2]))\n"
        "prepare_data(request, on_progress=lambda line: print(line, flush=True))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, path, folder / "cache", Path(__file__).parents[2] / "factories"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"TMPDIR": str(folder)},
        start_new_session=True, text=True,
    )  # fmt: skip
    assert "300 tokens" in process.stdout.readline(), process.communicate()
    return process


@pytest.mark.cold
@pytest.mark.parametrize("is_killed", [False, True], ids=["Ctrl-C", "killed"])
def test_the_subprocess_does_not_outlive_its_parent_and_leaves_no_half_cache(tmp_path, is_killed):
    process = start_preparing(tmp_path)
    pids = preparations_of(tmp_path)
    assert len(pids) == 1
    if is_killed:
        process.kill()
    else:
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
    _, errors = process.communicate(timeout=120)
    assert is_killed or ("KeyboardInterrupt" in errors and preparations_of(tmp_path) == [])
    wait_until_gone(pids[0])
    assert [folder.name for folder in (tmp_path / "cache" / "data").iterdir()] == ["locks"]


def preparations_of(folder):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            command = path.read_bytes()
            if b"shardwise.trainer.runtime.data.prepare\0" in command and str(folder).encode() in command:
                found.append(int(path.parent.name))
    return found


FILES = tuple(SourceFile(path=f"/data/{n}.jsonl", size_bytes=100 + n, mtime_ns=10**18) for n in range(3))
HUB = "hf://datasets/org/rows@{}/a.jsonl"
PROFILE = replace(
    estimate_data(num_bytes=10**6, seq_len=8, vocab_size=300, eval_share=None, window_bytes=10**5), fingerprint="then"
)
CHANGES = [
    (FILES[:1], [replace(FILES[0], size_bytes=7)], ("0.jsonl of 100 bytes", "0.jsonl of 7 bytes")),
    (FILES[:1], [replace(FILES[0], mtime_ns=10**18 + 10**9)], ("01:46:40", "01:46:41")),
    (FILES[:1], FILES[:2], ("/data/1.jsonl is new",)),
    (FILES[:2], FILES[:1], ("/data/1.jsonl is missing",)),
    (
        [replace(FILES[0], path=HUB.format("a" * 40), hub=HUB.format("a" * 40))],
        [replace(FILES[0], path=HUB.format("b" * 40), hub=HUB.format("b" * 40))],
        (HUB.format("a" * 40), HUB.format("b" * 40)),
    ),
]


@pytest.mark.parametrize(("then", "now", "facts"), CHANGES, ids=["size", "time", "new", "gone", "commit"])
def test_a_file_that_changed_is_refused_with_both_values(tmp_path, then, now, facts):
    """A run is resumed that read the first files where now there are the second."""
    for folder, files in ((tmp_path / "run" / "stream", then), (tmp_path / "cache", now)):
        folder.mkdir(parents=True)
        codec.write(folder / LISTING_NAME, replace(REQUEST, files=tuple(files)))
    data = replace(PROFILE, fingerprint="now", cache_dir=f"{tmp_path}/cache")
    with pytest.raises(InputError) as caught:
        refuse_other_stream(tmp_path / "run", data, PROFILE)
    assert [fact for fact in ("--resume", f"{tmp_path}/run", *facts) if fact not in str(caught.value)] == []


def test_what_is_counted_of_a_stream_is_said_to_be_of_its_first_window():
    profile = replace(PROFILE, num_documents=12, num_targets=900, cache_dir=None)
    first, second, *_ = describe_data(profile, Job())
    assert first.startswith("12 texts") and "first window" in first and "900 tokens of the window" in second
    assert "window" not in list(describe_data(replace(profile, is_stream=False), Job()))[1]
