"""The table of `doctor`'s checks, in the order that they are told, and how they are run: all at once, each with an end.

docs/doctor.md has a row for each of them.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from msgspec.structs import replace

from launch.doctor.building import check_build_locks, check_compiler, check_libaio, check_ninja, check_toolkit
from launch.doctor.disks import (
    check_folders,
    check_home,
    check_hub_cache,
    check_mounts,
    check_room,
    check_speed,
)
from launch.doctor.finding import Finding, warning
from launch.doctor.job import JobAsked, check_job
from launch.doctor.limits import (
    check_locked_memory,
    check_memory,
    check_open_files,
    check_other_limits,
    check_processes,
    check_shared_memory,
)
from launch.doctor.machine import Machine
from launch.doctor.network import check_hostname, check_hub, check_interfaces, check_proxies, check_wandb
from launch.doctor.python import check_libraries, check_python, check_shadows, check_variables
from launch.doctor.slurm import check_slurm
from launch.doctor.torch import check_collective, check_compiled, check_driver, check_memory_held, check_torch
from launch.doctor.wsl import check_wsl
from launch.probe.program import Beside
from trainer.spec.value import Value

DEADLINE_S = 32.0  # of all checks together, after torch has answered


class Check(Value, frozen=True, kw_only=True):
    """A row: `--quick` leaves out what is slow."""

    name: str
    find: Callable[[Machine], Iterable[Finding]]
    is_slow: bool = False


CHECKS = (
    Check(name="driver", find=check_driver),
    Check(name="torch", find=check_torch),
    Check(name="compiled-libraries", find=check_compiled, is_slow=True),
    Check(name="gpu-memory", find=check_memory_held),
    Check(name="collective", find=check_collective, is_slow=True),
    Check(name="python", find=check_python),
    Check(name="libraries", find=check_libraries),
    Check(name="shadowed-modules", find=check_shadows),
    Check(name="variables", find=check_variables),
    Check(name="compiler", find=check_compiler),
    Check(name="libaio", find=check_libaio),
    Check(name="ninja", find=check_ninja),
    Check(name="cuda-toolkit", find=check_toolkit),
    Check(name="build-locks", find=check_build_locks),
    Check(name="memory", find=check_memory),
    Check(name="shared-memory", find=check_shared_memory),
    Check(name="open-files", find=check_open_files),
    Check(name="processes", find=check_processes),
    Check(name="locked-memory", find=check_locked_memory),
    Check(name="other-limits", find=check_other_limits),
    Check(name="wsl", find=check_wsl),
    Check(name="folders", find=check_folders),
    Check(name="home", find=check_home),
    Check(name="room", find=check_room),
    Check(name="mounts", find=check_mounts),
    Check(name="disk-speed", find=check_speed, is_slow=True),
    Check(name="hub-cache", find=check_hub_cache),
    Check(name="hostname", find=check_hostname),
    Check(name="interfaces", find=check_interfaces),
    Check(name="proxies", find=check_proxies, is_slow=True),
    Check(name="hub", find=check_hub, is_slow=True),
    Check(name="wandb", find=check_wandb, is_slow=True),
    Check(name="slurm", find=check_slurm),
)
JOB_CHECK = "job"  # made for the job of the command line


def checks_for(asked: JobAsked | None) -> tuple[Check, ...]:
    """Every check, and the job's where there is one."""
    return CHECKS if asked is None else (*CHECKS, Check(name=JOB_CHECK, find=partial(check_job, asked)))


def run_checks(
    machine: Machine, checks: tuple[Check, ...] = CHECKS, *, deadline_s: float = DEADLINE_S
) -> Iterator[Finding]:
    """The findings of each check in the order of the table; one that has no end is told as that."""
    wanted = [check for check in checks if not (check.is_slow and machine.place.is_quick)]
    until_s = time.monotonic() + deadline_s
    running = [(check, Beside(partial(_findings, check, machine))) for check in wanted]
    for check, beside in running:
        yield from beside.wait(until_s) or (_without_end(check, deadline_s) if beside.is_running else ())


def _findings(check: Check, machine: Machine) -> tuple[Finding, ...]:
    return tuple(replace(finding, check=check.name) for finding in check.find(machine))


def _without_end(check: Check, deadline_s: float) -> tuple[Finding, ...]:
    sentence = (
        f"this check did not come to an end within {deadline_s:g} s: a disk, a server or a driver does not answer"
    )
    return (replace(warning(sentence, "df -h, mount and nvidia-smi show which hangs"), check=check.name),)
