"""`shardwise profile`: a few real steps, and files that the viewers they are for would take."""

import csv
import gzip
import json


def test_a_profile_names_modules_and_operators_and_leaves_its_files(workplace):
    answer = workplace.run("profile", "job.yaml", "--out", "here", "--steps", "6", "--json")
    told, folder = json.loads(answer.stdout), workplace.folder / "here" / "profile"
    assert told["run_dir"] == "here" and len(told["steps_s"]) == 2
    with gzip.open(folder / "trace.json.gz") as stream:
        events = json.load(stream)["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    retained = {each["place"]: each["num_bytes"] for each in told["profile"]["kept"]}
    assert any(place.startswith("transformer block 1, ") for place in retained)
    assert sum(retained.values()) <= told["profile"]["kept_bytes"]
    assert told["profile"]["operators"][0]["seconds"] > 0
    with (folder / "memory-timeline.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert {row["phase"] for row in rows} >= {"forward", "backward", "optimizer"}
    most = max(int(row["bytes_above_the_start"]) for row in rows)
    memory = told["memory"]
    assert most <= memory["peak_allocated_bytes"] < memory["steady_allocated_bytes"] + 2 * most
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
