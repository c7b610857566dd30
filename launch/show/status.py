"""The state of runs as text: a table of several, a block for one."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from shardwise.launch.rundir.state import RunState, RunStatus
from shardwise.slurm.jobs import describe_ended, describe_queued
from shardwise.trainer.spec.units import format_bytes, format_count, format_seconds

NUM_INCIDENTS = 5
SILENT_S = 120.0  # a write to a shared file system may appear a minute late


def render_table(statuses: Sequence[RunStatus], *, base: Path) -> str:
    """One line a run; paths below `base` are shown relative to it."""
    rows = [
        (shown_path(status.run_dir, base), status.state.value.replace("_", " "), _steps(status), _figures(status))
        for status in statuses
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows
    )


def render_status(status: RunStatus, *, base: Path) -> str:
    """All facts about one run."""
    head = f"{shown_path(status.run_dir, base)}: {status.state.value.replace('_', ' ')}"
    of = f" of {status.num_steps}" if status.num_steps is not None else ""
    at = f", step {status.step}{of}" if status.step is not None else ""
    is_known = status.state is RunState.FINISHED or status.reason in {f"job {job.job_id} runs" for job in status.jobs}
    lines = [f"{head}{at}"] + ([] if is_known else [f"  {status.reason}"])
    lines += [f"  {' '.join(status.overrides)}"] if status.overrides else []
    lines += [f"  {status.cancelled}"] if status.cancelled else []
    lines += [f"  {describe_queued(job)}" for job in status.jobs]
    if status.ended_job is not None and describe_ended(status.ended_job) not in status.reason:
        lines.append(f"  {describe_ended(status.ended_job)}")
    ranks = "1 rank" if status.num_ranks == 1 else f"{status.num_ranks} ranks"
    strategy = "" if status.strategy is None else f"{status.strategy} on {ranks}"
    lines += [f"  error: {line}" for line in (status.error or "").splitlines()[:1]]
    lines += [f"  {line}" for line in (strategy, _learning(status), _clock(status)) if line]
    lines += [f"  {status.problem}"] if status.problem else []
    lines += _history(status)
    lines += [f"  checkpoint: {status.checkpoint}"] if status.checkpoint else []
    lines += [f"  last line: {status.last_line}"] if status.last_line else []
    lines += [f"  logs: {log}" for log in status.logs]
    return "\n".join(lines)


def shown_path(path: str, base: Path) -> str:
    """The path, relative to `base` if it is below it."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(base)) if absolute.is_relative_to(base) and absolute != base else path


def _steps(status: RunStatus) -> str:
    if status.step is None:
        return "-" if status.num_steps is None else f"0/{status.num_steps}"
    return str(status.step) if status.num_steps is None else f"{status.step}/{status.num_steps}"


def _figures(status: RunStatus) -> str:
    parts = [f"loss {status.loss:.4f}"] if status.loss is not None else []
    if status.state is RunState.RUNNING:
        parts += [f"{format_count(status.tokens_per_s)} tokens/s"] if status.tokens_per_s else []
        parts += [f"{format_seconds(status.seconds_left)} left"] if status.seconds_left is not None else []
    elif status.state not in (RunState.FINISHED, RunState.WAITING):
        parts.append(status.reason)
    for job in status.jobs:
        if job.is_running:
            parts.append(f"job {job.job_id}" + (f" on {job.nodes}" if job.nodes else ""))
        else:
            expected = f", expected {job.start}" if job.start else ""
            parts.append(f"job {job.job_id} waits ({job.reason or 'not looked at yet'}{expected})")
    return "  ".join([*parts, *status.overrides])


def _learning(status: RunStatus) -> str:
    parts = [f"loss {status.loss:.4f}"] if status.loss is not None else []
    parts += [f"held-out loss {status.eval_loss:.4f}"] if status.eval_loss is not None else []
    parts += [f"learning rate {status.lr:.3g}"] if status.lr is not None else []
    parts += [f"{format_count(status.tokens_per_s)} tokens/s"] if status.tokens_per_s else []
    parts += [f"peak {format_bytes(status.memory_peak_bytes)} on rank 0"] if status.memory_peak_bytes else []
    return ", ".join(parts)


def _clock(status: RunStatus) -> str:
    """The time left, and the time since the last heartbeat."""
    parts = [status.phase] if status.phase and status.phase != "training" else []
    if status.seconds_left is not None:
        parts.append(f"about {format_seconds(status.seconds_left)} of training left")
        limit = next((job.seconds_left for job in status.jobs if job.is_running), None)
        if limit is not None and limit < status.seconds_left:
            parts.append("more than the time limit: the run continues in another job")
    if status.silent_s is not None and status.state is RunState.RUNNING:
        ago = format_seconds(max(1.0, status.silent_s))
        parts.append(f"last heartbeat {ago} ago" + (", which is long" if status.silent_s > SILENT_S else ""))
    return "; ".join(parts)


def _history(status: RunStatus) -> list[str]:
    if not status.num_attempts:
        return []
    attempts = "1 attempt" if status.num_attempts == 1 else f"{status.num_attempts} attempts"
    if not status.incidents:
        return [f"  {attempts}"]
    lines = [f"  {attempts}, {len(status.incidents)} incident{'s' if len(status.incidents) > 1 else ''}"]
    return lines + [f"    {incident}" for incident in status.incidents[-NUM_INCIDENTS:]]


def submitted_s(submitted: str) -> float:
    """Seconds of the epoch of `2026-11-22T17:30:00Z`; 0 if the text is no time."""
    try:
        return datetime.fromisoformat(submitted).timestamp()
    except ValueError:
        return 0.0
