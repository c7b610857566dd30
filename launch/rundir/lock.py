"""The owner of a run directory and its cancel flag: the files `.lock` and `cancelled`; its place, if it is moved.

The process that supervises the run holds `.lock`, with its pid and host as content. The file retains the last owner's
name after that process has ended, so readers check the process. Readers never lock it: a run that starts at that moment
would be refused.

A stop with a checkpoint usually means "continue later": a scheduler queues the job again, or the next job of a chain
starts. The cancel flag prevents both: the supervisor ends the run as after Ctrl-C, and a job that was cancelled with it
ends at once when it starts. The flag lists these jobs. Any other start of the run, by a person, removes the flag.

Supervisor, ranks and trackers write to paths. If the directory is moved meanwhile, they would make a second one at the
old path, so the supervisor holds the directory by descriptor (`HeldFolder`).
"""

import fcntl
import getpass
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Self

from shardwise.trainer.spec.codec import read_file, write_bytes
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
        return self.host in (None, os.uname().nodename)


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
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait(str(parse_owner(os.read(descriptor, 512)) or "an unknown process"))
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {os.uname().nodename}\n".encode(), 0)
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
        return parse_owner(read_file(run_dir / LOCK))
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


class HeldFolder:
    """A directory that is held by descriptor while processes write to its path."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._paths = [path.absolute()]  # by which processes know it, the newest last

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def follow(self) -> str | None:
        """Leaves a link at the old path of a directory that was moved; returns a sentence on that, None if it was not.

        EnvironmentFaultError if no link can be left: it was deleted, or moved to another file system, or with the
        folder above it, or another directory is there now.
        """
        held = os.fstat(self._descriptor)
        missing = [path for path in self._paths if not _is_same(path, held)]
        if not missing:
            return None
        place, old = Path(f"/proc/self/fd/{self._descriptor}").readlink(), self._paths[0]
        if held.st_nlink == 0 or not _is_same(place, held):
            raise EnvironmentFaultError(
                f"{old}: was deleted, or moved to another file system, while the run writes to it"
            )
        try:
            for path in missing:
                if path.is_symlink():
                    path.unlink()  # it led to the place before
                path.symlink_to(place)
        except OSError as error:
            raise EnvironmentFaultError(
                f"{old}: was moved to {place} while the run writes to it, and no link can be left: {error.strerror}; "
                f"continue it there, with --resume --run-dir {shlex.quote(str(place))}"
            ) from error
        self._paths.append(place)
        return f"{old} was moved to {place} while the run writes to it; a link at the old path leads there"


def _is_same(path: Path, held: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), held)
    except OSError:
        return False


CANCEL_FLAG = "cancelled"


def is_cancelled(run_dir: Path) -> bool:
    """True if a person has cancelled this run."""
    return (run_dir / CANCEL_FLAG).is_file()


def read_cancel_flag(run_dir: Path) -> str | None:
    """`cancelled 2030-01-02T12:00:00Z by user@host`; None if the run was not cancelled."""
    try:
        return read_file(run_dir / CANCEL_FLAG).decode(errors="replace").partition("\n")[0] or "cancelled"
    except OSError:
        return None


def write_cancel_flag(run_dir: Path, *, now: datetime, job_ids: Sequence[str] = ()) -> None:
    """Cancels a run and these jobs of Slurm; EnvironmentFaultError if the flag cannot be written."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, in a container
        name = str(os.getuid())
    lines = [f"cancelled {now:%Y-%m-%dT%H:%M:%SZ} by {name}@{os.uname().nodename}", " ".join(["jobs", *job_ids])]
    try:
        write_bytes(run_dir / CANCEL_FLAG, "".join(f"{line}\n" for line in lines).encode())
    except OSError as error:
        raise EnvironmentFaultError(f"{run_dir}: cannot be written: {error.strerror}") from error


def must_end_at_start(run_dir: Path, environment: Mapping[str, str] = os.environ) -> bool:
    """True if this process runs in a job that was cancelled; any other start removes the flag."""
    try:
        _, _, jobs = read_file(run_dir / CANCEL_FLAG).decode(errors="replace").partition("\njobs")
    except OSError:
        return False
    if own_job(environment) in jobs.split():
        return True
    (run_dir / CANCEL_FLAG).unlink(missing_ok=True)
    return False


def own_job(environment: Mapping[str, str]) -> str | None:
    """The id of the job that this program runs in, of an array ID_INDEX; None outside a job."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID") or None
