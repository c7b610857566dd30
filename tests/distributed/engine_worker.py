"""One rank of the engine tests: runs several attempts one after another in one process, as `trainer.__main__` runs one.

    torchrun ... engine_worker.py PLAN.json [PLAN.json ...]

Importing the libraries takes longer than training, so the engines of one library share a process group. Accelerate's
state is global: it is reset between attempts.
"""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path

from shardwise.trainer.runtime.run.state import ReportWriter, run_paths
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan


def main(
    plan_paths: list[str],
    around: Callable[[Path, int], AbstractContextManager[None]] = lambda path, rank: nullcontext(),
) -> None:
    """Runs the attempts, each inside what `around` makes of its plan's path and this rank."""
    import torch.distributed as dist
    from accelerate.state import AcceleratorState, GradientState

    from shardwise.trainer.runtime.loop.course import train
    from shardwise.trainer.runtime.run.state import RunState

    rank = int(os.environ.get("RANK", "0"))
    environment = dict(os.environ)
    for path in map(Path, plan_paths):
        paths = run_paths(path, started_at=datetime.now(UTC))
        state = RunState()
        with around(path, rank):
            train(codec.read(path, Plan), paths, ReportWriter(paths, rank=rank), state, lambda: False)
        assert state.verified is not None
        codec.write(path.with_name(f"engaged-{rank}.json"), state.verified)
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.clear()
        os.environ.update(environment)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
