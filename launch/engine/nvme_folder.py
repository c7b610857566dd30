"""The folder under `limits.nvme.path` that one attempt keeps offloaded state in: made for it, and gone after it.

    <limits.nvme.path>/shardwise-<run name>-<attempt>/zero_stage_3/optimizer/rank0/...

State on NVMe is worth nothing to a later attempt, which resumes from a checkpoint, so the supervisor removes the folder
however the attempt ends. Where the supervisor itself was killed, the next run under the same path removes it: an owner
holds an advisory lock in its folder, which the kernel gives up with the process, in whatever container it ran.
A folder gets its name only once it is locked, so one without a holder is never one that is being made.

DeepSpeed writes past the page cache and keeps its buffers locked in RAM; where the file system or the limit on locked
memory refuses that it ends the process, so both are asked beforehand.
"""

import contextlib
import errno
import fcntl
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.engine.offload_buffers import offload_buffers
from launch.probe.host import locks_without_limit
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.plan import Plan
from trainer.spec.units import format_bytes

_PREFIX = "shardwise-"
_OWNER = ".owner"


def nvme_folder(plan: Plan, run_dir: Path, attempt: int) -> Path | None:
    """The folder of an attempt of this plan's chosen candidate; None where it keeps nothing on NVMe."""
    path = plan.job.limits.nvme.path
    if path is None or not plan.chosen.strategy.offload.uses_nvme:
        return None
    return Path(path).expanduser().absolute() / f"{_PREFIX}{run_dir.absolute().name}-{attempt}"


def check_nvme(plan: Plan) -> None:
    """EnvironmentFaultError where the disk cannot hold what the chosen candidate offloads, or cannot be written so."""
    path = plan.job.limits.nvme.path
    if path is None or not plan.chosen.strategy.offload.uses_nvme:
        return
    parent = Path(path).expanduser()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_stale_folders(parent)
        _write_past_the_page_cache(parent)
    except OSError as error:
        words = "has no writing past the page cache (O_DIRECT)" if error.errno == errno.EINVAL else error.strerror
        raise EnvironmentFaultError(
            f"limits.nvme.path: {parent} cannot keep offloaded state: {words}; name a folder on a local disk"
        ) from error
    need, free, most = plan.chosen.memory.nvme_bytes, shutil.disk_usage(parent).free, plan.job.limits.nvme.size
    if free < need:
        raise EnvironmentFaultError(
            f"limits.nvme.path: {parent} has {format_bytes(free)} free, offloaded state needs {format_bytes(need)}; "
            "make room, or name a folder on another disk"
        )
    if most is not None and most < need:
        raise EnvironmentFaultError(
            f"limits.nvme.size: {format_bytes(most)} may be written, offloaded state needs {format_bytes(need)}"
        )
    check_locked_memory(plan, lockable_bytes())


def check_locked_memory(plan: Plan, limit_bytes: int | None) -> None:
    """EnvironmentFaultError where a rank locks more RAM than a process may; None: as much as it likes."""
    need = offload_buffers(plan).locked_bytes
    if limit_bytes is not None and limit_bytes < need:
        raise EnvironmentFaultError(
            f"{plan.chosen.strategy.offload} locks {format_bytes(need)} of RAM in each rank, "
            f"{format_bytes(limit_bytes)} may be locked here (ulimit -l)\nraise it: ulimit -l unlimited, "
            "LimitMEMLOCK=infinity in a systemd unit, or --ulimit memlock=-1 for a container"
        )


def lockable_bytes() -> int | None:
    """What a process of ours may lock in RAM; None: as much as it likes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or locks_without_limit(Path("/proc/self/status").read_text()):
        return None
    return soft


@contextmanager
def held_folder(folder: Path | None) -> Iterator[None]:
    """Makes the folder, holds it while the block runs, and removes it with everything in it."""
    if folder is None:
        yield
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        remove_stale_folders(folder.parent)
        owner = _make_locked(folder)
    except OSError as error:
        raise EnvironmentFaultError(
            f"{folder}: the folder for offloaded state cannot be made: {error.strerror}; see limits.nvme.path"
        ) from error
    try:
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(owner)


def remove_stale_folders(parent: Path) -> tuple[Path, ...]:
    """Removes the folders under `parent` whose owner is gone, and names them."""
    removed = []
    for owner in sorted(parent.glob(f"{_PREFIX}*/{_OWNER}")):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            descriptor = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), owner.stat()):  # else another one took its name meanwhile
                    shutil.rmtree(owner.parent)
                    removed.append(owner.parent)
            finally:
                os.close(descriptor)
    return tuple(removed)


def _make_locked(folder: Path) -> int:
    """Makes the folder with its lock held; the descriptor that holds it. OSError where it exists."""
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / "folder"
        made.mkdir()
        descriptor = os.open(made / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made.rename(folder)  # refused by the kernel where a folder of this name holds anything
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def _write_past_the_page_cache(folder: Path) -> None:
    """OSError where a file in `folder` cannot be opened as DeepSpeed opens it."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    finally:
        probe.unlink(missing_ok=True)
