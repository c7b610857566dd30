"""Offloaded state under DeepSpeed: the sizes of its buffers, and the folder on NVMe of one attempt.

ZeRO-3 updates one sub-group of weights after the other. `sub_group_size` is in elements of a rank's partition; a
sub-group is closed by the weight that fills it, so it may be larger by one piece (a rank's part of the largest
weight). Memory of a sub-group (DeepSpeed 0.19.8, runtime/swap_tensor and runtime/zero/stage3.py):

    state on NVMe      one buffer each for master weights, gradient and both moments, each as large as the largest
                       sub-group, locked in RAM (mlock) for the whole run
    weights on NVMe    also one in the computing type, through which updated weights are written, and `buffer_count`
                       buffers of one piece: every weight that is gathered, or about to be, holds one

So sub-groups are cut to the rest of the window that the memory estimate counts (`UPDATE_WINDOW_BYTES`), or of the
machine's limit on locked memory if that is less. DeepSpeed has a fixed size for all of these, and ends the process if
mlock refuses it.

A weight stays in RAM if a rank's piece of it is smaller than `SMALLEST_SWAPPED_BYTES`. With weights on NVMe nothing
stays gathered for reuse, and few weights are gathered ahead, because DeepSpeed stops the run when no buffer is free.

`pin_memory` is for GPUs alone: nothing copies to a device on a CPU. CUDA's pinned memory is not part of the limit on
locked memory; if it is limited (WSL) and would not fit, DeepSpeed uses pageable memory, which is slower.

The folder of an attempt is made for it and removed after it:

    <limits.nvme.path>/shardwise-<run name>-<attempt>/zero_stage_3/optimizer/rank0/...

State on NVMe is worthless to a later attempt, which resumes from a checkpoint, so the supervisor removes the folder
however the attempt ends. If the supervisor itself was killed, the next run under the same path removes it: an owner has
an advisory lock in its folder, which the kernel releases with the process, in any container. A folder gets
its name only once it is locked, so a folder without an owner is never one that is being made.

DeepSpeed writes past the page cache and keeps its buffers locked in RAM; if the file system or the limit on locked
memory refuses that it ends the process, so both are checked before.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shardwise.launch.probe.host import memlock_limit
from shardwise.trainer.spec.engines import SUB_GROUP_BUFFERS, UPDATE_WINDOW_BYTES, Offload, sub_group_elements
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.host_ram import pinnable_ram
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import MIB, format_bytes
from shardwise.trainer.spec.value import Value

SMALLEST_SWAPPED_BYTES = MIB  # DeepSpeed's MIN_AIO_BYTES, and the block size of our files
WEIGHTS_AHEAD = 2  # gathered before they are needed
WEIGHT_BUFFERS = 1 + 2 * WEIGHTS_AHEAD  # at work; gathered ahead; on their way from the disk
_PREFIX = "shardwise-"
_OWNER = ".owner"


class OffloadBuffers(Value, frozen=True, kw_only=True):
    """Sizes for one rank."""

    sub_group_elements: int
    weight_buffer_elements: int  # a rank's piece of the largest weight
    weight_buffers: int
    optimizer_buffers: int
    ahead_elements: int  # of whole weights that are gathered ahead of those on NVMe
    pins_memory: bool
    locked_bytes: int  # of RAM (mlock) that the buffers take; 0 without NVMe


def offload_buffers(plan: Plan) -> OffloadBuffers:
    """The buffers of a plan under ZeRO."""
    chosen, shape = plan.chosen, plan.model_shape
    strategy, num_ranks = chosen.strategy, chosen.num_ranks
    width = strategy.precision.compute_bytes
    partition, piece = -(-shape.num_parameters // num_ranks), -(-shape.largest_tensor // num_ranks)
    per_element = SUB_GROUP_BUFFERS * strategy.precision.master_bytes
    fixed = 0
    if strategy.offload is Offload.NVME_ALL:
        per_element += width
        fixed = WEIGHT_BUFFERS * piece * width
    sub_group = sub_group_elements(
        partition=partition, piece=piece, num_bytes=per_element, window=_window_bytes(plan) - fixed
    )
    return OffloadBuffers(
        sub_group_elements=sub_group,
        weight_buffer_elements=piece,
        weight_buffers=WEIGHT_BUFFERS,
        optimizer_buffers=SUB_GROUP_BUFFERS,
        ahead_elements=WEIGHTS_AHEAD * num_ranks * SMALLEST_SWAPPED_BYTES // width,
        pins_memory=_pins_memory(plan),
        locked_bytes=fixed + per_element * min(partition, sub_group + piece) if strategy.offload.uses_nvme else 0,
    )


def _window_bytes(plan: Plan) -> int:
    """RAM that one rank's buffers may take."""
    if not plan.chosen.strategy.offload.uses_nvme:
        return UPDATE_WINDOW_BYTES
    limit = plan.hardware.host.memlock_limit_bytes
    return UPDATE_WINDOW_BYTES if limit is None else min(UPDATE_WINDOW_BYTES, limit)


def _pins_memory(plan: Plan) -> bool:
    if plan.device_kind is DeviceKind.CPU:
        return False
    limit = pinnable_ram(plan.hardware.host, plan.job.limits.host_ram)
    return limit is None or plan.chosen.memory.pinned_bytes <= limit


def nvme_folder(plan: Plan, run_dir: Path, attempt: int) -> Path | None:
    """The folder of an attempt of this plan's chosen candidate; None if it keeps nothing on NVMe."""
    path = plan.job.limits.nvme.path
    if path is None or not plan.chosen.strategy.offload.uses_nvme:
        return None
    return Path(path).expanduser().absolute() / f"{_PREFIX}{run_dir.absolute().name}-{attempt}"


def check_nvme(plan: Plan) -> None:
    """Raises EnvironmentFaultError if the disk has no space for the offloaded state or refuses O_DIRECT."""
    path = plan.job.limits.nvme.path
    if path is None or not plan.chosen.strategy.offload.uses_nvme:
        return
    parent = Path(path).expanduser()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_stale_folders(parent)
        _write_past_the_page_cache(parent)
    except OSError as error:
        reason = "has no writing past the page cache (O_DIRECT)" if error.errno == errno.EINVAL else error.strerror
        raise EnvironmentFaultError(
            f"limits.nvme.path: {parent} cannot keep offloaded state: {reason}; name a folder on a local disk"
        ) from error
    need, free, most = plan.chosen.memory.nvme_bytes, shutil.disk_usage(parent).free, plan.job.limits.nvme.size
    if free < need:
        raise EnvironmentFaultError(
            f"limits.nvme.path: {parent} has {format_bytes(free)} free, offloaded state needs {format_bytes(need)}; "
            "free some space, or name a folder on another disk"
        )
    if most is not None and most < need:
        raise EnvironmentFaultError(
            f"limits.nvme.size: {format_bytes(most)} may be written, offloaded state needs {format_bytes(need)}"
        )
    check_locked_memory(plan, memlock_limit(Path("/proc/self/status").read_text()))


def check_locked_memory(plan: Plan, limit_bytes: int | None) -> None:
    """Raises EnvironmentFaultError if a rank locks more RAM than a process may; None: no limit."""
    need = offload_buffers(plan).locked_bytes
    if limit_bytes is not None and limit_bytes < need:
        raise EnvironmentFaultError(
            f"{plan.chosen.strategy.offload} locks {format_bytes(need)} of RAM in each rank, "
            f"{format_bytes(limit_bytes)} may be locked here (ulimit -l)\nraise it: ulimit -l unlimited, "
            "LimitMEMLOCK=infinity in a systemd unit, or --ulimit memlock=-1 for a container"
        )


@contextmanager
def held_folder(folder: Path | None) -> Iterator[None]:
    """Makes and locks the folder for the block, then removes it with everything in it."""
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
    """Removes the folders under `parent` whose owner has ended, and returns them."""
    removed = []
    for owner in sorted(parent.glob(f"{_PREFIX}*/{_OWNER}")):
        with contextlib.suppress(OSError):  # removed meanwhile, or another user's
            descriptor = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), owner.stat()):  # else a new folder has its name
                    shutil.rmtree(owner.parent)
                    removed.append(owner.parent)
            finally:
                os.close(descriptor)
    return tuple(removed)


def _make_locked(folder: Path) -> int:
    """Makes the folder locked and returns the descriptor of the lock; raises OSError if it exists."""
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent, ignore_cleanup_errors=True) as scratch:
        made = Path(scratch) / "folder"
        made.mkdir()
        descriptor = os.open(made / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            made.rename(folder)  # refused by the kernel if a folder of this name is not empty
        except OSError:
            os.close(descriptor)
            raise
    return descriptor


def _write_past_the_page_cache(folder: Path) -> None:
    """Raises OSError if a file in `folder` cannot be opened as DeepSpeed opens it."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    finally:
        probe.unlink(missing_ok=True)
