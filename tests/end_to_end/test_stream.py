"""`data.streaming: true` from the command line: a data set of a hub that is never here whole."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import COMMIT, Hub, serving
from workplace_factory import SENTENCES, Workplace, read_metrics

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.report import Ending, Report

NUM_FILES = 4


def rows_of(file: int) -> bytes:
    rows = [{"text": f"{SENTENCES[(file + row) % 4]} {file} {row}"} for row in range(60)]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.fixture
def hub() -> Iterator[Hub]:
    files = {f"data/train-{number:05d}-of-0000{NUM_FILES}.jsonl": rows_of(number) for number in range(NUM_FILES)}
    with serving(
        Hub(files={"org/rows": {**files, "rows.py": b"raise SystemExit('ran')", "README.md": b"rows"}})
    ) as hub:
        yield hub


@pytest.fixture
def online(workplace: Workplace, hub: Hub) -> Workplace:
    retained = {name: value for name, value in workplace.environment.items() if "PROXY" not in name.upper()}
    retained = {name: value for name, value in retained.items() if not name.startswith("HF_")}
    place = Workplace(workplace.folder, retained | {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1"})
    place.write_job(
        data={"train": "org/rows", "streaming": True, "eval": "10%"},
        train={"steps": 40},
        eval={"every": "20 steps"},
        checkpoint={"every": "20 steps"},
    )
    return place


def test_a_data_set_of_the_hub_is_trained_on_file_by_file(online: Workplace, hub: Hub) -> None:
    online.run("train", "job.yaml")
    run_dir = online.only_run()
    plan = (run_dir / "plan.json").read_text()
    assert "64 MiB" in plan, "of the window in which rows are shuffled"
    report = codec.read(run_dir / "report.json", Report)
    assert (report.ending, report.step) == (Ending.FINISHED, 40)
    assert [evaluation.step for evaluation in report.evaluations] == [20, 40]
    assert len([incident for incident in report.incidents if "began again" in incident]) == 1
    lines = read_metrics(run_dir)
    assert len(lines) == 40 and all("epoch" not in line for line in lines.values())

    fetched = [line.rpartition("/")[2] for line in hub.requests if line.startswith("GET") and "/resolve/" in line]
    assert {name for name in fetched if name != "README.md"} == {f"train-{n:05d}-of-00004.jsonl" for n in range(4)}
    assert max(map(fetched.count, fetched)) >= 2, "a second pass fetches again what was removed"
    left = [
        path.name for path in online.folder.rglob("*") if path.name.startswith("train-") or "incomplete" in path.name
    ]
    assert left == []
    assert [path.name for path in Path(online.environment["SHARDWISE_CACHE"], "streams").iterdir()] == ["locks"]
    assert f"org/rows@{COMMIT}" in plan
