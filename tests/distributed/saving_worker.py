"""One rank that saves and resumes under the engines of several plans, and looks at the memory that takes.

    torchrun ... saving_worker.py PLAN.json [...]

Leaves `memory-RANK.json` beside each plan: the largest anonymous bytes above the level before, while a checkpoint is
saved after one step, and while it is loaded into an engine that was built anew, above what that engine holds after it.
"""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

from msgspec.structs import replace
from rank_process import Peak, attempt, end_group

from shardwise.trainer.runtime.checkpoint import Save, find_checkpoint, import_state
from shardwise.trainer.runtime.loop.course import train
from shardwise.trainer.runtime.loop.session import build_session, facts_of
from shardwise.trainer.runtime.run.state import ReportWriter, RunState, run_paths
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan


def main(arguments: list[str]) -> None:
    rank = int(os.environ["RANK"])
    for path in map(Path, arguments):
        plan = codec.read(path, Plan)
        paths = run_paths(path, started_at=datetime.now(UTC))
        with attempt():
            train(plan, paths, ReportWriter(paths, rank=rank), RunState(), lambda: False)
        with attempt():
            path.with_name(f"memory-{rank}.json").write_text(json.dumps(measure(plan, paths, rank)))
    end_group()


def measure(plan: Plan, paths, rank: int) -> dict[str, int]:
    sharding, state = plan.chosen.strategy.sharding, RunState()
    session = build_session(plan, paths, ReportWriter(paths, rank=rank), state)
    checkpoint = find_checkpoint(paths.run_dir / "checkpoints", on_skip=print, ranks=session.ranks)
    assert checkpoint is not None
    with Peak() as loading:
        import_state(session.model, session.optimizer, checkpoint, sharding=sharding)
    with Peak() as saving:
        Save(
            paths.run_dir / "again", model=session.model, optimizer=session.optimizer, sharding=sharding,
            facts=replace(facts_of(plan, state), step=1), ranks=session.ranks, keep=1,
        ).run()  # fmt: skip
    return {"loading": loading.highest - loading.at_end, "kept": loading.at_end, "saving": saving.highest}


if __name__ == "__main__":
    main(sys.argv[1:])
