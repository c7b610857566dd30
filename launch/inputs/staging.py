"""Copies of what every rank reads on the node's own disk, if the job requests them (`slurm.stage`).

    <folders.scratch>/shardwise/staged/<digest>/<name>      one folder for each source, the same path on every node

A shared file system that serves a hundred ranks a model of 140 GB at once is slow for all of its users. A copy is made
under a temporary name, after a check of the free space, and renamed when it is complete; the digest covers names, sizes
and times of the source, so an outdated copy is never used.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from msgspec.structs import replace

from shardwise.launch.rundir.lock import exclusive
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.job.sections import Stage
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import format_bytes, format_seconds

_SPARE = 1.02  # a file system keeps a little for itself


def with_stages(plan: Plan, scratch: Path | None) -> Plan:
    """The plan with the path of each copy that its job requests; raises InputError without a scratch folder."""
    sources = {Stage.MODEL: plan.model_path, Stage.DATA: plan.data.cache_dir}
    wanted = [sources[stage] for stage in plan.job.slurm.stage]
    if not wanted:
        return plan
    if scratch is None:
        raise InputError(
            "slurm.stage: needs a folder on the nodes' own disks; name it in config.yaml: folders: {scratch: /a/folder}"
        )
    staged = {source: str(_place(Path(source), scratch)) for source in wanted if source is not None}
    return replace(plan, staged=staged)


def copy_staged(staged: Mapping[str, str], *, on_progress: Callable[[str], None]) -> None:
    """Makes the missing copies; raises EnvironmentFaultError without free space or permission."""
    for source, place in staged.items():
        try:
            _copy(Path(source), Path(place), on_progress)
        except OSError as error:
            raise EnvironmentFaultError(
                f"slurm.stage: {source} cannot be copied to {place}: {error.strerror or error}"
            ) from error


def _place(source: Path, scratch: Path) -> Path:
    listing = "\n".join(f"{path.relative_to(source)} {size} {time_ns}" for path, size, time_ns in _files(source))
    digest = hashlib.sha256(f"{source.absolute()}\n{listing}".encode()).hexdigest()[:16]
    return scratch.expanduser().absolute() / "shardwise" / "staged" / digest / source.name


def _files(source: Path) -> list[tuple[Path, int, int]]:
    """Every file below a folder with size and time, links followed: a hub's snapshot consists of links."""
    found = []
    for folder, _, names in os.walk(source, followlinks=True):
        for name in names:
            path = Path(folder) / name
            status = path.stat()
            found.append((path, status.st_size, status.st_mtime_ns))
    return sorted(found)


def _copy(source: Path, place: Path, on_progress: Callable[[str], None]) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    waiting = f"waiting: another process is copying to {place.parent}"
    with exclusive(place.parent / ".lock", on_wait=lambda _: on_progress(waiting)):  # jobs of one node share the copy
        if place.is_dir():
            return
        num_bytes = sum(size for _, size, _ in _files(source))
        free = shutil.disk_usage(place.parent).free
        if free < num_bytes * _SPARE:
            raise EnvironmentFaultError(
                f"slurm.stage: {source} is {format_bytes(num_bytes)}, {place.parents[3]} has {format_bytes(free)} "
                "free; free some space there or remove slurm.stage"
            )
        on_progress(f"copying {source} ({format_bytes(num_bytes)}) to {place.parents[3]}")
        started = time.monotonic()
        partial = place.with_name(f".{place.name}.part")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(source, partial)
        partial.rename(place)
        on_progress(f"  copied in {format_seconds(time.monotonic() - started)}")
