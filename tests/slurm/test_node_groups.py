"""The card of a node, and the groups of equal nodes."""

import pytest
from msgspec.structs import replace
from slurm_texts import nodes_of, partition_of

from shardwise.slurm.cluster import Gres, Node, Partition, parse_gres
from shardwise.slurm.node_groups import card_of, choose_group, group_nodes, satisfies
from shardwise.trainer.planning.tables.gpu_specs import GPU_SPECS
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.units import GIB

TOLD = [
    # GRES, features, the card, whether others would fit as well
    ("gpu:nvidia_h100_80gb_hbm3:8", (), "H100-SXM5-80GB", False),
    ("gpu:nvidia_a100-sxm4-80gb:8(S:1,3,5,7)", (), "A100-SXM4-80GB", False),
    ("gpu:nvidia_h100_nvl:1,VramPerGpu:no_consume:94G", (), "H100-NVL-94GB", False),
    ("gpu:tesla_v100-pcie-32gb:2", (), "V100-PCIe-32GB", False),
    ("gpu:a100_80gb:4", (), "A100-SXM4-80GB", True),
    ("gpu:A100.80gb:4", (), "A100-SXM4-80GB", True),
    ("gpu:rtx_3090:8,mps:rtx_3090:800", (), "RTX-3090", False),
    ("gpu:2080ti:4", (), "RTX-2080Ti", False),
    ("gpu:geforce_rtx_2080_ti:10(S:0)", ("GPU_MEM:11GB",), "RTX-2080Ti", False),
    ("gpu:nvidia_gh200_480gb:1", (), "GH200", False),  # the host's 480 GB
    ("gpu:nvidia_geforce_rtx_3080:4", (), "RTX-3080-10GB", True),
    ("gpu:nvidia_geforce_rtx_3080:4", ("GPU_MEM:12GB",), "RTX-3080-12GB", False),
    # a type that fits several rows: the least memory, on a baseboard where there are as many as on one
    ("gpu:a100:8", (), "A100-SXM4-40GB", True),
    ("gpu:a100:2", (), "A100-PCIe-40GB", True),
    # features decide
    ("gpu:a100:4", ("a100", "intel", "40gb"), "A100-SXM4-40GB", True),
    ("gpu:a100:4", ("gpu", "a100", "hbm80g"), "A100-SXM4-80GB", True),
    ("gpu:a100:2", ("sxm", "80gb"), "A100-PCIe-80GB", True),
    ("gpu:V100:4", ("GPU_SKU:V100", "GPU_MEM:32GB", "GPU_CC:7.0"), "V100-32GB", True),
    ("gpu:8(S:0-1)", ("A100-80GB",), "A100-SXM4-80GB", True),
    ("gpu:1", ("icelake", "mem512GB", "rack_f1", "gpua40"), "A40", False),
    # the RAM of a node, its scratch and its network are no memory of a GPU
    ("gpu:a100:4", ("mem80gb", "scr80gb", "ib80g"), "A100-SXM4-40GB", True),
    # features that disagree decide nothing
    ("gpu:a100:4", ("40gb", "80gb"), "A100-SXM4-40GB", True),
    ("gpu:2", ("a100", "v100"), None, False),
    # nothing is guessed at
    ("gpu:8", (), None, False),
    ("gpu:gtx_1080:4", (), None, False),
    ("gpu:v100_8gb:1", (), None, False),
]


@pytest.mark.parametrize(("gres", "features", "expected", "has_others"), TOLD)
def test_the_card_of_a_type(gres, features, expected, has_others):
    entries = parse_gres(gres)
    choice = card_of(entries[0], features, entries)
    assert (None if choice is None else choice.gpu.spec_name) == expected
    assert (choice is not None and len(choice.fits) > 1) is has_others
    if choice is not None:
        assert choice.gpu.spec_name in choice.fits
        smallest = min(GPU_SPECS[row].memory_bytes for row in choice.fits)
        assert choice.gpu.memory_bytes == smallest


@pytest.mark.parametrize("name", GPU_SPECS)
def test_every_card_is_found_under_its_own_names(name):
    """Under the catalogue's name and under those of nvidia-smi, as NVML makes a type of them."""
    row = GPU_SPECS[name]
    for text in (name, *(f"NVIDIA {smi}".lower().replace(" ", "_") for smi in row.smi_names)):
        choice = card_of(parse_gres(f"gpu:{text}:8")[0])
        assert choice is not None, text
        assert name in choice.fits, text
        assert abs(choice.gpu.memory_bytes - row.memory_bytes) < GIB or len(choice.fits) > 1, text


@pytest.mark.parametrize(
    ("kind", "features", "name", "memory_gib", "capability"),
    [
        ("a100_1g.5gb", (), "A100 MIG 1g.5gb", 4.75, (8, 0)),
        ("nvidia_a100_3g.20gb", (), "A100 MIG 3g.20gb", 19.5, (8, 0)),
        ("3g.40gb", ("A100-80GB",), "A100 MIG 3g.40gb", 39.25, (8, 0)),
        ("rtxpro6000_1g.24gb", (), "RTX MIG 1g.24gb", 22.8, (12, 0)),  # a profile without a row
    ],
)
def test_a_slice_has_the_memory_of_its_profile_and_the_chip_of_its_card(kind, features, name, memory_gib, capability):
    choice = card_of(parse_gres(f"gpu:{kind}:7")[0], features)
    assert choice is not None
    gpu = choice.gpu
    assert (gpu.name, gpu.is_mig_on, gpu.compute_capability) == (name, True, capability)
    assert (gpu.spec_name or "").endswith(f"-{name[5:].replace(' ', '-')}") is (gpu.spec_name is not None)
    assert (gpu.spec_name is None) is name.startswith("RTX")
    assert gpu.memory_bytes == pytest.approx(memory_gib * GIB, abs=1)


def node(name="n1", *, gres="a100", count=8, cores=64, ram_gib=500, features=(), **facts):
    gpus = (Gres(name="gpu", kind=gres, count=count),) if count else ()
    facts = {"partitions": ("gpu",), **facts}
    return Node(name=name, num_cores=cores, ram_bytes=ram_gib * GIB, gres=gpus, features=features, **facts)


def choice_of(cluster, partition, constraint=None):
    return choose_group(partition_of(cluster, partition), tuple(nodes_of(cluster).values()), constraint=constraint)


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


def test_gpu_nodes_come_before_cpu_nodes_many_before_few_and_whole_cards_before_slices():
    cpus = [node(f"c{number}", count=0) for number in range(9)]
    small = [node(f"s{number}", gres="t4", count=1) for number in range(3)]
    partition = Partition(name="gpu", num_nodes=14)
    choice = choose_group(partition, [*cpus, node("a1"), node("a2"), *small])
    assert [group.num_nodes for group in (choice.group, *choice.others)] == [3, 2, 9]
    assert choice.group.gpu_type == "t4"
    sliced_card, cards = Gres(name="gpu", kind="a100_1g.5gb", count=7), Gres(name="gpu", kind="a100", count=2)
    (group,) = group_nodes([replace(node(), gres=(sliced_card, cards))])
    assert (group.gres, group.is_mig, [one.kind for one in group.other_gpus]) == ("gpu:a100:2", False, ["a100_1g.5gb"])
    sliced = choice_of("lrz", "mcml-hgx-a100-80x4-mig").group
    assert (sliced.gpu_type, sliced.gpus_used, sliced.gres) == ("3g.40gb", 1, "gpu:3g.40gb:1")
    assert [one.count for one in sliced.other_gpus] == [4, 8]


def test_a_constraint_chooses_a_group_and_a_feature_selects_it():
    largest, small = choice_of("fake_nodes", "gpu"), choice_of("fake_nodes", "gpu", "a100&hbm40g")
    assert (largest.group.num_nodes, largest.group.gres, largest.num_hidden) == (4, "gpu:a100:8", 0)
    assert largest.constraint is None  # no other node has eight
    assert (small.group.num_nodes, small.group.gres, small.constraint) == (3, "gpu:a100:4", "hbm40g")
    assert [other.num_nodes for other in small.others] == [4]
    with pytest.raises(InputError, match=r"--constraint h100: .* gpu .*a100, hbm40g, hbm80g, ib"):
        choice_of("fake_nodes", "gpu", "h100")


CONSTRAINTS = {
    "a100&ib": True, "a100,ib": True, "h100|a100": True, "[h100|a100]": True, "h100|a100&ib": True, "a100*2&ib*4": True,
    "GPU_MEM:32GB&ib": True, "h100": False, "a100&h100": False, "ib&(h100|b200)": False,
    "a10": False,  # a whole word
}  # fmt: skip


def test_constraints_as_sbatch_reads_them():
    features = ("a100", "ib", "GPU_SKU:V100", "GPU_MEM:32GB")
    assert {constraint: satisfies(features, constraint) for constraint in CONSTRAINTS} == CONSTRAINTS
