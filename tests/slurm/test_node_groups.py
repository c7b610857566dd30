"""Equal nodes make a group, and a job is planned for one group."""

import pytest
from msgspec.structs import replace
from slurm_texts import nodes_of, partition_of

from shardwise.slurm.cluster import Gres, Node, Partition
from shardwise.slurm.node_groups import choose_group, group_nodes, satisfies
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.units import GIB


def node(name="n1", *, gres="a100", count=8, cores=64, ram_gib=500, features=(), **facts):
    gpus = (Gres(name="gpu", kind=gres, count=count),) if count else ()
    facts = {"partitions": ("gpu",), **facts}
    return Node(name=name, num_cores=cores, ram_bytes=ram_gib * GIB, gres=gpus, features=features, **facts)


def choice_of(cluster, partition, constraint=None):
    return choose_group(partition_of(cluster, partition), tuple(nodes_of(cluster).values()), constraint=constraint)


def test_nodes_whose_ram_differs_by_mebibytes_are_one_group_with_the_least_of_it():
    choice = choice_of("tum", "rtx_a6000_submit")
    assert (choice.group.num_nodes, choice.others) == (3, ())
    assert choice.group.ram_bytes == 742673 * 2**20
    assert choice.group.summary == "3 nodes of 8 x RTX-A6000 (80 cores, 725 GiB RAM)"


@pytest.mark.parametrize(
    ("other", "num_groups"),
    [
        (node("n2"), 1),
        (node("n2", ram_gib=250), 2),
        (node("n2", cores=32), 2),
        (node("n2", gres="h100"), 2),
        (node("n2", features=("80gb",)), 2),  # another card
        (node("n2", features=("rack7",)), 1),
    ],
)
def test_nodes_differ_by_gpus_cores_and_ram(other, num_groups):
    assert len(group_nodes([node("n1"), other])) == num_groups


def test_gpu_nodes_come_before_more_cpu_nodes_and_many_before_few():
    cpus = [node(f"c{number}", count=0) for number in range(9)]
    small = [node(f"s{number}", gres="t4", count=1) for number in range(3)]
    partition = Partition(name="gpu", num_nodes=14)
    choice = choose_group(partition, [*cpus, node("a1"), node("a2"), *small])
    assert [group.num_nodes for group in (choice.group, *choice.others)] == [3, 2, 9]
    assert choice.group.gpu_type == "t4"


def test_a_number_of_gpus_that_was_stated_chooses():
    small, large = [node(f"s{number}", count=4) for number in range(3)], [node("l1")]
    partition = Partition(name="gpu", num_nodes=4)
    assert choose_group(partition, [*large, *small]).group.num_gpus == 4
    assert choose_group(partition, [*large, *small], num_gpus=8).group.num_gpus == 8
    assert choose_group(partition, [*large, *small], num_gpus=2).group.num_gpus == 4


def test_a_constraint_chooses_a_group_and_a_feature_selects_it():
    largest, small = choice_of("fake_nodes", "gpu"), choice_of("fake_nodes", "gpu", "a100&hbm40g")
    assert (largest.group.num_nodes, largest.group.gres, largest.num_hidden) == (4, "gpu:a100:8", 0)
    assert largest.constraint is None  # no other node has eight
    assert (small.group.num_nodes, small.group.gres, small.constraint) == (3, "gpu:a100:4", "hbm40g")
    assert [other.num_nodes for other in small.others] == [4]
    with pytest.raises(InputError, match=r"--constraint h100: .* gpu .*a100, hbm40g, hbm80g, ib"):
        choice_of("fake_nodes", "gpu", "h100")


def test_groups_that_nothing_distinguishes_have_no_constraint():
    """Four of the same card would be given on a node with eight of them."""
    nodes = [node(f"s{number}", count=4) for number in range(3)] + [node("l1")]
    choice = choose_group(Partition(name="gpu", num_nodes=4), nodes)
    assert (choice.group.gres, choice.is_selected_by_gres, choice.constraint) == ("gpu:a100:4", False, None)


def test_whole_cards_come_before_slices_and_the_largest_slice_before_others():
    mixed = replace(
        node(), gres=(Gres(name="gpu", kind="a100_1g.5gb", count=7), Gres(name="gpu", kind="a100", count=2))
    )
    (group,) = group_nodes([mixed])
    assert (group.gres, group.is_mig, [one.kind for one in group.other_gpus]) == ("gpu:a100:2", False, ["a100_1g.5gb"])
    sliced = choice_of("lrz", "mcml-hgx-a100-80x4-mig").group
    assert (sliced.gpu_type, sliced.gpus_used, sliced.gres) == ("3g.40gb", 1, "gpu:3g.40gb:1")
    assert [one.count for one in sliced.other_gpus] == [4, 8]


def test_of_two_kinds_of_cards_on_a_node_the_one_with_more_memory_is_used():
    both = replace(node(), gres=(Gres(name="gpu", kind="t4", count=2), Gres(name="gpu", kind="h100", count=2)))
    (group,) = group_nodes([both])
    assert (group.gpu_type, group.other_gpus[0].kind) == ("h100", "t4")


def test_hidden_nodes_follow_from_the_totals_of_the_partition():
    hidden = choose_group(partition_of("dsai", "h100"), ())
    assert hidden.group.summary == "16 nodes of 4 x H100-SXM5-80GB (124 cores, 1.48 TiB RAM)"
    assert (hidden.num_hidden, hidden.num_nodes) == (16, 16)
    untyped = choose_group(partition_of("nchc", "dev"), ())
    assert untyped.group.summary == "128 nodes of 8 x GPU (104 cores, 1.81 TiB RAM)"


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        ("h100", False),
        ("a100&ib", True),
        ("a100&h100", False),
        ("a100,ib", True),
        ("h100|a100", True),
        ("[h100|a100]", True),
        ("ib&(h100|b200)", False),
        ("h100|a100&ib", True),
        ("a100*2&ib*4", True),
        ("GPU_MEM:32GB&ib", True),
        ("a10", False),  # a whole word
    ],
)
def test_constraints_as_sbatch_reads_them(constraint, expected):
    features = ("a100", "ib", "GPU_SKU:V100", "GPU_MEM:32GB")
    assert satisfies(features, constraint) is expected
