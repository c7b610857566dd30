"""Fixtures: one Slurm for the whole run of tests, and for each test that cluster with no job and every node up."""

import os
from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster, lacks_slurm, running_cluster


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmCluster]:
    """Started when the first test asks. Where it cannot be, tests skip; in continuous integration they fail."""
    obstacle = lacks_slurm()
    if obstacle is not None and os.environ.get("SHARDWISE_CI") == "1":
        pytest.fail(obstacle)
    if obstacle is not None:
        pytest.skip(obstacle)
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """The cluster; what a test leaves behind is cancelled, what it killed is booted."""
    yield slurm_cluster
    slurm_cluster.tidy()
