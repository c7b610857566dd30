"""Accounts, qualities of service and limits: which a partition accepts, which a job gets, and its share of a node."""

from typing import Any

import pytest
from msgspec.structs import replace
from slurm_texts import partition_of, slurm_text

from shardwise.slurm.access import (
    NodeShare,
    access_to,
    allowed_nodes,
    bounds_of,
    in_order,
    parse_associations,
    parse_qos_limits,
    share_within,
    time_limit_of,
)
from shardwise.slurm.cluster import JobLimits, Partition
from shardwise.trainer.spec.units import GIB

TEAM = partition_of("fake_nodes", "team")
OPEN = partition_of("fake_nodes", "cpu")
DEV = partition_of("nchc", "dev")
ASSOCIATIONS = "theory|theory||long,normal|normal|||\ntheory|vision|gpu|normal||||\ntheory|guest||low|low|||\n\n"
ALICE, BOB = (parse_associations(slurm_text("aurora", f"sacctmgr_{name}.txt")) for name in ("alice", "bob"))


def aurora(name: str) -> Partition:
    return partition_of("aurora", name)


def rows(text: str) -> str:
    """Associations written short: account|partition|qos|default qos."""
    return "".join(f"|{row}|||\n" for row in text.splitlines())


def test_rows_of_sacctmgr():
    theory, vision, _ = parse_associations(ASSOCIATIONS)
    assert (theory.account, theory.is_default, theory.partition) == ("theory", True, None)
    assert (theory.qos, theory.default_qos) == (("long", "normal"), "normal")
    assert (vision.partition, vision.default_qos, vision.is_default) == ("gpu", None, False)
    (limited,) = parse_associations("a|a||normal||3-00:00:00|cpu=24,gres/gpu=2|gres/gpu=10|\n")
    assert (limited.limits.source, limited.limits.max_time_s) == ("account a", 3 * 86400)
    assert (limited.limits.per_job, limited.limits.together) == ({"cpu": 24, "gres/gpu": 2}, {"gres/gpu": 10})
    found = parse_qos_limits("p_dev|04:00:00|gres/gpu=32,node=4||||DenyOnLimit,OverPartQOS\nnormal||||||\n")
    assert (found["p_dev"].source, found["p_dev"].max_time_s) == ("QOS p_dev", 14400)
    assert found["p_dev"].per_job == {"gres/gpu": 32, "node": 4} and found["p_dev"].is_over_partition
    assert (found["normal"].max_time_s, found["normal"].per_job) == (None, {})
    assert parse_associations("") == parse_associations("normal||||||||\n") == ()


def test_an_open_partition_takes_every_account_that_is_not_another_partitions():
    access = access_to(OPEN, parse_associations(ASSOCIATIONS))
    assert (access.accounts, access.qos, access.job_qos) == (("guest", "theory"), ("long", "low", "normal"), "normal")
    assert (access.account, access.states_account, access.states_qos) == ("theory", False, False)
    assert access.summary == "you may use it with accounts guest, theory; QOS long, low, normal"
    assert "vision" in access_to(partition_of("fake_nodes", "gpu"), parse_associations(ASSOCIATIONS)).accounts


@pytest.mark.parametrize(
    ("partition", "associations", "words"),
    [
        (TEAM, "guest||low|", "partition team accepts accounts theory, vision; you have account guest"),
        (TEAM, "theory||low|", "partition team accepts QOS long; yours are low"),
        (DEV, "proj1||normal|", "partition dev denies account proj1; you have account proj1"),
        (DEV, "", "you have no account for partition dev"),
        (DEV, "a|other|normal|", "you have no account for partition dev"),
        (replace(DEV, denied_qos=("low",)), "a||low|", "partition dev denies QOS low; yours are low"),
        (OPEN, "a||normal|\nb||normal|", "you have no default account; --account names one of a, b"),
    ],
)
def test_a_refusal_names_the_reason(partition, associations, words):
    assert access_to(partition, parse_associations(rows(associations))).summary == words


@pytest.mark.parametrize(
    ("partition", "who", "account", "qos", "used", "states"),
    [
        ("gpu", ALICE, None, None, ("vision", "normal"), (False, False)),
        ("gpu", ALICE, "theory", "debug", ("theory", "debug"), (False, False)),
        ("long", ALICE, None, None, ("vision", "long"), (False, True)),  # the only QOS there is not the default
        ("theory", ALICE, None, "long", ("theory", "long"), (True, False)),  # the only account is not the default
        ("gpu", BOB, None, None, ("vision", "normal"), (True, False)),
        ("staff", BOB, None, None, ("staff", "normal"), (False, False)),
        ("long", BOB, "staff", None, None, "accepts QOS long; yours are normal"),
        ("gpu", ALICE, "staff", None, None, "no account staff; --account names one of theory, vision"),
        ("gpu", ALICE, "guests", None, None, "account guests; --account names one of theory, vision"),
        ("gpu", ALICE, None, "scavenge", None, "no QOS scavenge; --qos names one of debug, long, normal"),
        ("long", ALICE, None, "normal", None, "QOS normal; --qos names one of long"),
        ("gpu", ALICE, "theory", None, None, "no default QOS; --qos names one of debug, long"),
        ("staff", ALICE, None, None, None, "accepts account staff; you have accounts theory, vision"),
    ],
)
def test_the_account_of_a_job_is_found_or_has_to_be_named(partition, who, account, qos, used, states):
    access = access_to(aurora(partition), who, account=account, qos=qos)
    if used is None:
        assert states in access.refusal and (access.account and access.limits) is None
    else:
        assert (access.refusal, (access.account, access.job_qos)) == (None, used)
        assert (access.states_account, access.states_qos) == states
        assert access.limits is not None and access.limits.source == f"account {used[0]}"


def test_any_qos_may_be_named_if_none_is_enforced():
    access = access_to(aurora("gpu"), ALICE, qos="scavenge", holds_to_qos=False)
    assert (access.refusal, access.job_qos, access.states_qos) == (None, "scavenge", False)
    access = access_to(aurora("gpu"), ALICE, account="theory", holds_to_qos=False)
    assert (access.refusal, access.job_qos, access.states_qos) == (None, None, False)


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
