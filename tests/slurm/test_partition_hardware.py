"""The hardware of a job on a partition: reported by Slurm, stated by the user, or assumed with a note."""

import pytest
from msgspec.structs import replace
from slurm_texts import nodes_of, partition_of

from shardwise.slurm.cluster import PartitionState
from shardwise.slurm.node_groups import choose_group
from shardwise.slurm.partition_hardware import NodeShare, hardware_of
from shardwise.trainer.planning.tables.gpu_names import hardware_from_spec
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import Disk, Gpu, Hardware, Host, Link, LinkKind, MeasuredRates
from shardwise.trainer.spec.units import GIB, MIB

UNKNOWN_HOST = Host(cpu_name=None, num_cores=None, ram_bytes=None, ram_available_bytes=None)


def of(cluster, name, *, num_nodes=1, spec=None, constraint=None, partition=None, **facts):
    partition = partition or partition_of(cluster, name)
    choice = choose_group(partition, tuple(nodes_of(cluster).values()), constraint=constraint)
    stated = hardware_from_spec(spec, local_host=lambda: UNKNOWN_HOST) if isinstance(spec, str) else spec
    return hardware_of(partition, choice, num_nodes=num_nodes, stated=stated, **facts)


def probed(count=8, name="NVIDIA A100-SXM4-80GB", spec_name="A100-SXM4-80GB"):
    gpus = tuple(
        Gpu(index=index, name=name, spec_name=spec_name, memory_bytes=80 * GIB, uuid=f"GPU-{index}", free_bytes=2 * GIB)
        for index in range(count)
    )
    links = tuple(Link(a=0, b=b, kind=LinkKind.NVLINK, bytes_per_s=250 * 10**9) for b in range(1, count))
    disk = Disk(path="/scratch", filesystem="xfs", total_bytes=10**12, free_bytes=10**12)
    host = Host(cpu_name="EPYC", disks=(disk,), num_cores=4, ram_bytes=64 * GIB, ram_available_bytes=60 * GIB)
    return Hardware(
        gpus=gpus, host=host, links=links, libraries={"torch": "2.13.0"},
        rates=MeasuredRates(matmul_flops_per_s=250 * 10**12), source="hw.json",
    )  # fmt: skip


PLANNED = [
    # cluster, partition, constraint, GPUs, cores, MiB of RAM
    ("fake_nodes", "gpu", None, ["A100-SXM4-80GB"] * 8, 128, 1031000 - 4096),
    ("fake_nodes", "gpu", "hbm40g", ["A100-SXM4-40GB"] * 4, 128, 515000),
    ("fake_nodes", "cpu", None, [], 62, 200000),  # MaxMemPerNode
    ("fake_nodes", "mig", None, ["A100-SXM4-40GB-MIG-3g.20gb"], 64, 500000),
    ("lrz", "mcml-dgx-a100-40x8", None, ["A100-SXM4-40GB"] * 8, 252, 965632),
    ("lrz", "lrz-hgx-h100-94x4", None, ["H100-NVL-94GB"] * 4, 92, 750000),
    ("lrz", "mcml-hgx-a100-80x4-mig", None, ["A100-SXM4-80GB-MIG-3g.40gb"], 88, 515600),
    ("nchc", "dev", None, ["H100-SXM5-80GB"] * 8, 104, 1900000),
    ("goethe", "gpu", None, [], 64, 500000 - 2048),
    ("hltcoe", "gpu", "40gb", ["A100-SXM4-40GB"] * 4, 96, 750000),
    ("unige", "private-lab-gpu", None, ["H100-NVL-94GB"], 62, 750 * 1024),
    ("dsai", "h100", None, ["H100-SXM5-80GB"] * 4, 124, 12000 * 124),  # MaxMemPerCPU
]


@pytest.mark.parametrize(("cluster", "name", "constraint", "cards", "cores", "ram_mib"), PLANNED)
def test_hardware_of_real_partitions(cluster, name, constraint, cards, cores, ram_mib):
    answer = of(cluster, name, constraint=constraint)
    hardware = answer.hardware
    assert [gpu.spec_name for gpu in hardware.gpus] == cards
    assert [gpu.index for gpu in hardware.gpus] == list(range(len(cards)))
    assert (hardware.host.num_cores, hardware.host.ram_bytes) == (cores, ram_mib * MIB)
    assert (hardware.num_nodes, hardware.num_cpu_devices, hardware.source) == (1, 1, f"partition {name}")
    assert "whole nodes" in hardware.notes[0]
    assert not (hardware.links or hardware.libraries or hardware.host.disks)


# A partition of fake_nodes, what is asked for, and the facts that the refusal names.
REFUSED = [
    ("pretend", {"spec": "4xA100-SXM4-80GB"}, ("4 GPUs", "8", "gpu:8")),
    ("gpu", {"spec": "8xH100-SXM5-80GB"}, ("H100-SXM5-80GB", "A100-SXM4-80GB or A100-PCIe-80GB", "gpu:a100:8")),
    ("gpu", {"spec": "8xA100-SXM4-40GB"}, ("A100-SXM4-40GB", "A100-SXM4-80GB")),  # the feature says 80
    ("gpu", {"spec": "2x8xA100-SXM4-80GB"}, ("2 nodes", "--nodes 1")),
    ("mig", {"spec": "1xA100-SXM4-40GB"}, ("A100-SXM4-40GB", "A100 MIG 3g.20gb")),
    ("gpu", {"num_nodes": 5}, ("--nodes 5", " 4 ", "4 x A100-SXM4-40GB")),
    ("gpu", {"share": NodeShare(gpus=9)}, ("slurm.gpus is 9", "8")),
    ("gpu", {"share": NodeShare(cores=129)}, ("slurm.cores is 129", "128")),
    ("gpu", {"share": NodeShare(ram_bytes=2048 * GIB)}, ("slurm.memory is 2 TiB", "1003 GiB")),
]


@pytest.mark.parametrize(("name", "asked", "facts"), REFUSED)
def test_what_disagrees_with_slurm_is_refused_with_both(name, asked, facts):
    with pytest.raises(InputError) as raised:
        of("fake_nodes", name, **asked)
    assert [fact for fact in facts if fact not in str(raised.value)] == []


def test_a_probed_node_supplies_facts_and_the_card_that_slurm_omits():
    hardware = of("fake_nodes", "gpu", num_nodes=3, spec=probed()).hardware
    assert len(hardware.links) == 7 and hardware.rates.matmul_flops_per_s == 250 * 10**12
    assert (hardware.libraries, hardware.host.disks[0].path) == ({"torch": "2.13.0"}, "/scratch")
    assert {(gpu.uuid, gpu.free_bytes) for gpu in hardware.gpus} == {(None, None)}
    assert [gpu.index for gpu in hardware.gpus] == list(range(8))
    assert (hardware.host.num_cores, hardware.host.ram_bytes) == (128, (1031000 - 4096) * MIB)
    assert hardware.host.ram_available_bytes is None
    assert any("hw.json" in note for note in hardware.notes)
    assert not any("assumed from the catalogue" in note for note in hardware.notes)
    named = probed(8, "NVIDIA GeForce GTX 1080", None)
    assert of("tum", "gtx_1080_submit", spec=named).hardware.gpus[0].name == "NVIDIA GeForce GTX 1080"
    with pytest.raises(InputError, match="TITAN"):
        of("tum", "gtx_1080_submit", spec=probed(8, "NVIDIA TITAN RTX", None))


def test_more_nodes_than_a_job_may_have_and_fewer_are_refused_and_hidden_ones_have_to_be_stated():
    with pytest.raises(InputError, match=r"--nodes 4.* 3 .*MaxNodes"):
        of("dsai", "h100", num_nodes=4)
    with pytest.raises(InputError, match=r"--nodes 1.* 2 "):
        of("fake_nodes", "gpu", partition=replace(partition_of("fake_nodes", "gpu"), min_nodes=2))
    assert of("dsai", "h100", num_nodes=3).num_allowed_nodes == 3
    with pytest.raises(InputError, match=r"partition compute.*\n--hardware .*1xCPU"):
        of("aris", "compute")
    hardware = of("aris", "compute", num_nodes=48, spec="1xCPU").hardware
    assert (hardware.gpus, hardware.host.num_cores, hardware.host.ram_bytes) == ((), 128, 507904 * MIB)
    stated = of("aris", "compute", spec="4xA100-SXM4-40GB")
    assert (len(stated.hardware.gpus), stated.group.gres) == (4, "gpu:4")


def test_a_partition_that_starts_no_jobs_or_has_no_node_in_service_is_refused():
    for state in set(PartitionState) - {PartitionState.UP}:
        with pytest.raises(EnvironmentFaultError, match=f"partition gpu is {state}"):
            of("fake_nodes", "gpu", partition=replace(partition_of("fake_nodes", "gpu"), state=state))
    partition = partition_of("tum", "rtx_3090_submit")
    drained = [replace(node, is_in_service=False) for node in nodes_of("tum").values()]
    with pytest.raises(EnvironmentFaultError, match="2 nodes of 8 x RTX-3090"):
        hardware_of(partition, choose_group(partition, drained), num_nodes=1)
    empty = replace(partition, num_nodes=0)
    with pytest.raises(EnvironmentFaultError, match="has no nodes"):
        hardware_of(empty, choose_group(empty, ()), num_nodes=1)


@pytest.mark.parametrize(
    ("share", "gpus", "cores", "ram_mib"),
    [
        (NodeShare(), 8, 128, 1026904),
        (NodeShare(gpus=2), 2, 32, 256726),
        (NodeShare(gpus=4, ram_bytes=100 * GIB), 4, 64, 100 * 1024),
        (NodeShare(cores=16), 8, 16, 1026904),
    ],
)
def test_some_gpus_of_a_node_come_with_their_share_of_it(share, gpus, cores, ram_mib):
    hardware = of("fake_nodes", "gpu", share=share, spec=probed()).hardware
    assert (len(hardware.gpus), hardware.host.num_cores) == (gpus, cores)
    assert hardware.host.ram_bytes == pytest.approx(ram_mib * MIB, abs=MIB)
    assert len(hardware.links) == gpus - 1
    assert ("whole nodes" in hardware.notes[0]) is share.is_whole
