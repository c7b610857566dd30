"""The functions behind `import shardwise`: the same steps as the command line, with values instead of text."""

import sys
from pathlib import Path

import msgspec

from shardwise.launch.commands.train import train as run_training
from shardwise.launch.options import TrainOptions
from shardwise.launch.plan.gather import plan_inputs, profile_data, read_inputs
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.plan import MemoryEstimate, Plan, SpeedEstimate
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.units import parse_bytes


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and speed of the chosen strategy of a job."""

    fits: bool
    strategy: str
    memory: MemoryEstimate
    speed: SpeedEstimate


def plan(
    job: str | Path,
    *overrides: str,
    hardware: str | None = None,
    vram: str | int | None = None,
    gpus: tuple[int, ...] | None = None,
) -> Plan:
    """The plan of a job file for this machine, or for `hardware` (a SPEC or a hardware.json).

    Raises NothingFitsError where no strategy fits, InputError where the job is wrong.
    """
    inputs = read_inputs(
        Path(job), overrides, gpus=gpus, vram_cap_bytes=_size(vram), hardware_spec=hardware, only_plans=True
    )
    return plan_inputs(inputs, profile_data(inputs))


def estimate(job: str | Path, *overrides: str, hardware: str | None = None, vram: str | int | None = None) -> Estimate:
    """Predicted memory and speed of what `plan` would choose."""
    chosen = plan(job, *overrides, hardware=hardware, vram=vram).chosen
    return Estimate(fits=chosen.memory.fits, strategy=chosen.strategy.name, memory=chosen.memory, speed=chosen.speed)


def train(
    job: str | Path,
    *overrides: str,
    vram: str | int | None = None,
    gpus: tuple[int, ...] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
) -> Report:
    """Trains as `shardwise train` does, in processes of its own, and returns the report.

    Raises EnvironmentFaultError where the run was stopped before it trained anything.
    """
    outcome = run_training(
        TrainOptions(
            job=Path(job),
            overrides=overrides,
            gpus=gpus,
            vram_cap_bytes=_size(vram),
            run_dir=Path(run_dir) if run_dir is not None else None,
            resume=resume,
        ),
        Console(sys.stdout),
    )
    if outcome.report is None:
        raise EnvironmentFaultError("the run was stopped before the first step")
    return outcome.report


def _size(vram: str | int | None) -> int | None:
    try:
        return None if vram is None else parse_bytes(vram)
    except ValueError as error:
        raise InputError(f"vram: {vram!r} is not {error}") from None
