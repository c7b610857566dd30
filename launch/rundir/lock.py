"""The lock of a run directory: the process that supervises the run holds `.lock`, with its pid and host as content.

The file keeps the last owner's name after that process has ended, so readers check the process. Readers never take the
lock: a run that starts at that moment would be refused.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from trainer.spec.errors import EnvironmentFaultError

LOCK = ".lock"


class Holder(NamedTuple):
    """A process of a machine."""

    pid: int
    host: str | None  # None: written by an earlier version

    @property
    def words(self) -> str:
        """`process 12 on n3`; of this machine `process 12`."""
        return f"process {self.pid}" + ("" if self.is_of_this_machine else f" on {self.host}")

    @property
    def is_of_this_machine(self) -> bool:
        return self.host in (None, socket.gethostname())


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Holds the run directory; another live holder is an error that names its process."""
    path = run_dir / LOCK
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise EnvironmentFaultError(f"{run_dir}: cannot be written: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = parse_holder(os.read(descriptor, 512))
            words = "an unknown process" if holder is None else holder.words
            raise EnvironmentFaultError(
                f"{run_dir}: is in use by {words}; wait for it, or stop it with: shardwise cancel {run_dir}"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, holder_line())
        yield
    finally:
        os.close(descriptor)


def holder_line() -> bytes:
    """What this process writes into the file that it holds."""
    return f"{os.getpid()} {socket.gethostname()}\n".encode()


def parse_holder(content: bytes) -> Holder | None:
    """The holder that the file names; None where it names none."""
    words = content.decode(errors="replace").split()
    if not words or not words[0].isdigit():
        return None
    return Holder(int(words[0]), words[1] if len(words) > 1 else None)


def last_holder(run_dir: Path) -> Holder | None:
    """Who held the directory last, and may hold it still."""
    try:
        return parse_holder((run_dir / LOCK).read_bytes())
    except OSError:
        return None


def holder_here(run_dir: Path) -> Holder | None:
    """The process of this machine that holds the directory now; None where none does, on this machine."""
    holder = last_holder(run_dir)
    return holder if holder is not None and holder.is_of_this_machine and _has_open(holder.pid, run_dir) else None


def _has_open(pid: int, run_dir: Path) -> bool:
    """Whether the process has the file open; of another user's, where that cannot be seen, whether it exists."""
    folder = Path(f"/proc/{pid}/fd")
    try:
        held = (run_dir / LOCK).stat()
        descriptors = list(folder.iterdir())
    except PermissionError:
        return folder.parent.exists()
    except OSError:
        return False
    return any(_is_file(path, held) for path in descriptors)


def _is_file(descriptor: Path, held: os.stat_result) -> bool:
    try:
        return os.path.samestat(descriptor.stat(), held)
    except OSError:
        return False
