"""Part 3: tokens per second of an 8B model compared with TRL, Unsloth, Axolotl and plain Accelerate on the same card.

Each trainer is a separate process that trains a few steps; a clock inside it records when a step has ended and the
device is idle. The losses are stored with the speed: trainers that do the same work have the same ones.

Unsloth and Axolotl need other versions of transformers and TRL than each other and shardwise, so each may have a folder
of packages of its own, PEERS/unsloth and PEERS/axolotl, whose packages its process finds before those of this Python.
A trainer whose packages are in neither place is refused, with a line that names them.
"""

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from on_gpu.bench import Bench
from on_gpu.case import Case, Outcome, Row
from on_gpu.peer_files import (
    SEED,
    Contest,
    PeerJob,
    accelerate_script,
    axolotl_config,
    best_axolotl_config,
    best_trl_script,
    best_unsloth_script,
    pinned_job,
    planned_job,
    trl_script,
    unsloth_script,
)
from on_gpu.programme import Step
from on_gpu.tables import bytes_cell, markdown_table, number, ratio
from shardwise.launch.rundir.process_record import descendants, record_of
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.plan import Plan

PART = "peers"
SCRIPTS, ROOT = Path(__file__).parent / "peer_scripts", Path(__file__).resolve().parents[2]
CONTESTS = (
    Contest(name="8B, LoRA", model="llama-3.1-8b", method="lora", precision="bf16-mixed", micro_batch=4, lr=1e-4),
    Contest(name="8B, all parameters", model="llama-3.1-8b", method="full", precision="bf16", micro_batch=2, lr=1e-5),
    Contest(name="8B, QLoRA", model="llama-3.1-8b", method="qlora", precision="bf16-mixed", micro_batch=4, lr=1e-4),
)
NEEDED = {"full": (), "lora": ("peft",), "qlora": ("peft", "bitsandbytes")}  # packages, besides a trainer's own
EXPECTED_S, LIMIT_S = 80.0, 300.0  # of one trainer on a GPU, from start to end
COMPILES_S = 40.0  # more: Unsloth and Axolotl compile their kernels, and import more
END_S, POLL_S = 10.0, 0.2
_OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "DefaultCPUAllocator: can't allocate")
_OFFLINE = {
    "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "WANDB_MODE": "disabled",
    "UNSLOTH_DISABLE_STATISTICS": "1", "AXOLOTL_DO_NOT_TRACK": "1", "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore",
}  # fmt: skip


class Trainer(NamedTuple):
    """A trainer of the comparison."""

    name: str
    package: str | None  # as pip names it; None for shardwise itself
    file: str
    write: Callable[[PeerJob], str]
    others: tuple[str, ...] = ()  # packages that it needs besides
    module: str | None = None  # that reads the file; None: the file is a script
    environment: str | None = None  # folder of its packages below PEERS, if it may have one


def _unsloth(name: str, write: Callable[[PeerJob], str]) -> Trainer:
    return Trainer(name, "unsloth", "train_unsloth.py", write, ("unsloth_zoo", "trl"), environment="unsloth")


def _axolotl(name: str, write: Callable[[PeerJob], str], *others: str) -> Trainer:
    return Trainer(name, "axolotl", "axolotl.yaml", write, others, module="axolotl.cli.train", environment="axolotl")


PINNED = "shardwise, same settings"
TRAINERS = (
    Trainer(PINNED, None, "job.yaml", pinned_job),
    Trainer("shardwise, its own choice", None, "job.yaml", planned_job),
    Trainer("TRL SFTTrainer", "trl", "train_trl.py", trl_script),
    Trainer("TRL SFTTrainer, best settings", "trl", "train_trl.py", best_trl_script, ("liger-kernel",)),
    _unsloth("Unsloth", unsloth_script),
    _unsloth("Unsloth, best settings", best_unsloth_script),
    _axolotl("Axolotl", axolotl_config),
    _axolotl("Axolotl, best settings", best_axolotl_config, "liger-kernel"),
    Trainer("plain Accelerate", "accelerate", "train_accelerate.py", accelerate_script),
)


class PeerError(Exception):
    """A trainer did not finish; the message is the reason in one line."""


def steps(bench: Bench) -> list[Step]:
    """Each trainer in each contest, alone on the card."""
    return [
        Step(
            PART, f"{contest.name}: {trainer.name}", partial(run_trainer, bench, contest, trainer), expected_s(trainer)
        )
        for contest in CONTESTS
        for trainer in TRAINERS
    ]


def expected_s(trainer: Trainer) -> float:
    """Upper bound of the seconds of a trainer on a GPU."""
    return EXPECTED_S + (COMPILES_S if trainer.environment else 0.0)


def run_trainer(bench: Bench, contest: Contest, trainer: Trainer) -> Row:
    """One trainer, from its start to the end of its last step."""
    facts: Row = {"contest": contest.name, "trainer": trainer.name}
    if (reason := missing_package(bench, contest, trainer)) is not None:
        return facts | {"outcome": str(Outcome.REFUSED), "reason": reason}
    (bench.work / "peers").mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=bench.work / "peers"))
    try:
        job = peer_job(bench, contest, folder)
        lines = _lines_of(bench, trainer, job)
        rates = figures(lines, tokens=job.seq_len * contest.micro_batch)
        return facts | {"outcome": str(Outcome.RAN), **rates, **_choice(folder / "run" / "plan.json")}
    except PeerError as error:
        is_out = str(error) == str(Outcome.OUT_OF_MEMORY)
        return facts | {"outcome": str(error) if is_out else str(Outcome.FAILED), "reason": str(error)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def missing_package(bench: Bench, contest: Contest, trainer: Trainer) -> str | None:
    """The first package that a trainer lacks, as a sentence; None if it has all."""
    packages = [*([trainer.package] if trainer.package else []), *trainer.others, *NEEDED[contest.method]]
    own = own_packages(bench, trainer)
    path = [*([str(own)] if own is not None else []), *sys.path]
    missing = next((each for each in packages if not any(distributions(name=each, path=path))), None)
    if missing is None:
        return None
    if trainer.environment is None:
        return f"{missing} is not installed here"
    place = "--peers DIR names no such folder" if own is None else f"{own} lacks it too"
    return f"{missing} is not installed here, and {place}"


def own_packages(bench: Bench, trainer: Trainer) -> Path | None:
    """The folder of a trainer's own packages; None if it has none."""
    folder = bench.peers / trainer.environment if bench.peers is not None and trainer.environment else None
    return folder if folder is not None and folder.is_dir() else None


def _choice(plan_path: Path) -> Row:
    """The settings and predicted speed of shardwise's plan; nothing for the other trainers, which write none."""
    if not plan_path.is_file():
        return {}
    chosen = codec.read(plan_path, Plan).chosen
    settings = msgspec.to_builtins(replace(chosen, reasons=(), buckets=None))
    del settings["memory"], settings["speed"]
    return {"settings": settings, "predicted_tokens_per_s": chosen.speed.tokens_per_s_per_gpu}


def figures(lines: list[Row], *, tokens: int) -> Row:
    """The figures of a trainer from the lines of its clock; `tokens` are those of a step."""
    seconds = [line["seconds"] for line in lines if line.get("seconds")]
    steady = seconds[len(seconds) // 3 :]  # the first third compiles, allocates and warms up
    peaks = [line["peak_allocated_bytes"] for line in lines if "peak_allocated_bytes" in line]
    return {
        "tokens_per_s": tokens / statistics.median(steady) if steady else None,
        "peak_allocated_bytes": max(peaks, default=None),
        "losses": {str(line["step"]): round(line["loss"], 4) for line in lines if line.get("loss") is not None},
        "versions": next((line["versions"] for line in lines if "versions" in line), {}),
    }


def peer_job(bench: Bench, contest: Contest, folder: Path) -> PeerJob:
    """The contest on this machine; creates model and rows if they do not exist."""
    case = Case(name=contest.name, model=contest.model, seq_len=contest.seq_len, micro_batch=contest.micro_batch)
    own_rows = bench.rows_of(case, contest.num_steps * contest.micro_batch)
    return PeerJob(
        contest=contest,
        seq_len=bench.seq_len_of(case),
        model=bench.model_of(contest.model),
        rows=_ordered_rows(bench, case, own_rows, num_steps=contest.num_steps),
        own_rows=own_rows,
        folder=folder,
        is_cuda=bool(bench.hardware.gpus),
    )


def _ordered_rows(bench: Bench, case: Case, own_rows: Path, *, num_steps: int) -> Path:
    """The rows in the order in which shardwise trains on them."""
    path = own_rows.with_name(f"{own_rows.stem}-by-{case.sequences_per_step}.jsonl")
    if not path.is_file():
        lines = [json.loads(line)["input_ids"] for line in own_rows.read_text().splitlines()]
        partial_path = path.with_suffix(".partial")
        with partial_path.open("w") as stream:
            for number_of_line in _order(bench, case, own_rows, num_steps=num_steps):
                ids = lines[number_of_line]
                stream.write(json.dumps({"input_ids": ids, "labels": ids, "attention_mask": [1] * len(ids)}) + "\n")
        partial_path.rename(path)
    return path


def _order(bench: Bench, case: Case, own_rows: Path, *, num_steps: int) -> Iterator[int]:
    """Numbers of the lines of `own_rows`; InputError if the prepared rows differ from these lines."""
    from shardwise.trainer.runtime.data.cache import TokenRows

    settings = {"data.train": str(own_rows), "train.seed": str(SEED)}
    _, profile = bench.inputs_of(replace(case, settings=settings, num_steps=num_steps))
    assert profile.cache_dir is not None
    rows = TokenRows.open(Path(profile.cache_dir), "train")
    lines = {tuple(json.loads(line)["input_ids"]): place for place, line in enumerate(own_rows.open())}
    order = rows.order(seed=SEED, sequences_per_step=case.sequences_per_step)
    for step in range(num_steps):
        for row in order.rows_of_step(step):
            place = lines.get(tuple(rows.row(row).tolist()))
            if place is None:
                raise InputError(f"{own_rows.name}: row {row} of the prepared data is none of its lines")
            yield place


def _lines_of(bench: Bench, trainer: Trainer, job: PeerJob) -> list[Row]:
    """Runs a trainer until its last step has ended; the lines of its clock."""
    file = job.folder / trainer.file
    file.write_text(trainer.write(job))
    environment = {**bench.environment, **_OFFLINE}
    if (own := own_packages(bench, trainer)) is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(own), environment.get("PYTHONPATH"))))
    if bench.hardware.gpus:
        visible = environment.get("CUDA_VISIBLE_DEVICES") or "0"
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[0]  # transformers' Trainer would use every card
    log_path = job.folder / "log.txt"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            argv_of(trainer, file, num_steps=job.contest.num_steps),
            cwd=ROOT if trainer.package is None else job.folder,  # where Unsloth writes compiled modules
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        _wait(bench, process, job)
    finally:
        _end(process)
    lines = _clock_lines(job.folder)
    if not _has_ended(lines, job.contest.num_steps):
        raise PeerError(_reason(log_path.read_text(errors="replace"), process.returncode))
    return lines


def argv_of(trainer: Trainer, file: Path, *, num_steps: int) -> list[str]:
    """The command of a trainer with its clock: a hook of shardwise, a wrapper for the others.

    `shardwise profile --time` runs the steps of the job's own plan and, like the others here, saves nothing.
    """
    if trainer.package is not None:
        target = [str(file)] if trainer.module is None else [trainer.module, str(file)]
        return [sys.executable, str(SCRIPTS / "with_clock.py"), str(file.parent), *target]
    hook = file.parent / "clock.py"
    hook.write_text(
        f"import sys\nfrom pathlib import Path\n\nsys.path.insert(0, {str(SCRIPTS)!r})\n"
        f"from step_clock import StepClock\n\nclock = StepClock(Path({str(file.parent)!r}))\n\n\n"
        "def on_step(step, metrics):\n"
        '    clock.end_of_step(step, loss=metrics["loss"], peak_bytes=metrics.get("memory_peak_bytes"))\n'
    )
    command = [sys.executable, "-m", "shardwise.launch.cli", "profile", str(file), f"extensions={hook}"]
    return [*command, "--time", "--steps", str(num_steps), "--out", str(file.parent / "run")]


def _wait(bench: Bench, process: subprocess.Popen[bytes], job: PeerJob) -> None:
    """Returns when the process or its last step has ended, a stop is requested, or the limit is over."""
    gives_up_at = time.monotonic() + LIMIT_S
    while process.poll() is None and bench.stop.kind is None and time.monotonic() < gives_up_at:
        lines = _clock_lines(job.folder)
        if _has_ended(lines, job.contest.num_steps):
            gives_up_at = min(gives_up_at, time.monotonic() + END_S)
            if any(line["step"] == job.contest.num_steps and line.get("loss") is not None for line in lines):
                return
        time.sleep(POLL_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with all that it started, and waits: the next trainer must not share the card with it."""
    family = [*descendants(process.pid), record_of(process.pid)]
    for member in family:
        if member is not None:
            member.send(signal.SIGKILL)
    process.wait(END_S)
    gives_up_at = time.monotonic() + END_S
    while any(member is not None and member.is_alive for member in family) and time.monotonic() < gives_up_at:
        time.sleep(POLL_S)


def _clock_lines(folder: Path) -> list[Row]:
    path = folder / "steps.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.is_file() else ""
    return [json.loads(line) for line in whole.splitlines()]


def _has_ended(lines: list[Row], num_steps: int) -> bool:
    return sum("seconds" in line for line in lines) >= num_steps


def _reason(log: str, return_code: int | None) -> str:
    """Why a trainer did not finish, from its output."""
    if any(message in log for message in _OUT_OF_MEMORY):
        return str(Outcome.OUT_OF_MEMORY)
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    last = (errors or lines or ["no output"])[-1]
    return f"ended with {return_code}: {last[:300]}"


def _groups(rows: Mapping[str, Row]) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for row in rows.values():
        found.setdefault(str(row.get("contest")), {})[str(row.get("trainer"))] = row
    return found


def summary(rows: Mapping[str, Row]) -> str:
    """One line."""
    parts = []
    for contest, trainers in _groups(rows).items():
        ours = trainers.get(PINNED, {}).get("tokens_per_s")
        others = {name: row.get("tokens_per_s") for name, row in trainers.items() if not name.startswith("shardwise")}
        ratios = [f"{ours / rate:.2f} x {name}" for name, rate in others.items() if ours and rate]
        parts.append(f"{contest}: {', '.join(ratios) or 'nothing to compare'}")
    return "; ".join(parts)


def table(rows: Mapping[str, Row]) -> str:
    """A Markdown table of trainers and contests, with the speed relative to shardwise with the same settings."""
    lines = []
    for contest, trainers in _groups(rows).items():
        base = trainers.get(PINNED, {}).get("tokens_per_s")
        for name, row in trainers.items():
            lines.append((
                contest, name, _outcome(row), number(row.get("tokens_per_s")), ratio(row.get("tokens_per_s"), base),
                bytes_cell(row.get("peak_allocated_bytes")), _last_loss(row),
            ))  # fmt: skip
    return markdown_table(
        ("contest", "trainer", "outcome", "tokens/s", f"of {PINNED}", "peak allocated", "last loss"), lines
    )


def _outcome(row: Mapping[str, Any]) -> str:
    reason = row.get("reason") or row.get("error")
    return str(row.get("outcome")) if not reason else f"{row.get('outcome')}: {reason}"


def _last_loss(row: Mapping[str, Any]) -> str:
    losses = row.get("losses") or {}
    return f"{losses[max(losses, key=int)]:.4f}" if losses else "-"
