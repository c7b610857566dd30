"""One rank of the tests of moving: trains, or goes on from what another engine or another number of ranks saved.

    torchrun ... moving_worker.py PLAN.json[@RUN_DIR][#STEP] [...]

Of `PLAN.json@RUN_DIR` the newest checkpoint of RUN_DIR is loaded and saved again at once, by the engine of this plan,
in the plan's own run directory; then the plan is trained on from there. With `#STEP` it is stopped after that step.
Of incidents only 8-bit state that was coded anew is one of a move; all are kept in incidents.json.
"""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from shardwise.trainer.runtime.loop.course import train
from shardwise.trainer.runtime.run.state import ReportWriter, RunPaths, RunState, run_paths
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.report import Ending


def main(arguments: list[str]) -> None:
    for argument in arguments:
        argument, _, last = argument.partition("#")
        plan_path, _, source = argument.partition("@")
        plan = codec.read(Path(plan_path), Plan)
        paths = run_paths(Path(plan_path), started_at=datetime.now(UTC))
        if source:
            run(plan, msgspec.structs.replace(paths, resume_dir=Path(source)), last=0)
        run(plan, paths, last=int(last) if last else plan.schedule.num_steps)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def run(plan: Plan, paths: RunPaths, *, last: int) -> None:
    """Runs the plan as `trainer.__main__` does, until step `last` or at least to its first step boundary."""
    environment, state = dict(os.environ), RunState()
    rank = int(os.environ.get("RANK", "0"))
    writer = ReportWriter(paths, rank=rank)
    ending = train(plan, paths, writer, state, lambda: state.step >= last)
    assert ending is (Ending.FINISHED if last == plan.schedule.num_steps else Ending.STOPPED)
    assert all(each.startswith("8-bit optimizer state") for each in state.incidents), state.incidents
    if rank == 0:
        retained = paths.run_dir / "incidents.json"
        known = json.loads(retained.read_text()) if retained.exists() else []
        retained.write_text(json.dumps(known + state.incidents))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)


if __name__ == "__main__":
    main(sys.argv[1:])
