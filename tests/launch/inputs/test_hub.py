"""Models, data sets and uploads on a hub that runs here: a real server, asked by the real library."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hub_server import COMMIT, NO_HUB, Hub, ask_hub, login, serving
from prepare_request_factory import request_for

from shardwise.trainer.spec.job.sources import DataSource

OLD_COMMIT = "f" * 40
TOKEN = "hf_secretsecretsecret"  # of the server in this file
TENSORS = b'{"model.embed_tokens.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}'
MODEL_FILES = {
    "config.json": b'{"model_type": "llama", "vocab_size": 4}',
    "tokenizer.json": b'{"model": {"vocab": {"a": 0}}}',
    "model.safetensors": len(TENSORS).to_bytes(8, "little") + TENSORS + b"\0" * 32,
    "pytorch_model.bin": b"pickled",
    "original/consolidated.safetensors": b"a second copy",
    "README.md": b"# A model",
}
README = b"---\nconfigs:\n- config_name: default\n  data_files:\n  - {split: train, path: 'data/a*'}\n---\n"
SHARDS = {f"data/a-0000{number}-of-00002.jsonl": b'{"text": "%d"}\n' % number for number in range(2)}
SCRIPT = b"raise SystemExit('a script ran')"
REPOSITORIES = {
    "org/model": MODEL_FILES,
    "org/rows": {"README.md": README, **SHARDS, "data/b [1].jsonl": b"{}\n", "rows.py": SCRIPT, "rows.pkl": b"pickled"},
    "org/plain": {"train [x].csv": b"text\na\n", "test.csv": b"text\nb\n"},
    "org/script": {"README.md": b"# Rows", "script.py": SCRIPT},
    "org/pictures": {"a.png": b"x", "b.tar": b"x"},
}
PROGRAM = """
import json, os, sys
from pathlib import Path
import msgspec
from shardwise.launch.inputs import hub
from shardwise.launch.inputs.data_files import list_files
from shardwise.launch.inputs.model_files import download_model, read_model_config
from shardwise.trainer.spec.data.profile import PrepareRequest
from shardwise.trainer.spec.errors import ShardwiseError
from shardwise.trainer.spec.job.reading import read_job

HOME = Path(os.environ["HOME"])

def model(wanted, with_weights):
    job = read_job({"model": wanted, "data": {"train": "x"}}, origin="job.yaml")
    files = read_model_config(job, cache_home=HOME)
    files = download_model(job, files, cache_home=HOME) if with_weights else files
    return files.model_path, files.tokenizer_path, files.revision, files.needs_download

def small_files(timeout_s):
    return hub.download_snapshot("org/model", revision=None, cache=HOME, setting="model.name", with_weights=False,
                                 timeout_s=timeout_s),

def rows(request):
    listed = list_files(msgspec.convert(request, PrepareRequest))
    names = [file.path.partition("/snapshots/")[2] for file in listed.files]
    return names, [Path(file.path).read_text() for file in listed.files], listed.revisions

def push(name, folder, is_public, token):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    target = hub.check_target(name, is_public=is_public)
    return (hub.upload(Path(folder), target) if folder else ""),

answers = []
for action, *question in json.loads(sys.argv[1]):
    try:
        answers.append([0, *globals()[action](*question)])
    except ShardwiseError as error:
        answers.append([int(error.exit_code), str(error)])
print(json.dumps(answers))
"""
Question = tuple[Any, ...]


@pytest.fixture
def hub() -> Iterator[Hub]:
    known = Hub(files=dict(REPOSITORIES), revisions={"main": COMMIT, "v1": OLD_COMMIT}, gated={"org/gated"})
    known.logins[TOKEN] = login(orgs={"lab": "write", "school": "read"})
    with serving(known) as served:
        yield served


def model(*, with_weights: bool = False, **wanted: str) -> Question:
    """Its place, its tokenizer's, its revision, and whether it is still to be downloaded."""
    return "model", wanted, with_weights


def rows(source: str, **part: Any) -> Question:
    """The files of a data set below snapshots/, their contents, and references."""
    request = request_for(cache_root=Path(), seq_len=8, vocab_size=9)
    request = msgspec.structs.replace(request, sources=(DataSource(source=source, **part),))
    return "rows", msgspec.to_builtins(request)


def push(name: str, folder: Path | None = None, *, is_public: bool = False, token: str | None = TOKEN) -> Question:
    """May one upload to `name`; where a folder is given it is uploaded, and the answer is its address."""
    return "push", name, None if folder is None else str(folder), is_public, token


def ask(home: Path, *questions: Question, endpoint: str = NO_HUB, **environment: str) -> list[Any]:
    """For each question, in one process with its cache in `home`: [0, answers] or [exit code, error]."""
    located = [
        (kind, {**rest[0], "cache_root": str(home), "hub_home": str(home)}) if kind == "rows" else (kind, *rest)
        for kind, *rest in questions
    ]
    return ask_hub(PROGRAM, json.dumps(located), home=home, endpoint=endpoint, **environment)


def downloaded(home: Path) -> set[str]:
    return {path.relative_to(home).as_posix().split("/", 4)[4] for path in home.rglob("snapshots/*/**/*.*")}


def test_a_plan_downloads_the_small_files_only_and_training_the_weights_once_and_nothing_pickled(tmp_path, hub):
    ((code, model_path, tokenizer_path, *rest),) = ask(tmp_path, model(name="org/model"), endpoint=hub.url)
    assert (code, model_path, rest) == (0, "org/model", [COMMIT, True])
    assert str(tokenizer_path).endswith(COMMIT)
    assert downloaded(tmp_path) == {"config.json", "tokenizer.json"}
    wanted = model(name="org/model", with_weights=True)
    (first,) = ask(tmp_path, wanted, endpoint=hub.url)
    assert (first[0], first[-1]) == (0, False) and str(first[1]).endswith(COMMIT)
    assert downloaded(tmp_path) == {"config.json", "tokenizer.json", "model.safetensors"}
    hub.requests.clear()
    assert ask(tmp_path, wanted, endpoint=hub.url) == [first]
    assert hub.requests == [], "what was downloaded is not asked for again"


def test_a_hub_that_takes_the_question_and_never_answers_is_given_up(tmp_path):
    """Left to itself, the library would wait for minutes, longer than the limit in `ask_hub`."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        ((code, error),) = ask(tmp_path, ("small_files", 0.3), endpoint=endpoint)
    assert code == 4 and "reached" in error


def test_only_the_files_of_the_split_are_downloaded_and_their_commit_is_recorded(tmp_path, hub):
    contents = [content.decode() for content in SHARDS.values()]
    expected = [0, [f"{COMMIT}/{name}" for name in SHARDS], contents, [f"org/rows@{COMMIT}"]]
    assert ask(tmp_path, rows("org/rows"), endpoint=hub.url) == [expected]
    assert downloaded(tmp_path) == {"README.md", *SHARDS}
    (listing,) = tmp_path.rglob("trees/*.json")
    listing.unlink()  # as another program fills the cache
    assert ask(tmp_path, rows("org/rows")) == [expected]
    (lost,) = tmp_path.rglob("a-00001-of-00002.jsonl")
    lost.unlink()  # as a download that was broken off leaves it
    assert ask(tmp_path, rows("org/rows"))[0][0] == 4, "one of two shards is not the split"
    assert ask(tmp_path, rows("org/rows"), endpoint=hub.url) == [expected]
    (readme,) = tmp_path.rglob("README.md")
    readme.with_name("data").joinpath("b [1].jsonl").write_text("{}")
    readme.unlink()
    assert ask(tmp_path, rows("org/rows"))[0][0] == 4, "without README.md the files of the split are not known"


def test_what_was_downloaded_is_not_asked_for_again_and_a_revision_is_pinned(tmp_path, hub):
    plain, pinned, held_out = rows("org/plain"), rows("org/plain@v1"), rows("org/plain", split="test")
    first, old = ask(tmp_path, plain, pinned, endpoint=hub.url)
    assert first[1:3] == [[f"{COMMIT}/train [x].csv"], ["text\na\n"]]
    assert old[3] == [f"org/plain@{OLD_COMMIT}"]
    *again, (code, error) = ask(tmp_path, plain, rows(f"org/plain@{COMMIT}"), pinned, held_out)
    assert again == [first, first, old]
    assert code == 4 and "hub" in error
    assert ask(tmp_path, held_out, endpoint=hub.url)[0][2] == ["text\nb\n"]
    for listing in tmp_path.rglob("trees/*.json"):
        listing.unlink()
    (lost,) = tmp_path.rglob(f"{COMMIT}/train [[]x].csv")
    lost.resolve().unlink()
    assert ask(tmp_path, plain)[0][0] == 4, "a link to nothing is not the split"


READER, READS_PARTS = "hf_readerreaderreader", "hf_partspartsparts"  # tokens that may not write


def fine_grained(kind: str, name: str, right: str) -> dict[str, Any]:
    scoped = [{"entity": {"type": kind, "name": name}, "permissions": [right]}]
    return login(role="fineGrained", fineGrained={"scoped": scoped})


REFUSED = [  # facts: the error begins with the first
    (model(name="org/gated"), 2, ("model.name: org/gated", "https://huggingface.co/org/gated", "hf auth login")),
    (model(name="org/gone"), 2, ("model.name: org/gone", "hf auth login")),
    (model(name="org/a--b"), 2, ("model.name: org/a--b", "repo_id")),
    (model(name="org/model", revision="v9"), 2, ("model.name: org/model", "revision v9")),
    (model(config="org/gone", tokenizer="train"), 2, ("model.config: org/gone", "hf auth login")),
    (rows("org/gated"), 2, ("data.train: org/gated ", "huggingface.co/datasets/org/gated", "hf auth login")),
    (rows("org/gone"), 2, ("data.train: org/gone ", "hf auth login")),
    (rows("org/rows@v9"), 2, ("data.train: org/rows ", "revision v9")),
    (rows("org/rows", subset="en"), 2, ("data.train: org/rows ", "subset en", "default")),
    (rows("org/plain", split="dev"), 2, ("data.train: org/plain ", "split dev", "test, train")),
    (rows("org/script"), 2, ("data.train: org/script ", "script.py", "\ndata.train=org/script@refs/convert/parquet")),
    (rows("org/pictures"), 2, ("data.train: org/pictures ", ".png, .tar")),
    (push("cats"), 2, ("--push cats", "USER/NAME")),
    (push("ann/" + "c" * 100), 2, ("--push ann/c",)),
    (push("ann/cats.git"), 2, ("--push ann/cats.git",)),
    (push("ann/cats", token=None), 4, ("", "no login", "hf auth login")),
    (push("ann/cats", token="hf_other"), 4, ("", "token", "hf auth login")),
    (push("bob/cats"), 2, ("", "ann, lab")),
    (push("school/cats"), 2, ("", "ann, lab")),
    (push("ann/cats", token=READER), 4, ("", "token laptop")),
    (push("ann/cats", token=READS_PARTS), 4, ("", "token laptop")),
    (push("ann/seen"), 2, ("", "add --public")),
    (push("ann/kept", is_public=True), 2, ("", "remove --public")),
]


def test_each_refusal_is_said_before_anything_is_made_with_the_next_step(tmp_path, hub):
    hub.repositories.update({"ann/seen": False, "ann/kept": True})
    hub.logins |= {READER: login(role="read"), READS_PARTS: fine_grained("user", "ann", "repo.content.read")}
    answers = ask(tmp_path, *(question for question, _, _ in REFUSED), endpoint=hub.url, HF_HOME=str(tmp_path))
    for ((action, *_), exit_code, facts), (code, error) in zip(REFUSED, answers, strict=True):
        assert code == exit_code and error.startswith(facts[0]), error
        assert [fact for fact in facts if fact not in error] == []
        assert len(error.splitlines()) <= (1 if action == "model" else 3) and "hf_" not in error
    assert hub.files == REPOSITORIES


def test_a_hub_that_cannot_be_reached_is_one_line_and_a_cache_that_cannot_be_written_is_named(tmp_path, hub):
    ((code, error),) = ask(tmp_path, rows("org/rows"))
    assert (code, len(error.splitlines())) == (4, 1)
    for fact in ("data.train: org/rows", str(tmp_path / "hub"), "reached", "name a local folder"):
        assert fact in error
    shutil.rmtree(tmp_path / "hub", ignore_errors=True)
    (tmp_path / "hub").write_text("a file")
    for code, error in ask(tmp_path, rows("org/rows"), rows("org/plain"), endpoint=hub.url):
        assert code == 4 and str(tmp_path / "hub") in error and "reached" not in error


def test_offline_is_respected_and_a_missing_path_is_not_looked_for_on_the_hub(tmp_path, hub):
    questions = rows("org/rows"), rows("data/rows.jsonl")
    (code, error), (code_of_path, error_of_path), (code_of_push, error_of_push) = ask(
        tmp_path, *questions, push("ann/cats"), endpoint=hub.url, HF_HUB_OFFLINE="1"
    )
    assert code == 4 and "HF_HUB_OFFLINE" in error and "name a local folder" in error
    assert code_of_push == 4 and "HF_HUB_OFFLINE" in error_of_push
    assert code_of_path == 2 and "data.train: data/rows.jsonl" in error_of_path
    assert ask(tmp_path, questions[1], endpoint=hub.url) == [[code_of_path, error_of_path]]
    assert hub.requests == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "out"
    made.mkdir()
    (made / "README.md").write_text("# a card\n")
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return made


@pytest.mark.parametrize("is_public", [True, False])
def test_a_folder_goes_up_whole_into_a_new_repository(is_public, hub, folder, tmp_path):
    assert ask(tmp_path / "home", push("ann/cats"), endpoint=hub.url) == [[0, ""]]
    assert hub.repositories == {} and {"GET /api/whoami-v2", "GET /api/models/ann/cats"} <= set(hub.requests)
    assert all(request.startswith("GET ") for request in hub.requests), "asking makes nothing"
    answers = ask(tmp_path / "home", push("ann/cats", folder, is_public=is_public), endpoint=hub.url)
    assert answers == [[0, f"{hub.url}/ann/cats"]]
    assert hub.files["ann/cats"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.repositories == {"ann/cats": not is_public}
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_fine_grained_token_may_write_what_it_names_and_an_upload_that_fails_has_a_remedy(hub, folder, tmp_path):
    hub.logins[TOKEN] = fine_grained("model", "ann/cats", "repo.write")
    answers = ask(tmp_path, *(push(name, folder) for name in ("ann/cats", "ann/dogs")), endpoint=hub.url)
    assert [code for code, _ in answers] == [0, 4]
    hub.refuses["POST /api/models/ann/cats/commit"] = 403
    ((code, error),) = ask(tmp_path, push("ann/cats", folder), endpoint=hub.url)
    assert code == 4 and f"hf upload ann/cats {folder} ." in error, "where the export is and how to go on"
