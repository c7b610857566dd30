"""Submission of a script with sbatch: first as a test, then for real. Refusals of Slurm come with a remedy.

Slurm applies the limits of accounts and qualities of service; they are not read here. A controller that does not deny
what exceeds them (EnforcePartLimits=NO, the default, or a QOS without DenyOnLimit) accepts a job that never starts, in
`sbatch --test-only` too, and states the reason with the waiting job: such a job is cancelled and counts as refused.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from shardwise.slurm.cluster import format_duration
from shardwise.slurm.jobs import cancel, never_starts, read_reason
from shardwise.slurm.partition_hardware import PartitionHardware
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
        return "--container-image" in _call(("srun", "--help"), environment).stdout
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


def explain_refusal(output: str, job: BatchJob, found: PartitionHardware | None) -> str:
    """Slurm's message and a remedy, in at most three lines. Pure."""
    lines = [_PREFIX.sub("", line).strip() for line in output.splitlines() if line.strip()]
    known = [(line, advice) for line in reversed(lines) if (advice := _advice(line)) is not None]
    message, advice = known[0] if known else (lines[0] if lines else "no reason given", None)
    return f"Slurm refuses this job: {message}\n{_requested(job) if advice is None else advice(job, found)}"


_Advice = Callable[[BatchJob, PartitionHardware | None], str]


def _advice(message: str) -> _Advice | None:
    """The remedy for a message of Slurm; None for an unknown one."""
    return next((each for each, texts in _REFUSALS.items() if any(text in message.lower() for text in texts)), None)


def _partition(job: BatchJob, _found: PartitionHardware | None) -> str:
    return f"--partition {job.partition or 'NAME'}: `sinfo --summarize` lists the partitions that you may use"


def _account(job: BatchJob, _found: PartitionHardware | None) -> str:
    yours = "`sacctmgr show assoc user=$USER` lists yours"
    return f"{_stated('account', job.account)}; {yours}: --account NAME{_accepted(job)}"


def _qos(job: BatchJob, _found: PartitionHardware | None) -> str:
    yours = "`sacctmgr show assoc user=$USER format=account,qos,defaultqos` lists yours"
    return f"{_stated('qos', job.qos)}; {yours}: --qos NAME{_accepted(job)}"


def _accepted(job: BatchJob) -> str:
    """Where to find the accounts, qualities of service and limits of the partition."""
    if job.partition is None:
        return ""
    return f"\n`scontrol show partition {shlex.quote(job.partition)}` has what it accepts"


def _nodes(job: BatchJob, found: PartitionHardware | None) -> str:
    has = f"; partition {found.partition.name} has {found.group.summary}" if found is not None else ""
    return f"{_requested(job)}{has}\nrequest less with --nodes, --gpus-per-node, slurm.cores or slurm.memory"


def _time(job: BatchJob, found: PartitionHardware | None) -> str:
    limit_s = job.time_limit_s
    requested = "no time limit was requested" if limit_s is None else f"requested: {format_duration(limit_s)}"
    limit = found.partition.max_time_s if found is not None else None
    most = (
        f"; {found.partition.name} allows {format_duration(limit)}" if found is not None and limit is not None else ""
    )
    return f"{requested}{most}; choose a shorter --time: an unfinished run continues in a further job"


def _feature(job: BatchJob, found: PartitionHardware | None) -> str:
    has = f"its nodes have {', '.join(found.group.features)}" if found is not None and found.group.features else ""
    return f"{_stated('constraint', job.constraint)}; {has or '`sinfo -o %N,%f` lists the features of nodes'}"


def _reservation(job: BatchJob, _found: PartitionHardware | None) -> str:
    return f"{_stated('reservation', job.reservation)}; `scontrol show reservation` lists those there are, and for whom"


def _limits(job: BatchJob, _found: PartitionHardware | None) -> str:
    return (
        f"{_requested(job)}\n`sacctmgr show qos` and `sacctmgr show assoc user=$USER` list what each grants; "
        "fewer --nodes or --gpus-per-node, or a shorter --time, may do"
    )


def _partition_limits(job: BatchJob, _found: PartitionHardware | None) -> str:
    return f"{_requested(job)}{_accepted(job)}"


def _option(_job: BatchJob, _found: PartitionHardware | None) -> str:
    return "slurm.extra is passed to sbatch unchanged; `sbatch --help` lists its options"


def _points(job: BatchJob, _found: PartitionHardware | None) -> str:
    return f"the sweep has {job.num_points} points; `scontrol show config` has the limit of an array (MaxArraySize)"


# Parts of Slurm's messages, in lower case.
_REFUSALS: dict[_Advice, tuple[str, ...]] = {
    _partition: (
        "partition specified",
        "invalid partition name",
        "group not permitted to use this partition",
        "partition not available",
    ),
    _account: ("invalid account", "invalidaccount", "accountnotallowed", "account not permitted", "account not known"),
    _qos: ("invalid qos", "invalidqos", "qosnotallowed", "qos not permitted", "qos not known"),
    _time: ("requested time limit is invalid", "invalid --time", "partitiontimelimit"),
    _feature: ("invalid feature",),
    _reservation: ("reservation is invalid", "access/permission denied"),
    _limits: ("job violates accounting/qos policy", "perjob", "maxwall"),
    _nodes: (
        "node configuration is not available",
        "node count specification invalid",
        "more processors requested than permitted",
        "memory required by task is not available",
        "invalid generic resource",
    ),
    _partition_limits: ("partitionconfig",),
    _points: ("invalid job array specification",),
    _option: ("unrecognized option", "invalid option", "invalid directive"),
}


def _stated(name: str, value: str | None) -> str:
    return f"no --{name} was requested" if value is None else f"requested: --{name}={value}"


def _requested(job: BatchJob) -> str:
    shown = ("nodes", "gpus-per-node", "gres", "cpus-per-task", "mem", "exclusive", "time", "partition", "constraint")
    options = [option for option in sbatch_options(job) if option[2:].partition("=")[0] in shown]
    return "requested: " + " ".join(options)


def _run_sbatch(
    arguments: Sequence[str], job: BatchJob, environment: Mapping[str, str], *, script: str = ""
) -> "subprocess.CompletedProcess[str]":
    done = _call(("sbatch", *arguments), submit_environment(environment, job), folder=job.workdir, stdin=script)
    if "Unable to contact slurm controller" in done.stderr:
        raise EnvironmentFaultError(
            "the controller of this cluster does not respond (`scontrol ping`); try again later"
        )
    return done


def _call(
    argv: Sequence[str], environment: Mapping[str, str], *, folder: str | None = None, stdin: str = ""
) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            argv,
            env=dict(environment),
            cwd=folder,
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise EnvironmentFaultError(
            f"{argv[0]} is not here: submit on a login node of the cluster, or train on this machine: shardwise train"
        ) from None
    except OSError as error:
        raise EnvironmentFaultError(f"{argv[0]} cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        raise EnvironmentFaultError(
            f"{argv[0]} gave no reply within {LIMIT_S:.0f} s; check with squeue whether the job was submitted"
        ) from None
