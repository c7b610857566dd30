"""The cluster of the tests is what it claims to be: nodes of their own, GPUs that are counted."""

from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster


def test_each_node_has_a_name_and_an_address_of_its_own(slurm: SlurmCluster, tmp_path: Path):
    line = "srun sh -c 'echo $(hostname) $(hostname -i) $(getent hosts n1)'"
    job = slurm.submit("--nodes=2", f"--output={tmp_path}/out", f"--wrap={line}")
    slurm.wait_for(job, "COMPLETED")
    first, second = (line.split() for line in sorted((tmp_path / "out").read_text().splitlines()))
    assert (first[0], second[0]) == ("n1", "n2") and first[1] != second[1]
    assert first[2:] == second[2:] == [first[1], "n1"], "each finds the other by its name"


def test_pretended_nodes_take_jobs_of_their_size_and_no_larger(slurm: SlurmCluster):
    words = ("sbatch", "--test-only", "--partition=h100", "--exclusive", "--nodes=4", "--wrap=true")
    assert "c[1-4]" in slurm.run(*words, "--gpus-per-node=h100:8").stderr
    assert "not available" in slurm.run(*words, "--gpus-per-node=h100:9", check=False).stderr
    assert "not available" in slurm.run(*words, "--gpus-per-node=a100:8", check=False).stderr


@pytest.mark.long
def test_a_node_that_loses_power_is_noticed_and_comes_back(slurm: SlurmCluster):
    job = slurm.submit("--nodes=1", "--nodelist=n4", "--output=/dev/null", "--wrap=sleep 100")
    slurm.wait_for(job, "RUNNING")
    slurm.kill_node("n4")
    slurm.wait_for(job, "PENDING", restarts=1)
    slurm.start_node("n4")
    assert slurm.wait_for(job, "RUNNING", restarts=1).nodes == "n4"
