"""Jobs of Slurm: that of this process, queued and ended ones, and how to cancel and signal them.

The facts on the job of this process are in its environment (sbatch(1), OUTPUT ENVIRONMENT VARIABLES). A program that
`srun` starts as one of several tasks cannot supervise a run: there would be one supervisor for each task.

Other jobs are read by commands with a time limit (`queries.run_slurm`). Variables that change the output of these
commands (SQUEUE_STATES, SLURM_TIME_FORMAT, SCANCEL_NAME, ...) are removed. Times are local, as Slurm prints them; None
is unknown. Reasons are those of https://slurm.schedmd.com/job_reason_codes.html; limits come in dozens, by the names of
their families. A reason that is not in the tables is shown as Slurm writes it.
"""

import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardwise.slurm.cluster import known, parse_duration, parse_number, parse_records
from shardwise.slurm.queries import run_slurm
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.units import format_seconds
from shardwise.trainer.spec.value import Value


class Allocation(NamedTuple):
    """The resources of a job, from the environment of its first node."""

    job_id: str
    num_nodes: int
    num_restarts: int  # of this job by requeueing; 0 in a follow-up job
    cores_per_node: int | None  # of the node that has fewest
    is_in_step: bool  # srun started this program: its own steps must share the resources of that step


def is_login_node(hardware: Hardware) -> bool:
    """True if sbatch is available, this is not inside a job, and there is no GPU to train on."""
    slurm = hardware.host.slurm
    return slurm is not None and slurm.has_sbatch and slurm.job_id is None and not hardware.gpus


def submit_line(job: str, overrides: Sequence[str] = ()) -> str:
    """The command that submits `job`, quoted for the shell."""
    return shlex.join(["shardwise", "submit", job, *overrides])


def find_allocation(environment: Mapping[str, str]) -> Allocation | None:
    """The job of this program; None outside a job. InputError if the program is one of several tasks."""
    job_id = environment.get("SLURM_JOB_ID")
    if not job_id:
        return None
    is_in_step = "SLURM_STEP_ID" in environment
    num_tasks = parse_number(environment.get("SLURM_STEP_NUM_TASKS")) if is_in_step else 1
    if num_tasks is not None and num_tasks > 1:
        raise InputError(
            f"srun started {num_tasks} tasks of this command, and it starts the ranks itself; run it once a job: "
            "in the batch script without srun, or with srun --ntasks=1"
        )
    num_nodes = environment.get("SLURM_JOB_NUM_NODES") or environment.get("SLURM_NNODES")
    return Allocation(
        job_id=job_id,
        num_nodes=parse_number(num_nodes) or 1,
        num_restarts=parse_number(environment.get("SLURM_RESTART_COUNT")) or 0,
        cores_per_node=_least_cores(environment.get("SLURM_JOB_CPUS_PER_NODE", "")),
        is_in_step=is_in_step,
    )


def srun_argv(allocation: Allocation, command: Sequence[str], *, labels: bool = False) -> list[str]:
    """The argv that runs `command` once on every node of the job, with all resources of the job there.

    A task that fails ends the others. `labels` prefixes each line of output with the number of its node.
    """
    nodes = allocation.num_nodes
    argv = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    argv += ["--mem=0", "--input=none", "--export=ALL", "--cpu-bind=none"]
    argv += [f"--cpus-per-task={allocation.cores_per_node}"] if allocation.cores_per_node else []
    argv += ["--overlap"] if allocation.is_in_step else []
    argv += ["--label"] if labels else []
    return [*argv, *command]


def place_in_step(environment: Mapping[str, str]) -> tuple[int, int, str] | None:
    """(nodes, number of this one, the first) of a step with one task on each of several nodes; None of any other."""
    nodes, tasks = (parse_number(environment.get(f"SLURM_STEP_NUM_{name}")) for name in ("NODES", "TASKS"))
    rank, names = parse_number(environment.get("SLURM_NODEID")), environment.get("SLURM_STEP_NODELIST")
    if nodes is None or nodes < 2 or tasks != nodes or rank is None or not names:
        return None
    first, *_ = run_slurm(["scontrol", "show", "hostnames", names], environment=environment).split()
    return nodes, rank, first


def _least_cores(text: str) -> int | None:
    """64 for `96(x2),64`; None for other text."""
    counts = [int(found[1]) for found in re.finditer(r"(\d+)(?:\(x\d+\))?(?:,|$)", text)]
    return min(counts, default=None)


# %o, the script's path, may hold anything but a line break, so it comes last.
QUEUE_FORMAT = "%i|%T|%S|%L|%D|%P|%V|%N|%r|%o"
ENDED_FORMAT = "JobID,State,ExitCode,Start,End,NodeList"
JOB_ID = re.compile(r"\d+(_\d+)?")


class QueuedJob(Value, frozen=True, kw_only=True):
    """A job that waits or runs; of an array, one of its tasks (ID_INDEX)."""

    job_id: str
    state: str
    reason: str | None = None  # why it waits
    start: str | None = None  # of a job that waits: as the scheduler expects it now
    submitted: str | None = None
    seconds_left: int | None = None  # of its time limit
    num_nodes: int | None = None
    partition: str | None = None
    nodes: str | None = None
    script: str = ""  # that was submitted, with its arguments

    @property
    def is_waiting(self) -> bool:
        return self.state == "PENDING"

    @property
    def is_running(self) -> bool:
        return self.state in ("RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "SIGNALING", "STAGE_OUT", "STOPPED")


class EndedJob(Value, frozen=True, kw_only=True):
    """The state or the end of a job, from the controller or the accounting."""

    job_id: str
    state: str
    exit_code: int | None = None
    end_signal: int | None = None
    start: str | None = None
    end: str | None = None
    nodes: str | None = None
    script: str | None = None


def parse_queue(text: str) -> tuple[QueuedJob, ...]:
    """The rows of `squeue --noheader --array --format=QUEUE_FORMAT`."""
    rows = (line.strip().split("|", 9) for line in text.splitlines())
    return tuple(
        QueuedJob(
            job_id=row[0],
            state=row[1],
            start=known(row[2]),
            seconds_left=parse_duration(row[3]),
            num_nodes=int(row[4]) if row[4].isdigit() else None,
            partition=known(row[5]),
            submitted=known(row[6]),
            nodes=known(row[7]),
            reason=known(row[8]),
            script=known(row[9]) or "",
        )
        for row in rows
        if len(row) == 10 and JOB_ID.match(row[0])
    )


def parse_jobs(text: str) -> tuple[EndedJob, ...]:
    """The records of `scontrol show job`, in one line each or in several; of an array one for each task."""
    # The job's name may hold anything, also `Key=value`.
    records = parse_records(re.sub(r" JobName=.*?(?= UserId=|$)", "", text, flags=re.MULTILINE), "JobId")
    return tuple(_ended_job(fields) for fields in records)


def parse_accounting(text: str) -> tuple[EndedJob, ...]:
    """The rows of `sacct --allocations --noheader --parsable2 --format=ENDED_FORMAT`, as Slurm orders them."""
    rows = (line.strip().split("|") for line in text.splitlines())
    return tuple(
        EndedJob(
            job_id=row[0],
            state=row[1].split(" ")[0],  # `CANCELLED by 1000`
            exit_code=_code(row[2], 0),
            end_signal=_code(row[2], 1),
            start=known(row[3]),
            end=known(row[4]),
            nodes=known(row[5]),
        )
        for row in rows
        if len(row) == 6 and JOB_ID.match(row[0])
    )


_REASONS = {
    "None": "the scheduler has not considered it yet",
    "Priority": "jobs of higher priority come first",
    "Resources": "the next to start here, once enough is free",
    "Dependency": "waits for the job before it",
    "DependencyNeverSatisfied": "the job it waits for did not end as required, so it never starts: cancel it",
    "BeginTime": "may not start before a time: a job that was queued again waits for up to two minutes",
    "JobHeldUser": "held: scontrol release JOBID releases it",
    "JobHeldAdmin": "held by an administrator",
    "JobHoldMaxRequeue": "held after too many requeues: scontrol release JOBID releases it",
    "JobArrayTaskLimit": "the number of the array's points that may run at once is reached",
    "Licenses": "a license is in use",
    "Reservation": "waits for its reservation to begin",
    "ReservationDeleted": "its reservation was deleted: cancel it",
    "ReqNodeNotAvail": "a node it requests is down, drained or reserved, perhaps for maintenance",
    "NodeDown": "a node it requests is down",
    "PartitionDown": "the partition starts no jobs",
    "PartitionInactive": "the partition accepts no jobs",
    "PartitionNodeLimit": "requests more nodes than the partition allows",
    "PartitionConfig": "requests more than the partition allows",
    "PartitionTimeLimit": "requests more time than the partition allows",
    "BadConstraints": "no node satisfies its request: cancel it and change slurm.constraint or slurm.gpus",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "QOSNotAllowed": "its QOS is not for this partition or account",
    "AccountNotAllowed": "its account is not for this partition",
    "launch failed requeued held": "a node could not start it, and it is held: scontrol release JOBID releases it",
}
_FAMILIES = (
    (r"Job's.account.not.(permitted|known).*", "its account is not for this partition, so it never starts: cancel it"),
    (r"Job's.QOS.not.(permitted|known).*", "its QOS is not for this partition, so it never starts: cancel it"),
    (
        r"QOSMaxJobsPerUser.*|AssocMaxJobs.*|MaxJobsPerAccount",
        "the number of your jobs that may run at once is reached",
    ),
    (r"(QOS|Assoc)MaxWall.*", "requests more time than your limit"),
    (r"QOSGrp.*", "all jobs of this QOS together are at its limit"),
    (r"AssocGrp.*", "all jobs of your account together are at its limit"),
    (r"(QOSMax|AssocMax).*(PerUser|PerAccount).*|Max.*PerAccount", "your jobs together are at your limit"),
    (r"(QOS|Assoc)M(ax|in).*", "requests more than one job may have"),
)
_ENDS = {
    "COMPLETED": "ended",
    "FAILED": "failed",
    "TIMEOUT": "was ended by its time limit",
    "CANCELLED": "was cancelled",
    "OUT_OF_MEMORY": "was ended for lack of memory on a node",
    "NODE_FAIL": "was ended by a node that failed",
    "PREEMPTED": "was preempted by another job",
    "BOOT_FAIL": "was ended by a node that did not start",
    "DEADLINE": "was ended by its deadline",
}
_CODES = {
    ExitCode.INPUT: "the job file, the input or the command line is wrong",
    ExitCode.NOTHING_FITS: "no strategy fits these nodes",
    ExitCode.ENVIRONMENT: "a problem of the machine, or the run failed",
    ExitCode.OUT_OF_MEMORY: "out of memory after every fallback",
    ExitCode.REQUEUE: "stopped to be requeued",
    ExitCode.INTERRUPTED: "stopped by request",
}


_NEVER = re.compile(
    r"Partition(Config|TimeLimit)|(Account|QOS)NotAllowed|Invalid(Account|QOS)|Job's.(account|QOS).not.(permitted|known).*"
    r"|(QOS|Assoc)MaxWall.*|(QOS|Assoc)Max.*PerJob.*"
)


def never_starts(reason: str) -> bool:
    """True if a job that waits for this reason starts only after an administrator changes a limit."""
    return _NEVER.match(reason.strip("() ")) is not None


def describe_reason(reason: str | None) -> str | None:
    """The meaning of the reason why a job waits; None if it is not known."""
    if reason is None:
        return _REASONS["None"]
    name = reason.partition(",")[0].strip("() ")
    if name in _REASONS:
        return _REASONS[name]
    return next((meaning for pattern, meaning in _FAMILIES if re.fullmatch(pattern, name)), None)


def describe_queued(job: QueuedJob) -> str:
    """`job 12: PENDING (Priority): jobs of higher priority come first; expected to start 2026-11-22T18:11:00`."""
    if not job.is_waiting:
        since = f" since {job.start}" if job.start else ""
        where = f" on {job.nodes}" if job.nodes else ""
        left = "no time limit" if job.seconds_left is None else f"{format_seconds(job.seconds_left)} of its time left"
        return f"job {job.job_id}: {job.state}{since}{where}, {left}"
    why = "" if job.reason is None else f" ({job.reason})"
    meaning = describe_reason(job.reason)
    start = f"; expected to start {job.start}" if job.start else ""
    return f"job {job.job_id}: PENDING{why}{'' if meaning is None else f': {meaning}'}{start}"


def describe_ended(job: EndedJob) -> str:
    """`job 12 failed with exit code 3: no strategy fits these nodes, at 2026-11-22T18:11:00`."""
    text = f"job {job.job_id} {_ENDS.get(job.state, f'is {job.state}')}"
    if job.state == "FAILED" and job.exit_code:
        meaning = next((text for code, text in _CODES.items() if code == job.exit_code), None)
        text += f" with exit code {job.exit_code}" + (f" ({meaning})" if meaning else "")
    elif job.state == "FAILED" and job.end_signal:
        text += f" by signal {job.end_signal}"
    return text + (f" at {job.end}" if job.end else "")


_OWN_SETTINGS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SLURM_TIME_FORMAT")
_UNKNOWN_JOB = "Invalid job id"


def has_slurm(environment: Mapping[str, str] = os.environ) -> bool:
    """True if Slurm's commands are on PATH."""
    return shutil.which("squeue", path=environment.get("PATH")) is not None


def read_queue(*, user: int | None = None, environment: Mapping[str, str] = os.environ) -> tuple[QueuedJob, ...]:
    """A user's jobs that wait or run, one a task of an array; EnvironmentFaultError if Slurm does not respond."""
    argv = (
        "squeue",
        "--noheader",
        "--array",
        f"--user={os.getuid() if user is None else user}",
        f"--format={QUEUE_FORMAT}",
    )
    return parse_queue(run_slurm(argv, environment=_neutral(environment)))


def read_job(job_id: str, environment: Mapping[str, str] = os.environ) -> EndedJob | None:
    """The state of a job, from the controller, else the accounting; None if neither knows it any more.

    EnvironmentFaultError if Slurm does not respond.
    """
    settings = _neutral(environment)
    try:
        found = parse_jobs(run_slurm(("scontrol", "-o", "show", "job", job_id), environment=settings))
    except EnvironmentFaultError as error:
        if _UNKNOWN_JOB not in str(error):
            raise
        found = ()
    if not found:
        found = _read_accounting(job_id, settings)
    return next((job for job in reversed(found) if job.job_id == job_id), found[-1] if found else None)


def cancel_waiting(job_ids: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Cancels those of the jobs that have not started."""
    _scancel(["--state=PENDING", *job_ids], environment)


def signal_batch_script(job_id: str, environment: Mapping[str, str] = os.environ) -> None:
    """Sends USR1 to the batch script of a running job, which forwards it."""
    _scancel(["--batch", "--signal=USR1", job_id], environment)


def cancel(job_ids: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Ends jobs now, as `scancel` does."""
    _scancel(list(job_ids), environment)


def _scancel(arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises EnvironmentFaultError with Slurm's message; a job that has ended already is no error."""
    try:
        run_slurm(("scancel", *arguments), environment=_neutral(environment))
    except EnvironmentFaultError as error:
        if _UNKNOWN_JOB not in str(error) and "already completing or completed" not in str(error):
            raise


def _read_accounting(job_id: str, settings: Mapping[str, str]) -> tuple[EndedJob, ...]:
    """The job in the accounting; () on a cluster without it."""
    options = ("--allocations", "--noheader", "--parsable2", f"--format={ENDED_FORMAT}")
    try:
        return parse_accounting(run_slurm(("sacct", "-j", job_id, *options), environment=settings))
    except EnvironmentFaultError:
        return ()


def _neutral(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_OWN_SETTINGS)}


def read_reason(job_id: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Why a job waits; None if it does not wait, and if the controller does not respond."""
    argv = ("squeue", "--noheader", f"--jobs={job_id}", "--states=PENDING", "--format=%r")
    try:
        lines = run_slurm(argv, environment=_neutral(environment)).splitlines()
    except EnvironmentFaultError:
        return None  # `shardwise status` shows it
    return known(lines[0]) if lines else None


def read_seconds_left(job_id: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Seconds until the job's time limit; None without one, and if the controller does not respond."""
    argv = ("squeue", "--noheader", f"--jobs={job_id}", "--format=%L")
    try:
        output = run_slurm(argv, environment=environment)
    except EnvironmentFaultError:
        return None  # the batch script still receives a signal ahead of the limit
    return parse_duration(output.strip())


def _ended_job(fields: Mapping[str, str | None]) -> EndedJob:
    array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId") or ""
    code = fields.get("ExitCode") or ""
    return EndedJob(
        job_id=f"{array}_{task}" if array and task.isdigit() else fields["JobId"] or "",
        state=fields.get("JobState") or "UNKNOWN",
        exit_code=_code(code, 0),
        end_signal=_code(code, 1),
        start=fields.get("StartTime"),
        end=fields.get("EndTime"),
        nodes=fields.get("NodeList"),
        script=fields.get("Command"),
    )


def _code(text: str, part: int) -> int | None:
    """A part of `CODE:SIGNAL`."""
    number = [*text.split(":"), ""][part]
    return int(number) if number.isdigit() else None
