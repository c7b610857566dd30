"""Runs whose ranks fail on purpose: a user's extensions file breaks one rank, once for each fault that is listed."""

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.attempt.watchdog import WatchLimits
from shardwise.launch.inputs.trusted_code import read_extension
from shardwise.launch.run.attempts import RunOutcome, run_attempts
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.plan import Candidate, Plan

# Steps of a few milliseconds, on a machine that may be busy with something else.
LIMITS = WatchLimits(phase_s=120.0, least_step_s=8.0)

PROGRAM = """
import ctypes
import faulthandler
import os
import signal
import time
from pathlib import Path

import torch
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_pre_hook

FAULTS = {faults!r}  # (kind, rank, call of loss in its attempt)
MARKS = Path({marks!r})
RANK = int(os.environ.get("RANK", "0"))
struck = [number for number in range(len(FAULTS)) if (MARKS / str(number)).exists()]
armed = None if len(struck) == len(FAULTS) else len(struck)
calls = 0


def loss(logits, labels):
    global calls
    calls += 1
    answer = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    if armed is None or (RANK, calls) != FAULTS[armed][1:]:
        return answer
    (MARKS / str(armed)).touch()
    return STRIKES[FAULTS[armed][0]](answer)


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, strike):
        ctx.strike = strike
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.strike()


def in_backward(strike):
    return lambda answer: Breaks.apply(answer, strike)


def in_optimizer(answer):
    register_optimizer_step_pre_hook(out_of_memory)
    return answer


def fail():
    raise RuntimeError("a bug in a kernel")


def sleep_for_ever(_=None):
    while True:
        time.sleep(0.1)


def hold_the_interpreter(_):
    ctypes.PyDLL(None).sleep(1000)  # C code that lets no other thread of Python run


def with_slow_disk(answer):
    fsync = os.fsync
    os.fsync = lambda file: (time.sleep(0.5), fsync(file))
    return answer


def hold_everything(_):
    held = []
    while True:
        held.append(torch.ones(2**20))


def fill_the_disk(answer):
    with (MARKS / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    return answer


def on_step(step, metrics):
    if step == {free_at} - 1:
        time.sleep(1.0)  # the supervisor sees what is in the heartbeats
    if step >= {free_at}:
        (MARKS / "filler").unlink(missing_ok=True)


STRIKES = {{
    "oom in forward": out_of_memory,
    "oom in backward": in_backward(out_of_memory),
    "oom in optimizer": in_optimizer,
    "sigkill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "segfault": lambda _: faulthandler._sigsegv(),
    "error in backward": in_backward(fail),
    "exit": lambda _: os._exit(3),
    "hang": sleep_for_ever,
    "hang in C": hold_the_interpreter,
    "slow disk": with_slow_disk,
    "full disk": fill_the_disk,
    "out of RAM": hold_everything,
    "stop": lambda answer: (os.kill(os.getpid(), signal.SIGSTOP), answer)[1],
}}
"""


class Fault(NamedTuple):
    kind: str
    rank: int
    call: int


def with_faults(plan: Plan, folder: Path, faults: Sequence[Fault], *, free_at: int = 10**9) -> Plan:
    """The plan with an extensions file that breaks its ranks, one fault an attempt; none for an empty list.

    `free_at` is the step after which a disk that was filled is empty again.
    """
    marks = folder / "marks"
    marks.mkdir(parents=True)
    path = folder / "faults.py"
    path.write_text(PROGRAM.format(faults=[tuple(fault) for fault in faults], marks=str(marks), free_at=free_at))
    return replace(plan, extension=read_extension(str(path)))


def halves(candidate: Candidate) -> tuple[Candidate, ...]:
    """Fallbacks of half the micro batch each, down to one sequence."""
    found, now = [], candidate
    while now.micro_batch > 1:
        now = replace(now, micro_batch=now.micro_batch // 2, accumulation=now.accumulation * 2)
        found.append(now)
    return tuple(found)


def run_plan(
    plan: Plan, run_dir: Path, *, stop: StopRequest | None = None, resume: bool = False, limits: WatchLimits = LIMITS
) -> tuple[RunOutcome, str]:
    lines = io.StringIO()
    run_dir.mkdir(parents=True, exist_ok=True)
    outcome = run_attempts(
        plan, run_dir=run_dir, resume=resume, extensions_dir=run_dir / "operators", console=Console(lines),
        stop=stop or StopRequest(), environment={**os.environ, "OMP_NUM_THREADS": "1"}, limits=limits,
    )  # fmt: skip
    return outcome, lines.getvalue()
