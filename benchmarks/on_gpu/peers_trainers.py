"""The trainers that are compared: what has to be installed, the file that a person writes, and how it is started.

Each may have a Python of its own, as many pin a torch: `SHARDWISE_PEER_PYTHON_AXOLOTL=/venvs/axolotl/bin/python`.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from on_gpu import peers_configs, peers_scripts
from on_gpu.peers_contests import PeerJob

SCRIPTS = Path(__file__).parent / "peer_scripts"
ROOT = Path(__file__).resolve().parents[2]
OWN_PACKAGE, RUN = "shardwise", "run"  # the folder of its run, beside the file
NEEDED = {"full": (), "lora": ("peft",), "qlora": ("peft", "bitsandbytes")}  # packages, beside a trainer's own


class Trainer(NamedTuple):
    """One of those that are compared."""

    name: str
    package: str  # as pip names it
    file: str  # what a person writes
    write: Callable[[PeerJob], str]
    command: str  # what a person types
    where: str = "callback"  # the end of a step, for peer_scripts/with_clock.py
    module: tuple[str, ...] = ()  # instead of running the file: the module that reads it, and what it is told
    methods: tuple[str, ...] = ("full", "lora", "qlora")

    @property
    def is_ours(self) -> bool:
        return self.package == OWN_PACKAGE


PINNED, PLANNED = "shardwise, same settings", "shardwise, its own choice"
TRAINERS = (
    Trainer(PINNED, OWN_PACKAGE, "job.yaml", peers_configs.pinned_job, "shardwise train job.yaml"),
    Trainer(PLANNED, OWN_PACKAGE, "job.yaml", peers_configs.planned_job, "shardwise train job.yaml"),
    Trainer("TRL SFTTrainer", "trl", "train_trl.py", peers_scripts.trl_script, "python train_trl.py"),
    Trainer(
        "transformers Trainer", "transformers", "train_trainer.py", peers_scripts.transformers_script,
        "python train_trainer.py",
    ),
    Trainer("bare loop", "torch", "train_bare.py", peers_scripts.bare_script, "python train_bare.py", where="print"),
    Trainer("Unsloth", "unsloth", "train_unsloth.py", peers_scripts.unsloth_script, "python train_unsloth.py"),
    Trainer(
        "Axolotl", "axolotl", "axolotl.yaml", peers_configs.axolotl_config, "axolotl train axolotl.yaml",
        module=("axolotl.cli.train",),
    ),
    Trainer(
        "LLaMA-Factory", "llamafactory", "llamafactory.yaml", peers_configs.llamafactory_config,
        "llamafactory-cli train llamafactory.yaml", module=("llamafactory.launcher",),
    ),
    Trainer(
        "torchtitan", "torchtitan", "torchtitan.toml", peers_configs.torchtitan_config,
        "torchrun --nproc_per_node 1 -m torchtitan.train --job.config_file torchtitan.toml",
        where="optimizer", module=("torchtitan.train", "--job.config_file"), methods=("full",),
    ),
)  # fmt: skip
BY_NAME = {trainer.name: trainer for trainer in TRAINERS}


def python_of(trainer: Trainer, environment: Mapping[str, str]) -> str:
    """The interpreter that a trainer runs in."""
    return environment.get(f"SHARDWISE_PEER_PYTHON_{trainer.package.upper()}", sys.executable)


def installed_version(package: str, python: str) -> str | None:
    """The version of a package from the metadata there; None where it is not installed."""
    if package == OWN_PACKAGE:
        return "this one"
    if python == sys.executable:
        try:
            return version(package)
        except PackageNotFoundError:
            return None
    code = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        asked = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except OSError:
        return None
    return asked.stdout.strip() if asked.returncode == 0 else None


def why_not(trainer: Trainer, job: PeerJob, environment: Mapping[str, str]) -> str | None:
    """Why a trainer has no part in a contest here; None where it has."""
    if job.contest.method not in trainer.methods:
        return f"trains no {job.contest.method}"
    if trainer.package == "torchtitan" and job.contest.model not in peers_configs.TORCHTITAN_FLAVORS:
        return f"has no {job.contest.model}"
    python = python_of(trainer, environment)
    if installed_version(trainer.package, python) is None:
        return "not installed here"
    missing = [each for each in NEEDED[job.contest.method] if installed_version(each, python) is None]
    if missing:
        return f"{missing[0]} is not installed here"
    if trainer.package in ("unsloth", "torchtitan") and not job.is_cuda:
        return "needs a GPU"
    return None


def write_files(trainer: Trainer, job: PeerJob) -> Path:
    """Writes what a person writes, and what else the trainer needs of the rows; the path of the first."""
    job.folder.mkdir(parents=True, exist_ok=True)
    path = job.folder / trainer.file
    path.write_text(trainer.write(job))
    if trainer.package == "llamafactory":
        _save_rows(job)
    if trainer.package == "torchtitan":
        _write_text(job)
    return path


def words_of(trainer: Trainer, file: Path, clock: Path, environment: Mapping[str, str]) -> list[str]:
    """The process to start, its clock included."""
    python = python_of(trainer, environment)
    if trainer.is_ours:
        run = str(file.parent / RUN)
        words = [python, "-m", "launch.cli", "train", str(file)]
        return [*words, f"extensions={_extension(clock)}", "--run-dir", run]
    words = [python, str(SCRIPTS / "with_clock.py"), str(clock), trainer.where]
    return [*words, "-m", *trainer.module, str(file)] if trainer.module else [*words, str(file)]


def count_lines(text: str) -> int:
    """Lines that say something: neither empty nor a comment."""
    return sum(1 for line in text.splitlines() if line.strip() and not line.strip().startswith("#"))


def _extension(clock: Path) -> Path:
    """shardwise's own hook at the end of a step, which calls the same clock."""
    path = clock / "clock.py"
    path.write_text(
        f"import sys\nfrom pathlib import Path\n\nsys.path.insert(0, {str(SCRIPTS)!r})\n"
        f"from step_clock import StepClock\n\nclock = StepClock(Path({str(clock)!r}))\n\n\n"
        "def on_step(step, metrics):\n"
        '    clock.end_of_step(step, loss=metrics["loss"], peak_bytes=metrics.get("memory_peak_bytes"))\n'
    )
    return path


def _save_rows(job: PeerJob) -> None:
    folder = peers_configs.saved_rows(job)
    if folder.is_dir():
        return
    from datasets import Dataset, DatasetDict

    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    rows = Dataset.from_list([json.loads(line) for line in job.rows.open()])
    DatasetDict({"train": rows}).save_to_disk(partial)
    partial.rename(folder)


def _write_text(job: PeerJob) -> None:
    folder = peers_configs.text_rows(job)
    folder.mkdir(exist_ok=True)
    with (folder / "rows.jsonl").open("w") as stream:
        for line in job.rows.open():
            words = " ".join(f"t{number}" for number in json.loads(line)["input_ids"])
            stream.write(json.dumps({"text": words}) + "\n")
