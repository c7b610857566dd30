"""The folder for state on NVMe: made for one attempt, held by it, gone after it, also where its owner was killed."""

import io
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from engine_plan_factory import engine_plan
from msgspec.structs import replace

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.engine.launcher import prepare_attempt
from shardwise.launch.engine.offload import (
    check_locked_memory,
    check_nvme,
    held_folder,
    nvme_folder,
    remove_stale_folders,
)
from shardwise.launch.run.attempts import run_attempts
from shardwise.launch.run.disk_needs import check_disk
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.job.sections import Job, Limits, NvmeLimit
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending

HOLDER = """
import sys, time
from pathlib import Path
from shardwise.launch.engine.offload import held_folder
with held_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def plan_under(path: Path, *, nvme_bytes: int = 0, size: int | None = None, offload=Offload.NVME_ALL) -> Plan:
    job = Job(limits=Limits(nvme=NvmeLimit(path=str(path), size=size)))
    plan = engine_plan(Sharding.ZERO3, offload, job=job)
    memory = replace(plan.chosen.memory, nvme_bytes=nvme_bytes)
    return replace(plan, candidates=(replace(plan.chosen, memory=memory),))


def test_deepspeed_is_told_the_folder_of_its_attempt(tmp_path: Path):
    plan = plan_under(tmp_path / "nvme")
    attempt = prepare_attempt(plan, plan.chosen, run_dir=tmp_path / "bot", resume=False)
    zero = msgspec.json.decode((attempt / "ds_config.json").read_bytes())["zero_optimization"]
    expected = str(tmp_path / "nvme" / "shardwise-bot-1")
    assert zero["offload_optimizer"]["nvme_path"] == zero["offload_param"]["nvme_path"] == expected
    in_memory = plan_under(tmp_path / "nvme", offload=Offload.OPTIMIZER_PARAMS)
    assert nvme_folder(in_memory, tmp_path / "bot", 1) is None


def test_a_folder_that_is_held_cannot_be_taken_and_goes_with_everything_in_it_however_the_attempt_ends(tmp_path: Path):
    folder = tmp_path / "nvme" / "shardwise-bot-1"
    with pytest.raises(RuntimeError), held_folder(folder):
        assert remove_stale_folders(folder.parent) == ()
        with pytest.raises(EnvironmentFaultError, match=str(folder)), held_folder(folder):
            pass  # somebody holds it
        (folder / "zero_stage_3").mkdir()
        (folder / "zero_stage_3" / "0_param.tensor.swp").write_bytes(b"weights")
        raise RuntimeError
    assert list((tmp_path / "nvme").iterdir()) == []


@pytest.mark.cold
def test_the_folder_of_a_killed_owner_is_removed_by_the_next_run(tmp_path: Path):
    folder = tmp_path / "shardwise-bot-1"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(folder)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder.stdout:
        assert holder.stdout.readline() == b"held\n"
        (folder / "left.swp").write_bytes(b"weights")
        assert remove_stale_folders(tmp_path) == ()
        holder.kill()
        holder.wait()
    with held_folder(tmp_path / "shardwise-bot-2"):
        assert not folder.exists()


def test_a_folder_that_cannot_hold_the_state_is_refused_with_both_numbers(tmp_path: Path):
    (tmp_path / "shardwise-bot-1").mkdir()
    (tmp_path / "shardwise-bot-1" / ".owner").touch()
    check_nvme(plan_under(tmp_path, nvme_bytes=2048))
    assert list(tmp_path.iterdir()) == [], "what a killed run left behind is made free before space is counted"
    with pytest.raises(EnvironmentFaultError, match=r"limits\.nvme\.path: .* 1024 TiB"):
        check_disk(plan_under(tmp_path, nvme_bytes=2**50), tmp_path / "run")
    with pytest.raises(EnvironmentFaultError, match=r"limits\.nvme\.size: 1 KiB .* needs 2 KiB"):
        check_nvme(plan_under(tmp_path, nvme_bytes=2048, size=1024))
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", Path("/proc")):  # a file; a folder in which no file can be opened with O_DIRECT
        with pytest.raises(EnvironmentFaultError, match=rf"limits\.nvme\.path: .*{folder}"):
            check_nvme(plan_under(folder))


def test_more_locked_memory_than_granted_is_named_with_how_to_raise_it(tmp_path: Path):
    with pytest.raises(EnvironmentFaultError, match=r"64 KiB.*\n.*ulimit -l"):
        check_locked_memory(plan_under(tmp_path), 64 * 1024)
    check_locked_memory(plan_under(tmp_path), None)


def test_an_attempt_starts_without_locks_of_dead_ranks_and_leaves_nothing_on_the_disk(tmp_path: Path):
    """A real launcher, whose rank fails because there is no data, before it would load an operator."""
    operators = tmp_path / "operators"
    lock = operators / "async_io" / "lock"
    lock.parent.mkdir(parents=True)
    for path in (lock, operators / "cpu_adam.built", operators / "async_io.built"):
        path.touch()
    (tmp_path / "bot").mkdir()
    plan, lines = plan_under(tmp_path / "nvme"), io.StringIO()
    outcome = run_attempts(
        replace(plan, data=replace(plan.data, cache_dir=str(tmp_path / "no-data"))), run_dir=tmp_path / "bot",
        resume=False, extensions_dir=operators, console=Console(lines), stop=StopRequest(),
    )  # fmt: skip
    assert outcome.report is not None and outcome.report.ending is Ending.FAILED
    assert "no-data" in (outcome.report.error or "")
    assert not lock.exists() and str(lock) in lines.getvalue()
    assert list((tmp_path / "nvme").iterdir()) == []
