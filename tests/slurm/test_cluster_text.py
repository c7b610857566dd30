"""Quantities, partitions and nodes in Slurm's own text, and commands of Slurm that succeed, fail and hang."""

import pytest
from slurm_jobs import write_program
from slurm_texts import CLUSTERS, nodes_of, partition_of, slurm_text

from shardwise.slurm import cluster as slurm
from shardwise.slurm.queries import read_partitions, run_slurm
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.units import GIB, MIB


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60", 3600), ("30:00", 1800), ("2-00:00:00", 172800), ("7-12:30", 649800), ("UNLIMITED", None), ("", None)],
)
def test_durations(text, seconds):
    assert slurm.parse_duration(text) == seconds
    assert seconds is None or slurm.parse_duration(slurm.format_duration(seconds)) == seconds


@pytest.mark.parametrize(
    ("hours", "limit_s", "jobs", "facts"),
    [
        (38, 172800, 1, ("38 h 00 min", "2-00:00:00", "one job")),
        (60, 86400, 3, ("2.5 days", "1-00:00:00", "3 jobs")),
        (0.1, 60, 6, ("00:01:00", "6 jobs")),
        (500, None, 1, ("20.8 days", "gpu", "one job")),
    ],
)
def test_a_run_is_as_many_jobs_as_its_hours_take(hours, limit_s, jobs, facts):
    assert slurm.num_jobs(hours, limit_s) == jobs
    described = slurm.describe_num_jobs(hours, limit_s, place="gpu")
    assert [fact for fact in facts if fact not in described] == []


PARSED = [
    # cluster, node, cores, MiB of RAM, GPUs as (type, count), in service
    ("lrz", "dgx-001", 252, 965632, ((None, 8),), True),
    ("lrz", "hgx-019", 88, 515600, (("3g.40gb", 4), ("2g.20gb", 4), ("1g.10gb", 8)), True),
    ("lrz", "gpu-001", 18, 337920, ((None, 2),), True),
    ("tum", "n01", 96, 1001519, (("a100", 4),), True),
    ("tum", "n06", 80, 742673, (("rtx_3090", 8),), False),
    ("nchc", "hgpn01", 104, 1900000, (("H100", 8),), True),
    ("goethe", "gpu31-021", 256, 1900000 - 2048, ((None, 2),), True),
    ("goethe", "gpu35-001", 64, 500000 - 2048, (), True),
    ("slinky", "esc8000a-1", 11, 245760, (("a40", 1),), True),
    ("hltcoe", "rack5n06", 96, 750000, (("a100", 4),), True),
    ("parallelcluster", "gpu-st-ml-1", 32, 249036, (("rtxproserver6000", 1),), True),
    ("fake_nodes", "a1", 128, 1031000 - 4096, (("a100", 8),), True),  # powered down: it boots for a job
    ("fake_nodes", "m1", 64, 500000, (("a100_3g.20gb", 4), ("a100_1g.5gb", 7)), True),
    ("fake_nodes", "p01", 62, 256000, (), True),  # two cores are kept for the system
]


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_captured_cluster_parses(cluster):
    nodes, partitions = nodes_of(cluster), slurm.parse_partitions(slurm_text(cluster, "scontrol_partition.txt"))
    assert nodes or partitions
    assert len(nodes) == slurm_text(cluster, "scontrol_node.txt").count("NodeName=")
    assert len(partitions) == slurm_text(cluster, "scontrol_partition.txt").count("PartitionName=")
    assert all(node.partitions and node.ram_bytes for node in nodes.values())
    assert all(partition.num_nodes for partition in partitions)


@pytest.mark.parametrize(("cluster", "name", "cores", "ram_mib", "gpus", "in_service"), PARSED)
def test_nodes(cluster, name, cores, ram_mib, gpus, in_service):
    node = nodes_of(cluster)[name]
    assert (node.num_cores, node.ram_bytes) == (cores, ram_mib * MIB)
    assert tuple((one.kind, one.count) for one in node.gpus) == gpus
    assert node.is_in_service is in_service


@pytest.mark.parametrize(
    ("fields", "cores"),
    [
        ("CPUTot=32", 32),
        ("CPUTot=32 CoreSpecCount=2 ThreadsPerCore=2", 28),  # before 22.05
        ("CPUEfctv=30 CPUTot=32 CPUSpecList=30-31", 30),
        ("CPUTot=0", 1),
    ],
)
def test_cores_that_are_kept_for_the_system_are_not_for_jobs(fields, cores):
    (node,) = slurm.parse_nodes(f"NodeName=n1 {fields} RealMemory=1000 State=IDLE Partitions=a")
    assert node.num_cores == cores


IN_SERVICE = ("IDLE", "MIXED+PLANNED", "IDLE+CLOUD+POWERED_DOWN", "idle~")
OUT_OF_SERVICE = ("DOWN*", "IDLE*", "IDLE+DRAIN", "MIXED+DRAINING", "INVAL", "UNKNOWN*")  # * does not answer


@pytest.mark.parametrize("state", [*IN_SERVICE, *OUT_OF_SERVICE])
def test_which_states_take_jobs(state):
    (node,) = slurm.parse_nodes(f"NodeName=n1 CPUTot=8 RealMemory=1000 State={state} Partitions=a")
    assert node.is_in_service is (state in IN_SERVICE)


def test_free_text_changes_no_field_and_gpus_that_are_only_accounted_for_count():
    line = (
        "NodeName=n1 CPUTot=8 RealMemory=1000 State=IDLE+DRAIN Partitions=gpu Gres=gpu:a100:4 "
        "OS=Linux 5.15.0 #1 SMP Tue Nov 14 Reason=NHC: Gres=gpu:a100:3 found, State=IDLE wanted [root@2026-01-01]"
    )
    (node,) = slurm.parse_nodes(line)
    assert [one.count for one in node.gpus] == [4]
    assert not node.is_in_service
    line = "NodeName=n1 CPUTot=8 RealMemory=9 Gres=(null) State=IDLE CfgTRES=cpu=8,mem=9M,gres/gpu=4,gres/gpu:a40=4"
    (node,) = slurm.parse_nodes(line)
    assert node.gpus == (slurm.Gres(name="gpu", kind="a40", count=4),)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ()),
        ("gpu", (("gpu", None, 1),)),
        ("gpu:a100:8", (("gpu", "a100", 8),)),
        ("gpu:a100:8(S:0-1)", (("gpu", "a100", 8),)),
        ("gpu:a100_1g.5gb:7(S:0)", (("gpu", "a100_1g.5gb", 7),)),
        ("gpu:tesla:2,shard:8", (("gpu", "tesla", 2), ("shard", None, 8))),
        ("gpu:a100:4,mps:a100:400", (("gpu", "a100", 4), ("mps", "a100", 400))),
        ("gpu:nvidia_h100_nvl:1(S:2),VramPerGpu:no_consume:94G", (
            ("gpu", "nvidia_h100_nvl", 1), ("VramPerGpu", None, 94 * GIB),
        )),
        ("gpu:0", ()),
    ],
)  # fmt: skip
def test_gres(text, expected):
    assert tuple((one.name, one.kind, one.count) for one in slurm.parse_gres(text)) == expected


def test_amounts_are_powers_of_1024_also_those_of_tres():
    assert [slurm.parse_amount(text) for text in ("8", "4K", "94G", "a100")] == [8, 4096, 94 * GIB, None]
    memory = [slurm.parse_memory(text) for text in ("256000", "256000M", "750G")]
    assert memory == [256000 * MIB, 256000 * MIB, 750 * GIB]
    assert slurm.parse_tres("cpu=1984,mem=24752000M,node=16,billing=24320,gres/gpu=64,gres/gpu:h100=64") == {
        "cpu": 1984, "mem": 24752000 * MIB, "node": 16, "billing": 24320, "gres/gpu": 64, "gres/gpu:h100": 64
    }  # fmt: skip
    assert slurm.parse_tres("cpu=4,mem=1.5T") == {"cpu": 4, "mem": 3 * 512 * GIB}
    assert slurm.parse_tres(None) == slurm.parse_tres("N/A") == {}


def test_limits_of_partitions_and_unknown_words_are_read_as_the_worst():
    h100 = partition_of("dsai", "h100")
    assert (h100.max_nodes, h100.max_time_s) == (3, 3 * 86400)
    assert (h100.max_cpus_per_node, h100.max_ram_per_cpu_bytes, h100.num_nodes) == (128, 12000 * MIB, 16)
    compute = partition_of("aris", "compute")
    assert (compute.max_ram_per_node_bytes, compute.max_nodes, compute.is_default) == (507904 * MIB, None, True)
    (partition,) = slurm.parse_partitions("PartitionName=a TotalNodes=1 State=PAUSED GraceTime=20 PreemptMode=MIGRATE")
    assert (partition.state, partition.grace_time_s) == (slurm.PartitionState.INACTIVE, 20)
    (partition,) = slurm.parse_partitions("PartitionName=a TotalNodes=1 Nodes=n1 GraceTime=20 PreemptMode=OFF")
    assert partition.grace_time_s == 0, "no job is preempted"


@pytest.mark.parametrize(
    ("words", "expected"), [("FORCE", True), ("FORCE:4", True), ("FORCE:1", False), ("YES:4", False), ("NO", False)]
)
def test_only_forced_sharing_breaks_exclusive_nodes(words, expected):
    (partition,) = slurm.parse_partitions(f"PartitionName=a TotalNodes=1 Nodes=n1 OverSubscribe={words} State=UP")
    assert partition.is_oversubscribed is expected


def program(folder, name, script):
    write_program(folder / name, f"#!/bin/sh\n{script}\n")
    return {"PATH": f"{folder}:/usr/bin:/bin"}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"echo '{slurm_text('fake_nodes', 'no_controller.txt').strip()}' >&2; exit 1", "controller"),
        ("echo 'scontrol: error: x'; exit 1", "scontrol -o show partition: scontrol: error: x"),
        ("exit 3", "exit code 3"),
    ],
)
def test_failures_name_the_command(tmp_path, script, words):
    environment = program(tmp_path, "scontrol", script)
    with pytest.raises(EnvironmentFaultError) as raised:
        read_partitions(environment)
    assert words in str(raised.value) and "scontrol -o show partition" in str(raised.value)


def test_commands_are_run_in_plain_english_without_a_shell_and_one_that_is_missing_or_silent_is_an_error(tmp_path):
    with pytest.raises(EnvironmentFaultError, match=r"scontrol .*PATH.*\n.*--hardware"):
        read_partitions({"PATH": str(tmp_path)})
    write_program(tmp_path / "scontrol", "#!/nonexistent\n")
    with pytest.raises(EnvironmentFaultError, match="scontrol"):
        read_partitions({"PATH": str(tmp_path)})
    environment = program(tmp_path, "scontrol", "exec sleep 60")
    with pytest.raises(EnvironmentFaultError, match=r"scontrol show node: .*0\.2 s"):
        run_slurm(("scontrol", "show", "node"), environment=environment, timeout_s=0.2)
    environment = program(tmp_path, "sacctmgr", 'for word; do echo "<$word>"; done; echo "$LC_ALL"')
    text = run_slurm(("sacctmgr", "a b", "$(touch x)", "; rm y"), environment={**environment, "LC_ALL": "de_DE.UTF-8"})
    assert text == "<a b>\n<$(touch x)>\n<; rm y>\nC\n"
