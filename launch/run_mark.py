"""The mark of a run that a person cancelled: the file `cancelled` in its directory.

A stop with a checkpoint usually means "go on later": a scheduler queues the job again, the next job of a chain takes
over. The mark says that nothing goes on: whoever supervises the run, or is started for it by a scheduler, ends it as
after Ctrl-C. A person's own `train --resume` takes the mark away.
"""

import getpass
import os
import socket
from datetime import datetime
from pathlib import Path

from trainer.spec.codec import write_bytes
from trainer.spec.errors import EnvironmentFaultError

MARK = "cancelled"


def is_cancelled(run_dir: Path) -> bool:
    """Whether a person has cancelled this run."""
    return (run_dir / MARK).is_file()


def read_mark(run_dir: Path) -> str | None:
    """When and by whom the run was cancelled, in words; None where it was not."""
    try:
        return " ".join((run_dir / MARK).read_text(errors="replace").split()) or "cancelled"
    except OSError:
        return None


def mark_cancelled(run_dir: Path, *, now: datetime) -> None:
    """Leaves the mark; EnvironmentFaultError where it cannot be written."""
    try:
        write_bytes(run_dir / MARK, f"cancelled {now:%Y-%m-%dT%H:%M:%SZ} by {_who()}\n".encode())
    except OSError as error:
        raise EnvironmentFaultError(f"{run_dir}: cannot be written: {error.strerror}") from error


def clear_mark(run_dir: Path) -> None:
    """Takes the mark away where there is one."""
    (run_dir / MARK).unlink(missing_ok=True)


def _who() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, in a container
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"
