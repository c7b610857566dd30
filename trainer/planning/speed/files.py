"""Predicted seconds in which a run writes its checkpoints, as far as training waits for them, and its export.

A run saves after its first step and reads that back (the rehearsal), then as the schedule has it, and at its end. The
first and the last save are waited for; those between cost a copy into host RAM where they are written in the background
(`saving_choice`). The export is written and read back.

The rate is that of earlier runs on this device, else that of the run directory's disk, if `probe --measure` has timed
it: large blocks of one thread, past the page cache. Without either nothing is predicted.
"""

from typing import NamedTuple

from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.speed.rates import rates_of
from shardwise.trainer.planning.speed.work import adapters_of, trained_parameters, work_of
from shardwise.trainer.spec.hardware import Disk
from shardwise.trainer.spec.messages.rank_files import saving_choice
from shardwise.trainer.spec.plan import Candidate, Schedule
from shardwise.trainer.spec.value import Value

ADAPTER_BYTES = 4  # of a trained number of an adapter


class Volume(Value, frozen=True, kw_only=True):
    """Bytes that a run writes while it waits, and those of them that it reads back."""

    written: float
    read: float


class SavedVolume(Value, frozen=True, kw_only=True):
    """Bytes of all saves of a run."""

    waited: Volume  # for the first and the last save
    between: Volume  # by the saves between
    copied_s: float | None  # seconds of those between, where they are written in the background


def saving_seconds(
    context: PlanningContext, candidate: Candidate, configuration: Configuration, *, training_s: float
) -> float | None:
    """Seconds that training waits for its checkpoints; None if their size or the rate of the disk is not known."""
    rate = _rate(context, context.corrections.times.saved_bytes_per_s)
    volume = saved_volume(context, candidate, configuration, training_s=training_s)
    if rate is None or volume is None:
        return None
    between_s = rate.seconds(volume.between) if volume.copied_s is None else volume.copied_s
    share = context.schedule.saving_max_share
    return rate.seconds(volume.waited) + (between_s if share is None else min(between_s, share * training_s))


def export_seconds(context: PlanningContext, configuration: Configuration) -> float | None:
    """Seconds of the export at the end; None if the rate of the disk is not known."""
    rate = _rate(context, context.corrections.times.exported_bytes_per_s)
    return None if rate is None else rate.seconds(export_volume(context, configuration))


def saved_volume(
    context: PlanningContext, candidate: Candidate, configuration: Configuration, *, training_s: float
) -> SavedVolume | None:
    """What the saves of a run move whose steps and evaluations take `training_s`; None if that is not known."""
    num_bytes, schedule = candidate.memory.checkpoint_bytes, context.schedule
    if not num_bytes:
        return None
    number = _saves_between(schedule, training_s=training_s)
    waited = Volume(written=num_bytes * (1 + schedule.rehearses_save), read=num_bytes * schedule.rehearses_save)
    copied_s = None
    if saving_choice(context.job, context.hardware, candidate).is_background:
        copied_s = number * num_bytes / candidate.num_ranks / rates_of(configuration, context.device).pcie
    return SavedVolume(waited=waited, between=Volume(written=number * num_bytes, read=0.0), copied_s=copied_s)


def export_volume(context: PlanningContext, configuration: Configuration) -> Volume:
    """Bytes of the exported weights: of the whole model in the type that it is trained in, or of its adapters."""
    shape = context.shape
    if configuration.method.freezes_base:
        trained = trained_parameters(configuration, work_of(shape), adapters_of(shape, configuration))
        num_bytes = trained * ADAPTER_BYTES
    else:
        num_bytes = shape.num_parameters * configuration.strategy.precision.master_bytes
    return Volume(written=num_bytes, read=num_bytes)


def _saves_between(schedule: Schedule, *, training_s: float) -> int:
    """Saves after the first and before the last one."""
    by_steps = (schedule.num_steps - 1) // schedule.checkpoint_every_steps if schedule.checkpoint_every_steps else 0
    by_time = int(training_s / schedule.checkpoint_every_s) if schedule.checkpoint_every_s else 0
    return max(by_steps, by_time)


class _Rate(NamedTuple):
    """Bytes per second."""

    write: float
    read: float

    def seconds(self, volume: Volume) -> float:
        return volume.written / self.write + volume.read / self.read


def _rate(context: PlanningContext, learned: float | None) -> _Rate | None:
    """The rate that runs had, else that of the disk; None without either."""
    if learned is not None:
        return _Rate(learned, learned)
    disk = output_disk(context)
    if disk is None or disk.write_bytes_per_s is None:
        return None
    return _Rate(disk.write_bytes_per_s, disk.read_bytes_per_s or disk.write_bytes_per_s)


def output_disk(context: PlanningContext) -> Disk | None:
    """The measured disk that the run directory is on; of one whose path is relative, the slowest that was measured."""
    disks, output = context.hardware.host.disks, context.job.output
    measured = [disk for disk in disks if disk.write_bytes_per_s is not None]
    if output is None or not output.startswith("/"):
        return min(measured, key=lambda disk: disk.write_bytes_per_s or 0, default=None)
    above = [disk for disk in disks if f"{output}/".startswith(f"{disk.path.rstrip('/')}/")]
    return max(above, key=lambda disk: len(disk.path), default=None)
