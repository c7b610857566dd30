"""Ranks that run out of memory, die or hang: the run goes on, and learns what it would have learned."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fault_factory
import pytest
from fault_factory import Fault, halves, run_plan, with_faults
from kill_factory import Count, losses
from msgspec.structs import replace
from outcome_file import FAULTS
from rank_factory import rank_plan, write_rows
from workplace_factory import LIMIT_S

from shardwise.trainer.spec import codec, report
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending
from shardwise.trainer.spec.strategy import LossHead

NUM_STEPS = 14


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Two ranks, four sequences each, a checkpoint every second step, and fallbacks of two and one sequences."""
    made = rank_plan(
        write_rows(tmp_path_factory.mktemp("data") / "rows"), Sharding.DDP, num_ranks=2, micro_batch=4, accumulation=1,
        num_steps=NUM_STEPS, checkpoint_every_steps=2, loss=LossHead.EAGER,
    )  # fmt: skip
    return replace(made, fallbacks=halves(made.chosen))


@pytest.fixture(scope="module")
def undisturbed(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("undisturbed")
    outcome, _ = run_plan(with_faults(plan, folder, []), folder / "run")
    assert outcome.exit_code is ExitCode.DONE and outcome.report is not None
    assert [attempt.ending for attempt in outcome.report.history] == [Ending.FINISHED]
    return losses(folder / "run")


FINDS_HEADERS_AND_FAILS = '#!/bin/sh\ncase "$*" in *"-x c++ -"*) exit 0 ;; *) exit 1 ;; esac\n'


def test_a_rank_out_of_memory_a_dead_one_and_one_that_fails_are_named_and_the_run_goes_on(
    plan, undisturbed, tmp_path, monkeypatch
):
    """In one run; a fallback whose operator cannot be built is left out, when the run comes to it and not before."""
    program = tmp_path / "c++"
    program.write_text(FINDS_HEADERS_AND_FAILS)
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    two = plan.fallbacks[0]
    built = replace(two.strategy, name="zero2+optimizer/fp32/deepspeed_cpu_adam", sharding=Sharding.ZERO2,
                    offload=Offload.OPTIMIZER, optimizer=Optimizer.DEEPSPEED_CPU_ADAM)  # fmt: skip
    faults = [Fault("sigkill", 1, 4), Fault("oom in optimizer", 1, 3), Fault("error in backward", 0, 6)]
    faulty = replace(with_faults(plan, tmp_path, faults), fallbacks=(replace(two, strategy=built), two))
    outcome, printed = run_plan(faulty, tmp_path / "run")
    assert outcome.exit_code is ExitCode.DONE and outcome.report is not None, printed
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, abs=1e-5)
    killed, full, failed, finished = history = outcome.report.history
    assert [(each.micro_batch, each.accumulation) for each in history] == [(4, 1)] * 2 + [(2, 2)] * 2
    ran = [codec.read(tmp_path / f"run/attempts/{number}/plan.json", Plan).chosen for number in range(1, 5)]
    assert ran == [plan.chosen] * 2 + [two] * 2
    assert (killed.fault, killed.step) == (report.Fault.KILLED, 3)
    assert "rank 1" in killed.cause and "SIGKILL" in killed.cause
    assert (full.fault, full.resumed_from_step, full.step) == (report.Fault.OUT_OF_MEMORY, 2, 4)
    (incident,) = [line for line in outcome.report.incidents if line.startswith("out of memory at step ")]
    assert incident in printed
    reported = printed[printed.index(built.name) :]
    assert "cpu_adam could not be built" in reported and "log: " in reported
    assert failed.fault is report.Fault.ERROR and "RuntimeError: a bug in a kernel" in failed.cause
    assert (finished.fault, finished.ending, finished.resumed_from_step) == (None, Ending.FINISHED, 6)


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group below ours whose processes may hold 3 GiB: a supervisor, a launcher and a rank."""
    own = next((line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), None)
    group = Path("/sys/fs/cgroup/memory") / (own or "").rpartition(":")[2].lstrip("/") / f"shardwise-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(3 * 2**30))
    except OSError as error:
        pytest.skip(f"making a memory group (cgroups, version 1) needs root: {error}")
    yield group
    group.rmdir()


# A supervisor inside the group, as in a container or under Slurm.
INSIDE = """
import os, sys
from pathlib import Path
group, plan, run_dir, factories = map(Path, sys.argv[1:])
(group / "cgroup.procs").write_text(str(os.getpid()))
sys.path.append(str(factories))
from fault_factory import run_plan
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan
sys.exit(int(run_plan(codec.read(plan, Plan), run_dir)[0].exit_code))
"""


@pytest.mark.cold
@pytest.mark.long
@pytest.mark.kills
def test_a_rank_that_the_kernel_ends_for_want_of_ram_is_out_of_memory(
    plan, undisturbed, memory_group, tmp_path, record_property
):
    """A real kill by the kernel, which counts it, and which takes the rank rather than its supervisor."""
    strategy = replace(plan.chosen.strategy, name="none/fp32/adamw", sharding=Sharding.NONE)
    chosen = replace(plan.chosen, strategy=strategy, num_ranks=1, micro_batch=8)
    hardware = replace(plan.hardware, num_cpu_devices=1)
    alone = replace(plan, candidates=(chosen,), fallbacks=halves(chosen), hardware=hardware)
    codec.write(tmp_path / "plan.json", with_faults(alone, tmp_path, [Fault("out of RAM", 0, 4)]))
    factories = Path(fault_factory.__file__).parent
    argv = [sys.executable, "-c", INSIDE, memory_group, tmp_path / "plan.json", tmp_path / "run", factories]
    done = subprocess.run([*map(str, argv)], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr
    ended, finished = codec.read(tmp_path / "run" / "report.json", report.Report).history
    assert ended.fault is report.Fault.HOST_OUT_OF_MEMORY, ended
    assert "rank 0" in ended.cause
    assert (ended.micro_batch, finished.micro_batch, finished.resumed_from_step) == (8, 4, 2)
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, abs=1e-5)
    record_property(FAULTS, {"a control group out of memory": Count(1, 1).row()})


KINDS = ("oom in forward", "oom in backward", "oom in optimizer", "segfault", "exit", "hang in C", "stop")


@pytest.mark.long
@pytest.mark.kills
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 1])
def test_every_fault_on_every_rank_is_survived(plan, undisturbed, tmp_path, kind, rank, record_property):
    outcome, printed = run_plan(with_faults(plan, tmp_path, [Fault(kind, rank, 7)]), tmp_path / "run")
    assert outcome.exit_code is ExitCode.DONE and outcome.report is not None, printed
    broken, finished = outcome.report.history
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, abs=1e-5)
    assert finished.resumed_from_step == 6
    assert finished.micro_batch == (2 if kind.startswith("oom") else 4)
    words = {
        "segfault": (f"rank {rank}", "SIGSEGV"),
        "exit": (f"rank {rank}", "code 3"),
        "hang in C": (f"rank {rank}", "forward of step 7"),
        "stop": (f"rank {rank}", "forward of step 7"),
    }
    for fact in words.get(kind, ("OutOfMemoryError",)):
        assert fact in broken.cause
    record_property(FAULTS, {f"a rank: {kind}": Count(1, 1).row()})


@pytest.mark.long
@pytest.mark.kills
@pytest.mark.parametrize("sharding", [Sharding.FSDP, Sharding.ZERO2, Sharding.ZERO3])
def test_every_engine_survives(plan, undisturbed, tmp_path, sharding):
    strategy = replace(plan.chosen.strategy, sharding=sharding, base_config=sharding.facts.base_configs[Offload.NONE])
    chosen = replace(plan.chosen, strategy=strategy)
    sharded = replace(plan, candidates=(chosen,), fallbacks=halves(chosen))
    faults = [Fault("oom in backward", 1, 5), Fault("sigkill", 0, 6), Fault("hang", 1, 9)]
    outcome, printed = run_plan(with_faults(sharded, tmp_path, faults), tmp_path / "run")
    assert outcome.exit_code is ExitCode.DONE and outcome.report is not None, printed
    assert losses(tmp_path / "run") == pytest.approx(undisturbed, abs=1e-5)
    told = [(each.fault, each.resumed_from_step) for each in outcome.report.history]
    memory, killed, hung = report.Fault.OUT_OF_MEMORY, report.Fault.KILLED, report.Fault.HUNG
    assert told == [(memory, None), (killed, 4), (hung, 6), (None, 10)]
