"""Which limits on a job hold, and what they leave of nodes and of one."""

from typing import Any

import pytest
from msgspec.structs import replace

from shardwise.slurm.cluster import JobLimits
from shardwise.slurm.job_limits import NodeShare, allowed_nodes, bounds_of, in_order, share_within, time_limit_of
from shardwise.trainer.spec.units import GIB

PARTITION = JobLimits(source="QOS partgpu", per_user={"gres/gpu": 12})
LONG = JobLimits(source="QOS long", max_time_s=7200, per_job={"gres/gpu": 16, "node": 2}, per_user={"gres/gpu": 8})
ACCOUNT = JobLimits(source="account vision", max_time_s=3600, per_job={"gres/gpu": 4, "cpu": 24})
NODE: dict[str, Any] = {"gpus": 4, "gpu_type": "a100", "cores": 64, "ram_bytes": 400 * GIB}


def words(limits: tuple[JobLimits, ...]) -> list[str]:
    return [bound.text for bound in bounds_of(limits)]


def test_of_each_kind_the_first_that_is_set_holds():
    assert words(in_order(PARTITION, LONG, ACCOUNT)) == [
        "QOS long: 16 GPUs a job",
        "QOS long: 2 nodes a job",
        "account vision: 24 cores a job",
        "QOS partgpu: 12 GPUs a user",
    ]
    assert time_limit_of(in_order(PARTITION, LONG, ACCOUNT)) == 7200
    assert time_limit_of(in_order(PARTITION, None, ACCOUNT)) == 3600
    assert time_limit_of(in_order(PARTITION, None, None)) is None


def test_a_qos_may_go_before_that_of_the_partition():
    over = replace(LONG, is_over_partition=True)
    assert words(in_order(PARTITION, over, None)) == [
        "QOS long: 16 GPUs a job",
        "QOS long: 2 nodes a job",
        "QOS long: 8 GPUs a user",
    ]
    assert in_order(None, over, None) == (over,)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (JobLimits(source="QOS q"), None),
        (JobLimits(source="QOS q", per_job={"billing": 5, "gres/gpu:v100": 1}), None),
        (JobLimits(source="QOS q", per_job={"gres/gpu": 11}), (2, "QOS q: 11 GPUs a job")),
        (JobLimits(source="QOS q", per_job={"gres/gpu:a100": 4}), (1, "QOS q: 4 a100 GPUs a job")),
        (JobLimits(source="QOS q", per_account={"cpu": 128}), (2, "QOS q: 128 cores an account")),
        (JobLimits(source="QOS q", together={"mem": 900 * GIB}), (2, "QOS q: 900 GiB RAM for all together")),
        (JobLimits(source="QOS q", per_user={"node": 1}, per_job={"gres/gpu": 99}), (1, "QOS q: 1 node a user")),
    ],
)
def test_nodes_that_the_bounds_allow(limits, expected):
    assert allowed_nodes(bounds_of((limits,)), **NODE) == expected


@pytest.mark.parametrize(
    ("amounts", "asked", "expected"),
    [
        ({"gres/gpu": 4}, NodeShare(), None),
        ({"gres/gpu": 2}, NodeShare(), NodeShare(gpus=2)),
        ({"gres/gpu:a100": 1, "gres/gpu": 2}, NodeShare(), NodeShare(gpus=1)),
        ({"gres/gpu": 2, "cpu": 32}, NodeShare(), NodeShare(gpus=2)),
        ({"gres/gpu": 2, "cpu": 31}, NodeShare(), NodeShare(gpus=2, cores=31)),
        ({"mem": 100 * GIB}, NodeShare(), NodeShare(ram_bytes=100 * GIB)),
        ({"mem": 100 * GIB, "gres/gpu": 1}, NodeShare(), NodeShare(gpus=1)),
        ({"gres/gpu": 2}, NodeShare(gpus=4), None),
        ({"cpu": 8}, NodeShare(gpus=1, cores=4), None),
        ({"gres/gpu": 0}, NodeShare(), None),
        ({"cpu": 0}, NodeShare(), None),
    ],
)
def test_the_share_of_a_node_that_the_bounds_allow(amounts, asked, expected):
    found = share_within(bounds_of((JobLimits(source="QOS q", per_job=amounts),)), asked, **NODE)
    assert (found and found[0]) == expected
    assert found is None or found[1].startswith("QOS q: ")
