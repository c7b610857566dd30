"""Piece `peers`: shardwise beside other trainers on the same model, rows, precision and global batch.

Each trainer is a process of its own, and a step is timed from outside: from where the process is let go to where its
step has ended and the device is idle. Alone, every trainer runs from start to end, A B C and again A B C; where all
fit on the card at once, they moreover take turns step by step, which is the comparison that counts.
"""

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from on_gpu import peers_table
from on_gpu.bench import Bench
from on_gpu.peers_contests import CONTESTS, Contest, PeerJob, peer_job
from on_gpu.peers_run import PeerError, Trained, TrainerRun, train_alone, train_in_turns
from on_gpu.peers_trainers import (
    BY_NAME,
    ROOT,
    RUN,
    TRAINERS,
    Trainer,
    count_lines,
    installed_version,
    python_of,
    why_not,
    words_of,
    write_files,
)
from on_gpu.pieces import Piece, Row, Step
from trainer.planning.device import device_of
from trainer.planning.speed import flops_per_token
from trainer.runtime.export_plan import read_plan
from trainer.spec.model_shape import read_model_shape
from trainer.spec.plan import Candidate
from trainer.spec.strategy import Method, Precision

CONTEXT_BYTES = 1 << 30  # of a CUDA process, beside what its allocator reserves
LEAST_IN_TURNS = 2


def steps(bench: Bench, done: Mapping[str, Row]) -> Iterator[Step]:
    """Every trainer alone, by rounds; then in turns those that the rows so far say fit together."""
    yield from steps_of(bench, done, CONTESTS)


def steps_of(
    bench: Bench, done: Mapping[str, Row], contests: Sequence[Contest], trainers: Sequence[Trainer] = TRAINERS
) -> Iterator[Step]:
    for contest in contests:
        for number in range(1, contest.rounds + 1):
            for trainer in trainers:
                yield Step(
                    alone_name(contest, trainer, number),
                    lambda contest=contest, trainer=trainer: run_alone(bench, contest, trainer),
                    expected_s=contest.expected_s,
                )
        if contest.takes_turns:
            names = [trainer.name for trainer in trainers]
            group = fitting(done, contest, names, room_bytes=_room_bytes(bench))
            if len(group) >= LEAST_IN_TURNS:
                yield Step(
                    f"{contest.name}: in turns",
                    lambda contest=contest, group=group: run_in_turns(bench, contest, group),
                    expected_s=60.0 + 30.0 * len(group),
                )


def alone_name(contest: Contest, trainer: Trainer, number: int) -> str:
    """The name of a step."""
    return f"{contest.name}: {trainer.name}, round {number}"


def fitting(
    done: Mapping[str, Row], contest: Contest, names: Sequence[str], *, room_bytes: int | None
) -> tuple[str, ...]:
    """Trainers that ran alone and fit on the device together: ours first, then as many as there is room for."""
    group, taken = [], 0
    for name in names:
        row = done.get(alone_name(contest, BY_NAME[name], 1), {})
        if row.get("outcome") != "ran":
            continue
        memory = row["memory"]
        need = memory.get("peak_reserved_bytes", memory.get("peak_resident_bytes", 0)) + CONTEXT_BYTES
        if room_bytes is None or taken + need <= room_bytes:
            group.append(name)
            taken += need
    return tuple(group)


def run_alone(bench: Bench, contest: Contest, trainer: Trainer) -> Row:
    """One trainer from start to end."""
    folder = _fresh(bench)
    job = peer_job(bench, contest, folder)
    reason = why_not(trainer, job, bench.environment)
    known = _facts(bench, job, trainer)
    if reason is not None:
        return known | {"outcome": reason}
    try:
        run, text = _started(bench, job, trainer)
        known |= {"lines": count_lines(text), "file": _readable(text, bench)}
        known |= _told(train_alone(run, num_steps=job.num_steps), job, trainer)
    except PeerError as error:
        return known | {"outcome": "failed", "reason": _readable(str(error), bench)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return known | {"outcome": "ran"}


def run_in_turns(bench: Bench, contest: Contest, names: Sequence[str]) -> Row:
    """Several trainers, step by step in turn."""
    folder = _fresh(bench)
    trainers = [BY_NAME[name] for name in names]
    jobs = [peer_job(bench, contest, folder / str(number)) for number in range(len(trainers))]
    try:
        runs = [_started(bench, job, trainer)[0] for job, trainer in zip(jobs, trainers, strict=True)]
        train_in_turns(runs, num_steps=jobs[0].num_steps)
        each = zip(runs, jobs, trainers, strict=True)
        told = {trainer.name: _told(run.trained, job, trainer) for run, job, trainer in each}
    except PeerError as error:
        return _facts(bench, jobs[0], None) | {"outcome": "failed", "reason": _readable(str(error), bench)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return _facts(bench, jobs[0], None) | {"outcome": "ran", "trainers": told}


def _started(bench: Bench, job: PeerJob, trainer: Trainer) -> tuple[TrainerRun, str]:
    """The process, not started yet, and what a person writes for it."""
    file = write_files(trainer, job)
    clock = job.folder / "clock"
    clock.mkdir(parents=True)
    words = words_of(trainer, file, clock, bench.environment)
    run = TrainerRun(
        words,
        clock,
        environment={**bench.environment, **_one_gpu(bench)},
        stop=bench.stop,
        needs_rank=trainer.package == "torchtitan",
    )
    return run, file.read_text()


def _facts(bench: Bench, job: PeerJob, trainer: Trainer | None) -> Row:
    """What the tables need to know of a contest and a trainer."""
    contest = job.contest
    facts: Row = {
        "contest": contest.name,
        "model": contest.model,
        "method": contest.method,
        "precision": contest.precision,
        "checkpointing": contest.checkpointing,
        "seq_len": job.seq_len,
        "micro_batch": contest.micro_batch,
        "accumulation": contest.accumulation,
        "tokens_per_step": job.tokens_per_step,
        "num_steps": job.num_steps,
        "is_rehearsal": bench.is_tiny,
        "device": bench.device_name,
        **_model_flops(bench, job),
    }
    if trainer is not None:
        version = installed_version(trainer.package, python_of(trainer, bench.environment))
        facts |= {"trainer": trainer.name, "command": trainer.command, "version": version}
    return facts


def _model_flops(bench: Bench, job: PeerJob) -> dict[str, Any]:
    """FLOPs of a token by the one count for all trainers, and the card's stated peak; no peak without a GPU."""
    contest = job.contest
    shape = read_model_shape(json.loads((job.model / "config.json").read_text()))
    peak = device_of(bench.hardware).peak_flops_per_s.get(Precision.BF16) if bench.hardware.gpus else None
    flops = flops_per_token(shape, job.seq_len, Method(contest.method))
    return {"flops_per_token": flops, "peak_flops_per_s": peak}


def _told(trained: Trained, job: PeerJob, trainer: Trainer) -> dict[str, Any]:
    return {
        **({"chosen": _chosen(read_plan(job.folder / RUN).chosen)} if trainer.is_ours else {}),
        "seconds": trained.seconds,
        "losses": {str(step): loss for step, loss in sorted(trained.losses.items())},
        "memory": trained.memory,
        "versions": trained.versions,
    }


def _chosen(candidate: Candidate) -> dict[str, str]:
    """What shardwise trained with, also where nothing was pinned."""
    return {
        "strategy": candidate.strategy.name,
        "precision": candidate.strategy.precision,
        "optimizer": candidate.strategy.optimizer,
        "checkpointing": candidate.checkpointing,
        "attention": candidate.attention,
        "loss": candidate.loss,
        "compile": str(candidate.compile).lower(),
        "micro batch": f"{candidate.micro_batch} x {candidate.accumulation}",
    }


def _room_bytes(bench: Bench) -> int | None:
    """What trainers that are there at once may take of the card, or of RAM; None where it is not known."""
    if bench.hardware.gpus:
        return int(0.92 * device_of(bench.hardware).usable_bytes)
    available = bench.hardware.host.ram_available_bytes
    return None if available is None else int(0.8 * available)


def _one_gpu(bench: Bench) -> dict[str, str]:
    """Of several cards the first: transformers' Trainer would take all of them."""
    visible = bench.environment.get("CUDA_VISIBLE_DEVICES")
    return {"CUDA_VISIBLE_DEVICES": visible.split(",")[0] if visible else "0"} if bench.hardware.gpus else {}


def _fresh(bench: Bench) -> Path:
    """A folder for one run."""
    folder = bench.work / "peers"
    folder.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(dir=folder))


def _readable(text: str, bench: Bench) -> str:
    """Without the paths of this machine."""
    text = re.sub(rf"{re.escape(str(bench.work))}(/peers/[^/'\"\s]+)?", "WORK", text)
    for folder, name in ((sys.prefix, "PYTHON"), (str(ROOT), "SHARDWISE")):
        text = text.replace(folder, name)
    return text


PIECE = Piece(
    name="peers",
    about="shardwise beside other trainers: speed, memory, loss, lines",
    steps=steps,
    tables=peers_table.tables,
    version=2,
    goals=peers_table.goals,
)
