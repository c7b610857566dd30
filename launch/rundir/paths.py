"""Names and creation of run directories, their attempts and checkpoints.

    <output>-<UTC time>/   job.yaml  hardware.json  plan.json (never rewritten)  metrics.jsonl  report.json
                           console.log (lines that the run printed)
        attempts/N/        plan.json  accelerate.yaml  ds_config.json  environment.json  status.json  pids/  logs/
                           report.json; of several machines accelerate-1.yaml, environment-1.json ... as well;
                           out-of-memory.txt after an out of memory
        checkpoints/  export/  logs/ (of the trackers)  wandb/  spent.json (the limit that ended the run)

A directory belongs to one supervisor at a time, which holds its lock (`launch.rundir.lock`).
"""

import os
import re
import shlex
import stat
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from shardwise.launch.rundir.lock import LOCK
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.messages.submission import SCRIPT_NAME

CONSOLE_LOG = "console.log"
_STAMP = "%Y%m%d-%H%M%S"
_NOT_USE = (LOCK, ".nodes.json")  # of a run that is about to begin
_STAMPED = r"-\d{8}-\d{6}(-\d+)?$"


def no_run(folder: Path, missing: str = "plan.json") -> InputError:
    """The error for a folder that is no run directory, with what it is or where the runs are."""
    error = f"{folder}: is not a run directory: it has no {missing}"
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        return InputError(f"{error}; it is a model's folder: name the run that exported it, RUN of RUN/export")
    return InputError(f"{error}; shardwise status lists the runs in ./runs")


def output_base(output: str | None, name: str) -> Path:
    """`output` of the job, else `runs/<name>`; the time is appended to it."""
    return Path(output) if output else Path("runs") / name


def make_run_dir(base: Path, *, now: datetime) -> Path:
    """A new directory `<base>-<UTC time>`; two runs of one second get different names."""
    for path in _names(base, now):
        if _make(path):
            return path
    raise EnvironmentFaultError(f"{next(_names(base, now))}: a hundred runs of this second exist already")


def free_run_dir(base: Path, *, now: datetime) -> Path:
    """The name that `make_run_dir` would use, for `use_run_dir` later."""
    return next((path for path in _names(base, now) if not path.exists()), base)


def use_run_dir(path: Path) -> Path:
    """`path` as a new run directory; InputError if it is not empty."""
    refuse_used(path)
    _make(path, may_exist=True)
    return path


def refuse_used(path: Path) -> None:
    """Raises InputError if the path exists and is not an empty directory."""
    if path.exists() and not path.is_dir():
        raise InputError(f"--run-dir {path}: is a file, not a directory")
    if path.is_dir() and any(entry.name not in _NOT_USE for entry in path.iterdir()):
        script = path / SCRIPT_NAME
        remedy = (
            f"{shlex.join(['sbatch', str(script)])} continues it" if script.is_file() else "add --resume to continue it"
        )
        raise InputError(f"--run-dir {path}: is used already; {remedy}, or name another directory")


def _names(base: Path, now: datetime) -> Iterator[Path]:
    stamped = base.with_name(f"{base.name}-{now.strftime(_STAMP)}")
    yield stamped
    yield from (stamped.with_name(f"{stamped.name}-{number}") for number in range(2, 100))


def find_run_dir(base: Path) -> Path:
    """The newest run directory of this name, for `--resume`."""
    found = sorted(
        path
        for path in (base.parent.iterdir() if base.parent.is_dir() else ())
        if is_open(path) and re.sub(_STAMPED, "", path.name) == base.name and re.search(_STAMPED, path.name)
    )
    with_plan = [path for path in found if (path / "plan.json").is_file()]
    usable = with_plan or [path for path in found if is_before_plan(path) and not is_submitted(path)]
    if not usable:
        raise InputError(f"--resume: no run named {base}-<time> exists; start it without --resume")
    return usable[-1]


def is_open(folder: Path) -> bool:
    """True if it is a folder and this user may read it, unlike a private one of another user in a shared folder."""
    return folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)


def refuse_links(run_dir: Path) -> None:
    """InputError for a link in place of what a run writes: it may lead to another's files. Also for a FIFO or a device.

    A link in place of the run directory itself is no error.
    """
    for name in (LOCK, "metrics.jsonl", "logs/sinks.log", "cancelled", CONSOLE_LOG):
        path = run_dir / name
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise InputError(f"{path}: is a link or no plain file, and the run would write to it; remove it")
    for name in ("attempts", "checkpoints", "export", ".export.partial", "logs", "model_code", "wandb", "tensorboard"):
        path = run_dir / name
        if path.is_symlink():
            raise InputError(f"{path}: is a link, and the run would write behind it; put the folder itself there")


def is_submitted(run_dir: Path) -> bool:
    """True if the run was submitted and has not begun."""
    return (run_dir / "submission.json").is_file() and not (run_dir / "plan.json").is_file()


def is_before_plan(run_dir: Path) -> bool:
    """True if the run was submitted and has not begun, or was killed before its plan was written."""
    if not run_dir.is_dir() or (run_dir / "plan.json").is_file():
        return False
    names = {path.name for path in run_dir.iterdir()}
    return not names or not names.isdisjoint((LOCK, "submission.json"))


def committed_checkpoints(run_dir: Path) -> list[Path]:
    """Committed checkpoint folders, oldest first; loading one verifies its content."""
    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if re.fullmatch(r"step-\d{8}", path.name) and (path / "MANIFEST.json").is_file()
    )


def next_attempt(run_dir: Path) -> int:
    """The number of the next attempt: one more than the highest that exists."""
    folder = run_dir / "attempts"
    numbers = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()] if folder.is_dir() else []
    return max(numbers, default=0) + 1


def _make(path: Path, *, may_exist: bool = False) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=may_exist)
    except FileExistsError:
        return False
    except OSError as error:
        raise EnvironmentFaultError(
            f"{path}: the run directory cannot be made: {error.strerror}; name another place with --run-dir or output"
        ) from error
    if not os.access(path, os.W_OK):
        raise EnvironmentFaultError(f"{path}: no permission to write; name another place with --run-dir or output")
    return True
