"""Accounts and qualities of service, as sacctmgr lists them and as a partition takes them."""

import pytest
from msgspec.structs import replace
from slurm_texts import partition_of, slurm_text

from shardwise.slurm.access import access_to, parse_associations, parse_qos_limits
from shardwise.slurm.cluster import Partition

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
        (TEAM, "guest||low|", "partition team takes accounts theory, vision; you have account guest"),
        (TEAM, "theory||low|", "partition team takes QOS long; yours are low"),
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
        ("long", BOB, "staff", None, None, "takes QOS long; yours are normal"),
        ("gpu", ALICE, "staff", None, None, "no account staff; --account names one of theory, vision"),
        ("gpu", ALICE, "guests", None, None, "account guests; --account names one of theory, vision"),
        ("gpu", ALICE, None, "scavenge", None, "no QOS scavenge; --qos names one of debug, long, normal"),
        ("long", ALICE, None, "normal", None, "QOS normal; --qos names one of long"),
        ("gpu", ALICE, "theory", None, None, "no default QOS; --qos names one of debug, long"),
        ("staff", ALICE, None, None, None, "takes account staff; you have accounts theory, vision"),
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
