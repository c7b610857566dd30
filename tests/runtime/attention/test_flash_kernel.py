"""A kernel of the hub for flash: how it is loaded, that it is the one that was named, and that a rank trains on it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from architecture_factory import TINY
from attempt_runs import losses_of
from hub_kernel_factory import COMMIT, KERNEL, REPOSITORY, hub_environment, put_kernel
from rank_factory import rank_plan, write_attempt, write_packed_rows
from transformers.utils.import_utils import is_kernels_available

from shardwise.trainer.runtime.attention.choice import attention_name, check_attention
from shardwise.trainer.runtime.attention.flash_kernel import load_flash_kernel, main
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Report
from shardwise.trainer.spec.strategy import Attention, LossHead

OTHER, MISSING, FOREIGN, OPEN = (digit * 40 for digit in "abcd")
FINDS_KERNELS = pytest.mark.cold  # transformers looks for the package when it is imported
LOADS_EACH = """
import json, sys
from shardwise.trainer.runtime.attention.flash_kernel import load_flash_kernel
from shardwise.trainer.spec.errors import EnvironmentFaultError
answers = []
for name in sys.argv[1:]:
    try:
        answers.append(load_flash_kernel(name))
    except EnvironmentFaultError as error:
        answers.append(str(error))
json.dump(answers, sys.stdout)
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """Three commits: one that runs here, one that is built for others, one that runs another kernel."""
    folder = tmp_path_factory.mktemp("hub")
    put_kernel(folder)
    put_kernel(folder, FOREIGN, variant="torch29-cxx11-cu130-x86_64-linux")
    depends: dict[str, Any] = {"kernel-depends": [{"repo-id": "some/kernel", "version": 1}]}
    put_kernel(folder, OPEN, **depends)
    return folder


def loaded(cache: Path, *commits: str, **settings: str) -> list[list[str] | str]:
    """What loading each commit in one process gives: the kernel and the build, or the message."""
    names = [f"{REPOSITORY}@{commit}" for commit in commits]
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADS_EACH, *names],
        env=hub_environment(cache, TRANSFORMERS_VERBOSITY="error", **settings),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_name_is_the_pinned_kernels_for_flash_alone():
    assert attention_name(Attention.FLASH, KERNEL) == KERNEL
    assert attention_name(Attention.SDPA, KERNEL) == "sdpa"


@pytest.mark.skipif(is_kernels_available(), reason="kernels is installed")
def test_without_the_package_the_line_that_installs_it_is_given():
    facts = rf"{KERNEL} (?s:.*)pin\.attention=sdpa(?s:.*)-m pip install 'shardwise\[hub-kernels\]'"
    with pytest.raises(EnvironmentFaultError, match=facts):
        load_flash_kernel(KERNEL)
    with pytest.raises(EnvironmentFaultError, match=facts):
        check_attention(Attention.FLASH, read_model_shape(TINY["llama"]), KERNEL)


@FINDS_KERNELS
def test_what_is_in_the_cache_is_loaded_and_what_cannot_run_is_refused_with_the_next_step(cache):
    found, missing, foreign, chained = loaded(cache, COMMIT, MISSING, FOREIGN, OPEN)
    assert found == [KERNEL, "torch-cpu"]
    assert f"{REPOSITORY}@{MISSING}" in missing and "HF_HOME" in missing
    assert (
        f"HF_HUB_OFFLINE=0 python -m shardwise.trainer.runtime.attention.flash_kernel {REPOSITORY}@{MISSING}\n"
        in missing
    )
    assert f"{REPOSITORY}@{FOREIGN}" in foreign and f"a build for torch {torch.__version__}" in foreign
    if not is_kernels_available():  # the package itself would go and look for the other one
        assert f"{REPOSITORY}@{OPEN}" in chained and "some/kernel" in chained


@FINDS_KERNELS
def test_a_folder_in_the_place_of_the_kernel_is_not_taken_for_it(cache, tmp_path):
    put = put_kernel(tmp_path, OTHER)
    (result,) = loaded(cache, COMMIT, LOCAL_KERNELS=f"{REPOSITORY}={put}")
    assert all(fact in result for fact in (KERNEL, f"{put / 'build' / 'torch-cpu'}", "unset LOCAL_KERNELS"))


@pytest.mark.skipif(is_kernels_available(), reason="kernels is installed")
def test_the_process_that_fetches_ends_with_the_code_of_its_error(capsys):
    assert main([KERNEL]) == ExitCode.ENVIRONMENT
    assert KERNEL in capsys.readouterr().err
    assert main([]) == ExitCode.INPUT
    assert "OWNER/flash-attn2@COMMIT" in capsys.readouterr().err


def plan_with(cache_dir: Path, attention: Attention, flash_kernel: str | None = None) -> Plan:
    return rank_plan(
        cache_dir, num_steps=4, micro_batch=2, accumulation=4, loss=LossHead.FUSED, attention=attention,
        flash_kernel=flash_kernel,
    )  # fmt: skip


def trained(run_dir: Path, plan: Plan, environment: dict[str, str]) -> tuple[Report, list[float]]:
    """The report of a rank, and the loss of each step."""
    plan_path = write_attempt(run_dir, plan)
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.trainer", str(plan_path)],
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return codec.read(plan_path.with_name("report.json"), Report), losses_of(run_dir)


@FINDS_KERNELS
def test_a_rank_trains_packed_rows_on_the_kernel_and_reports_its_commit_and_build(cache, tmp_path):
    """The losses are those of PyTorch's attention, so documents were separated."""
    rows = write_packed_rows(tmp_path / "rows")
    report, losses = trained(tmp_path / "flash", plan_with(rows, Attention.FLASH, KERNEL), hub_environment(cache))
    assert report.verified is not None
    assert report.verified.attention == KERNEL
    assert report.verified.facts["flash"] == "build torch-cpu"
    _, expected = trained(tmp_path / "sdpa", plan_with(rows, Attention.SDPA), dict(os.environ))
    assert losses == pytest.approx(expected, rel=1e-5)
