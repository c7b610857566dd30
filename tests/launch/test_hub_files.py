"""Downloads from a hub that runs here: a real server, asked by the real library in a process of its own."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, serving

TENSORS = b'{"model.embed_tokens.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]}}'
FILES = {
    "config.json": b'{"model_type": "llama", "vocab_size": 4}',
    "tokenizer.json": b'{"model": {"vocab": {"a": 0}}}',
    "model.safetensors": len(TENSORS).to_bytes(8, "little") + TENSORS + b"\0" * 32,
    "pytorch_model.bin": b"pickled",
    "original/consolidated.safetensors": b"a second copy",
    "README.md": b"# A model",
}
REPOSITORIES = {"org/model": FILES, "org/shape": {name: FILES[name] for name in ("config.json", "tokenizer.json")}}

PROGRAM = """
import json, sys
from pathlib import Path
from launch.model_files import download_model, read_model_config
from trainer.spec.errors import ShardwiseError
from trainer.spec.job_file import read_job

model, wants_weights, home = json.loads(sys.argv[1]), sys.argv[2] == "weights", Path(sys.argv[3])
job = read_job({"model": model, "data": {"train": "x"}}, origin="job.yaml")
try:
    files = read_model_config(job, cache_home=home)
    files = download_model(job, files, cache_home=home) if wants_weights else files
except ShardwiseError as error:
    print(json.dumps([int(error.exit_code), str(error)]))
else:
    print(json.dumps([0, files.model_path, files.tokenizer_path, files.revision, files.needs_download]))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub(files=REPOSITORIES, gated={"org/gated"})) as served:
        yield served


def ask(
    home: Path, model: dict[str, str], *, endpoint: str, weights: bool = False, timeout_s: int = 60, **environment: str
) -> list[object]:
    """[exit code, words] or [0, model path, tokenizer path, revision, needs download]."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith("HF_") and "PROXY" not in name.upper()
    }
    answer = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(model), "weights" if weights else "", str(home)],
        env={**kept, "HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout.splitlines()[-1])
    assert isinstance(found, list)
    return found


def downloaded(home: Path) -> set[str]:
    return {path.name for path in home.rglob("snapshots/*/*")}


def test_a_plan_downloads_the_small_files_only(tmp_path, hub):
    code, model_path, tokenizer_path, revision, needs_download = ask(tmp_path, {"name": "org/model"}, endpoint=hub.url)
    assert (code, model_path, revision, needs_download) == (0, "org/model", COMMIT, True)
    assert str(tokenizer_path).endswith(COMMIT)
    assert downloaded(tmp_path) == {"config.json", "tokenizer.json"}


def test_training_downloads_the_weights_and_nothing_pickled_or_twice(tmp_path, hub):
    code, model_path, _, _, needs_download = ask(tmp_path, {"name": "org/model"}, endpoint=hub.url, weights=True)
    assert (code, needs_download) == (0, False)
    assert str(model_path).endswith(COMMIT)
    assert downloaded(tmp_path) == {"config.json", "tokenizer.json", "model.safetensors"}


def test_what_was_downloaded_is_not_asked_for_again(tmp_path, hub):
    first = ask(tmp_path, {"name": "org/model"}, endpoint=hub.url, weights=True)
    hub.requests.clear()
    assert ask(tmp_path, {"name": "org/model"}, endpoint=hub.url, weights=True) == first
    assert hub.requests == []


def test_a_snapshot_without_a_tokenizer_is_completed_where_that_is_possible(tmp_path, hub):
    ask(tmp_path, {"name": "org/shape"}, endpoint=hub.url)
    (snapshot,) = tmp_path.rglob("snapshots/*")
    (snapshot / "tokenizer.json").unlink()
    assert ask(tmp_path, {"name": "org/shape"}, endpoint="http://127.0.0.1:9")[2] is None
    assert ask(tmp_path, {"name": "org/shape"}, endpoint=hub.url)[2] == str(snapshot)


def test_a_repository_without_weights_is_refused_when_they_are_needed(tmp_path, hub):
    assert ask(tmp_path, {"name": "org/shape"}, endpoint=hub.url)[0] == 0
    code, words = ask(tmp_path, {"name": "org/shape"}, endpoint=hub.url, weights=True)
    assert code == 2
    assert "holds no model.safetensors" in str(words)


@pytest.mark.parametrize(
    ("model", "code", "words"),
    [
        (
            {"name": "org/gated"},
            2,
            "model.name: org/gated is gated; ask for access at https://huggingface.co/org/gated, then run: "
            "hf auth login",
        ),
        (
            {"name": "org/gone"},
            2,
            "model.name: org/gone is neither a folder here nor a model on the hub that you may see; check the name or, "
            "for a private one, run: hf auth login",
        ),
        ({"name": "org/model", "revision": "v9"}, 2, "model.name: org/model has no revision v9"),
        (
            {"config": "org/gone", "tokenizer": "train"},
            2,
            "model.config: org/gone is neither a folder here nor a model on the hub that you may see; check the name "
            "or, for a private one, run: hf auth login",
        ),
    ],
)
def test_each_refusal_of_the_hub_is_one_line_with_the_next_step(tmp_path, hub, model, code, words):
    assert ask(tmp_path, model, endpoint=hub.url) == [code, words]


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path):
    code, words = ask(tmp_path, {"name": "org/model"}, endpoint="http://127.0.0.1:9")
    assert code == 4
    assert words == (
        f"model.name: org/model is neither a folder here nor in {tmp_path / 'hub'}, and the hub cannot be reached; "
        "name a local folder"
    )


def test_offline_is_respected_and_named(tmp_path, hub):
    code, words = ask(tmp_path, {"name": "org/model"}, endpoint=hub.url, HF_HUB_OFFLINE="1")
    assert code == 4
    assert "and HF_HUB_OFFLINE is set; name a local folder" in str(words)
    assert hub.requests == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, hub):
    (tmp_path / "hub").write_text("a file where the cache should be")
    code, words = ask(tmp_path, {"name": "org/model"}, endpoint=hub.url)
    assert code == 4
    assert str(words).startswith(f"model.name: org/model cannot be downloaded into {tmp_path / 'hub'}: ")


def test_a_hub_that_takes_the_question_and_never_answers_is_given_up(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, words = ask(tmp_path, {"name": "org/model"}, endpoint=endpoint, timeout_s=20)  # the library waits minutes
    assert code == 4
    assert str(words).endswith("and the hub cannot be reached; name a local folder")
