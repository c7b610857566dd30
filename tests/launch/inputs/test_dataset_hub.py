"""Data sets from a hub that runs here: a real server, asked by the real library in a process of its own."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_questions import NO_HUB, ask_hub
from hub_server import COMMIT, Hub, serving

OLD_COMMIT = "f" * 40
README = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: 'data/a*'}\n---\n"
FILES = {
    "README.md": README, "data/a-00000-of-00002.jsonl": b'{"text": "one"}\n',
    "data/a-00001-of-00002.jsonl": b'{"text": "two"}\n', "data/b [1].jsonl": b'{"text": "three"}\n',
    "rows.py": b"raise SystemExit('a script ran')", "rows.pkl": b"pickled", ".gitattributes": b"",
}  # fmt: skip
REPOSITORIES = {
    "org/rows": FILES,
    "org/plain": {"train [x].csv": b"text\na\n", "test.csv": b"text\nb\n"},
    "org/script": {"README.md": b"# Rows", "script.py": FILES["rows.py"]},
    "org/pictures": {"a.png": b"x", "b.tar": b"x"},
}

PROGRAM = """
import json, sys
from pathlib import Path
from shardwise.launch.inputs.data_files import list_files
from shardwise.trainer.spec.data.profile import PrepareRequest
from shardwise.trainer.spec.errors import ShardwiseError
from shardwise.trainer.spec.job.sections import (BadRows, DataFormat)
from shardwise.trainer.spec.job.sources import DataSource

answers, home = [], sys.argv[2]
for source in json.loads(sys.argv[1]):
    request = PrepareRequest(
        sources=(DataSource(**source),), eval_share=None, eval_source=None, format=DataFormat.AUTO, fields={},
        packing=None, bad_rows=BadRows.FAIL, bad_rows_max=0.0, seq_len=8, vocab_size=9, tokenizer=None, cache_root=home,
        hub_home=home,
    )
    try:
        listed = list_files(request)
    except ShardwiseError as error:
        answers.append([int(error.exit_code), str(error)])
    else:
        names = [file.path.partition("/snapshots/")[2] for file in listed.files]
        answers.append([0, names, [Path(file.path).read_text() for file in listed.files], listed.revisions])
print(json.dumps(answers))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    revisions = {"main": COMMIT, "v1": OLD_COMMIT}
    with serving(Hub(files=REPOSITORIES, revisions=revisions, gated={"org/gated"})) as served:
        yield served


def ask_all(home: Path, *sources: dict[str, str], endpoint: str = NO_HUB, **environment: str) -> list[Any]:
    """For each source: [exit code, error] or [0, files below snapshots/, their contents, references]."""
    return ask_hub(PROGRAM, json.dumps(sources), str(home), home=home, endpoint=endpoint, **environment)


def ask(home: Path, source: str, *, endpoint: str = NO_HUB) -> Any:
    (answer,) = ask_all(home, {"source": source}, endpoint=endpoint)
    return answer


def downloaded(home: Path) -> set[str]:
    return {path.relative_to(home).as_posix().split("/", 4)[4] for path in home.rglob("snapshots/*/**/*.*")}


def test_only_the_files_of_the_split_are_downloaded_and_their_commit_is_recorded(tmp_path, hub):
    shards = ["data/a-00000-of-00002.jsonl", "data/a-00001-of-00002.jsonl"]
    assert ask(tmp_path, "org/rows", endpoint=hub.url) == [
        0,
        [f"{COMMIT}/{name}" for name in shards],
        ['{"text": "one"}\n', '{"text": "two"}\n'],
        [f"org/rows@{COMMIT}"],
    ]
    assert downloaded(tmp_path) == {"README.md", *shards}


def test_what_was_downloaded_is_not_asked_for_again_and_a_revision_is_pinned(tmp_path, hub):
    plain, pinned = {"source": "org/plain"}, {"source": "org/plain@v1"}
    held_out = {"source": "org/plain", "split": "test"}
    first, old = ask_all(tmp_path, plain, pinned, endpoint=hub.url)
    assert first[1:3] == [[f"{COMMIT}/train [x].csv"], ["text\na\n"]]
    assert old[3] == [f"org/plain@{OLD_COMMIT}"]
    *again, (code, error) = ask_all(tmp_path, plain, {"source": f"org/plain@{COMMIT}"}, pinned, held_out)
    assert again == [first, first, old]
    assert code == 4 and "hub" in error
    assert ask_all(tmp_path, held_out, endpoint=hub.url)[0][2] == ["text\nb\n"]


def test_a_download_that_was_broken_off_is_gone_on_with(tmp_path, hub):
    first = ask(tmp_path, "org/rows", endpoint=hub.url)
    (lost,) = tmp_path.rglob("a-00001-of-00002.jsonl")
    lost.unlink()
    assert ask(tmp_path, "org/rows")[0] == 4
    assert ask(tmp_path, "org/rows", endpoint=hub.url) == first


REFUSED = [
    ({"source": "org/gated"}, ("https://huggingface.co/datasets/org/gated", "hf auth login")),
    ({"source": "org/gone"}, ("hf auth login",)),
    ({"source": "org/rows@v9"}, ("revision v9",)),
    ({"source": "org/rows", "subset": "en"}, ("subset en", "default")),
    ({"source": "org/plain", "split": "dev"}, ("split dev", "test, train")),
    ({"source": "org/script"}, ("script.py", "\ndata.train=org/script@refs/convert/parquet")),
    ({"source": "org/pictures"}, (".png, .tar",)),
]


def test_each_refusal_names_the_source_and_the_next_step(tmp_path, hub):
    answers = ask_all(tmp_path, *(source for source, _ in REFUSED), endpoint=hub.url)
    for (source, facts), (code, error) in zip(REFUSED, answers, strict=True):
        assert code == 2 and error.startswith(f"data.train: {source['source'].partition('@')[0]} ")
        assert [fact for fact in facts if fact not in error] == []


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path):
    code, error = ask(tmp_path, "org/rows")
    assert (code, len(error.splitlines())) == (4, 1)
    for fact in ("data.train: org/rows", str(tmp_path / "hub"), "reached", "name a local folder"):
        assert fact in error


def test_offline_is_respected_and_named(tmp_path, hub):
    ((code, error),) = ask_all(tmp_path, {"source": "org/rows"}, endpoint=hub.url, HF_HUB_OFFLINE="1")
    assert (code, hub.requests) == (4, [])
    assert "HF_HUB_OFFLINE" in error and "name a local folder" in error


def test_a_path_that_is_missing_is_not_looked_for_on_the_hub(tmp_path, hub):
    code, error = ask(tmp_path, "data/rows.jsonl", endpoint=hub.url)
    assert (code, hub.requests) == (2, []) and "data.train: data/rows.jsonl" in error
