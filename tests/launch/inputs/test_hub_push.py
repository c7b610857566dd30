"""Uploads to a small hub on this machine, through the real huggingface_hub; and everything that refuses one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_questions import ask_hub
from hub_server import Hub, login, serving

TOKEN = "hf_secretsecretsecret"  # of the server in this file
PROGRAM = """
import json, os, sys
from pathlib import Path
from shardwise.launch.inputs.hub import check_target, upload
from shardwise.trainer.spec.errors import ShardwiseError

answers = []
for name, folder, is_public, token in json.loads(sys.argv[1]):
    os.environ.pop("HF_TOKEN", None)
    if token:
        os.environ["HF_TOKEN"] = token
    try:
        target = check_target(name, is_public=is_public)
        answers.append([0, upload(Path(folder), target) if folder else ""])
    except ShardwiseError as error:
        answers.append([int(error.exit_code), str(error)])
print(json.dumps(answers))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub(logins={TOKEN: login(orgs={"lab": "write", "school": "read"})})) as served:
        yield served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "out"
    made.mkdir()
    (made / "README.md").write_text("# a card\n")
    (made / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return made


Question = tuple[str, str | None, bool, str | None]


def question(name: str, folder: Path | None = None, *, is_public: bool = False, token: str | None = TOKEN) -> Question:
    """May one upload to `name`; where a folder is given it is uploaded."""
    return name, None if folder is None else str(folder), is_public, token


def push(hub_url: str, home: Path, *questions: Question, **environment: str) -> list[Any]:
    """For each question: [exit code, the error or the address]."""
    return ask_hub(PROGRAM, json.dumps(questions), home=home, endpoint=hub_url, HF_HOME=str(home), **environment)


@pytest.mark.parametrize("is_public", [True, False])
def test_a_folder_goes_up_whole_into_a_new_repository(is_public, hub, folder, tmp_path):
    answers = push(hub.url, tmp_path / "home", question("ann/cats", folder, is_public=is_public))
    assert answers == [[0, f"{hub.url}/ann/cats"]]
    assert hub.files["ann/cats"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.repositories == {"ann/cats": not is_public}
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_asking_makes_nothing(hub, tmp_path):
    assert push(hub.url, tmp_path / "home", question("ann/cats")) == [[0, ""]]
    assert hub.repositories == {}
    assert {"GET /api/whoami-v2", "GET /api/models/ann/cats"} <= set(hub.requests)
    assert all(request.startswith("GET ") for request in hub.requests)


def fine_grained(kind: str, name: str, right: str) -> dict[str, Any]:
    """A token whose rights are listed."""
    scoped = [{"entity": {"type": kind, "name": name}, "permissions": [right]}]
    return {"role": "fineGrained", "fineGrained": {"scoped": scoped}}


MAY_READ = fine_grained("user", "ann", "repo.content.read")
MAY_WRITE = fine_grained("model", "ann/cats", "repo.write")
READER, READS_PARTS = "hf_readerreaderreader", "hf_partspartsparts"  # tokens that may not write

REFUSED = [
    (question("cats"), 2, ("--push cats", "USER/NAME")),
    (question("ann/" + "c" * 100), 2, ("--push ann/c",)),
    (question("ann/cats.git"), 2, ("--push ann/cats.git",)),
    (question("ann/cats", token=None), 4, ("no login", "hf auth login")),
    (question("ann/cats", token="hf_other"), 4, ("token", "hf auth login")),
    (question("bob/cats"), 2, ("ann, lab",)),
    (question("school/cats"), 2, ("ann, lab",)),
    (question("ann/cats", token=READER), 4, ("token laptop",)),
    (question("ann/cats", token=READS_PARTS), 4, ("token laptop",)),
    (question("ann/seen"), 2, ("add --public",)),
    (question("ann/kept", is_public=True), 2, ("remove --public",)),
]


def test_what_cannot_be_uploaded_is_said_before_anything_is_made(hub, tmp_path):
    hub.repositories.update({"ann/seen": False, "ann/kept": True})
    hub.logins |= {READER: login(role="read"), READS_PARTS: login(**MAY_READ)}
    answers = push(hub.url, tmp_path / "home", *(asked for asked, _, _ in REFUSED))
    for (asked, exit_code, facts), (code, error) in zip(REFUSED, answers, strict=True):
        assert code == exit_code, (asked, error)
        assert [fact for fact in facts if fact not in error] == []
        assert len(error.splitlines()) <= 3 and "hf_" not in error
    assert hub.files == {}


def test_a_fine_grained_token_may_write_what_it_names(hub, folder, tmp_path):
    hub.logins[TOKEN] = login(**MAY_WRITE)
    answers = push(hub.url, tmp_path / "home", *(question(name, folder) for name in ("ann/cats", "ann/dogs")))
    assert [code for code, _ in answers] == [0, 4]


def test_an_upload_that_fails_says_where_the_export_is_and_how_to_go_on(hub, folder, tmp_path):
    hub.refuses["POST /api/models/ann/cats/commit"] = 403
    ((code, error),) = push(hub.url, tmp_path / "home", question("ann/cats", folder))
    assert code == 4 and f"hf upload ann/cats {folder} ." in error
