"""What a cluster with accounts grants: of a plan on a login node, and of what `shardwise submit` asks for."""

from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_texts import install_slurm

from shardwise.launch.cli import main
from shardwise.launch.plan.partition import read_partition_hardware
from shardwise.trainer.spec.errors import ExitCode

JOB = """\
model: {{name: llama-3.2-1b}}
data: {{train: {data}, eval: none}}
train: {{seq_len: 1024, tokens_per_step: 65536, tokens: 20M}}
"""
TAKES = "#!/bin/sh\necho 'sbatch: Job 7 to start at 2026-11-22T21:11:00 using 64 processors on nodes a1' >&2\n"

Submit = Callable[..., tuple[int, str, str]]


@pytest.fixture
def login_as(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, str]]:
    """Makes this a login node of the captured cluster with accounts, and the user one of its users."""
    environment = install_slurm(tmp_path, "aurora")
    (tmp_path / "sbatch").write_text(TAKES)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("SHARDWISE_CACHE", "SHARDWISE_SITE_CONFIG", "XDG_CACHE_HOME", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)

    def login(user: str) -> dict[str, str]:
        for name, value in {**environment, "LOGNAME": user}.items():
            monkeypatch.setenv(name, value)
        return environment

    return login


@pytest.fixture
def submit(tmp_path: Path, login_as, capsys: pytest.CaptureFixture[str]) -> Submit:
    """`shardwise submit job.yaml --dry-run --partition WORDS` of a user: exit code, script, and what else was said."""
    (tmp_path / "rows.txt").write_text("a row of text\n" * 1000)
    (tmp_path / "job.yaml").write_text(JOB.format(data=tmp_path / "rows.txt"))

    def typed(user: str, words: str) -> tuple[int, str, str]:
        login_as(user)
        code = main(["submit", str(tmp_path / "job.yaml"), "--dry-run", "--partition", *words.split(" ")])
        return code, *capsys.readouterr()

    return typed


def options(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH ")]


def test_the_limits_are_those_of_the_qos_a_job_runs_under(login_as) -> None:
    environment = login_as("alice")
    for qos, limits in {None: (3, 3 * 86400), "long": (2, 5 * 86400), "debug": (1, 1800)}.items():
        found = read_partition_hardware("gpu", nodes=1, qos=qos, environment=environment)
        assert (found.num_allowed_nodes, found.time_limit_s) == limits  # 12 GPUs a user; the account's MaxWall
    assert len(found.hardware.gpus) == 2
    assert any("theory, vision" in note and "debug, long, normal" in note for note in found.hardware.notes)


def test_limits_that_are_not_enforced_do_not_count(login_as, tmp_path: Path) -> None:
    environment = login_as("alice")
    program = (tmp_path / "scontrol").read_text()
    config = "AccountingStorageEnforce = none\\nClusterName = aurora"
    (tmp_path / "scontrol").write_text(
        program.replace('case "$*" in', f'case "$*" in\n"show config") printf "{config}\\n"; exit ;;', 1)
    )
    answer = read_partition_hardware("staff", nodes=4, environment=environment)
    assert answer.access is None and "accounts" in answer.hardware.notes[-1]
    assert read_partition_hardware("gpu", nodes=4, environment=environment).time_limit_s == 7 * 86400


@pytest.mark.parametrize(
    ("user", "words", "fact"),
    [
        ("alice", "staff", "account staff"),
        ("alice", "gpu slurm.extra=[-Aguests]", "account guests"),
        ("carol", "gpu", "no account for partition gpu"),
        ("alice", "gpu --qos long --nodes 3", "QOS long: 2 nodes"),
        ("alice", "gpu --qos debug --time 2:00:00", "00:30:00"),
    ],
)
def test_a_job_that_would_never_start_is_refused(submit: Submit, user: str, words: str, fact: str) -> None:
    code, out, err = submit(user, words)
    assert code == ExitCode.INPUT and fact in err and out == ""


@pytest.mark.parametrize(
    ("user", "words", "stated"),
    [
        ("alice", "gpu", []),
        ("alice", "gpu --account theory --qos debug", ["--account=theory", "--qos=debug"]),
        ("alice", "long", ["--qos=long"]),  # the default would not do
        ("alice", "theory --qos long", ["--account=theory", "--qos=long"]),
        ("bob", "gpu", ["--account=vision"]),
        ("bob", "staff", []),
    ],
)
def test_an_account_and_a_qos_are_stated_where_the_default_would_not_do(submit: Submit, user, words, stated) -> None:
    code, script, _ = submit(user, words)
    assert code == ExitCode.DONE
    assert [option for option in options(script) if option.startswith(("--account", "--qos"))] == stated


def test_a_job_requests_no_more_than_its_limits_allow(submit: Submit) -> None:
    code, script, _ = submit("bob", "gpu")  # 2 GPUs and 24 cores a job
    asked = options(script)
    assert code == ExitCode.DONE and "--exclusive" not in asked
    assert {"--gpus-per-node=a100:2", "--cpus-per-task=24", "--mem=250000M"} <= set(asked)
    assert " on 2 x A100" in script.splitlines()[1]
    code, script, _ = submit("alice", "gpu")
    assert {"--gpus-per-node=a100:4", "--exclusive"} <= set(options(script))
