"""Queries to Slurm: runs its commands and parses their output.

Commands run with LC_ALL=C and a limit of TIMEOUT_S: they wait seconds for a controller that is down, and a minute
without a configuration. Every failure is an EnvironmentFaultError that names the command.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence

from shardwise.slurm.cluster import Node, Partition, parse_nodes, parse_partitions
from shardwise.trainer.spec.errors import EnvironmentFaultError

TIMEOUT_S = 20.0
_NO_CONTROLLER = ("Unable to contact slurm controller", "Zero Bytes were transmitted", "Socket timed out")


def read_partitions(environment: Mapping[str, str] = os.environ) -> tuple[Partition, ...]:
    """Every partition that Slurm shows this user."""
    return parse_partitions(run_slurm(("scontrol", "-o", "show", "partition"), environment=environment))


def read_nodes(environment: Mapping[str, str] = os.environ) -> tuple[Node, ...]:
    """Every node that Slurm shows; a cloud's that are powered down may be missing."""
    return parse_nodes(run_slurm(("scontrol", "-o", "show", "node"), environment=environment))


def run_slurm(argv: Sequence[str], *, environment: Mapping[str, str] = os.environ, timeout_s: float = TIMEOUT_S) -> str:
    """The output of a command of Slurm; EnvironmentFaultError if it is missing, hangs, or fails."""
    done = call_slurm(argv, environment={**environment, "LC_ALL": "C"}, timeout_s=timeout_s)
    if done.returncode != 0:
        raise EnvironmentFaultError(_failure(" ".join(argv), done.stderr or done.stdout, done.returncode))
    return done.stdout


def call_slurm(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str],
    timeout_s: float,
    folder: str | None = None,
    stdin: str = "",
    if_late: str = "is the Slurm controller up, and slurm.conf in its place?",
) -> "subprocess.CompletedProcess[str]":
    """Runs a command of Slurm to its end, whatever its exit code; EnvironmentFaultError if it is missing or hangs."""
    command = " ".join(argv)
    try:
        return subprocess.run(
            argv,
            env=dict(environment),
            cwd=folder,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError:
        raise EnvironmentFaultError(
            f"{argv[0]} is not on PATH: Slurm's commands are on a login node of the cluster\n"
            "elsewhere name the machine: --hardware 4x8xH100-SXM5-80GB, or train on this one: shardwise train"
        ) from None
    except OSError as error:
        raise EnvironmentFaultError(f"{command}: cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise EnvironmentFaultError(f"{command}: no reply within {timeout_s:g} s; {if_late}") from None


def _failure(command: str, output: str, code: int) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if any(sign in line for sign in _NO_CONTROLLER for line in lines):
        return f"{command}: the Slurm controller does not respond; try again, or contact the administrators"
    return f"{command}: {'; '.join(lines[:2]) or f'ended with exit code {code}'}"
