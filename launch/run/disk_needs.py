"""The room that a job needs on the disks: for files of the hub that are not in the caches yet, checkpoints and exports.

The hub is queried before anything large is downloaded, and not for complete files.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.launch.engine.offload import check_nvme
from shardwise.launch.inputs.data_files import is_of_hub
from shardwise.launch.inputs.dataset_files import Part, list_dataset
from shardwise.launch.inputs.hub import hub_cache, missing_files
from shardwise.launch.inputs.model_files import ModelFiles
from shardwise.launch.inputs.trusted_code import has_kernel
from shardwise.launch.plan.gather import PlanInputs
from shardwise.launch.probe import disks
from shardwise.trainer.spec.job.sections import Job
from shardwise.trainer.spec.job.sources import DataSource
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.units import format_bytes

EXPORT_BYTES_PER_PARAMETER = 4
INODES_A_FILE = 3  # of the hub's cache: the content, its name, a lock


class Need(NamedTuple):
    """Files of the hub that a job needs, and the size of those that are missing."""

    what: str
    folder: Path
    num_bytes: int
    num_files: int

    @property
    def summary(self) -> str:
        """`the weights of org/model: 2 GiB in 3 files into /cache/hub`."""
        if not self.num_files:
            return f"{self.what}: here already, in {self.folder}"
        files = "1 file" if self.num_files == 1 else f"{self.num_files} files"
        return f"{self.what}: {format_bytes(self.num_bytes)} in {files} into {self.folder}"


class Source(NamedTuple):
    """A data set of the hub, as the job names it."""

    source: DataSource
    setting: str

    @property
    def part(self) -> Part:
        return Part(self.source.subset, self.source.split)


def model_need(job: Job, model: ModelFiles, hub_home: Path | None) -> Need | None:
    """The weights; None if they are a folder of this machine, or the model starts from scratch."""
    cache, repository = hub_cache(hub_home), model.repository
    if repository is None:
        return None
    what = f"the weights of {repository}"
    if not model.needs_download:
        return Need(what, cache, 0, 0)
    revision = job.model.revision or model.revision
    left = missing_files(repository, revision=revision, cache=cache, setting="model.name")
    return Need(what, cache, sum(left.values()), len(left))


def data_sources(job: Job) -> Iterator[Source]:
    """Data sets of the hub that the job learns from or is scored on."""
    for source in job.data.train:
        if is_of_hub(source.source):
            yield Source(source, "data.train")
    held_out = job.data.eval_source
    if held_out is not None and is_of_hub(held_out):
        source = DataSource(source=held_out, subset=job.data.eval_subset, split=job.data.eval_split)
        yield Source(source, "data.eval")


def data_need(source: Source, hub_home: Path | None) -> Need:
    """The files of one part of a data set."""
    cache, name = hub_cache(hub_home), source.source.source
    listed = list_dataset(name, source.part, cache=cache, setting=source.setting)
    left = [file.size_bytes for file in listed.files if not file.path.is_file()]
    return Need(f"the data of {name} ({source.setting})", cache, sum(left), len(left))


def check_room(folder: Path, *, num_bytes: int, num_files: int, what: str) -> None:
    """EnvironmentFaultError with both numbers if a cache's file system, or a quota, has too little left."""
    disks.check_room(
        folder,
        num_bytes=num_bytes,
        num_files=num_files,
        what=f"{what} needs",
        remedy="make room, or name another with folders.huggingface and folders.cache in config.yaml",
    )


def check_room_of(needs: Sequence[Need]) -> None:
    """Of all of them together, as they share the hub's cache."""
    for folder in {need.folder for need in needs}:
        here = [need for need in needs if need.folder == folder and need.num_files]
        check_room(
            folder,
            num_bytes=sum(need.num_bytes for need in here),
            num_files=INODES_A_FILE * sum(need.num_files for need in here),
            what=" with ".join(need.what for need in here),
        )


def missing_for(
    inputs: PlanInputs, *, kernel: str | None = None, environment: Mapping[str, str] = os.environ
) -> tuple[str, ...]:
    """`the weights of org/model`, `the data of org/rows`, `the kernel ...`; `kernel` is the one that the plan runs.

    Config, tokenizer and data that is not streamed are here already, as nothing could be planned without them.
    """
    missing = [f"the weights of {inputs.model.repository}"] if inputs.model.needs_download else []
    listed = (*inputs.request.files, *inputs.request.eval_files)
    remote = {
        file.hub.partition("@")[0].removeprefix("hf://datasets/") for file in listed if file.is_remote and file.hub
    }
    if remote:
        missing.append(f"the data of {', '.join(sorted(remote))}")
    if kernel is not None and not has_kernel(kernel, environment):
        missing.append(f"the kernel {kernel}")
    return tuple(missing)


def needed_disk_bytes(plan: Plan) -> int:
    """Bytes a run of this plan needs on the disk at once."""
    memory, freezes_base = plan.chosen.memory, plan.chosen.method.freezes_base
    export = memory.checkpoint_bytes if freezes_base else plan.model_shape.num_parameters * EXPORT_BYTES_PER_PARAMETER
    return export + memory.checkpoint_bytes * min(2, plan.job.checkpoint.keep + 1)


def check_disk(plan: Plan, run_dir: Path) -> None:
    """EnvironmentFaultError with both numbers if the run would fill a disk, or a quota on it."""
    check_nvme(plan)
    disks.check_room(
        run_dir,
        num_bytes=needed_disk_bytes(plan),
        what="checkpoints and the exported model need",
        remedy="make room, or name another disk with output or --run-dir",
    )
