"""Jobs on models and data of a hub: fetched whole for machines without a network, or streamed and never here whole."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from export_factory import write_base
from hub_server import COMMIT, Hub, serving
from workplace_factory import SENTENCES, TINY_CONFIG, Workplace, read_metrics

from shardwise.trainer.runtime.data.tokenizer import train_tokenizer, write_trained_tokenizer
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report

NUM_FILES = 4
ROWS = [{"text": f"{SENTENCES[number % 4]} {number}"} for number in range(240)]
FILES = {f"train-{number:05d}-of-0000{NUM_FILES}.jsonl" for number in range(NUM_FILES)}


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "model"
    write_trained_tokenizer(train_tokenizer(iter(SENTENCES), vocab_size=TINY_CONFIG["vocab_size"]), folder)
    write_base(folder, TINY_CONFIG)
    model = {path.name: path.read_bytes() for path in folder.iterdir()} | {"pytorch_model.bin": b"never fetched"}
    rows = {
        f"data/{name}": "".join(json.dumps(row) + "\n" for row in ROWS[number::NUM_FILES]).encode()
        for number, name in enumerate(sorted(FILES))
    }
    more = {"rows.py": b"raise SystemExit('ran')", "README.md": b"rows"}
    with serving(Hub(files={"org/model": model, "org/rows": {**rows, **more}})) as served:
        yield served


@pytest.fixture
def online(workplace: Workplace, hub: Hub) -> Workplace:
    retained = {
        name: value
        for name, value in workplace.environment.items()
        if "PROXY" not in name.upper() and not name.startswith("HF_")
    }
    return Workplace(workplace.folder, retained | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"})


def test_after_fetch_a_job_of_the_hub_trains_without_a_network(online: Workplace, hub: Hub) -> None:
    """Nothing is asked about complete files, and a download that was broken off is gone on with."""
    online.write_job(
        model={"name": "org/model", "config": None, "tokenizer": None}, data={"train": "org/rows", "eval": "10%"},
        train={"steps": 2}, checkpoint={"every": "100 steps"},
    )  # fmt: skip
    cache = online.folder / "home" / ".cache" / "huggingface" / "hub"
    lines = online.run("fetch", "job.yaml").stdout.splitlines()
    weights = [line for line in lines if line.startswith("the weights of org/model: ")]
    assert weights and weights[0].endswith(f"1 file into {cache}")
    size = sum(len(content) for name, content in hub.files["org/rows"].items() if name.startswith("data/"))
    assert any("org/rows" in line and f"{size / 1024:.3g} KiB" in line and str(cache) in line for line in lines)
    assert any(line.startswith("the prepared data: prepared now, ") for line in lines)
    assert lines[-1] == "without a network: HF_HUB_OFFLINE=1 shardwise train job.yaml"
    assert not list(cache.rglob("pytorch_model.bin"))

    (broken,) = cache.rglob("snapshots/*/model.safetensors")
    broken.unlink()
    lines = online.run("fetch", "job.yaml", "--no-prepare").stdout.splitlines()
    data = f"the data of org/rows (data.train): here already, in {cache}"
    assert " in 1 file into " in lines[0] and lines[1] == data and broken.is_file()
    asked = len(hub.requests)
    lines = online.run("fetch", "job.yaml", "--no-prepare").stdout.splitlines()
    assert lines[:2] == [f"the weights of org/model: here already, in {cache}", data]
    assert len(hub.requests) == asked

    nowhere = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    Workplace(online.folder, online.environment | nowhere).run("train", "job.yaml")
    assert f"org/rows@{COMMIT}" in (online.only_run() / "plan.json").read_text()


def test_a_data_set_of_the_hub_is_trained_on_file_by_file_and_fetched_whole_on_request(online, hub):
    every = {"every": "20 steps"}
    online.write_job(
        data={"train": "org/rows", "streaming": True, "eval": "10%"}, train={"steps": 40}, eval=every, checkpoint=every
    )
    online.run("train", "job.yaml")
    run_dir = online.only_run()
    plan = (run_dir / "plan.json").read_text()
    assert "64 MiB" in plan, "of the window in which rows are shuffled"
    assert f"org/rows@{COMMIT}" in plan
    report = codec.read(run_dir / "report.json", Report)
    assert (report.ending, report.step) == (Ending.FINISHED, 40)
    assert [evaluation.step for evaluation in report.evaluations] == [20, 40]
    assert len([incident for incident in report.incidents if "began again" in incident]) == 1
    lines = read_metrics(run_dir)
    assert len(lines) == 40 and all("epoch" not in line for line in lines.values())

    fetched = [line.rpartition("/")[2] for line in hub.requests if line.startswith("GET") and "/resolve/" in line]
    assert set(fetched) - {"README.md"} == FILES
    assert max(map(fetched.count, fetched)) >= 2, "a second pass fetches again what was removed"
    names = [path.name for path in online.folder.rglob("*")]
    assert not [name for name in names if name.startswith("train-") or "incomplete" in name]
    assert [path.name for path in Path(online.environment["SHARDWISE_CACHE"], "streams").iterdir()] == ["locks"]

    lines_of_fetch = online.run("fetch", "job.yaml", "--no-prepare").stdout.splitlines()
    assert any(line.startswith("the data of org/rows") and " in 4 files into " in line for line in lines_of_fetch)
    assert {path.name for path in (online.folder / "home").rglob("train-*.jsonl")} == FILES
