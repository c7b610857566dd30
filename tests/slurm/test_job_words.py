"""Why a job waits and how one ended is said in words that tell what to do."""

import pytest

from slurm.jobs import EndedJob, QueuedJob, describe_ended, describe_queued, describe_reason


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "higher priority"),
        ("Resources", "once enough is free"),
        ("Job's_account_not_permitted_to_use_this_partition_(staff_allows_staff_not_vision)", "account is not for"),
        ("Job's account not permitted to use this partition (a allows b,c not d)", "so it never starts: cancel it"),
        ("Job's_QOS_not_permitted_to_use_this_partition_(long_allows_long_not_normal)", "QOS is not for this"),
        ("QOSMaxNodePerJobLimit", "asks for more than one job may have"),
        ("QOSMaxJobsPerUserLimit", "so many of your jobs may run at once"),
        ("AssocMaxJobsLimit", "so many of your jobs may run at once"),
        ("DependencyNeverSatisfied", "never starts: cancel it"),
        ("BeginTime", "queued again"),
        ("ReqNodeNotAvail, UnavailableNodes:gpu-q-[2-47]", "down, drained or reserved"),
        ("QOSMaxGRESPerUser", "your jobs together are at your limit"),
        ("MaxGRESPerAccount", "your jobs together are at your limit"),
        ("QOSMaxCpuPerUserLimit", "your jobs together are at your limit"),
        ("QOSMaxWallDurationPerJobLimit", "asks for more time"),
        ("AssocMaxWallDurationPerJobLimit", "asks for more time"),
        ("QOSMaxNodePerJobLimit", "more than one job may have"),
        ("QOSGrpGRES", "everybody's jobs of this QOS"),
        ("AssocGrpGRES", "everybody's jobs of your account"),
        ("launch failed requeued held", "scontrol release"),
        ("JobHeldUser", "scontrol release"),
        (None, "not looked at it yet"),
    ],
)
def test_a_reason_is_explained(reason, words):
    assert words in (describe_reason(reason) or "")


def test_an_unknown_reason_is_shown_as_it_is():
    assert describe_reason("SomethingNew") is None
    job = QueuedJob(job_id="12", state="PENDING", reason="SomethingNew")
    assert describe_queued(job) == "job 12: PENDING (SomethingNew)"


def test_a_job_that_waits_says_when_it_is_expected():
    job = QueuedJob(job_id="12", state="PENDING", reason="Priority", start="2026-11-22T18:11:00")
    assert describe_queued(job) == (
        "job 12: PENDING (Priority): jobs of higher priority come first; expected to start 2026-11-22T18:11:00"
    )


def test_a_job_that_runs_says_where_and_how_long_it_may():
    job = QueuedJob(job_id="12", state="RUNNING", start="2026-11-22T18:11:00", nodes="n[1-2]", seconds_left=7200)
    assert describe_queued(job) == "job 12: RUNNING since 2026-11-22T18:11:00 on n[1-2], 2 h 00 min of its time left"
    assert "no time limit" in describe_queued(QueuedJob(job_id="12", state="RUNNING"))


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (EndedJob(job_id="12", state="COMPLETED", exit_code=0), "job 12 ended"),
        (
            EndedJob(job_id="12", state="FAILED", exit_code=3, end="2026-11-22T18:11:00"),
            "job 12 failed with exit code 3 (no strategy fits these nodes) at 2026-11-22T18:11:00",
        ),
        (EndedJob(job_id="12", state="FAILED", exit_code=127), "job 12 failed with exit code 127"),
        (EndedJob(job_id="12", state="FAILED", exit_code=0, end_signal=9), "job 12 failed by signal 9"),
        (EndedJob(job_id="12", state="TIMEOUT", exit_code=0, end_signal=15), "job 12 was ended by its time limit"),
        (EndedJob(job_id="12", state="REVOKED"), "job 12 is REVOKED"),
    ],
)
def test_an_end_is_explained(job, words):
    assert describe_ended(job) == words
