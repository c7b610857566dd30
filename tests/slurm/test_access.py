"""Accounts and qualities of service, as sacctmgr lists them and as a partition takes them."""

import pytest
from msgspec.structs import replace
from slurm_texts import partition_of

from slurm.access import access_to, parse_associations, parse_qos_limits

TEAM = partition_of("fake_nodes", "team")
ASSOCIATIONS = "theory||long,normal|normal\nvision|gpu|normal|\nguest||low|low\n\n"


def test_rows_of_sacctmgr():
    theory, vision, _ = parse_associations(ASSOCIATIONS)
    assert (theory.account, theory.partition, theory.qos, theory.default_qos) == (
        "theory",
        None,
        ("long", "normal"),
        "normal",
    )
    assert (vision.partition, vision.default_qos) == ("gpu", None)
    p_dev, normal = parse_qos_limits("p_dev|04:00:00|gres/gpu=32,node=4\nnormal||\n")
    assert (p_dev.name, p_dev.max_time_s, p_dev.max_tres) == ("p_dev", 14400, {"gres/gpu": 32, "node": 4})
    assert (normal.max_time_s, normal.max_tres) == (None, {})


def test_an_open_partition_takes_every_account_that_is_not_another_partitions():
    access = access_to(partition_of("fake_nodes", "cpu"), parse_associations(ASSOCIATIONS))
    assert (access.accounts, access.qos, access.default_qos) == (
        ("guest", "theory"),
        ("long", "low", "normal"),
        "normal",
    )
    assert access.words == "you may use it with accounts guest, theory; QOS long, low, normal"
    assert "vision" in access_to(partition_of("fake_nodes", "gpu"), parse_associations(ASSOCIATIONS)).accounts


def test_a_partition_takes_the_accounts_and_qos_it_names():
    access = access_to(partition_of("fake_nodes", "team"), parse_associations(ASSOCIATIONS))
    assert (access.accounts, access.qos, access.refusal) == (("theory",), ("long",), None)


@pytest.mark.parametrize(
    ("partition", "associations", "words"),
    [
        (TEAM, "guest||low|\n", "partition team takes theory, vision; your accounts are guest"),
        (TEAM, "theory||low|\n", "partition team takes QOS long; yours are low"),
        (partition_of("nchc", "dev"), "proj1||normal|\n", "partition dev denies proj1; your accounts are proj1"),
        (partition_of("nchc", "dev"), "", "you have no account for partition dev"),
        (
            replace(partition_of("nchc", "dev"), denied_qos=("low",)),
            "a||low|\n",
            "partition dev denies QOS low; yours are low",
        ),
    ],
)  # fmt: skip
def test_why_a_partition_is_not_open_is_said(partition, associations, words):
    assert access_to(partition, parse_associations(associations)).words == words
