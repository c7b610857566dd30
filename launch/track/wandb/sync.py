"""`shardwise status --sync`: sends what runs wrote offline to wandb's server, from a machine that has a network.

`wandb sync` does it, in a process of its own; it appends the folders of a run in the order they were written, as each
says that it resumes. Which were sent stands in RUN/wandb.json and, as wandb itself has it, beside the folder's log:
sending a folder twice would double its rows. The folder that a run still writes to is left for later.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from launch.rundir.state import RunState
from launch.terminal import Console
from launch.track.checks import login_problem
from launch.track.wandb.files import WandbRun, offline_folders, read_wandb_run, write_wandb_run
from trainer.spec.errors import EnvironmentFaultError, ExitCode

_MARK = ".wandb.synced"  # beside a log that wandb sync has sent


def sync_runs(runs: Sequence[tuple[Path, RunState]], console: Console, environment: Mapping[str, str]) -> ExitCode:
    """Sends the offline folders of every run; EnvironmentFaultError where there is no login, or some were not sent."""
    waiting = [(run_dir, folders) for run_dir, state in runs if (folders := folders_to_send(run_dir, state, console))]
    if not waiting:
        console.line("wandb: nothing to send")
        return ExitCode.DONE
    problem = login_problem(environment)
    if problem is not None:
        raise EnvironmentFaultError(f"--sync: {problem}")
    failed = [run_dir for run_dir, folders in waiting if not _sync_run(run_dir, folders, console, environment)]
    if failed:
        raise EnvironmentFaultError(
            "--sync: not everything was sent, the lines above say why; what was sent is not sent again:\n"
            + "\n".join(f"  {run_dir}" for run_dir in failed)
        )
    return ExitCode.DONE


def folders_to_send(run_dir: Path, state: RunState, console: Console) -> list[Path]:
    """The offline folders of a run that the server does not have, but for one that may still be written to."""
    kept = read_wandb_run(run_dir)
    if kept is None:
        return []
    waiting = [path for path in offline_folders(run_dir) if path.name not in kept.synced and not _is_marked(path)]
    may_write = state in (RunState.STARTING, RunState.RUNNING, RunState.UNKNOWN)
    if may_write and kept.writing in [path.name for path in waiting]:
        console.line(f"{run_dir}: {kept.writing} is still being written: sync again when the run has ended")
        waiting = [path for path in waiting if path.name != kept.writing]
    return waiting


def _sync_run(run_dir: Path, folders: Sequence[Path], console: Console, environment: Mapping[str, str]) -> bool:
    kept = read_wandb_run(run_dir)
    assert kept is not None
    console.line(f"{run_dir}: sending {len(folders)} {'folder' if len(folders) == 1 else 'folders'} to wandb")
    subprocess.run(
        [sys.executable, "-P", "-m", "wandb", "sync", *(str(folder.absolute()) for folder in folders)],
        env=_online(environment),
        cwd=run_dir,  # wandb writes its log of this into ./wandb
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # no terminal to ask at
        check=False,
    )
    sent = tuple(folder.name for folder in folders if _is_marked(folder))
    write_wandb_run(run_dir, _with_sent(kept, sent))
    return len(sent) == len(folders)


def _with_sent(kept: WandbRun, sent: tuple[str, ...]) -> WandbRun:
    return msgspec.structs.replace(kept, synced=tuple(dict.fromkeys((*kept.synced, *sent))))


def _is_marked(folder: Path) -> bool:
    return any(folder.glob(f"*{_MARK}"))


def _online(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what switches wandb off: sending is what was asked for."""
    return {name: value for name, value in environment.items() if name != "WANDB_MODE"}
