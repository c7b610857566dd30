"""Submission of a script with sbatch: first as a test, then for real. Refusals of Slurm come with a remedy.

Slurm applies the limits of accounts and qualities of service; they are not read here. A controller that does not deny
what exceeds them (EnforcePartLimits=NO, the default, or a QOS without DenyOnLimit) accepts a job that never starts, in
`sbatch --test-only` too, and states the reason with the waiting job: such a job is cancelled and counts as refused.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from shardwise.slurm.cluster import format_duration
from shardwise.slurm.jobs import cancel, never_starts, read_reason
from shardwise.slurm.partition_hardware import PartitionHardware
from shardwise.slurm.queries import call_slurm
from shardwise.slurm.sbatch import BatchJob, sbatch_options
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError

LIMIT_S = 120.0  # a busy controller replies late, and a job must not be submitted twice
_RETAINED_SLURM = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
_OTHER_NAMES = {"time": "TIMELIMIT", "array": "ARRAY_INX", "mem": "MEM_PER_NODE", "no-requeue": "NO_REQUEUE"}
_CLASHING = ("SBATCH_MEM_PER_CPU", "SBATCH_MEM_PER_GPU", "SBATCH_WAIT", "SBATCH_ARRAY_INX")
_PREFIX = re.compile(r"^(sbatch: |srun: )?(error: |fatal: )?(allocation failure: |Batch job submission failed: )?")


def check_script(text: str, job: BatchJob, found: PartitionHardware | None, *, environment: Mapping[str, str]) -> str:
    """Slurm's reply to `sbatch --test-only`: `Job 7 to start at ...`; InputError if it refuses the script."""
    done = _run_sbatch(["--test-only"], job, environment, script=text)
    if done.returncode != 0:
        raise InputError(explain_refusal(done.stderr or done.stdout, job, found))
    lines = [line.removeprefix("sbatch: ") for line in done.stderr.splitlines() if " to start at " in line]
    return lines[0] if lines else "Slurm would accept it"


def submit_script(
    script: Path,
    job: BatchJob,
    found: PartitionHardware | None,
    *,
    after: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """The id of the job; `after` is the id of a job that it waits for.

    InputError if Slurm refuses it, or accepts it and would never start it.
    """
    arguments = ["--parsable", *([f"--dependency=afterany:{after}"] if after is not None else []), str(script)]
    done = _run_sbatch(arguments, job, environment)
    job_id = done.stdout.strip().splitlines()[-1].partition(";")[0] if done.stdout.strip() else ""
    if done.returncode != 0 or not job_id.isdigit():
        raise InputError(explain_refusal(done.stderr or done.stdout, job, found))
    reason = read_reason(job_id, environment)
    if reason is not None and never_starts(reason):
        cancel([job_id], environment)
        raise InputError(explain_refusal(f"it would never start ({reason})", job, found))
    return job_id


def knows_pyxis(environment: Mapping[str, str] = os.environ) -> bool:
    """True if srun has the options of the container plugin."""
    try:
        return "--container-image" in call_slurm(("srun", "--help"), environment=environment, timeout_s=LIMIT_S).stdout
    except EnvironmentFaultError:
        return False


def submit_environment(environment: Mapping[str, str], job: BatchJob) -> dict[str, str]:
    """`environment` without variables that would override the script or belong to the job that submits this one.

    A variable of sbatch (SBATCH_PARTITION) overrides the script's own option. Variables for options that the script
    does not set stay: sites set them for accounts.
    """
    stated = {option[2:].partition("=")[0] for option in sbatch_options(job)}
    overruling = {f"SBATCH_{_OTHER_NAMES.get(name, name.replace('-', '_').upper())}" for name in stated}
    overruling |= {"SBATCH_REQUEUE", "SBATCH_NO_REQUEUE", *_CLASHING}
    return {
        name: value
        for name, value in environment.items()
        if name not in overruling and (not name.startswith("SLURM_") or name in _RETAINED_SLURM)
    }


class _Remedy(NamedTuple):
    texts: tuple[str, ...]  # parts of Slurm's messages, in lower case
    options: tuple[str, ...]  # that the message is about
    remedy: str


_SIZE = ("nodes", "gpus-per-node", "gres", "cpus-per-task", "mem", "exclusive", "time", "partition", "constraint")
_ACCEPTED = "`scontrol show partition {partition}` has what it accepts"
_REMEDIES = (
    _Remedy(
        (
            "partition specified",
            "invalid partition name",
            "group not permitted to use this partition",
            "partition not available",
        ),
        ("partition",),
        "`sinfo --summarize` lists the partitions that you may use",
    ),
    _Remedy(
        ("invalid account", "invalidaccount", "accountnotallowed", "account not permitted", "account not known"),
        ("account",),
        f"`sacctmgr show assoc user=$USER` lists yours: --account NAME; {_ACCEPTED}",
    ),
    _Remedy(
        ("invalid qos", "invalidqos", "qosnotallowed", "qos not permitted", "qos not known"),
        ("qos",),
        f"`sacctmgr show assoc user=$USER format=account,qos,defaultqos` lists yours: --qos NAME; {_ACCEPTED}",
    ),
    _Remedy(
        ("requested time limit is invalid", "invalid --time", "partitiontimelimit"),
        ("time", "partition"),
        "{limit}choose a shorter --time: an unfinished run continues in a further job",
    ),
    _Remedy(
        ("invalid feature",),
        ("constraint",),
        "`sinfo -o %N,%f` lists the features of nodes{features}",
    ),
    _Remedy(
        ("reservation is invalid", "access/permission denied"),
        ("reservation",),
        "`scontrol show reservation` lists those there are, and for whom",
    ),
    _Remedy(
        ("job violates accounting/qos policy", "perjob", "maxwall"),
        _SIZE,
        "`sacctmgr show qos` and `sacctmgr show assoc user=$USER` list what each grants; "
        "fewer --nodes or --gpus-per-node, or a shorter --time, may do",
    ),
    _Remedy(
        (
            "node configuration is not available",
            "node count specification invalid",
            "more processors requested than permitted",
            "memory required by task is not available",
            "invalid generic resource",
        ),
        _SIZE,
        "{nodes}request less with --nodes, --gpus-per-node, slurm.cores or slurm.memory",
    ),
    _Remedy(("partitionconfig",), _SIZE, _ACCEPTED),
    _Remedy(
        ("invalid job array specification",),
        ("array",),
        "`scontrol show config` has the limit of an array (MaxArraySize)",
    ),
    _Remedy(
        ("unrecognized option", "invalid option", "invalid directive"),
        (),
        "slurm.extra is passed to sbatch unchanged; `sbatch --help` lists its options",
    ),
)


def explain_refusal(output: str, job: BatchJob, found: PartitionHardware | None) -> str:
    """Slurm's message, the options that it is about, and a remedy, in three lines. Pure."""
    lines = [_PREFIX.sub("", line).strip() for line in output.splitlines() if line.strip()]
    known = [(line, row) for line in reversed(lines) if (row := _remedy_of(line)) is not None]
    message, row = known[0] if known else (lines[0] if lines else "no reason given", None)
    explained = [f"Slurm refuses this job: {message}"]
    names = _SIZE if row is None else row.options
    options = [option for option in sbatch_options(job) if option[2:].partition("=")[0] in names]
    if names:
        explained.append(f"requested: {' '.join(options) or f'no --{names[0]}'}")
    if row is not None:
        explained.append(row.remedy.format(**_facts(job, found)))
    return "\n".join(explained)


def _remedy_of(message: str) -> _Remedy | None:
    """The row of a message of Slurm; None for an unknown one."""
    return next((row for row in _REMEDIES if any(text in message.lower() for text in row.texts)), None)


def _facts(job: BatchJob, found: PartitionHardware | None) -> dict[str, str]:
    """The partition as remedies name it; empty where it is not known."""
    facts = {"partition": shlex.quote(job.partition or "NAME"), "limit": "", "features": "", "nodes": ""}
    if found is not None:
        name, limit_s = found.partition.name, found.partition.max_time_s
        facts["limit"] = "" if limit_s is None else f"{name} allows {format_duration(limit_s)}; "
        facts["features"] = f"; those of {name} have {', '.join(found.group.features)}" if found.group.features else ""
        facts["nodes"] = f"partition {name} has {found.group.summary}; "
    return facts


def _run_sbatch(
    arguments: Sequence[str], job: BatchJob, environment: Mapping[str, str], *, script: str = ""
) -> "subprocess.CompletedProcess[str]":
    done = call_slurm(
        ("sbatch", *arguments),
        environment=submit_environment(environment, job),
        timeout_s=LIMIT_S,
        folder=job.workdir,
        stdin=script,
        if_late="see with squeue whether the job was submitted",
    )
    if "Unable to contact slurm controller" in done.stderr:
        raise EnvironmentFaultError(
            "the controller of this cluster does not respond (`scontrol ping`); try again later"
        )
    return done
