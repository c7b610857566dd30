"""Uploads to a small hub on this machine, through the real huggingface_hub; and everything that refuses one."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, login, serving

TOKEN = "hf_secretsecretsecret"  # of the server in this file
PROGRAM = """
import sys
from pathlib import Path
from launch.hub_push import check_target, upload
from trainer.spec.errors import ShardwiseError
try:
    target = check_target(sys.argv[1], is_public="--public" in sys.argv)
    if "--check" not in sys.argv:
        print(upload(Path(sys.argv[2]), target))
except ShardwiseError as error:
    print(error, file=sys.stderr)
    sys.exit(int(error.exit_code))
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


def push(hub_url: str, home: Path, *words: str | Path, token: str | None = TOKEN, **environment: str):
    """A process of its own: the library reads its settings when it is imported."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    settings = {"HF_ENDPOINT": hub_url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env=clean | settings | ({} if token is None else {"HF_TOKEN": token}),
    )


@pytest.mark.parametrize(("words", "is_private"), [((), True), (("--public",), False)])
def test_a_folder_goes_up_whole_into_a_new_repository(words, is_private, hub, folder, tmp_path):
    answer = push(hub.url, tmp_path / "home", "ann/cats", folder, *words)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.strip() == f"{hub.url}/ann/cats"
    assert hub.files["ann/cats"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    assert hub.repositories == {"ann/cats": is_private}
    assert TOKEN not in answer.stdout + answer.stderr
    assert not any(TOKEN.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_an_organisation_and_a_repository_that_is_there_are_uploaded_to(hub, folder, tmp_path):
    hub.repositories["lab/cats"] = True
    answer = push(hub.url, tmp_path / "home", "lab/cats", folder)
    assert answer.returncode == 0, answer.stderr
    assert set(hub.files["lab/cats"]) == {"README.md", "model.safetensors"}


def test_asking_makes_nothing(hub, tmp_path):
    answer = push(hub.url, tmp_path / "home", "ann/cats", "--check")
    assert answer.returncode == 0, answer.stderr
    assert hub.repositories == {}
    assert {"GET /api/whoami-v2", "GET /api/models/ann/cats"} <= set(hub.requests)
    assert all(request.startswith("GET ") for request in hub.requests)


def test_a_login_that_was_stored_is_taken(hub, folder, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(TOKEN)
    assert push(hub.url, tmp_path / "home", "ann/cats", folder, token=None).returncode == 0
    assert "ann/cats" in hub.files


def fine_grained(kind: str, name: str, right: str) -> dict[str, object]:
    """A token whose rights are listed."""
    scoped = [{"entity": {"type": kind, "name": name}, "permissions": [right]}]
    return {"role": "fineGrained", "fineGrained": {"scoped": scoped}}


MAY_READ = fine_grained("user", "ann", "repo.content.read")
MAY_WRITE = fine_grained("model", "ann/cats", "repo.write")


@pytest.mark.parametrize(
    ("name", "words", "token", "who", "exit_code", "message"),
    [
        ("cats", (), TOKEN, {}, 2, "--push cats: is not USER/NAME"),
        ("ann/" + "c" * 100, (), TOKEN, {}, 2, "--push ann/c"),
        ("ann/cats.git", (), TOKEN, {}, 2, "--push ann/cats.git: "),
        ("ann/cats", (), None, {}, 4, "there is no login for the hub;\nlog in with: hf auth login"),
        ("ann/cats", (), "hf_other", {}, 4, "the hub does not know this token;\nlog in with: hf auth login"),
        ("bob/cats", (), TOKEN, {}, 2, "you are ann and may write to ann, lab"),
        ("school/cats", (), TOKEN, {}, 2, "you are ann and may write to ann, lab"),
        ("ann/cats", (), TOKEN, {"role": "read"}, 4, "the token laptop may not write there"),
        ("ann/cats", (), TOKEN, MAY_READ, 4, "the token laptop may not write there"),
        ("ann/seen", (), TOKEN, {}, 2, "is on the hub already and is public; add --public"),
        ("ann/kept", ("--public",), TOKEN, {}, 2, "is on the hub already and is private; leave --public out"),
    ],
)  # fmt: skip
def test_what_cannot_be_uploaded_is_said_before_anything_is_made(
    name, words, token, who, exit_code, message, hub, tmp_path
):
    hub.repositories.update({"ann/seen": False, "ann/kept": True})
    hub.logins[TOKEN] = login(orgs={"lab": "write", "school": "read"}, **who)
    answer = push(hub.url, tmp_path / "home", name, "--check", *words, token=token)
    assert (answer.returncode, message in answer.stderr) == (exit_code, True), answer.stderr
    assert 1 <= len(answer.stderr.strip().splitlines()) <= 3
    assert TOKEN not in answer.stderr and hub.files == {}


def test_a_fine_grained_token_may_write_what_it_names(hub, folder, tmp_path):
    hub.logins[TOKEN] = login(**MAY_WRITE)
    assert push(hub.url, tmp_path / "home", "ann/cats", folder).returncode == 0
    assert push(hub.url, tmp_path / "home", "ann/dogs", folder).returncode == 4


def test_a_hub_that_is_not_there_and_one_that_may_not_be_asked(tmp_path):
    with serving(Hub()) as gone:
        pass
    answer = push(gone.url, tmp_path / "home", "ann/cats", "--check")
    assert answer.returncode == 4 and "the hub cannot be reached (ConnectError);\nnothing was exported" in answer.stderr
    answer = push(gone.url, tmp_path / "home", "ann/cats", "--check", HF_HUB_OFFLINE="1")
    assert answer.returncode == 4 and "HF_HUB_OFFLINE is set; unset it" in answer.stderr


def test_an_upload_that_fails_says_where_the_export_is_and_how_to_go_on(hub, folder, tmp_path):
    hub.refuses["POST /api/models/ann/cats/commit"] = 403
    answer = push(hub.url, tmp_path / "home", "ann/cats", folder)
    assert answer.returncode == 4
    assert "the hub refuses to write there" in answer.stderr
    assert f"the export is whole in {folder}; to try again: hf upload ann/cats {folder} ." in answer.stderr
