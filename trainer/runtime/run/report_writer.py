"""Status and report files of a rank: status.json while it runs, report.json at the end.

    attempts/N/status.json            phase and step, by rank 0, replaced atomically, at most twice a second in a phase
    attempts/N/heartbeats/rank-R      the last sign of life of each rank, overwritten in place
    attempts/N/report.json            by rank 0
    attempts/N/report-rank-R.json     by another rank that failed or ran out of memory; each has a file of its own

If attempts/N/report.json exists already, the attempt has ended and was started again by hand. Everything is then
written under attempts/N/again-<UTC time of the start>/, as if that were the run directory, and nothing is overwritten.
"""

import json
import os
import time
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.rank_files import HEARTBEAT_BYTES, Heartbeat, encode_heartbeat, heartbeat_path
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.value import Value

STATUS_INTERVAL_S = 0.5
_REPORTED_PACKAGES = ("shardwise", "torch", "accelerate", "transformers", "deepspeed", "safetensors")


class RunPaths(Value, frozen=True, kw_only=True):
    """Every path a rank reads or writes."""

    plan_dir: Path  # of plan.json
    attempt_dir: Path  # where this attempt's pids, status and report go
    run_dir: Path  # where metrics, checkpoints and the export go
    resume_dir: Path  # whose checkpoints are resumed from
    attempt: int
    is_again: bool


def run_paths(plan_path: Path, *, started_at: datetime) -> RunPaths:
    """The paths that follow from `RUN/attempts/N/plan.json`."""
    plan_dir = plan_path.resolve().parent
    run_dir = plan_dir.parent.parent
    is_again = (plan_dir / "report.json").exists()
    again = plan_dir / f"again-{started_at.strftime('%Y%m%d-%H%M%S')}"
    return RunPaths(
        plan_dir=plan_dir,
        attempt_dir=again if is_again else plan_dir,
        run_dir=again if is_again else run_dir,
        resume_dir=run_dir,
        attempt=int(plan_dir.name) if plan_dir.name.isdigit() else 1,
        is_again=is_again,
    )


def start_of_launch(*, world_size: int) -> datetime:
    """When the launcher of these ranks started, the same on every rank of a node; of a lone rank, when itself did."""
    pid = os.getpid() if world_size == 1 else os.getppid()
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    boot = next(
        int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
    )
    return datetime.fromtimestamp(boot + ticks / os.sysconf("SC_CLK_TCK"), tz=UTC)


class ReportWriter:
    """Writes one rank's heartbeats, status and report."""

    def __init__(self, paths: RunPaths, *, rank: int) -> None:
        self.attempt_dir, self.rank = paths.attempt_dir, rank
        self._num_beats, self._step = 0, 0
        self._phase, self._written_at = "", 0.0  # of status.json, and when it was written
        self._heartbeat: int | None = None  # a descriptor, open while the process lives

    def write_status(self, phase: str, *, step: int = 0) -> None:
        """Writes the status on rank 0 and a heartbeat on each rank; a full disk is no error.

        While a phase lasts, the status is written every half second: replacing a file costs more than a short step.
        """
        self.beat(phase, step=step)
        now = time.monotonic()
        if self.rank == 0 and (phase != self._phase or now - self._written_at >= STATUS_INTERVAL_S):
            self._phase, self._written_at = phase, now
            status = {"phase": phase, "step": step}
            with suppress(OSError):
                codec.write_bytes(self.attempt_dir / "status.json", json.dumps(status).encode())

    def beat(self, phase: str, *, step: int) -> None:
        """Writes a heartbeat: one small write, cheap enough for every phase of a step."""
        self._num_beats = self._num_beats + 1 if step == self._step else 1
        self._step = step
        beat = Heartbeat(count=self._num_beats, phase=phase, step=step)
        with suppress(OSError):
            if self._heartbeat is None:
                self._heartbeat = _open_heartbeat(heartbeat_path(self.attempt_dir, self.rank))
            os.pwrite(self._heartbeat, encode_heartbeat(beat), 0)

    def write_report(self, report: Report) -> None:
        """Writes this rank's report."""
        name = "report.json" if self.rank == 0 else f"report-rank-{self.rank}.json"
        codec.write_redacted(self.attempt_dir / name, report)


def _open_heartbeat(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    os.ftruncate(descriptor, HEARTBEAT_BYTES)
    return descriptor


def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide what a run does; one that is not installed is omitted."""
    versions = {}
    for package in _REPORTED_PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
