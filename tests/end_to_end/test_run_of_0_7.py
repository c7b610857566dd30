"""A run directory, a job file and a checkpoint that version 0.7.0 wrote: resumed, reported and exported."""

import shutil
from pathlib import Path

import msgspec
import pytest
from workplace_factory import Workplace

CAPTURED = Path(__file__).parents[1] / "captured" / "run_of_0_7"


def losses(path: Path) -> dict[int, float]:
    lines = map(msgspec.json.decode, path.read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_it_is_resumed_reported_and_exported(workplace: Workplace) -> None:
    for name in ("job.yaml", "config.json", "text.txt"):
        shutil.copy(CAPTURED / name, workplace.folder / name)
    run_dir = workplace.folder / "runs" / "old-20261125-062908"
    shutil.copytree(CAPTURED / "run", run_dir)
    stopped, whole = losses(run_dir / "metrics.jsonl"), losses(CAPTURED / "whole.jsonl")
    assert (max(stopped), max(whole)) == (28, 40)

    workplace.run("train", "job.yaml", "--resume")
    report = msgspec.json.decode((run_dir / "report.json").read_bytes())
    assert (report["ending"], report["step"], report["resumed_from_step"]) == ("finished", 40, 28)
    assert losses(run_dir / "metrics.jsonl") == pytest.approx(whole, rel=1e-4)
    assert "finished at step 40" in workplace.run("report", str(run_dir)).stdout
    workplace.run("export", str(run_dir), "exported")
    assert (workplace.folder / "exported" / "model.safetensors").is_file()
