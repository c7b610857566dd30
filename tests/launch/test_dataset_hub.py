"""Data sets from a hub that runs here: a real server, asked by the real library in a process of its own."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, serving

OLD_COMMIT = "f" * 40
README = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: 'data/a*'}\n---\n"
FILES = {
    "README.md": README,
    "data/a-00000-of-00002.jsonl": b'{"text": "one"}\n',
    "data/a-00001-of-00002.jsonl": b'{"text": "two"}\n',
    "data/b [1].jsonl": b'{"text": "three"}\n',
    "rows.py": b"raise SystemExit('a script ran')",
    "rows.pkl": b"pickled",
    ".gitattributes": b"",
}
REPOSITORIES = {
    "org/rows": FILES,
    "org/plain": {"train [x].csv": b"text\na\n", "test.csv": b"text\nb\n"},
    "org/script": {"README.md": b"# Rows", "script.py": FILES["rows.py"]},
    "org/pictures": {"a.png": b"x", "b.tar": b"x"},
}

PROGRAM = """
import json, sys
from pathlib import Path
from launch.data_files import list_files
from trainer.spec.data_request import PrepareRequest
from trainer.spec.errors import ShardwiseError
from trainer.spec.job import BadRows, DataFormat, DataSource

source, home = json.loads(sys.argv[1]), sys.argv[2]
request = PrepareRequest(
    sources=(DataSource(**source),), eval_share=None, eval_source=None, format=DataFormat.AUTO, fields={}, packing=None,
    bad_rows=BadRows.FAIL, bad_rows_max=0.0, seq_len=8, vocab_size=9, tokenizer=None, cache_root=home, hub_home=home,
)
try:
    listed = list_files(request)
except ShardwiseError as error:
    print(json.dumps([int(error.exit_code), str(error)]))
else:
    names = [file.path.partition("/snapshots/")[2] for file in listed.files]
    print(json.dumps([0, names, [Path(file.path).read_text() for file in listed.files], listed.revisions]))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    revisions = {"main": COMMIT, "v1": OLD_COMMIT}
    with serving(Hub(files=REPOSITORIES, revisions=revisions, gated={"org/gated"})) as served:
        yield served


NO_HUB = "http://127.0.0.1:9"


def ask(home: Path, source: str, *, endpoint: str = NO_HUB, environment: dict[str, str] | None = None, **part: str):
    """[exit code, words] or [0, files below snapshots/, their contents, references]."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_") and "PROXY" not in name.upper()
    }
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps({"source": source, **part}), str(home)],
        env=kept | {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HOME": str(home)} | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout.splitlines()[-1])


def downloaded(home: Path) -> set[str]:
    return {path.relative_to(home).as_posix().split("/", 4)[4] for path in home.rglob("snapshots/*/**/*.*")}


def fill_cache(home: Path, *names: str, commit: str = COMMIT) -> None:
    """As another program leaves it: files and a reference, no listing."""
    root = home / "hub" / "datasets--org--rows"
    for name in names:
        path = root / "snapshots" / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(FILES[name])
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)


def test_only_the_files_of_the_split_are_downloaded_and_their_commit_is_recorded(tmp_path, hub):
    shards = ["data/a-00000-of-00002.jsonl", "data/a-00001-of-00002.jsonl"]
    assert ask(tmp_path, "org/rows", endpoint=hub.url) == [
        0,
        [f"{COMMIT}/{name}" for name in shards],
        ['{"text": "one"}\n', '{"text": "two"}\n'],
        [f"org/rows@{COMMIT}"],
    ]
    assert downloaded(tmp_path) == {"README.md", *shards}


def test_what_was_downloaded_is_not_asked_for_again_and_needs_no_hub(tmp_path, hub):
    first = ask(tmp_path, "org/plain", endpoint=hub.url)
    assert first[1:3] == [[f"{COMMIT}/train [x].csv"], ["text\na\n"]]
    assert ask(tmp_path, "org/plain") == first
    assert ask(tmp_path, f"org/plain@{COMMIT}") == first
    code, words = ask(tmp_path, "org/plain", split="test")
    assert (code, "the hub cannot be reached" in words) == (4, True)
    assert ask(tmp_path, "org/plain", split="test", endpoint=hub.url)[2] == ["text\nb\n"]


def test_a_revision_is_pinned(tmp_path, hub):
    assert ask(tmp_path, "org/plain@v1", endpoint=hub.url)[3] == [f"org/plain@{OLD_COMMIT}"]
    assert ask(tmp_path, "org/plain@v1")[3] == [f"org/plain@{OLD_COMMIT}"]
    assert ask(tmp_path, "org/plain")[0] == 4


def test_a_download_that_was_broken_off_is_gone_on_with(tmp_path, hub):
    first = ask(tmp_path, "org/rows", endpoint=hub.url)
    (lost,) = tmp_path.rglob("a-00001-of-00002.jsonl")
    lost.unlink()
    assert ask(tmp_path, "org/rows")[0] == 4
    assert ask(tmp_path, "org/rows", endpoint=hub.url) == first


def test_a_cache_that_another_program_filled_is_used_where_it_is_whole(tmp_path):
    fill_cache(tmp_path, "README.md", "data/a-00000-of-00002.jsonl", "data/a-00001-of-00002.jsonl")
    assert ask(tmp_path, "org/rows")[3] == [f"org/rows@{COMMIT}"]


def test_a_cache_that_lacks_a_shard_is_completed(tmp_path, hub):
    fill_cache(tmp_path, "README.md", "data/a-00001-of-00002.jsonl")
    assert ask(tmp_path, "org/rows")[0] == 4
    assert len(ask(tmp_path, "org/rows", endpoint=hub.url)[1]) == 2


REFUSED = [
    ({"source": "org/gated"}, "data.train: org/gated is gated; ask for access at "
     "https://huggingface.co/datasets/org/gated, then run: hf auth login"),
    ({"source": "org/gone"}, "data.train: org/gone is neither a folder here nor a data set on the hub that you may "
     "see; check the name or, for a private one, run: hf auth login"),
    ({"source": "org/rows@v9"}, "data.train: org/rows has no revision v9"),
    ({"source": "org/rows", "subset": "en"}, "data.train: org/rows has no subset en; it has default"),
    ({"source": "org/plain", "split": "dev"}, "data.train: org/plain has no split dev; it has test, train"),
    ({"source": "org/script"}, "data.train: org/script is made by its program script.py, which is never run; the hub "
     "may hold it as Parquet:\ndata.train=org/script@refs/convert/parquet"),
    ({"source": "org/pictures"}, "data.train: org/pictures holds no rows and no text, only .png, .tar"),
]  # fmt: skip


@pytest.mark.parametrize("source, words", REFUSED, ids=[row[1][:50] for row in REFUSED])
def test_each_refusal_is_one_line_with_the_next_step(tmp_path, hub, source, words):
    assert ask(tmp_path, endpoint=hub.url, **source) == [2, words]


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path):
    assert ask(tmp_path, "org/rows") == [
        4,
        f"data.train: org/rows is neither a folder here nor in {tmp_path / 'hub'}, and the hub cannot be reached; "
        "name a local folder",
    ]


def test_offline_is_respected_and_named(tmp_path, hub):
    code, words = ask(tmp_path, "org/rows", endpoint=hub.url, environment={"HF_HUB_OFFLINE": "1"})
    assert code == 4
    assert "and HF_HUB_OFFLINE is set; name a local folder" in words
    assert hub.requests == []


def test_a_hub_that_never_answers_is_given_up(tmp_path):
    """Left to itself, the library would ask for minutes, and the program be ended by the limit in `ask`."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        code, words = ask(tmp_path, "org/rows", endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert (code, "the hub cannot be reached" in words) == (4, True)


def test_a_path_that_is_missing_is_not_looked_for_on_the_hub(tmp_path, hub):
    code, words = ask(tmp_path, "data/rows.jsonl", endpoint=hub.url)
    assert (code, words.startswith("data.train: data/rows.jsonl was not found: there is no ")) == (2, True)
    assert hub.requests == []
