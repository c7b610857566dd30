"""Text that Slurm of real clusters printed, under captured/slurm_*, and a program that prints it."""

import shlex
from pathlib import Path

from captured_machine import CAPTURED

from shardwise.slurm.cluster import Node, Partition, parse_nodes, parse_partitions

CLUSTERS = tuple(sorted(folder.name.removeprefix("slurm_") for folder in CAPTURED.glob("slurm_*")))


def slurm_text(cluster: str, file: str) -> str:
    path = CAPTURED / f"slurm_{cluster}" / file
    return path.read_text() if path.exists() else ""


def nodes_of(cluster: str) -> dict[str, Node]:
    return {node.name: node for node in parse_nodes(slurm_text(cluster, "scontrol_node.txt"))}


def partition_of(cluster: str, name: str) -> Partition:
    """A captured partition; one that is made up around the nodes where the cluster's own was not published."""
    found = {one.name: one for one in parse_partitions(slurm_text(cluster, "scontrol_partition.txt"))}
    count = sum(name in node.partitions for node in nodes_of(cluster).values())
    return found.get(name) or Partition(name=name, num_nodes=count)


def install_slurm(folder: Path, cluster: str) -> dict[str, str]:
    """Puts a scontrol that answers as the cluster did into `folder`; the environment that finds it."""
    texts = shlex.quote(str(CAPTURED / f"slurm_{cluster}"))
    programs = {
        "scontrol": f"""case "$*" in
    "-o show partition") exec cat {texts}/scontrol_partition.txt ;;
    "-o show node") exec cat {texts}/scontrol_node.txt ;;
esac
exit 9
""",
        "sbatch": "exit 9\n",
    }
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}")
        (folder / name).chmod(0o755)
    configuration = folder / "slurm.conf"
    configuration.write_text(f"ClusterName={cluster}\n")
    return {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_CONF": str(configuration)}
