"""`shardwise ladder` and `shardwise profile`: a few real steps, their peaks, and the files that viewers take."""

import csv
import gzip
import json
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
Rows = dict[str, dict]


def check(rows: Rows, *, lowered: tuple[str, ...]) -> None:
    assert all(rows[name]["peak_change"] < -0.02 for name in lowered), rows
    for row in rows.values():
        if row["outcome"] == "ran":
            assert row["predicted_peak_bytes"] == pytest.approx(row["peak_bytes"], rel=0.1), row["rung"]
    assert len({row["micro_batch"] for row in rows.values() if row["micro_batch"]}) == 1


def test_each_technique_lowers_the_peak_as_predicted(workplace):
    files = {name: workplace.folder / f"ladder.{name}" for name in ("csv", "html")}
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    rungs = "fp32,full,flash,lora"
    few = ("train.tokens_per_step=1024", "data.train=text")
    answer = workplace.run("ladder", QUICKSTART, *few, "--rungs", rungs, "--steps", "3", "--json", *options)
    rows = {row["rung"]: row for row in json.loads(answer.stdout)}
    assert list(rows) == rungs.split(",")
    check(rows, lowered=("full", "lora"))
    assert rows["flash"]["outcome"] == "skipped" and "GPU" in rows["flash"]["reason"]
    for row in (rows["fp32"], rows["lora"]):
        phases = [row[f"{phase}_peak_bytes"] for phase in ("forward", "backward", "optimizer")]
        assert max(phases) == row["peak_bytes"] and row["exit_code"] == 0
    with files["csv"].open() as stream:
        assert [row["rung"] for row in csv.DictReader(stream)] == list(rows)
    assert "quickstart" in files["html"].read_text()
    assert list((workplace.folder / "cache" / "ladder").iterdir()) == []


@pytest.mark.long
@pytest.mark.products
def test_the_whole_ladder_of_the_quickstart(workplace):
    answer = workplace.run("ladder", QUICKSTART, "--json", timeout=1800)
    rows = {row["rung"]: row for row in json.loads(answer.stdout)}
    lowered = ("bf16-mixed", "full", "sdpa", "chunked", "adamw_8bit", "lora", "qlora")
    assert [name for name, row in rows.items() if row["outcome"] == "ran"] == ["fp32", *lowered]
    assert rows["sdpa"]["peak_change"] < 0 and all(rows[name]["step_s"] for name in lowered)
    check({name: row for name, row in rows.items() if name != "sdpa"}, lowered=tuple(set(lowered) - {"sdpa"}))


def test_a_rung_that_runs_out_of_memory_is_shown_and_the_ladder_goes_on(workplace):
    """Steps that need four hundred MiB where all logits are held, in one micro batch."""
    workplace.write_job(train={"steps": 2, "seq_len": 128, "tokens_per_step": 32768})
    words = ("pin.micro_batch=256", "--steps", "3", "--vram", "144MiB", "--rungs", "fp32,full+chunked+micro_batch=32")
    answer = workplace.run("ladder", "job.yaml", "--json", *words)
    first, last = json.loads(answer.stdout)
    assert (first["outcome"], first["exit_code"], first["peak_bytes"]) == ("out of memory", 5, None)
    assert first["need_bytes"] > first["limit_bytes"] == 144 * 2**20
    assert (last["outcome"], last["exit_code"], last["peak_change"]) == ("ran", 0, None)
    assert "exit code 5" in answer.stderr


def test_a_profile_names_operators_and_leaves_its_files(workplace):
    answer = workplace.run("profile", "job.yaml", "--out", "here", "--steps", "6", "--json")
    told, folder = json.loads(answer.stdout), workplace.folder / "here" / "profile"
    assert told["run_dir"] == "here" and len(told["steps_s"]) == 2
    with gzip.open(folder / "trace.json.gz") as stream:
        events = json.load(stream)["traceEvents"]
    assert {"aten::mm", "[memory]"} <= {event.get("name") for event in events}
    assert told["profile"]["operators"][0]["seconds"] > 0
    assert {path.name for path in folder.iterdir()} == {"trace.json.gz", "profile.json"}
    memory = told["memory"]
    assert {"forward", "backward", "optimizer"} <= memory["peaks"].keys()
    assert max(memory["peaks"].values()) == memory["peak_allocated_bytes"] > memory["steady_allocated_bytes"]
    assert not (workplace.folder / "here" / "checkpoints").exists()
    again = workplace.run("profile", "job.yaml", "--out", "here", check=False)
    assert again.returncode == 2 and "here" in again.stderr


def test_time_alone_is_told_and_nothing_is_left(workplace):
    output = workplace.run("profile", "job.yaml", "log.every=5 steps", "--steps", "5", "--time").stdout
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert any("8 steps" in line for line in lines)
    assert any("2 steps were timed" in line for line in lines)
    assert not (workplace.folder / "runs").exists()
    assert list((workplace.folder / "cache" / "profile").iterdir()) == []
