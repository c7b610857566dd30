"""Times and sizes as Slurm writes them, and how many jobs a run takes."""

import pytest

from shardwise.slurm.cluster import (
    describe_num_jobs,
    format_duration,
    num_jobs,
    parse_amount,
    parse_duration,
    parse_memory,
)
from shardwise.trainer.spec.units import GIB, MIB


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60", 3600),
        ("30:00", 1800),
        ("2-00:00:00", 172800),
        ("7-12:30", 649800),
        ("UNLIMITED", None),
        ("", None),
        (None, None),
    ],
)
def test_durations(text, seconds):
    assert parse_duration(text) == seconds
    if seconds is not None:
        assert parse_duration(format_duration(seconds)) == seconds


def test_amounts_are_powers_of_1024():
    assert (parse_amount("8"), parse_amount("4K"), parse_amount("94G"), parse_amount("a100")) == (
        8,
        4096,
        94 * GIB,
        None,
    )
    assert (parse_memory("256000"), parse_memory("256000M"), parse_memory("750G")) == (
        256000 * MIB,
        256000 * MIB,
        750 * GIB,
    )


@pytest.mark.parametrize(
    ("hours", "limit_s", "jobs", "words"),
    [
        (38, 172800, 1, "38 h 00 min at a limit of 2-00:00:00: one job"),
        (60, 86400, 3, "2.5 days at a limit of 1-00:00:00: 3 jobs, which continue each other"),
        (0.1, 60, 6, "6 min 00 s at a limit of 00:01:00: 6 jobs, which continue each other"),
        (500, None, 1, "20.8 days; gpu sets no time limit: one job"),
    ],
)
def test_a_run_is_as_many_jobs_as_its_hours_take(hours, limit_s, jobs, words):
    assert num_jobs(hours, limit_s) == jobs
    assert describe_num_jobs(hours, limit_s, place="gpu") == words
