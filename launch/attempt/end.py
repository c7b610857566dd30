"""The end of an attempt, from the reports of its ranks, its heartbeats and the output of the launcher.

When one rank fails, the others lose their connection to it and report that, and the launcher ends them. The cause is
the first of: out of memory, an orderly end, a rank that hung, a signal, and of several errors the earliest.

A rank counts as killed by the kernel for lack of RAM only if the kernel counted such a kill during the attempt. A
SIGKILL alone may be sent by a person or a scheduler.
"""

import re
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ExitCode, InputError
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending, Fault, Figures, Report, predicted_figures

_ORDERLY = (Ending.FINISHED, Ending.STOPPED, Ending.PREEMPTED)
# Errors of torch for a rendezvous that failed: a port that another process uses meanwhile, a peer that was late.
_TRANSIENT = ("DistNetworkError", "DistStoreError", "DistBackendError", "EADDRINUSE", "address already in use")


class AttemptEnd(NamedTuple):
    """The end of one attempt."""

    report: Report  # of the ranks, or made for ranks that left none; its error is the cause
    fault: Fault | None  # None: it ended in order
    is_final: bool = False  # the user has to fix something
    is_transient: bool = False  # the ranks could not connect, which may succeed next time
    has_report: bool = True  # a rank wrote one
    is_machine_lost: bool = False  # one of several was lost, or did not connect

    @property
    def has_trained(self) -> bool:
        """True if it did a step."""
        return self.report.step > (self.report.resumed_from_step or 0)


class Observed(NamedTuple):
    """Observations of the supervisor while an attempt ran."""

    return_code: int | None  # of the launcher; None: the supervisor ended it
    hung: str | None = None  # the ranks without heartbeat, in a sentence
    lost_ranks: tuple[int, ...] = ()  # ended without a report while others lived, which the supervisor killed then
    step: int = 0  # by the heartbeats
    was_cut_short: bool = False  # by a second Ctrl-C
    num_oom_kills: int | None = None  # counted by the kernel meanwhile; None: nothing counts them
    lost: str | None = None  # the machine that was lost, in a sentence


def attempt_end(attempt_dir: Path, seen: Observed) -> AttemptEnd:
    """The end of an attempt, from its files and the observations of the supervisor."""
    reports = rank_reports(attempt_dir)
    by_ending = {ending: [report for report in reports.values() if report.ending is ending] for ending in Ending}
    if by_ending[Ending.OUT_OF_MEMORY]:
        return AttemptEnd(by_ending[Ending.OUT_OF_MEMORY][0], Fault.OUT_OF_MEMORY)
    for ending in _ORDERLY:
        if by_ending[ending]:
            return AttemptEnd(by_ending[ending][0], None)
    fault, cause = _fault(attempt_dir, reports, seen)
    base = reports.get(0) or next(iter(reports.values()), None) or _report_without_ranks(attempt_dir, seen)
    ending = Ending.OUT_OF_MEMORY if fault.is_memory else Ending.FAILED
    report = msgspec.structs.replace(base, ending=ending, error=cause.text, step=max(base.step, seen.step))
    return AttemptEnd(
        report,
        fault,
        is_final=cause.exit_code not in (None, ExitCode.INTERNAL),
        is_transient=any(name in cause.text for name in _TRANSIENT),
        has_report=bool(reports),
        is_machine_lost=seen.lost is not None,
    )


class _Cause(NamedTuple):
    text: str
    exit_code: int | None = None  # reported by a rank


def _fault(attempt_dir: Path, reports: dict[int, Report], seen: Observed) -> tuple[Fault, _Cause]:
    if seen.was_cut_short:
        return Fault.KILLED, _Cause("ended at once by a second Ctrl-C, without a checkpoint")
    if seen.hung is not None:
        return Fault.HUNG, _Cause(seen.hung)
    if seen.lost is not None:
        return Fault.KILLED, _Cause(seen.lost)
    logs = attempt_dir / "logs"
    killed = killed_rank(attempt_dir, among=seen.lost_ranks)
    if killed is not None:
        name = f"rank {killed.rank}"
        if killed.number == signal.SIGKILL and seen.num_oom_kills:
            return Fault.HOST_OUT_OF_MEMORY, _Cause(f"the kernel killed {name} for lack of host memory")
        if killed.number == signal.SIGABRT and _could_not_allocate(logs / f"rank-{killed.rank}.log"):
            return Fault.OUT_OF_MEMORY, _Cause(f"{name} ended itself: it could not allocate memory")
        is_likely_memory = killed.number == signal.SIGKILL and seen.num_oom_kills is None
        hint = ", often out of host memory" if is_likely_memory else ""
        return Fault.KILLED, _Cause(f"{name} was killed by {_signal_name(killed.number)}{hint}")
    exited = _exited_without_report(attempt_dir, reports)
    if exited is not None:
        if _could_start_no_thread(logs / f"rank-{exited.rank}.log", attempt_dir):
            return Fault.OUT_OF_MEMORY, _Cause(f"rank {exited.rank} could start no thread under the memory cap")
        end = f"rank {exited.rank} ended with code {exited.number} and wrote no report"
        return Fault.ERROR, _Cause(f"{end}: {last_error_line(attempt_dir, rank=exited.rank)}\nlogs: {logs}")
    if reports:
        return Fault.ERROR, _earliest_error(attempt_dir, reports)
    if seen.lost_ranks:
        return Fault.KILLED, _Cause(
            f"rank {seen.lost_ranks[0]} ended without a report, and the launcher did not say how"
        )
    if seen.return_code is not None and seen.return_code < 0:
        return Fault.KILLED, _Cause(f"the launcher was killed by {_signal_name(-seen.return_code)}")
    end = "was ended" if seen.return_code is None else f"ended with code {seen.return_code}"
    cause = f"no rank wrote a report, the launcher {end}: {last_error_line(attempt_dir)}"
    return Fault.ERROR, _Cause(f"{cause}\nlogs: {logs}")


def rank_reports(attempt_dir: Path) -> dict[int, Report]:
    """The reports of the ranks that wrote one, by rank."""
    reports = {}
    for path in sorted(attempt_dir.glob("report*.json")):
        try:
            reports[_rank_of(path)] = codec.read(path, Report)
        except InputError:
            continue  # damaged by the fault itself
    return reports


def _rank_of(path: Path) -> int:
    return int(path.stem.removeprefix("report-rank-")) if path.stem != "report" else 0


def _earliest_error(attempt_dir: Path, reports: dict[int, Report]) -> _Cause:
    """The error of the rank that reported first: the others lost their connection to it."""
    written = {_rank_of(path): path.stat().st_mtime_ns for path in attempt_dir.glob("report*.json")}
    rank = min(reports, key=lambda each: written[each])
    error, code = reports[rank].error or "no reason given", reports[rank].exit_code
    is_common = rank == 0 or error.startswith(f"rank {rank}") or reports.get(0, reports[rank]).error == error
    return _Cause(error if is_common else f"rank {rank}: {error}", code)


def _report_without_ranks(attempt_dir: Path, seen: Observed) -> Report:
    """The report of an attempt whose ranks wrote none."""
    plan = codec.read(attempt_dir / "plan.json", Plan)
    return Report(
        ending=Ending.FAILED,
        exit_code=int(ExitCode.ENVIRONMENT),
        plan=plan.chosen,
        predicted=predicted_figures(plan.chosen),
        measured=Figures(),
        verified=None,
        incidents=(),
        versions=plan.versions,
        step=seen.step,
        num_steps=plan.schedule.num_steps,
        tokens=0,
        duration_s=0.0,
    )


class EndedRank(NamedTuple):
    """A rank that a signal ended, or that exited with a code."""

    rank: int
    number: int  # of the signal, or the code


def killed_rank(attempt_dir: Path, *, among: Sequence[int] = ()) -> EndedRank | None:
    """The rank that a signal ended, according to the launcher's output; of these ranks if some are given."""
    ended = (EndedRank(each.rank, -each.number) for each in _failed_ranks(attempt_dir) if each.number < 0)
    return next((each for each in ended if not among or each.rank in among), None)


def _exited_without_report(attempt_dir: Path, reports: dict[int, Report]) -> EndedRank | None:
    """The rank that exited with a code of failure and wrote no report; the others lost their connection to it."""
    ended = (each for each in _failed_ranks(attempt_dir) if each.number > 0 and each.rank not in reports)
    return next(ended, None)


def _failed_ranks(attempt_dir: Path) -> Iterator[EndedRank]:
    """Each rank that failed by itself, with its code or minus the signal, according to the launcher's output.

    torchrun reports at once which rank failed first (of those that it found at the same moment the lowest), and at the
    end lists every rank that failed, including those that it ended itself. Accelerate's launcher of a single rank
    prints the message of subprocess.
    """
    for text, first in _launcher_texts(attempt_dir):
        by_torchrun = set(re.findall(_ENDED_BY_TORCHRUN, text))
        seen = [(int(rank) + first, number, pid) for number, rank, pid in re.findall(_SEEN_BY_TORCHRUN, text)]
        seen += [(int(rank), number, pid) for rank, number, pid in re.findall(_LISTED_BY_TORCHRUN, text)]
        yield from (EndedRank(rank, int(number)) for rank, number, pid in seen if pid not in by_torchrun)
        yield from (EndedRank(first, -int(number)) for number in re.findall(_DIED_ALONE, text))


def launcher_log(attempt_dir: Path, node_rank: int) -> Path:
    """The file with the output of a machine's launcher."""
    return attempt_dir / "logs" / ("launcher.log" if node_rank == 0 else f"launcher-{node_rank}.log")


def _launcher_texts(attempt_dir: Path) -> list[tuple[str, int]]:
    """The output of each machine's launcher, with the first rank of that machine: torchrun counts from 0 on each."""
    num_nodes = len([*(attempt_dir / "logs").glob("launcher*.log")])
    if not num_nodes:
        return []
    plan = codec.read(attempt_dir / "plan.json", Plan) if num_nodes > 1 else None
    texts = []
    for node in range(num_nodes):
        log = launcher_log(attempt_dir, node)
        first = 0 if plan is None else node * plan.chosen.num_ranks // num_nodes
        texts.append((_read(log), first))
    return texts


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


_SEEN_BY_TORCHRUN = r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)"
_LISTED_BY_TORCHRUN = r"rank\s*: (\d+) \(local_rank: \d+\)\s+exitcode\s*: (-?\d+) \(pid: (\d+)\)"
_ENDED_BY_TORCHRUN = r"Sending process (\d+) closing signal"
_DIED_ALONE = r"died with <Signals\.\w+: (\d+)>"


def _could_not_allocate(log: Path) -> bool:
    """True if C++ or Rust code aborted the process because an allocation failed."""
    text = _read(log)
    return "std::bad_alloc" in text or re.search(r"memory allocation of \d+ bytes failed", text) is not None


def _could_start_no_thread(log: Path, attempt_dir: Path) -> bool:
    """True if OpenMP ended the process because the memory cap has no room for the stack of a thread."""
    is_capped = codec.read(attempt_dir / "plan.json", Plan).hardware.vram_cap_bytes is not None
    return is_capped and "libgomp: Thread creation failed" in _read(log)


def last_error_line(attempt_dir: Path, *, rank: int | None = None) -> str:
    """The last line of a rank's or of all logs that looks like an error, else the last line."""
    folder = attempt_dir / "logs"
    logs = sorted(folder.glob("rank-*.log" if rank is None else f"rank-{rank}.log"))
    logs += sorted(folder.glob("launcher*.log")) if rank is None else []
    lines = [line for path in logs for line in _read(path).splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return (errors or lines or ["(no output)"])[-1].strip()[:300]


def _read(log: Path) -> str:
    return log.read_text(errors="replace") if log.is_file() else ""
