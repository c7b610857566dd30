"""How long a job still has, as Slurm tells it."""

from slurm_cluster import SlurmCluster

from slurm.jobs import read_seconds_left


def test_the_time_that_is_left_is_read_from_the_queue(slurm: SlurmCluster):
    limited = slurm.submit("--time=10", "--output=/dev/null", "--wrap=sleep 60")
    endless = slurm.submit("--time=UNLIMITED", "--output=/dev/null", "--wrap=sleep 60")
    for job in (limited, endless):
        slurm.wait_for(job, "RUNNING")
    left_s = read_seconds_left(limited, slurm.environment)
    assert left_s is not None and 500 < left_s <= 600
    assert read_seconds_left(endless, slurm.environment) is None


def test_a_job_nobody_knows_and_a_place_without_slurm_have_no_limit(slurm: SlurmCluster):
    assert read_seconds_left("999999", slurm.environment) is None
    assert read_seconds_left("1", {"PATH": "/nonexistent"}) is None
