"""Jobs of Slurm: reads the queue and ended jobs, describes their states, cancels and signals them.

Each call is one command with a time limit (`queries.ask_slurm`). Variables that change the output of these commands
(SQUEUE_STATES, SLURM_TIME_FORMAT, SCANCEL_NAME, ...) are removed. Times are local, as Slurm prints them; None is
unknown. Reasons are those of https://slurm.schedmd.com/job_reason_codes.html; limits come in dozens, by the names of
their families. A reason that is not in the tables is shown as Slurm writes it.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence

from slurm.quantities import parse_duration
from slurm.queries import ask_slurm
from trainer.spec.errors import EnvironmentFaultError, ExitCode
from trainer.spec.units import format_seconds
from trainer.spec.value import Value

# %o, the script's path, may hold anything but a line break, so it comes last.
QUEUE_FORMAT = "%i|%T|%S|%L|%D|%P|%V|%N|%r|%o"
ENDED_FORMAT = "JobID,State,ExitCode,Start,End,NodeList"
JOB_ID = re.compile(r"\d+(_\d+)?")
_NOTHING = ("", "N/A", "NONE", "None", "(null)", "Unknown", "None assigned", "n/a")
_KEY = re.compile(r"(?:^|\s)([A-Z][A-Za-z]*(?:[/:][A-Za-z:/]*)?)=")


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
    """How a job ended, or stands, as the controller or the accounting tells."""

    job_id: str
    state: str
    exit_code: int | None = None
    end_signal: int | None = None  # that ended it
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
            start=_known(row[2]),
            seconds_left=parse_duration(row[3]),
            num_nodes=int(row[4]) if row[4].isdigit() else None,
            partition=_known(row[5]),
            submitted=_known(row[6]),
            nodes=_known(row[7]),
            reason=_known(row[8]),
            script=_known(row[9]) or "",
        )
        for row in rows
        if len(row) == 10 and JOB_ID.match(row[0])
    )


def parse_jobs(text: str) -> tuple[EndedJob, ...]:
    """The records of `scontrol show job`, in one line each or in several; of an array one for each task."""
    return tuple(_job_of(fields) for fields in _records(text))


def parse_accounting(text: str) -> tuple[EndedJob, ...]:
    """The rows of `sacct --allocations --noheader --parsable2 --format=ENDED_FORMAT`, as Slurm orders them."""
    rows = (line.strip().split("|") for line in text.splitlines())
    return tuple(
        EndedJob(
            job_id=row[0],
            state=row[1].split(" ")[0],  # `CANCELLED by 1000`
            exit_code=_exit_code(row[2]),
            end_signal=_end_signal(row[2]),
            start=_known(row[3]),
            end=_known(row[4]),
            nodes=_known(row[5]),
        )
        for row in rows
        if len(row) == 6 and JOB_ID.match(row[0])
    )


def _records(text: str) -> Iterator[dict[str, str]]:
    starts = [match.start() for match in re.finditer(r"^\s*JobId=", text, re.MULTILINE)]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        head, _, rest = text[start:end].partition(" UserId=")  # the name between may hold anything
        if not rest:
            head, _, rest = text[start:end].partition("\n")
        yield {**_fields(rest), **_fields(head.partition(" JobName=")[0])}


def _fields(record: str) -> dict[str, str]:
    matches = list(_KEY.finditer(record))
    ends = [match.start() for match in matches[1:]] + [len(record)]
    fields: dict[str, str] = {}
    for match, end in zip(matches, ends, strict=True):
        fields.setdefault(match[1], record[match.end() : end].strip())  # free text stands late
    return fields


def _job_of(fields: dict[str, str]) -> EndedJob:
    array, task = fields.get("ArrayJobId"), fields.get("ArrayTaskId", "")
    return EndedJob(
        job_id=f"{array}_{task}" if array and task.isdigit() else fields["JobId"],
        state=fields.get("JobState", "UNKNOWN"),
        exit_code=_exit_code(fields.get("ExitCode", "")),
        end_signal=_end_signal(fields.get("ExitCode", "")),
        start=_known(fields.get("StartTime", "")),
        end=_known(fields.get("EndTime", "")),
        nodes=_known(fields.get("NodeList", "")),
        script=_known(fields.get("Command", "")),
    )


def _exit_code(text: str) -> int | None:
    """Of `CODE:SIGNAL`."""
    code = text.partition(":")[0]
    return int(code) if code.isdigit() else None


def _end_signal(text: str) -> int | None:
    number = text.partition(":")[2]
    return int(number) if number.isdigit() else None


def _known(text: str) -> str | None:
    return None if text.strip() in _NOTHING else text.strip()


_REASONS = {
    "None": "the scheduler has not looked at it yet",
    "Priority": "jobs of higher priority come first",
    "Resources": "the next to start here, once enough is free",
    "Dependency": "waits for the job before it",
    "DependencyNeverSatisfied": "the job it waits for ended otherwise than it asks, so it never starts: cancel it",
    "BeginTime": "may not start before a time: a job that was queued again waits for up to two minutes",
    "JobHeldUser": "held: scontrol release JOBID lets it go",
    "JobHeldAdmin": "held by an administrator",
    "JobHoldMaxRequeue": "held, as it was queued again too often: scontrol release JOBID lets it go",
    "JobArrayTaskLimit": "so many points of the array run at once",
    "Licenses": "a license is in use",
    "Reservation": "waits for its reservation to begin",
    "ReservationDeleted": "its reservation is gone: cancel it",
    "ReqNodeNotAvail": "a node it asks for is down, drained or reserved, perhaps for maintenance",
    "NodeDown": "a node it asks for is down",
    "PartitionDown": "the partition starts no jobs",
    "PartitionInactive": "the partition takes no jobs",
    "PartitionNodeLimit": "asks for more nodes than the partition allows",
    "PartitionTimeLimit": "asks for more time than the partition allows",
    "BadConstraints": "no node is as it asks: cancel it and change slurm.constraint or slurm.gpus",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QOS is not valid",
    "QOSNotAllowed": "its QOS is not for this partition or account",
    "AccountNotAllowed": "its account is not for this partition",
    "launch failed requeued held": "a node could not start it, and it is held: scontrol release JOBID lets it go",
}
_FAMILIES = (
    (r"Job's.account.not.permitted.*", "its account is not for this partition, so it never starts: cancel it"),
    (r"Job's.QOS.not.permitted.*", "its QOS is not for this partition, so it never starts: cancel it"),
    (r"QOSMaxJobsPerUser.*|AssocMaxJobs.*|MaxJobsPerAccount", "so many of your jobs may run at once"),
    (r"(QOS|Assoc)MaxWall.*", "asks for more time than your limit"),
    (r"QOSGrp.*", "everybody's jobs of this QOS together are at its limit"),
    (r"AssocGrp.*", "everybody's jobs of your account together are at its limit"),
    (r"(QOSMax|AssocMax).*(PerUser|PerAccount).*|Max.*PerAccount", "your jobs together are at your limit"),
    (r"(QOS|Assoc)M(ax|in).*", "asks for more than one job may have"),
)
_ENDS = {
    "COMPLETED": "ended",
    "FAILED": "failed",
    "TIMEOUT": "was ended by its time limit",
    "CANCELLED": "was cancelled",
    "OUT_OF_MEMORY": "was ended for want of memory on a node",
    "NODE_FAIL": "was ended by a node that failed",
    "PREEMPTED": "made way for another job",
    "BOOT_FAIL": "was ended by a node that did not start",
    "DEADLINE": "was ended by its deadline",
}
_CODES = {
    ExitCode.INPUT: "the job file, the input or the command line is wrong",
    ExitCode.NOTHING_FITS: "no strategy fits these nodes",
    ExitCode.ENVIRONMENT: "the machine was in the way, or the run failed",
    ExitCode.OUT_OF_MEMORY: "out of memory after every fallback",
    ExitCode.REQUEUE: "stopped to be requeued",
    ExitCode.INTERRUPTED: "stopped by request",
}


def describe_reason(reason: str | None) -> str | None:
    """What a reason of a job that waits means; None where it says nothing more."""
    if reason is None:
        return _REASONS["None"]
    name = reason.partition(",")[0].strip("() ")
    if name in _REASONS:
        return _REASONS[name]
    return next((words for pattern, words in _FAMILIES if re.fullmatch(pattern, name)), None)


def describe_queued(job: QueuedJob) -> str:
    """`job 12: PENDING (Priority): jobs of higher priority come first; expected to start 2026-11-22T18:11:00`."""
    if not job.is_waiting:
        since = f" since {job.start}" if job.start else ""
        where = f" on {job.nodes}" if job.nodes else ""
        left = "no time limit" if job.seconds_left is None else f"{format_seconds(job.seconds_left)} of its time left"
        return f"job {job.job_id}: {job.state}{since}{where}, {left}"
    why = "" if job.reason is None else f" ({job.reason})"
    words = describe_reason(job.reason)
    start = f"; expected to start {job.start}" if job.start else ""
    return f"job {job.job_id}: PENDING{why}{'' if words is None else f': {words}'}{start}"


def describe_ended(job: EndedJob) -> str:
    """`job 12 failed with exit code 3: no strategy fits these nodes, at 2026-11-22T18:11:00`."""
    words = f"job {job.job_id} {_ENDS.get(job.state, f'is {job.state}')}"
    if job.state == "FAILED" and job.exit_code:
        meaning = next((text for code, text in _CODES.items() if code == job.exit_code), None)
        words += f" with exit code {job.exit_code}" + (f" ({meaning})" if meaning else "")
    elif job.state == "FAILED" and job.end_signal:
        words += f" by signal {job.end_signal}"
    return words + (f" at {job.end}" if job.end else "")


_OWN_SETTINGS = ("SQUEUE_", "SACCT_", "SCANCEL_", "SCONTROL_", "SLURM_TIME_FORMAT")
_UNKNOWN_JOB = "Invalid job id"


def has_slurm(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether Slurm can be asked here."""
    return shutil.which("squeue", path=environment.get("PATH")) is not None


def read_queue(*, user: int | None = None, environment: Mapping[str, str] = os.environ) -> tuple[QueuedJob, ...]:
    """A user's jobs that wait or run, one a task of an array; EnvironmentFaultError where Slurm does not answer."""
    whose = os.getuid() if user is None else user
    argv = ("squeue", "--noheader", "--array", f"--user={whose}", f"--format={QUEUE_FORMAT}")
    return parse_queue(ask_slurm(argv, environment=_neutral(environment)))


def read_job(job_id: str, environment: Mapping[str, str] = os.environ) -> EndedJob | None:
    """How a job ended or stands: as the controller says, else the accounting; None where neither knows it any more.

    EnvironmentFaultError where Slurm does not answer.
    """
    settings = _neutral(environment)
    try:
        found = parse_jobs(ask_slurm(("scontrol", "-o", "show", "job", job_id), environment=settings))
    except EnvironmentFaultError as error:
        if _UNKNOWN_JOB not in str(error):
            raise
        found = ()
    if not found:
        found = _read_accounting(job_id, settings)
    return next((job for job in reversed(found) if job.job_id == job_id), found[-1] if found else None)


def cancel_waiting(job_ids: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Cancels those of the jobs that have not started; one that did meanwhile is left alone."""
    _scancel(["--state=PENDING", *job_ids], environment)


def signal_batch_script(job_id: str, environment: Mapping[str, str] = os.environ) -> None:
    """USR1 to the batch script of a job that runs, which passes it on."""
    _scancel(["--batch", "--signal=USR1", job_id], environment)


def cancel(job_ids: Sequence[str], environment: Mapping[str, str] = os.environ) -> None:
    """Ends jobs now, as a person's scancel does."""
    _scancel(list(job_ids), environment)


def _scancel(words: Sequence[str], environment: Mapping[str, str]) -> None:
    """EnvironmentFaultError says what Slurm says; that a job is gone already is no error."""
    try:
        ask_slurm(("scancel", *words), environment=_neutral(environment))
    except EnvironmentFaultError as error:
        if _UNKNOWN_JOB not in str(error) and "already completing or completed" not in str(error):
            raise


def _read_accounting(job_id: str, settings: Mapping[str, str]) -> tuple[EndedJob, ...]:
    """Nothing where the cluster keeps no accounts."""
    words = ("--allocations", "--noheader", "--parsable2", f"--format={ENDED_FORMAT}")
    try:
        return parse_accounting(ask_slurm(("sacct", "-j", job_id, *words), environment=settings))
    except EnvironmentFaultError:
        return ()


def _neutral(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_OWN_SETTINGS)}


def read_seconds_left(job_id: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Seconds until the job's time limit; None without one, and where the controller does not answer."""
    argv = ("squeue", "--noheader", f"--jobs={job_id}", "--format=%L")
    try:
        answer = ask_slurm(argv, environment=environment)
    except EnvironmentFaultError:
        return None  # the batch script still hears of the limit by a signal
    return parse_duration(answer.strip())
