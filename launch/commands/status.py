"""`shardwise status`: how runs stand, from their files and from Slurm; nothing is changed, nothing heavy is loaded."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from launch.options import StatusOptions
from launch.rundir.files import RunFiles, outputs_of, read_run, tail_lines
from launch.rundir.find import RUNS, find_runs, run_dirs_of, runs_below
from launch.rundir.state import Queue, RunStatus, read_liveness, status_of
from launch.show.status_text import render_status, render_table, submitted_s
from launch.terminal import Console
from trainer.spec.errors import ExitCode

_LAST_LINE_BYTES = 4096
_LONGEST_LINE = 200


def run_status(options: StatusOptions, console: Console, *, environment: Mapping[str, str] = os.environ) -> ExitCode:
    """Shows one run, the points of a sweep, or all of the user's."""
    queue, base = Queue(environment), Path.cwd()
    if options.run is None:
        found, others = _own_runs(queue)
        statuses = [_status(files, queue, environment, reads_ended=False) for files in found]
        if options.sync:
            return _sync(statuses, console, environment)
        if options.as_json:
            console.line(_as_json(statuses))
            return ExitCode.DONE
        console.line(
            render_table(statuses, base=base) if statuses else f"no runs in {base / RUNS}, and none in a queue"
        )
        if others:
            console.line(f"runs of others in {RUNS} are left out: {others}; name one to see it")
        if queue.problem is not None and any(files.submission is not None for files in found):
            console.line(f"from files alone: {queue.problem}")
        return ExitCode.DONE
    runs = find_runs(options.run, environment)
    statuses = [_status(files, queue, environment, reads_ended=not runs.is_sweep) for files in runs.runs]
    if options.sync:
        return _sync(statuses, console, environment)
    if options.as_json:
        console.line(_as_json(statuses if runs.is_sweep else statuses[0]))
    elif runs.is_sweep:
        console.line(render_table(statuses, base=base))
    else:
        console.line(render_status(statuses[0], base=base))
        _offer_sync(runs.runs[0].run_dir, console)
    return ExitCode.DONE


def _status(files: RunFiles, queue: Queue, environment: Mapping[str, str], *, reads_ended: bool) -> RunStatus:
    liveness = read_liveness(files, queue, reads_ended=reads_ended, environment=environment)
    logs = log_places(files)
    return status_of(files, liveness, now_s=time.time(), last_line=last_line(files), logs=tuple(map(str, logs)))


def _sync(statuses: Sequence[RunStatus], console: Console, environment: Mapping[str, str]) -> ExitCode:
    from launch.track.wandb.sync import sync_runs  # for --sync alone

    return sync_runs([(Path(status.run_dir), status.state) for status in statuses], console, environment)


def _offer_sync(run_dir: Path, console: Console) -> None:
    if (run_dir / "wandb.json").is_file():
        from launch.track.wandb.files import unsynced_folders

        folders = unsynced_folders(run_dir)
        if folders:
            console.line(f"  wandb: {len(folders)} written offline; to send: shardwise status {run_dir} --sync")


def log_places(files: RunFiles) -> list[Path]:
    """Where the run writes what it has to say: the newest output of Slurm, and the folder of the newest attempt."""
    outputs = outputs_of(files)[-1:]
    folder = None if files.attempt_dir is None else files.attempt_dir / "logs"
    return [*outputs, *([folder] if folder is not None and folder.is_dir() else [])]


def last_line(files: RunFiles) -> str | None:
    """The last line with something in it of the newest output, else of rank 0."""
    outputs = outputs_of(files)
    rank_0 = [] if files.attempt_dir is None else [files.attempt_dir / "logs" / "rank-0.log"]
    for path in (*outputs[-1:], *rank_0):
        lines = [line.strip() for line in tail_lines(path, _LAST_LINE_BYTES) if line.strip()]
        if lines:
            return "".join(each if each.isprintable() else " " for each in lines[-1])[:_LONGEST_LINE]
    return None


def _own_runs(queue: Queue) -> tuple[list[RunFiles], int]:
    """The user's runs, the newest first, and how many runs of others are beside them."""
    mine = os.getuid()
    here = runs_below(RUNS)
    own = [path for path in here if path.stat().st_uid == mine]
    known = {path.resolve() for path in here}
    queued = [path for path in run_dirs_of(queue.jobs_of(mine) or ()) if path.resolve() not in known]
    return sorted(map(read_run, [*own, *queued]), key=_age), len(here) - len(own)


def _age(files: RunFiles) -> tuple[float, str, int, str]:
    """Smaller for what is newer; points of a sweep by their numbers."""
    submission, folder = files.submission, files.run_dir
    began_s = (folder / "plan.json").stat().st_mtime if submission is None else submitted_s(submission.submitted)
    return -began_s, str(folder.parent), len(folder.name), folder.name


def _as_json(status: RunStatus | Sequence[RunStatus]) -> str:
    return msgspec.json.format(msgspec.json.encode(status), indent=1).decode()
