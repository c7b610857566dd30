"""A process for ranks that were started with `accelerate launch` by hand; rank 0 starts it.

    python -m shardwise.launch.run.by_hand RUN/attempts/N LAUNCHER_PID DESCRIPTOR

It holds the run directory, so that `status`, `watch` and `cancel` find a living owner and a second start is refused,
prints the course, runs the trackers, passes stop requests on to the ranks, and writes the report of the run. To
DESCRIPTOR it writes `READY`, or why the run cannot start. Nothing is restarted: the launcher is a process of the user.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from shardwise.launch.attempt.end import rank_reports
from shardwise.launch.attempt.supervisor import KILL_GRACE_S, LocalRanks, StopRequest
from shardwise.launch.attempt.watchdog import CallStack, WatchLimits
from shardwise.launch.job import state_home
from shardwise.launch.plan.calibration_store import store_measurements
from shardwise.launch.probe.host import read_oom_kills
from shardwise.launch.run.attempts import RunContext, watch_by_hand
from shardwise.launch.rundir import paths as run_dirs
from shardwise.launch.rundir.lock import HeldFolder, locked
from shardwise.launch.rundir.process_record import ProcessRecord, read_state, record_of
from shardwise.launch.show.recorded_run import read_recorded
from shardwise.launch.show.report import render_report
from shardwise.launch.terminal import Console
from shardwise.launch.track.start import running_trackers
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ShardwiseError
from shardwise.trainer.spec.messages.rank_files import READY
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.secrets import redacted_output


class RanksByHand(LocalRanks):
    """The ranks below a launcher that is not ours: a fault of this process leaves them running."""

    def __init__(self, attempt_dir: Path, launcher: ProcessRecord | None, *, num_ranks: int) -> None:
        """`num_ranks` are those of this machine."""
        self._attempt_dir, self._ranks = attempt_dir, range(num_ranks)
        self._notified: set[ProcessRecord] = set()
        self._kills_before = read_oom_kills()
        self._their_launcher, self._num_ranks = launcher, num_ranks

    def poll(self) -> int | None:
        """0 once every rank has ended or reported: rank 0 waits for this process with its report written."""
        records, reports = self._records(), rank_reports(self._attempt_dir)
        if any(record.is_alive and rank not in reports for rank, record in records.items()):
            return None
        is_starting = self._their_launcher is not None and self._their_launcher.is_alive
        return None if is_starting and len(records) < self._num_ranks else 0

    def end_survivors(self) -> tuple[int, ...]:
        lost = self._lost_ranks()
        self._kill()
        return tuple(sorted(lost))

    def stopped(self) -> dict[str, ProcessRecord]:
        named = {f"rank {rank}": record for rank, record in self._records().items()}
        return {name: record for name, record in named.items() if read_state(record.pid) == ("T", record.start_time)}

    def dump_stacks(self) -> dict[int, CallStack]:
        for record in self._records().values():
            record.send(signal.SIGUSR2)  # they write to where their output goes
        return {}

    def end(self) -> None:
        if sys.exc_info()[0] is None:
            self._kill()

    def _kill(self) -> None:
        reports = rank_reports(self._attempt_dir)
        ranks = [record for rank, record in self._records().items() if rank not in reports]
        for rank in ranks:
            rank.send(signal.SIGKILL)
        deadline = time.monotonic() + KILL_GRACE_S
        while any(rank.is_alive for rank in ranks) and time.monotonic() < deadline:
            time.sleep(0.02)


def main() -> int:
    """Watches the attempt to its end; returns the exit code of the run."""
    attempt_dir, launcher = Path(sys.argv[1]), int(sys.argv[2])
    run_dir, stop, console = attempt_dir.parent.parent, StopRequest(), Console()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")  # the ranks are ended first where memory runs out
    with open(int(sys.argv[3]), "w") as reply, redacted_output(), stop.listening():  # noqa: PTH123  # a descriptor
        try:
            with locked(run_dir), HeldFolder(run_dir) as folder:
                whole = run_dir / "plan.json"
                plan = codec.read(whole if whole.is_file() else attempt_dir / "plan.json", Plan)
                console.start_recording()
                console.record_in(run_dir / run_dirs.CONSOLE_LOG)
                with running_trackers(
                    plan,
                    run_dir=run_dir,
                    console=console,
                    environment=os.environ,
                    stop=stop,
                    first_attempt=int(attempt_dir.name),
                ) as trackers:
                    _reply(reply, READY)
                    num_ranks = plan.chosen.num_ranks // plan.num_machines
                    ranks = RanksByHand(attempt_dir, record_of(launcher), num_ranks=num_ranks)
                    context = RunContext(
                        plan=plan,
                        run_dir=run_dir,
                        extensions_dir=attempt_dir,  # nothing is built
                        console=console,
                        stop=stop,
                        environment=os.environ,
                        limits=WatchLimits(),
                        cluster=None,
                        deadline=None,
                        trackers=trackers,
                        folder=folder,
                    )
                    report = watch_by_hand(context, attempt_dir, ranks)
            recommended = read_recorded(run_dir).recommended if whole.is_file() else ()
            console.line()
            console.line(render_report(report, run_dir=run_dir, recommended=recommended))
            store_measurements(state_home(os.environ), report, plan, on_line=console.line)
        except ShardwiseError as error:
            _reply(reply, str(error))
            return int(error.exit_code)
    return report.exit_code


def _reply(stream: TextIO, text: str) -> None:
    """Only the first reply counts; the rank may have ended meanwhile."""
    if not stream.closed:
        with suppress(OSError), stream:
            stream.write(json.dumps(text) + "\n")


if __name__ == "__main__":
    sys.exit(main())
