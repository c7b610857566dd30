"""Refusals of Slurm with their remedies, and the environment of a submission."""

from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster
from slurm_jobs import batch_job, write_program

from shardwise.slurm.cluster import Partition
from shardwise.slurm.node_groups import NodeGroup
from shardwise.slurm.partition_hardware import PartitionHardware
from shardwise.slurm.sbatch import render_script
from shardwise.slurm.submit import check_script, explain_refusal, submit_environment, submit_script
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import Hardware, Host

RUN_DIR = Path("/home/me/runs/tiny")


def found() -> PartitionHardware:
    return PartitionHardware(
        hardware=Hardware(gpus=(), host=Host(cpu_name=None, num_cores=96, ram_bytes=None, ram_available_bytes=None)),
        partition=Partition(name="h100", num_nodes=4, max_time_s=2 * 86400),
        group=NodeGroup(
            names=("c1",), num_nodes=4, num_in_service=4, num_cores=96, ram_bytes=None, num_gpus=8, gpu_type="h100",
            features=("h100", "ib"),
        ),
        num_allowed_nodes=4,
    )  # fmt: skip


REFUSED_HERE = [
    ({"partition": "nope"}, ("nope", "sinfo --summarize")),
    ({"constraint": "xyz"}, ("feature", "requested: --constraint=xyz\n", "those of h100 have h100, ib")),
    ({"gres": "gpu:h100:9"}, ("not available", "--gpus-per-node=h100:9", "partition h100 has 4 nodes of 8 x gpu:h100")),
    ({"num_nodes": 5}, ("Node count", "--nodes=5")),
    ({"memory_bytes": 2**50}, ("not available", "--mem=1073741824M")),
    ({"time_limit_s": 3 * 86400}, ("time limit", "--time=3-00:00:00", "h100 allows 2-00:00:00")),
    ({"reservation": "foo"}, ("reservation", "requested: --reservation=foo\n`scontrol show reservation`")),
    ({"extra": ("--foo=1",)}, ("--foo", "slurm.extra")),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED_HERE)
def test_refusals_of_this_slurm_have_a_remedy(slurm: SlurmCluster, tmp_path: Path, changes, says):
    job = batch_job(tmp_path / "run", **{"partition": "h100", **changes})
    with pytest.raises(InputError) as refused:
        check_script(render_script(job), job, found(), environment=slurm.environment)
    message = str(refused.value)
    assert message.startswith("Slurm refuses this job: ") and message.count("\n") <= 2
    assert all(words in message for words in says), message
    assert not (tmp_path / "run").exists()


# As the slurmctld of clusters with accounting answer (src/common/slurm_errno.c), some with words of their own before.
REFUSED_ELSEWHERE = [
    ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n",
     ("no --account\n", "show assoc user=$USER`", "--account NAME")),
    ("allocation failure: Invalid qos specification\n", ("no --qos\n", "user=$USER format=account,qos", "--qos NAME")),
    ("sbatch: error: QOSMaxNodePerJobLimit\nsbatch: error: Batch job submission failed: Job violates accounting/QOS "
     "policy (job submit limit, user's size and/or time limits)\n", ("sacctmgr show qos", "show assoc", "--nodes")),
    ("sbatch: error: job_submit.lua: name your project with --account\n",
     ("job_submit.lua: name your project with --account", "--nodes=1 --time=01:00:00")),
    ("", ("no reason given",)),
]  # fmt: skip


@pytest.mark.parametrize(("said", "facts"), REFUSED_ELSEWHERE)
def test_refusals_of_other_clusters_have_a_remedy(said, facts):
    explained = explain_refusal(said, batch_job(RUN_DIR, time_limit_s=3600), found())
    assert [fact for fact in facts if fact not in explained] == []


# Reasons of Slurm 22.05 with EnforcePartLimits=NO, and of https://slurm.schedmd.com/job_reason_codes.html.
REASONS = [
    ("Job's account not known, so it can't use this partition (gpu allows vision)", "--account NAME"),
    ("Job's QOS not permitted to use this partition (gpu allows long not normal)", "--qos NAME"),
    ("AccountNotAllowed", "`scontrol show partition 'g p u'`"),
    ("PartitionConfig", "`scontrol show partition 'g p u'`"),
    ("PartitionTimeLimit", "h100 allows 2-00:00:00"),
    ("QOSMaxWallDurationPerJobLimit", "sacctmgr show qos"),
    ("QOSMaxNodePerJobLimit", "--nodes"),
    ("AssocMaxGRESPerJob", "--gpus-per-node"),
    ("Priority", None), ("None", None), ("QOSMaxGRESPerUser", None), ("AssocGrpGRES", None), ("Dependency", None),
    ("JobHeldUser", None), ("", None),
]  # fmt: skip


@pytest.mark.parametrize(("reason", "fact"), REASONS)
def test_a_job_that_slurm_accepts_and_never_starts_is_cancelled_and_refused(tmp_path: Path, reason, fact):
    programs = {"sbatch": "echo '7;aurora'", "squeue": 'echo "$REASON"', "scancel": f'echo "$*" >>"{tmp_path}/log"'}
    for name, text in programs.items():
        write_program(tmp_path / name, f"#!/bin/sh\n{text}\n")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "REASON": reason}
    job = batch_job(tmp_path, partition="g p u", time_limit_s=3600)
    if fact is None:
        assert submit_script(tmp_path / "train.sbatch", job, found(), environment=environment) == "7"
        assert not (tmp_path / "log").exists()
        return
    with pytest.raises(InputError) as refused:
        submit_script(tmp_path / "train.sbatch", job, found(), environment=environment)
    message = str(refused.value)
    assert message.startswith(f"Slurm refuses this job: it would never start ({reason})\n") and fact in message
    assert message.count("\n") <= 2 and (tmp_path / "log").read_text() == "7\n"


def test_a_controller_that_is_down_and_a_missing_sbatch_are_environment_faults(slurm: SlurmCluster, tmp_path: Path):
    config = tmp_path / "slurm.conf"
    text = (slurm.folder / "slurm.conf").read_text()
    config.write_text(text.replace("SlurmctldPort=6817", "SlurmctldPort=6999").replace("Timeout=5", "Timeout=1"))
    job = batch_job(tmp_path / "run")
    with pytest.raises(EnvironmentFaultError, match="controller"):
        check_script(render_script(job), job, None, environment={**slurm.environment, "SLURM_CONF": str(config)})
    with pytest.raises(EnvironmentFaultError, match="login node"):
        check_script("", job, None, environment={"PATH": str(tmp_path)})


def test_variables_that_would_override_the_script_are_removed():
    """And a variable for what the script leaves to the site goes along."""
    outside = {
        "SBATCH_PARTITION": "other", "SBATCH_TIMELIMIT": "1", "SBATCH_ACCOUNT": "proj", "SBATCH_NO_REQUEUE": "1",
        "SBATCH_MEM_PER_CPU": "1G", "SLURM_JOB_ID": "7", "SLURM_CONF": "/c", "HF_TOKEN": "t", "PATH": "/bin",
    }  # fmt: skip
    job = batch_job(RUN_DIR, partition="h100", time_limit_s=3600)
    assert set(submit_environment(outside, job)) == {"SBATCH_ACCOUNT", "SLURM_CONF", "HF_TOKEN", "PATH"}
    assert "SBATCH_ACCOUNT" not in submit_environment(outside, batch_job(RUN_DIR, account="mine"))


def test_the_script_overrules_the_environment(slurm: SlurmCluster, tmp_path: Path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    job = batch_job(run_dir, partition="low", time_limit_s=600, extra=("--hold",))
    (run_dir / "train.sbatch").write_text(render_script(job))
    outside = {**slurm.environment, "SBATCH_PARTITION": "gpu", "SBATCH_TIMELIMIT": "1", "SBATCH_SIGNAL": "TERM"}
    shown = slurm.job(submit_script(run_dir / "train.sbatch", job, None, environment=outside)).text
    assert " Partition=low " in shown and " TimeLimit=00:10:00 " in shown
