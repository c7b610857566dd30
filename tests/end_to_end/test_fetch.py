"""`shardwise fetch` downloads enough to train without a network, and asks the hub nothing about complete files."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from export_factory import write_base
from hub_server import COMMIT, Hub, serving
from workplace_factory import SENTENCES, TINY_CONFIG, Workplace

from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer

NUM_FILES = 3
ROWS = [{"text": f"{SENTENCES[number % 4]} {number}"} for number in range(240)]


def rows_file(number: int) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in ROWS[number::NUM_FILES]).encode()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "model"
    write_trained_tokenizer(train_tokenizer(iter(SENTENCES), vocab_size=TINY_CONFIG["vocab_size"]), folder)
    write_base(folder, TINY_CONFIG)
    model = {path.name: path.read_bytes() for path in folder.iterdir()} | {"pytorch_model.bin": b"never fetched"}
    rows = {f"data/train-{number:05d}-of-0000{NUM_FILES}.jsonl": rows_file(number) for number in range(NUM_FILES)}
    with serving(Hub(files={"org/model": model, "org/rows": rows})) as served:
        yield served


@pytest.fixture
def online(workplace: Workplace, hub: Hub) -> Workplace:
    retained = {name: value for name, value in workplace.environment.items() if "PROXY" not in name.upper()}
    retained = {name: value for name, value in retained.items() if not name.startswith("HF_")}
    place = Workplace(workplace.folder, retained | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"})
    place.write_job(
        model={"name": "org/model", "config": None, "tokenizer": None},
        data={"train": "org/rows", "eval": "10%"},
        train={"steps": 2},
        checkpoint={"every": "100 steps"},
    )
    return place


def offline(place: Workplace) -> Workplace:
    """The same without a network: the hub's address leads nowhere."""
    nowhere = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    return Workplace(place.folder, place.environment | nowhere)


def test_after_fetch_a_job_of_the_hub_trains_without_a_network(online: Workplace, hub: Hub):
    cache = online.folder / "home" / ".cache" / "huggingface" / "hub"
    lines = online.run("fetch", "job.yaml").stdout.splitlines()
    size = sum(map(len, (rows_file(number) for number in range(NUM_FILES))))
    assert any(
        line.startswith("the weights of org/model: ") and line.endswith(f"1 file into {cache}") for line in lines
    )
    assert any("org/rows" in line and f"{size / 1024:.3g} KiB" in line and str(cache) in line for line in lines)
    assert any(line.startswith("the prepared data: prepared now, ") for line in lines)
    assert lines[-1] == "without a network: HF_HUB_OFFLINE=1 shardwise train job.yaml"
    assert not list(cache.rglob("pytorch_model.bin"))

    asked = len(hub.requests)
    lines = online.run("fetch", "job.yaml", "--no-prepare").stdout.splitlines()
    assert lines[:2] == [
        f"the weights of org/model: here already, in {cache}",
        f"the data of org/rows (data.train): here already, in {cache}",
    ]
    assert len(hub.requests) == asked

    offline(online).run("train", "job.yaml")
    assert f"org/rows@{COMMIT}" in (online.only_run() / "plan.json").read_text()


def test_a_stream_is_fetched_whole(online: Workplace, hub: Hub):
    cache = online.folder / "home" / ".cache" / "huggingface" / "hub"
    lines = online.run("fetch", "job.yaml", "data.streaming=true", "--no-prepare").stdout.splitlines()
    assert any(line.startswith("the data of org/rows") and " in 3 files into " in line for line in lines)
    assert len(list(cache.rglob("train-*.jsonl"))) == NUM_FILES


def test_a_download_that_was_broken_off_is_gone_on_with(online: Workplace, hub: Hub):
    online.run("fetch", "job.yaml", "--no-prepare")
    (broken,) = (online.folder / "home").rglob("snapshots/*/model.safetensors")
    broken.unlink()
    lines = online.run("fetch", "job.yaml", "--no-prepare").stdout.splitlines()
    assert " in 1 file into " in lines[0] and "here already" in lines[1]
    assert broken.is_file()
