"""Ranks that a signal ends while they start: each end is named with its rank and signal, and the run is started again.

In a third of the cases the other ranks are stopped a moment before, and react to nothing but SIGKILL, as ranks do that
wait in a collective on their GPU.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count, product
from pathlib import Path
from typing import NamedTuple

import pytest
from fault_factory import run_plan
from kill_factory import Count, check
from rank_factory import rank_plan, write_rows

from shardwise.launch.attempt.watchdog import WatchLimits
from shardwise.launch.rundir.process_record import ProcessRecord, descendants, read_records
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.messages.rank_files import STEP_PHASES, read_heartbeat
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Fault

pytestmark = [pytest.mark.long, pytest.mark.starts, pytest.mark.cold]
NUM_KILLS = int(os.environ.get("SHARDWISE_START_KILLS", "200"))  # in parts of
KILLS_A_PART, KILLS_A_RUN = 10, 2  # the third attempt that ends at one step ends a run
ENGINES = [
    (Sharding.NONE, 1), (Sharding.ZERO2, 1), (Sharding.DDP, 2), (Sharding.ZERO2, 2), (Sharding.ZERO3, 2),
    (Sharding.FSDP, 2), (Sharding.DDP, 3), (Sharding.ZERO3, 3), (Sharding.FSDP, 3),
]  # fmt: skip
INTERPRETER, FIRST_STEP = "a new interpreter", "the first step"
# The phases of a start in their order, each with the longest delay in seconds after which a rank in it is struck.
PHASES = {
    INTERPRETER: 0.5,
    "importing the libraries": 4.0,
    "starting the engine": 0.5,
    "loading the data": 0.05,
    "loading the model": 0.3,
    "preparing the engine": 0.3,
    FIRST_STEP: 0.2,
}
LIMITS = WatchLimits(phase_s=300.0, least_step_s=90.0)  # longer than a supervisor takes to end ranks that do not react
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)


class Blow(NamedTuple):
    """A signal to one rank, some seconds after it came to a phase; the other ranks may be stopped just before."""

    phase: str
    delay_s: float
    rank: int
    number: signal.Signals
    others_wait: bool


def ranks_of(attempt: Path, num_ranks: int) -> dict[int, ProcessRecord]:
    """The ranks of an attempt, also those that have not registered: processes below the launcher that run a trainer."""
    launcher = read_records(attempt / "pids").get("launcher")
    found: dict[int, ProcessRecord] = {}
    for record in descendants(launcher.pid) if launcher is not None and launcher.is_alive else ():
        with suppress(OSError):
            process = Path("/proc") / str(record.pid)
            if b"shardwise.trainer" not in (process / "cmdline").read_bytes():
                continue
            variables = [each for each in (process / "environ").read_bytes().split(b"\0") if each.startswith(b"RANK=")]
            if variables or num_ranks == 1:
                found.setdefault(int(variables[0].removeprefix(b"RANK=")) if variables else 0, record)
    return found


def phase_of(attempt: Path, rank: int) -> str:
    beat = read_heartbeat(attempt, rank)
    if beat is None:
        return INTERPRETER
    return FIRST_STEP if beat.step or beat.phase in STEP_PHASES or beat.phase not in PHASES else beat.phase


def strike(attempt: Path, blow: Blow, num_ranks: int, is_over: Callable[[], bool]) -> bool:
    """Ends the rank; False if its attempt ended before."""
    order = list(PHASES)
    reached_s: float | None = None
    while not is_over() and not (attempt.parent / str(int(attempt.name) + 1)).exists():
        ranks = ranks_of(attempt, num_ranks)
        if blow.rank in ranks:
            if reached_s is None and order.index(phase_of(attempt, blow.rank)) >= order.index(blow.phase):
                reached_s = time.monotonic()
            if reached_s is not None and time.monotonic() - reached_s >= blow.delay_s:
                for other in ranks.values() if blow.others_wait else ():
                    if other != ranks[blow.rank]:
                        other.send(signal.SIGSTOP)
                return ranks[blow.rank].send(blow.number)
        time.sleep(0.01)
    return False


def run_and_strike(plan: Plan, run_dir: Path, blows: Sequence[Blow]) -> list[tuple[str, str | None]]:
    """Where each rank was struck, and what is wrong about its end; None: named, and the run was started again."""
    is_over, struck, num_ranks = threading.Event(), list[tuple[int, str, Blow]](), plan.chosen.num_ranks

    def work() -> None:
        for number, blow in enumerate(blows, start=1):
            attempt = run_dir / "attempts" / str(number)
            if not strike(attempt, blow, num_ranks, is_over.is_set):
                return
            struck.append((number, phase_of(attempt, blow.rank), blow))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        outcome, printed = run_plan(plan, run_dir, limits=LIMITS)
    finally:
        is_over.set()
        thread.join()
    records = {record.number: record for record in (() if outcome.report is None else outcome.report.history)}
    found = []
    for number, phase, blow in struck:
        record, cause = records.get(number), f"rank {blow.rank} was killed by {blow.number.name}"
        wrong = [] if outcome.exit_code is ExitCode.DONE else [f"the run ended with {outcome.exit_code!r}"]
        if record is None or record.fault is not Fault.KILLED or cause not in (record.cause or ""):
            wrong.append(f"expected {cause!r}, reported {record}")
        pids = read_records(run_dir / "attempts" / str(number) / "pids")
        if any(each.is_alive for each in pids.values()):
            wrong.append(f"processes of the attempt live: {pids}")
        told = f"attempt {number} of {num_ranks} ranks, {phase}, {blow}: {'; '.join(wrong)}\n{printed}"
        found.append((phase, told if wrong else None))
    return found


@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(-(-NUM_KILLS // KILLS_A_PART)))
def test_a_rank_that_ends_while_it_starts_is_named_and_the_run_is_started_again(tmp_path, record_property, seed):
    """Parts of consecutive seeds go through all engines and phases."""
    rows, chance, counts = write_rows(tmp_path / "rows"), random.Random(seed), dict[str, Count]()
    num_kills = min(KILLS_A_PART, NUM_KILLS)
    kinds = list(product(ENGINES, range(len(PHASES))))
    random.Random(0).shuffle(kinds)  # the same for every part
    numbers = count(seed * num_kills // KILLS_A_RUN)
    while sum(each.tried for each in counts.values()) < num_kills:
        number = next(numbers)
        (sharding, num_ranks), first = kinds[number % len(kinds)]
        plan = rank_plan(
            rows, sharding, num_ranks=num_ranks, micro_batch=2, accumulation=1, sequences_per_step=2 * num_ranks,
            num_steps=60,
        )  # fmt: skip
        blows = [
            Blow(
                phase=phase, delay_s=chance.uniform(0.0, PHASES[phase]), rank=chance.randrange(num_ranks),
                number=chance.choice(SIGNALS), others_wait=num_ranks > 1 and chance.random() < 1 / 3,
            )
            for phase in (list(PHASES)[(first + further) % len(PHASES)] for further in range(KILLS_A_RUN))
        ]  # fmt: skip
        for phase, wrong in run_and_strike(plan, tmp_path / f"run-{number}", blows):
            row = counts.setdefault(f"SIGKILL of a rank that starts: {phase}", Count())
            row.add(Count(tried=1, survived=int(wrong is None), notes=[] if wrong is None else [wrong]))
    check(counts, record_property)
