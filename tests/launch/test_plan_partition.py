"""`shardwise plan --partition` as it is typed on a login node: against captured clusters, and a real one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from planning_factory import machine
from slurm_texts import install_slurm
from typed_command import Answer, Run, in_empty_home, typed, write_rows

from shardwise.launch.plan.partition import sbatch_option
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.plan import Plan

JOB = """\
model: {{name: llama-3.2-1b}}
data: {{train: {data}, eval: none}}
train: {{seq_len: 1024, tokens_per_step: 524288, tokens: 2G}}
limits: {{hours: 100}}
{more}
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`shardwise plan job.yaml -v WORDS` in an empty home, on a login node of `cluster`."""
    in_empty_home(tmp_path, monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "bin").mkdir()

    def planned(*words: str, cluster: str = "fake_nodes", more: str = "") -> Answer:
        for name, value in install_slurm(tmp_path / "bin", cluster).items():
            monkeypatch.setenv(name, value)
        job = tmp_path / "job.yaml"
        job.write_text(JOB.format(data=write_rows(tmp_path), more=more))
        return typed(capsys, "plan", str(job), "-v", *words)

    return planned


def test_a_plan_for_a_partition_compares_numbers_of_nodes(run: Run) -> None:
    answer = run("--partition", "gpu", "--nodes", "2")
    assert (answer.code, answer.err) == (ExitCode.DONE, "")
    assert answer.out.splitlines()[0].endswith(" on 2 nodes of 8 x A100-SXM4-80GB")
    title = next(line for line in answer.out.splitlines() if line.startswith("nodes: "))
    assert title.startswith("nodes: 2 are 1.") and title.endswith("; gpu allows 4") and ", 4 are 3." in title
    facts = (
        "on 2 nodes: ", " 2-00:00:00: one job", "4 nodes of 8 x A100-SXM4-80GB (128 cores, 1003 GiB RAM)",
        "A100-SXM4-80GB, A100-PCIe-80GB: the first", "assumed from the catalogue", "`shardwise submit --dry-run`",
    )  # fmt: skip
    assert [fact for fact in facts if fact not in answer.text] == []


def test_one_node_is_the_default_a_long_run_is_several_jobs_and_a_probe_gives_the_rest(
    run: Run, tmp_path: Path
) -> None:
    answer = run("--partition", "gpu", "slurm.time=0:30:00")
    assert answer.out.splitlines()[0].endswith(" on 8 x A100-SXM4-80GB")
    assert "on 1 node: " in answer.text and " 00:30:00: " in answer.text and " jobs, " in answer.text
    too_long = run("--partition", "gpu", "slurm.time=3-00:00:00")
    assert re.search(r"slurm\.time 3-00:00:00 .*gpu .*2-00:00:00", too_long.text)
    hardware = machine("8xH100-SXM5-80GB", libraries=("a-library-of-the-node",))
    codec.write(tmp_path / "hw.json", hardware)
    probed = run("--partition", "pretend", "--hardware", str(tmp_path / "hw.json"), "--json")
    assert codec.decode(probed.out.encode(), Plan, origin="stdout").hardware.libraries == hardware.libraries


CONSTRAINTS = {
    ("--constraint=a100",): "a100", ("--constraint a100&ib",): "a100&ib", ("--constraint", "a100"): "a100",
    ("-C a100",): "a100", ("-Ca100",): "a100", ("--comment=x", "-C", "a100"): "a100", ("--cpus-per-task=4",): None,
    ("--constraint",): None, (): None,
}  # fmt: skip


def test_a_constraint_and_a_share_of_a_node_are_those_of_the_line_or_of_the_job(run: Run) -> None:
    answer = run("--partition", "gpu", "--constraint", "hbm40g", "slurm.gpus=2")
    assert answer.out.splitlines()[0].endswith(" on 2 x A100-SXM4-40GB")
    assert "2 GPUs, 64 cores, 251 GiB RAM" in answer.text
    for more in ("slurm: {constraint: hbm40g}", "slurm: {extra: [--constraint=hbm40g]}", "slurm: {extra: [-C hbm40g]}"):
        assert run("--partition", "gpu", more=more).out.splitlines()[0].endswith(" on 4 x A100-SXM4-40GB")
    assert {extra: sbatch_option(extra, "--constraint", "-C") for extra in CONSTRAINTS} == CONSTRAINTS


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (("--partition", "gpx"), ExitCode.INPUT, ("no such partition", "did you mean gpu?", "debug, low, gpu")),
        (("--partition", "closed"), ExitCode.ENVIRONMENT, ("partition closed is DOWN",)),
        (("--partition", "pretend"), ExitCode.INPUT, ("gpu:8", "--hardware 8x", "srun --partition=pretend")),
        (("--partition", "gpu", "--constraint", "b200"), ExitCode.INPUT, ("--constraint b200", "hbm80g")),
    ],
)
def test_errors_are_three_lines_at_most(run: Run, words: tuple[str, ...], code: ExitCode, expected: tuple[str, ...]):
    answer = run(*words)
    assert answer.code == code, answer
    assert len(answer.err.splitlines()) <= 3 and not answer.out
    assert [part for part in expected if part not in answer.err] == []


def test_a_login_node_plans_for_the_partition_of_the_job_and_no_other_machine_does(run: Run, monkeypatch) -> None:
    more = "slurm: {partition: gpu, nodes: 3}"
    answer = run(more=more)
    assert answer.out.splitlines()[0].endswith(" on 3 nodes of 8 x A100-SXM4-80GB")
    assert re.search(r"partition gpu.*\(slurm\.partition\)", answer.text)
    other = run("--hardware", "1xRTX-4090", more=more)
    assert other.out.splitlines()[0].endswith(" on 1 x RTX-4090") and "partition gpu" not in other.text
    assert run("--nodes", "2", more=more).out.splitlines()[0].endswith(" on 2 nodes of 8 x A100-SXM4-80GB")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    answer = run("train.tokens=1M", more=more)
    assert "A100" not in answer.out and "partition gpu" not in answer.out


def test_other_plans_load_nothing_of_it(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(JOB.format(data=write_rows(tmp_path), more=""))
    script = (
        "import sys; from shardwise.launch.cli import main; "
        f"code = main(['plan', {str(job)!r}, '--hardware', '1xRTX-4090']); "
        "heavy = {'torch', 'shardwise.slurm.partition_hardware', 'shardwise.slurm.queries', 'subprocess'}; "
        "sys.exit(code or ', '.join(heavy & set(sys.modules)) or 0)"
    )
    argv = [sys.executable, "-c", script]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env={"HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
