"""What decides how ranks meet is kept; no secret is."""

import json
from pathlib import Path

from launch.attempt.local_ranks import write_environment

ENVIRONMENT = {
    "SLURM_JOB_ID": "7",
    "NCCL_SOCKET_IFNAME": "ib0",
    "CUDA_VISIBLE_DEVICES": "0,1",
    "PATH": "/bin",
    "https_proxy": "http://me:swordfish-9@proxy:3128",
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwxyz",
    "WANDB_API_KEY": "1234",
    "SLURM_JWT_TOKEN": "abc",
    "MY_DIARY": "private",
    "LS_COLORS": "rs=0",
    "SHARDWISE_CACHE": "/scratch/canary-canary/x",
    "BACKUP_PASSWORD": "canary-canary",
}


def test_variables_that_ranks_connect_by_are_recorded_without_secrets(tmp_path: Path):
    write_environment(tmp_path, ENVIRONMENT, node_rank=1)
    text = (tmp_path / "environment-1.json").read_text()
    for secret in ("swordfish", "hf_abc", "canary", "1234", "abc"):
        assert secret not in text
    variables = json.loads(text)["variables"]
    assert list(variables) == [
        "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "PATH", "SHARDWISE_CACHE", "SLURM_JOB_ID", "https_proxy",
    ]  # fmt: skip
    assert variables["https_proxy"] == "http://[redacted]@proxy:3128" and variables["SLURM_JOB_ID"] == "7"
