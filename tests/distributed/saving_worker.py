"""One rank that saves and resumes under the engines of several plans, and looks at the memory that takes.

    torchrun ... saving_worker.py PLAN.json [...]

Leaves `memory-RANK.json` beside each plan: the largest anonymous bytes above the level before, while a checkpoint is
saved after one step, and while it is loaded into an engine that was built anew, above what that engine holds after it.
"""

import ctypes
import gc
import json
import os
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from msgspec.structs import replace

from shardwise.trainer.runtime.checkpoint import Save, find_checkpoint, import_state
from shardwise.trainer.runtime.loop.course import train
from shardwise.trainer.runtime.loop.memory_profile import anonymous_bytes
from shardwise.trainer.runtime.loop.session import build_session, facts_of
from shardwise.trainer.runtime.run.state import ReportWriter, RunState, run_paths
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import Plan

INTERVAL_S = 0.002


def main(arguments: list[str]) -> None:
    rank = int(os.environ["RANK"])
    for path in map(Path, arguments):
        plan = codec.read(path, Plan)
        paths = run_paths(path, started_at=datetime.now(UTC))
        run(
            lambda plan=plan, paths=paths: train(plan, paths, ReportWriter(paths, rank=rank), RunState(), lambda: False)
        )
        answer = run(lambda plan=plan, paths=paths: measure(plan, paths, rank))
        path.with_name(f"memory-{rank}.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def run(work):
    """Does the work in an environment of its own, and forgets Accelerate's state after it."""
    environment = dict(os.environ)
    answer = work()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.clear()
    os.environ.update(environment)
    return answer


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


class Peak:
    """The largest anonymous memory while a block runs, above the level before it."""

    def __enter__(self) -> "Peak":
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        self.level, self.highest, self._is_done = anonymous_bytes(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.at_end = anonymous_bytes() - self.level
        self._is_done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_done.is_set():
            self.highest = max(self.highest, anonymous_bytes() - self.level)
            time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main(sys.argv[1:])
