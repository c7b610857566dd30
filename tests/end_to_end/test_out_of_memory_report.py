"""An attempt that runs out of memory leaves a report for a person, whatever follows."""

from pathlib import Path

from fault_factory import Fault, halves, run_plan, with_faults
from msgspec.structs import replace
from rank_factory import rank_plan, write_rows
from workplace_factory import Workplace

from shardwise.launch.run.trials import short_plan
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.messages.rank_files import MemoryState, memory_state_path
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import LossHead


def capped_plan(place: Workplace) -> Plan:
    """A real one: a data limit on the process refuses what the plan thought was there."""
    place.write_job(train={"steps": 2, "seq_len": 128, "tokens_per_step": 65536}, pin={"loss": "eager"})
    place.run("train", "job.yaml", "--dry-run", "--run-dir", "made")
    plan = codec.read(place.folder / "made" / "plan.json", Plan)
    plan = replace(plan, hardware=replace(plan.hardware, vram_cap_bytes=2**20))
    return replace(short_plan(plan, plan.chosen, num_steps=3), candidates=plan.candidates)


def words_of(path: Path) -> str:
    return " ".join(path.read_text().split())


def test_memory_that_runs_out_on_a_cpu_is_told_with_its_limit_and_what_would_fit(workplace, tmp_path):
    plan = capped_plan(workplace)
    outcome, printed = run_plan(plan, tmp_path / "run", environment=workplace.environment)
    assert outcome.exit_code is ExitCode.OUT_OF_MEMORY, printed
    path = tmp_path / "run" / "attempts" / "1" / "out-of-memory.txt"
    assert str(path) in printed
    state = codec.read(memory_state_path(path.parent, 0), MemoryState)
    assert (state.step, state.phase) in [(1, "forward"), (1, "backward")]
    assert state.tensors["weights"] > 50_000 and state.data_limit_bytes and state.host_bytes
    text = words_of(path)
    assert f"{state.phase} of step 1" in text
    assert "data limit" in text and "micro batch 128 x 4" in text, "what would need less"


def test_the_report_names_the_fallback_that_comes_next(tmp_path):
    rows = write_rows(tmp_path / "rows")
    made = rank_plan(rows, Sharding.NONE, num_ranks=1, micro_batch=8, accumulation=1, num_steps=2, loss=LossHead.EAGER)
    plan = with_faults(replace(made, fallbacks=halves(made.chosen)[:1]), tmp_path, [Fault("oom in backward", 0, 1)])
    outcome, printed = run_plan(plan, tmp_path / "run")
    assert outcome.exit_code is ExitCode.DONE, printed
    text = words_of(tmp_path / "run" / "attempts" / "1" / "out-of-memory.txt")
    assert "backward of step 1" in text
    assert "OutOfMemoryError" in text and "micro batch 4 x 2" in text
    assert not (tmp_path / "run" / "attempts" / "2" / "out-of-memory.txt").exists()
