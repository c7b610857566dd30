"""Accounts, qualities of service and limits: which a partition accepts, which a job gets, and its share of a node."""

from typing import Any

import pytest
from msgspec.structs import replace
from slurm_texts import partition_of, slurm_text

from shardwise.slurm import access as rights
from shardwise.slurm.cluster import JobLimits
from shardwise.trainer.spec.units import GIB

ASSOCIATIONS = "theory|theory||long,normal|normal|||\ntheory|vision|gpu|normal||||\ntheory|guest||low|low|||\n\n"


def aurora(partition: str, who: str, **asked: Any) -> rights.Access:
    """What a user of the captured cluster with accounts may do there."""
    return rights.access_to(
        partition_of("aurora", partition),
        rights.parse_associations(slurm_text("aurora", f"sacctmgr_{who}.txt")),
        **asked,
    )


def test_rows_of_sacctmgr():
    theory, vision, _ = rights.parse_associations(ASSOCIATIONS)
    assert (theory.account, theory.is_default, theory.partition) == ("theory", True, None)
    assert (theory.qos, theory.default_qos) == (("long", "normal"), "normal")
    assert (vision.partition, vision.default_qos, vision.is_default) == ("gpu", None, False)
    (limited,) = rights.parse_associations("a|a||normal||3-00:00:00|cpu=24,gres/gpu=2|gres/gpu=10|\n")
    assert (limited.limits.source, limited.limits.max_time_s) == ("account a", 3 * 86400)
    assert (limited.limits.per_job, limited.limits.together) == ({"cpu": 24, "gres/gpu": 2}, {"gres/gpu": 10})
    found = rights.parse_qos_limits("p_dev|04:00:00|gres/gpu=32,node=4||||DenyOnLimit,OverPartQOS\nnormal||||||\n")
    assert (found["p_dev"].source, found["p_dev"].max_time_s) == ("QOS p_dev", 14400)
    assert found["p_dev"].per_job == {"gres/gpu": 32, "node": 4} and found["p_dev"].is_over_partition
    assert (found["normal"].max_time_s, found["normal"].per_job) == (None, {})
    assert rights.parse_associations("") == rights.parse_associations("normal||||||||\n") == ()


def test_an_open_partition_takes_every_account_that_is_not_another_partitions():
    access = rights.access_to(partition_of("fake_nodes", "cpu"), rights.parse_associations(ASSOCIATIONS))
    assert (access.accounts, access.qos, access.job_qos) == (("guest", "theory"), ("long", "low", "normal"), "normal")
    assert (access.account, access.states_account, access.states_qos) == ("theory", False, False)
    assert access.summary == "you may use it with accounts guest, theory; QOS long, low, normal"
    two = rights.parse_associations("|a||normal||||\n|b||normal||||\n")
    refusal = rights.access_to(partition_of("fake_nodes", "cpu"), two).refusal
    assert refusal is not None and "no default account; --account names one of a, b" in refusal
    assert (
        "vision"
        in rights.access_to(partition_of("fake_nodes", "gpu"), rights.parse_associations(ASSOCIATIONS)).accounts
    )


@pytest.mark.parametrize(
    ("partition", "who", "account", "qos", "used", "states"),
    [
        ("gpu", "alice", None, None, ("vision", "normal"), (False, False)),
        ("gpu", "alice", "theory", "debug", ("theory", "debug"), (False, False)),
        ("long", "alice", None, None, ("vision", "long"), (False, True)),  # the only QOS there is not the default
        ("theory", "alice", None, "long", ("theory", "long"), (True, False)),  # the only account is not the default
        ("gpu", "bob", None, None, ("vision", "normal"), (True, False)),
        ("staff", "bob", None, None, ("staff", "normal"), (False, False)),
        ("long", "bob", "staff", None, None, "accepts QOS long; yours are normal"),
        ("gpu", "alice", "staff", None, None, "no account staff; --account names one of theory, vision"),
        ("gpu", "alice", "guests", None, None, "account guests; --account names one of theory, vision"),
        ("gpu", "alice", None, "scavenge", None, "no QOS scavenge; --qos names one of debug, long, normal"),
        ("long", "alice", None, "normal", None, "QOS normal; --qos names one of long"),
        ("gpu", "alice", "theory", None, None, "no default QOS; --qos names one of debug, long"),
        ("staff", "alice", None, None, None, "accepts account staff; you have accounts theory, vision"),
    ],
)
def test_the_account_of_a_job_is_found_or_has_to_be_named(partition, who, account, qos, used, states):
    access = aurora(partition, who, account=account, qos=qos)
    if used is None:
        assert states in access.refusal and (access.account and access.limits) is None
    else:
        assert (access.refusal, (access.account, access.job_qos)) == (None, used)
        assert (access.states_account, access.states_qos) == states
        assert access.limits is not None and access.limits.source == f"account {used[0]}"


def test_any_qos_may_be_named_if_none_is_enforced():
    access = aurora("gpu", "alice", qos="scavenge", holds_to_qos=False)
    assert (access.refusal, access.job_qos, access.states_qos) == (None, "scavenge", False)
    access = aurora("gpu", "alice", account="theory", holds_to_qos=False)
    assert (access.refusal, access.job_qos, access.states_qos) == (None, None, False)


PARTITION = JobLimits(source="QOS partgpu", per_user={"gres/gpu": 12})
LONG = JobLimits(source="QOS long", max_time_s=7200, per_job={"gres/gpu": 16, "node": 2}, per_user={"gres/gpu": 8})
ACCOUNT = JobLimits(source="account vision", max_time_s=3600, per_job={"gres/gpu": 4, "cpu": 24})
NODE: dict[str, Any] = {"gpus": 4, "gpu_type": "a100", "cores": 64, "ram_bytes": 400 * GIB}


def words(limits: tuple[JobLimits, ...]) -> list[str]:
    return [bound.text for bound in rights.bounds_of(limits)]


def test_of_each_kind_the_first_limit_that_is_set_holds_and_a_qos_may_go_first():
    assert words(rights.in_order(PARTITION, LONG, ACCOUNT)) == [
        "QOS long: 16 GPUs a job",
        "QOS long: 2 nodes a job",
        "account vision: 24 cores a job",
        "QOS partgpu: 12 GPUs a user",
    ]
    assert rights.time_limit_of(rights.in_order(PARTITION, LONG, ACCOUNT)) == 7200
    assert rights.time_limit_of(rights.in_order(PARTITION, None, ACCOUNT)) == 3600
    assert rights.time_limit_of(rights.in_order(PARTITION, None, None)) is None
    over = replace(LONG, is_over_partition=True)
    assert words(rights.in_order(PARTITION, over, None)) == [
        "QOS long: 16 GPUs a job",
        "QOS long: 2 nodes a job",
        "QOS long: 8 GPUs a user",
    ]
    assert rights.in_order(None, over, None) == (over,)


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
    assert rights.allowed_nodes(rights.bounds_of((limits,)), **NODE) == expected


@pytest.mark.parametrize(
    ("amounts", "asked", "expected"),
    [
        ({"gres/gpu": 4}, rights.NodeShare(), None),
        ({"gres/gpu": 2}, rights.NodeShare(), rights.NodeShare(gpus=2)),
        ({"gres/gpu:a100": 1, "gres/gpu": 2}, rights.NodeShare(), rights.NodeShare(gpus=1)),
        ({"gres/gpu": 2, "cpu": 32}, rights.NodeShare(), rights.NodeShare(gpus=2)),
        ({"gres/gpu": 2, "cpu": 31}, rights.NodeShare(), rights.NodeShare(gpus=2, cores=31)),
        ({"mem": 100 * GIB}, rights.NodeShare(), rights.NodeShare(ram_bytes=100 * GIB)),
        ({"mem": 100 * GIB, "gres/gpu": 1}, rights.NodeShare(), rights.NodeShare(gpus=1)),
        ({"gres/gpu": 2}, rights.NodeShare(gpus=4), None),
        ({"cpu": 8}, rights.NodeShare(gpus=1, cores=4), None),
        ({"gres/gpu": 0}, rights.NodeShare(), None),
        ({"cpu": 0}, rights.NodeShare(), None),
    ],
)
def test_the_share_of_a_node_that_the_bounds_allow(amounts, asked, expected):
    found = rights.share_within(rights.bounds_of((JobLimits(source="QOS q", per_job=amounts),)), asked, **NODE)
    assert (found and found[0]) == expected
    assert found is None or found[1].startswith("QOS q: ")
