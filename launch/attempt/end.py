"""How an attempt ended, from what its processes left: reports of ranks, signs of life, and what the launcher printed.

Several things are true at once when one rank fails: the others lose it and say so, the launcher ends them. What tells
most comes first: out of memory, an orderly end, a rank that hung, a signal, and of several errors the earliest.

That the kernel ended a rank for want of RAM is said only where it counted a kill meanwhile. A SIGKILL alone may be a
person's, or a scheduler's.
"""

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from trainer.spec import codec
from trainer.spec.errors import ExitCode, InputError
from trainer.spec.plan import Plan
from trainer.spec.report import Ending, Fault, Figures, Report, predicted_figures

_ORDERLY = (Ending.FINISHED, Ending.STOPPED, Ending.PREEMPTED)
# torch's types for a rendezvous that failed: a port that somebody took first, a peer that was late.
_TRANSIENT = ("DistNetworkError", "DistStoreError", "DistBackendError", "EADDRINUSE", "address already in use")


class AttemptEnd(NamedTuple):
    """The end of one attempt."""

    report: Report  # of the ranks, or made for ranks that left none; its error is the cause
    fault: Fault | None  # None: it ended in order
    is_final: bool = False  # a person has to mend something
    is_transient: bool = False  # the ranks did not meet, which says nothing of the next time
    has_report: bool = True  # the ranks left one
    is_machine_lost: bool = False  # one of several is gone, or did not come

    @property
    def has_trained(self) -> bool:
        """Whether it did a step."""
        return self.report.step > (self.report.resumed_from_step or 0)


class Observed(NamedTuple):
    """What the supervisor saw of an attempt while it ran."""

    return_code: int | None  # of the launcher; None: we ended it
    hung: str | None = None  # who gave no sign of life, in a sentence
    step: int = 0  # as far as signs of life tell
    was_cut_short: bool = False  # by us, at a person's request
    num_oom_kills: int | None = None  # that the kernel counted meanwhile; None: nothing counts them
    lost: str | None = None  # the machine that is gone, in a sentence


def attempt_end(attempt_dir: Path, seen: Observed) -> AttemptEnd:
    """The end that `attempt_dir` and the supervisor's eyes tell of."""
    reports = rank_reports(attempt_dir)
    by_ending = {ending: [report for report in reports.values() if report.ending is ending] for ending in Ending}
    if by_ending[Ending.OUT_OF_MEMORY]:
        return AttemptEnd(by_ending[Ending.OUT_OF_MEMORY][0], Fault.OUT_OF_MEMORY)
    for ending in _ORDERLY:
        if by_ending[ending]:
            return AttemptEnd(by_ending[ending][0], None)
    fault, cause = _fault(attempt_dir, reports, seen)
    base = reports.get(0) or next(iter(reports.values()), None) or _made_report(attempt_dir, seen)
    ending = Ending.OUT_OF_MEMORY if fault.is_memory else Ending.FAILED
    report = msgspec.structs.replace(base, ending=ending, error=cause.words, step=max(base.step, seen.step))
    return AttemptEnd(
        report,
        fault,
        is_final=cause.exit_code not in (None, ExitCode.INTERNAL),
        is_transient=any(words in cause.words for words in _TRANSIENT),
        has_report=bool(reports),
        is_machine_lost=seen.lost is not None,
    )


class _Cause(NamedTuple):
    words: str
    exit_code: int | None = None  # that a rank reported


def _fault(attempt_dir: Path, reports: dict[int, Report], seen: Observed) -> tuple[Fault, _Cause]:
    if seen.was_cut_short:
        return Fault.KILLED, _Cause("ended at once by a second Ctrl-C, without a checkpoint")
    if seen.hung is not None:
        return Fault.HUNG, _Cause(seen.hung)
    if seen.lost is not None:
        return Fault.KILLED, _Cause(seen.lost)
    logs = attempt_dir / "logs"
    killed = killed_rank(attempt_dir)
    if killed is not None:
        if killed.number == signal.SIGKILL and seen.num_oom_kills:
            return Fault.HOST_OUT_OF_MEMORY, _Cause(f"the kernel killed rank {killed.rank} for want of host memory")
        if killed.number == signal.SIGABRT and _gave_up_allocating(logs / f"rank-{killed.rank}.log"):
            return Fault.OUT_OF_MEMORY, _Cause(f"rank {killed.rank} ended itself: it could not allocate memory")
        return Fault.KILLED, _Cause(killed.words(is_counted=seen.num_oom_kills is not None))
    left = _left_without_report(attempt_dir, reports)
    if left is not None and _could_start_no_thread(logs / f"rank-{left.rank}.log", attempt_dir):
        return Fault.OUT_OF_MEMORY, _Cause(f"rank {left.rank} could start no thread under the memory cap")
    if left is not None:
        words = f"rank {left.rank} ended with code {left.number} and left no report"
        return Fault.ERROR, _Cause(f"{words}\nlast words: {last_words(attempt_dir, rank=left.rank)}\nlogs: {logs}")
    if reports:
        return Fault.ERROR, _earliest_error(attempt_dir, reports)
    if seen.return_code is not None and seen.return_code < 0:
        return Fault.KILLED, _Cause(f"the launcher was killed by {_signal_name(-seen.return_code)}")
    end = "was ended" if seen.return_code is None else f"ended with code {seen.return_code}"
    told = f"no rank left a report, the launcher {end}"
    return Fault.ERROR, _Cause(f"{told}\nlast words: {last_words(attempt_dir)}\nlogs: {logs}")


def rank_reports(attempt_dir: Path) -> dict[int, Report]:
    """The reports of the ranks that left one, by rank."""
    reports = {}
    for path in sorted(attempt_dir.glob("report*.json")):
        try:
            reports[_rank_of(path)] = codec.read(path, Report)
        except InputError:
            continue  # damaged by the very fault it reports: the others, or the log, tell
    return reports


def _rank_of(path: Path) -> int:
    return int(path.stem.removeprefix("report-rank-")) if path.stem != "report" else 0


def _earliest_error(attempt_dir: Path, reports: dict[int, Report]) -> _Cause:
    """Of the rank that reported first: the others lost it."""
    written = {_rank_of(path): path.stat().st_mtime_ns for path in attempt_dir.glob("report*.json")}
    rank = min(reports, key=lambda each: written[each])
    error, code = reports[rank].error or "no reason given", reports[rank].exit_code
    is_told_by_all = rank == 0 or error.startswith(f"rank {rank}") or reports.get(0, reports[rank]).error == error
    return _Cause(error if is_told_by_all else f"rank {rank}: {error}", code)


def _made_report(attempt_dir: Path, seen: Observed) -> Report:
    """A report for ranks that left none."""
    plan = codec.read(attempt_dir / "plan.json", Plan)
    return Report(
        ending=Ending.FAILED,
        exit_code=int(ExitCode.ENVIRONMENT),
        plan=plan.chosen,
        predicted=predicted_figures(plan.chosen),
        measured=Figures(),
        engaged=None,
        incidents=(),
        versions=plan.versions,
        step=seen.step,
        num_steps=plan.schedule.num_steps,
        tokens=0,
        duration_s=0.0,
    )


class KilledRank(NamedTuple):
    """A rank that a signal ended, or that left with a code."""

    rank: int
    number: int  # of the signal, or the code

    def words(self, *, is_counted: bool) -> str:
        """`rank 1 was killed by SIGKILL`, with what that often means where nobody counts the kernel's kills."""
        is_likely_memory = self.number == signal.SIGKILL and not is_counted
        hint = ", often out of host memory" if is_likely_memory else ""
        return f"rank {self.rank} was killed by {_signal_name(self.number)}{hint}"


def killed_rank(attempt_dir: Path) -> KilledRank | None:
    """The rank that a signal ended, where the launcher saw one.

    torchrun says at once which rank failed first, with minus the signal for a code, and at the end lists every rank
    that did not end well, those that it ended itself among them. Accelerate's launcher of a single rank says it in
    subprocess's words.
    """
    found: list[KilledRank] = []
    for text, first in _launcher_texts(attempt_dir):
        by_torchrun = set(_ENDED_BY_TORCHRUN.findall(text))
        seen = [(int(rank) + first, number, pid) for number, rank, pid in _SEEN_BY_TORCHRUN.findall(text)]
        seen += [(int(rank), number, pid) for rank, number, pid in _LISTED_BY_TORCHRUN.findall(text)]
        found += [KilledRank(rank, int(number)) for rank, number, pid in seen if pid not in by_torchrun]
        found += [KilledRank(first, int(number)) for number in _DIED_ALONE.findall(text)]
    return found[0] if found else None


def launcher_log(attempt_dir: Path, node_rank: int) -> Path:
    """What the launcher of a machine printed."""
    return attempt_dir / "logs" / ("launcher.log" if node_rank == 0 else f"launcher-{node_rank}.log")


def _launcher_texts(attempt_dir: Path) -> list[tuple[str, int]]:
    """What each machine's launcher printed, with the first of its ranks: it counts its own from 0."""
    num_nodes = len([*(attempt_dir / "logs").glob("launcher*.log")])
    if not num_nodes:
        return []
    plan = codec.read(attempt_dir / "plan.json", Plan) if num_nodes > 1 else None
    texts = []
    for node in range(num_nodes):
        log = launcher_log(attempt_dir, node)
        first = 0 if plan is None else node * plan.chosen.num_ranks // num_nodes
        texts.append((log.read_text(errors="replace") if log.is_file() else "", first))
    return texts


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


_SEEN_BY_TORCHRUN = re.compile(r"failed \(exitcode: -(\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_LISTED_BY_TORCHRUN = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: -(\d+) \(pid: (\d+)\)")
_ENDED_BY_TORCHRUN = re.compile(r"Sending process (\d+) closing signal")
_DIED_ALONE = re.compile(r"died with <Signals\.\w+: (\d+)>")


def _gave_up_allocating(log: Path) -> bool:
    """Whether C++ or Rust code ended the process because an allocation failed where nobody could catch it."""
    try:
        text = log.read_text(errors="replace")
    except OSError:
        return False
    return "std::bad_alloc" in text or re.search(r"memory allocation of \d+ bytes failed", text) is not None


def _left_without_report(attempt_dir: Path, reports: dict[int, Report]) -> KilledRank | None:
    """The rank that torchrun saw fail first, with its exit code, where it said nothing itself."""
    for text, first in _launcher_texts(attempt_dir):
        for code, rank, _ in _LEFT.findall(text):
            if int(rank) + first not in reports:
                return KilledRank(int(rank) + first, int(code))
    return None


_LEFT = re.compile(r"failed \(exitcode: (\d+)\) local_rank: (\d+) \(pid: (\d+)\)")


def _could_start_no_thread(log: Path, attempt_dir: Path) -> bool:
    """Whether OpenMP ended the process because the stack of a thread is more than a memory cap leaves."""
    is_capped = codec.read(attempt_dir / "plan.json", Plan).hardware.vram_cap_bytes is not None
    return is_capped and any("libgomp: Thread creation failed" in line for line in _lines(log))


def last_words(attempt_dir: Path, *, rank: int | None = None) -> str:
    """The last line of a rank's or the launcher's log that looks like an error, else the last line."""
    lines: list[str] = []
    logs = sorted((attempt_dir / "logs").glob("rank-*.log" if rank is None else f"rank-{rank}.log"))
    launchers = sorted((attempt_dir / "logs").glob("launcher*.log")) if rank is None else []
    for path in [*logs, *launchers]:
        lines += _lines(path)
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or lines or ["(no output)"])[-1].strip()[:300]


def _lines(path: Path) -> Sequence[str]:
    return [line for line in path.read_text(errors="replace").splitlines() if line.strip()] if path.is_file() else ()
