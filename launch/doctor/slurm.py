"""`doctor`: on a machine of a Slurm cluster, whether its controller answers and munge speaks for us."""

import shutil
from collections.abc import Iterator, Mapping

from launch.doctor.finding import Finding, Level, explained, fault, fine, warning
from launch.doctor.machine import Machine
from launch.probe.program import ask
from slurm.allocation import is_login_node
from slurm.queries import run_slurm
from trainer.spec.errors import EnvironmentFaultError


def check_slurm(machine: Machine) -> Iterator[Finding]:
    """Nothing where there is no Slurm."""
    hardware = machine.hardware
    if hardware is None or hardware.host.slurm is None:
        return
    is_needed = is_login_node(hardware)
    level = Level.FAULT if is_needed else Level.WARNING
    problem = munge_problem(machine.environment, timeout_s=machine.place.slurm_timeout_s)
    if problem is not None:
        make = fault if is_needed else warning
        yield make(
            f"munge does not speak for this user: {problem}",
            "sudo systemctl restart munge; its clock and its key must be those of the controller",
        )
    try:
        answer = run_slurm(
            ("scontrol", "ping"), environment=machine.environment, timeout_s=machine.place.slurm_timeout_s
        )
    except EnvironmentFaultError as error:
        yield explained(
            level, str(error), otherwise="ask who runs the cluster; sudo systemctl status slurmctld, on its machine"
        )
        return
    where = "this is a login node: shardwise submit" if is_needed else "Slurm is here"
    yield fine(f"{where}; {' '.join(answer.split())[:120]}")


def munge_problem(environment: Mapping[str, str], *, timeout_s: float) -> str | None:
    """Why a credential cannot be made and read back; None where it can, and where there is no munge."""
    munge, unmunge = (shutil.which(name, path=environment.get("PATH")) for name in ("munge", "unmunge"))
    if munge is None or unmunge is None:
        return None
    made = ask([munge, "-n"], environment=environment, timeout_s=timeout_s)
    if made.exit_code != 0:
        return "munge does not answer" if made.exit_code is None else made.last_line
    read = ask([unmunge], environment=environment, timeout_s=timeout_s, standard_input=made.output)
    if read.exit_code == 0:
        return None
    return "unmunge does not answer" if read.exit_code is None else read.last_line
