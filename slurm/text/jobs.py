"""What Slurm says of jobs, as values: `squeue` of those in the queue, `scontrol show job` and `sacct` of any.

Pure. Times are the local ones that Slurm prints; what it does not know is None.
"""

import re
from collections.abc import Iterator

from slurm.text.quantities import parse_duration
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
