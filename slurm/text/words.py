"""Why a job waits and how one ended, in words. Pure.

Reasons are those of https://slurm.schedmd.com/job_reason_codes.html; limits come in dozens, by the names of their
families. A reason that is not here is shown as Slurm writes it.
"""

import re

from slurm.text.jobs import EndedJob, QueuedJob
from trainer.spec.errors import ExitCode
from trainer.spec.units import format_seconds

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


def reason_words(reason: str | None) -> str | None:
    """What a reason of a job that waits means; None where it says nothing more."""
    if reason is None:
        return _REASONS["None"]
    name = reason.partition(",")[0].strip("() ")
    if name in _REASONS:
        return _REASONS[name]
    return next((words for pattern, words in _FAMILIES if re.fullmatch(pattern, name)), None)


def queued_words(job: QueuedJob) -> str:
    """`job 12: PENDING (Priority): jobs of higher priority come first; expected to start 2026-11-22T18:11:00`."""
    if not job.is_waiting:
        since = f" since {job.start}" if job.start else ""
        where = f" on {job.nodes}" if job.nodes else ""
        left = "no time limit" if job.seconds_left is None else f"{format_seconds(job.seconds_left)} of its time left"
        return f"job {job.job_id}: {job.state}{since}{where}, {left}"
    why = "" if job.reason is None else f" ({job.reason})"
    words = reason_words(job.reason)
    start = f"; expected to start {job.start}" if job.start else ""
    return f"job {job.job_id}: PENDING{why}{'' if words is None else f': {words}'}{start}"


def ended_words(job: EndedJob) -> str:
    """`job 12 failed with exit code 3: no strategy fits these nodes, at 2026-11-22T18:11:00`."""
    words = f"job {job.job_id} {_ENDS.get(job.state, f'is {job.state}')}"
    if job.state == "FAILED" and job.exit_code:
        meaning = next((text for code, text in _CODES.items() if code == job.exit_code), None)
        words += f" with exit code {job.exit_code}" + (f" ({meaning})" if meaning else "")
    elif job.state == "FAILED" and job.end_signal:
        words += f" by signal {job.end_signal}"
    return words + (f" at {job.end}" if job.end else "")
