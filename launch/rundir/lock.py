"""The lock of a run directory: the process that supervises the run holds `.lock`, with its pid and host as content.

The file keeps the last owner's name after that process has ended, so readers check the process. Readers never take the
lock: a run that starts at that moment would be refused.
"""

import fcntl
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from shardwise.trainer.spec.errors import EnvironmentFaultError

LOCK = ".lock"


class LockOwner(NamedTuple):
    """A process of a machine."""

    pid: int
    host: str | None  # None: written by an earlier version

    def __str__(self) -> str:
        """`process 12 on n3`; of this machine `process 12`."""
        return f"process {self.pid}" + ("" if self.is_local else f" on {self.host}")

    @property
    def is_local(self) -> bool:
        return self.host in (None, socket.gethostname())


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Holds the lock while the block runs; EnvironmentFaultError names another living owner."""

    def refuse(owner: str) -> None:
        raise EnvironmentFaultError(
            f"{run_dir}: is in use by {owner}; wait for it, or stop it with: shardwise cancel {run_dir}"
        )

    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive(run_dir / LOCK, on_wait=refuse))
        except OSError as error:
            raise EnvironmentFaultError(f"{run_dir}: cannot be written: {error.strerror}") from error
        yield


@contextmanager
def exclusive(path: Path, *, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock of a file while the block runs; waits for another process after `on_wait` got its name."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait(str(parse_owner(os.read(descriptor, 512)) or "an unknown process"))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def parse_owner(content: bytes) -> LockOwner | None:
    """The owner that the content of a lock names; None if it names none."""
    pid, _, host = content.decode(errors="replace").strip().partition(" ")
    return LockOwner(int(pid), host or None) if pid.isdigit() else None


def recorded_owner(run_dir: Path) -> LockOwner | None:
    """The last owner of the lock, on any machine, which may have ended."""
    try:
        return parse_owner((run_dir / LOCK).read_bytes())
    except OSError:
        return None


def local_owner(run_dir: Path) -> LockOwner | None:
    """The process of this machine that holds the lock now; None if none does."""
    owner = recorded_owner(run_dir)
    return owner if owner is not None and owner.is_local and _has_open(owner.pid, run_dir / LOCK) else None


def _has_open(pid: int, lock: Path) -> bool:
    """True if the process has the file open. Of another user's process only its existence can be read."""
    folder = Path(f"/proc/{pid}/fd")
    try:
        status = lock.stat()
        descriptors = list(folder.iterdir())
    except PermissionError:
        return folder.parent.exists()
    except OSError:
        return False

    def is_lock(descriptor: Path) -> bool:
        try:
            return os.path.samestat(descriptor.stat(), status)
        except OSError:
            return False

    return any(map(is_lock, descriptors))
