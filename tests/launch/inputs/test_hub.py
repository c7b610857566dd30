"""Downloads from a hub that runs here: a real server, asked by the real library in a process of its own."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_questions import ask_hub
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
MODEL = {"name": "org/model"}

PROGRAM = """
import json, sys
from pathlib import Path
from shardwise.launch.inputs.model_files import download_model, read_model_config
from shardwise.trainer.spec.errors import ShardwiseError
from shardwise.trainer.spec.job.reading import read_job

answers, home = [], Path(sys.argv[2])
for model, wants_weights in json.loads(sys.argv[1]):
    job = read_job({"model": model, "data": {"train": "x"}}, origin="job.yaml")
    try:
        files = read_model_config(job, cache_home=home)
        files = download_model(job, files, cache_home=home) if wants_weights else files
    except ShardwiseError as error:
        answers.append([int(error.exit_code), str(error)])
    else:
        answers.append([0, files.model_path, files.tokenizer_path, files.revision, files.needs_download])
print(json.dumps(answers))
"""
IN_TIME = """
import json, sys
from pathlib import Path
from shardwise.launch.inputs.hub import download_snapshot
from shardwise.trainer.spec.errors import ShardwiseError
try:
    download_snapshot("org/model", revision=None, cache=Path(sys.argv[1]), setting="model.name", with_weights=False,
                      timeout_s=0.3)
except ShardwiseError as error:
    print(json.dumps([int(error.exit_code), str(error)]))
"""


@pytest.fixture
def hub() -> Iterator[Hub]:
    with serving(Hub(files={"org/model": FILES}, gated={"org/gated"})) as served:
        yield served


def ask_all(home: Path, *questions: tuple[dict[str, str], bool], endpoint: str, **environment: str) -> list[Any]:
    """For each model, with its weights or without: [exit code, error] or [0, its facts]."""
    return ask_hub(PROGRAM, json.dumps(questions), str(home), home=home, endpoint=endpoint, **environment)


def ask(home: Path, model: dict[str, str], *, endpoint: str, weights: bool = False, **environment: str) -> Any:
    """[exit code, error] or [0, model path, tokenizer path, revision, needs download]."""
    (answer,) = ask_all(home, (model, weights), endpoint=endpoint, **environment)
    return answer


def downloaded(home: Path) -> set[str]:
    return {path.name for path in home.rglob("snapshots/*/*")}


def test_a_plan_downloads_the_small_files_only(tmp_path, hub):
    code, model_path, tokenizer_path, revision, needs_download = ask(tmp_path, MODEL, endpoint=hub.url)
    assert (code, model_path, revision, needs_download) == (0, "org/model", COMMIT, True)
    assert str(tokenizer_path).endswith(COMMIT)
    assert downloaded(tmp_path) == {"config.json", "tokenizer.json"}


def test_training_downloads_the_weights_and_nothing_pickled_or_twice(tmp_path, hub):
    first = ask(tmp_path, MODEL, endpoint=hub.url, weights=True)
    assert (first[0], first[-1]) == (0, False)
    assert str(first[1]).endswith(COMMIT)
    assert downloaded(tmp_path) == {"config.json", "tokenizer.json", "model.safetensors"}
    hub.requests.clear()
    assert ask(tmp_path, MODEL, endpoint=hub.url, weights=True) == first
    assert hub.requests == [], "what was downloaded is not asked for again"


REFUSED = [
    ({"name": "org/gated"}, ("model.name: org/gated", "https://huggingface.co/org/gated", "hf auth login")),
    ({"name": "org/gone"}, ("model.name: org/gone", "hf auth login")),
    ({"name": "org/model", "revision": "v9"}, ("model.name: org/model", "revision v9")),
    ({"config": "org/gone", "tokenizer": "train"}, ("model.config: org/gone", "hf auth login")),
]


def test_each_refusal_of_the_hub_is_one_line_with_the_next_step(tmp_path, hub):
    answers = ask_all(tmp_path, *((model, False) for model, _ in REFUSED), endpoint=hub.url)
    for (_, facts), (code, error) in zip(REFUSED, answers, strict=True):
        assert (code, len(error.splitlines())) == (2, 1)
        assert [fact for fact in facts if fact not in error] == []


def test_a_hub_that_takes_the_question_and_never_answers_is_given_up(tmp_path):
    """Left to itself, the library would wait for minutes, longer than the limit in `ask_hub`."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        code, error = ask_hub(IN_TIME, str(tmp_path), home=tmp_path, endpoint=endpoint)
    assert code == 4 and "reached" in error
