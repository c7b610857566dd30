"""The tiny run saving in the background, for test_background; as a program, what must die or be several ranks.

python background_run.py crash ROOT POINT ...    one child per point, killed there (`random-N`: at a random moment)
python background_run.py ranks ROOT              two gloo ranks, answers in ROOT/answers-R.json
"""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_run as tiny
import torch
from torch.nn.parallel import DistributedDataParallel

from shardwise.trainer.runtime.checkpoint import Ranks, find_checkpoint, state_digest
from shardwise.trainer.runtime.checkpoint.save import BackgroundSave, Save
from shardwise.trainer.spec.errors import ShardwiseError
from shardwise.trainer.spec.strategy import Sharding


def begin(root: Path, model: torch.nn.Module, optimizer: object, step: int, **changed: Any) -> BackgroundSave:
    """A save of the tiny run, keeping 2."""
    settings: dict[str, Any] = {
        "sharding": Sharding.NONE, "facts": tiny.build_facts(step), "ranks": Ranks.alone(), "keep": 2,
    }  # fmt: skip
    return BackgroundSave(Save(root, model=model, optimizer=optimizer, **(settings | changed)))


def run_until(root: Path, last: int, *, on_point_of_4: Callable[[str], None] = lambda point: None) -> str:
    """Trains from the newest checkpoint (or the start) to step `last`, a save begun at every second step."""
    checkpoint = find_checkpoint(root, on_skip=lambda line: None)
    if checkpoint is None:
        model = tiny.build_model()
        optimizer, start = tiny.build_optimizer(model), 0
    else:
        model, optimizer = tiny.resume(checkpoint)
        start = checkpoint.step
    saving: BackgroundSave | None = None
    for step in range(start, last):
        tiny.train(model, optimizer, start=step, stop=step + 1)
        if saving is not None:
            saving.poll()
        if (step + 1) % 2 == 0:
            if saving is not None:
                saving.finish()
            points = {"on_point": on_point_of_4} if step + 1 == 4 else {}
            saving = begin(root, model, optimizer, step + 1, **points)
    if saving is not None:
        saving.finish()
    return tiny.digest(model, optimizer)


def _die_at(point: str) -> Callable[[str], None]:
    def on_point(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_point


def _crash(root: Path, points: list[str]) -> None:
    for point in points:
        is_random = point.startswith("random-")
        child = os.fork()
        if child == 0:
            run_until(root / point, 200 if is_random else 6, on_point_of_4=_die_at(point))
            os._exit(0)
        if is_random:
            time.sleep(random.Random(point).uniform(0.0, 0.6))
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _two_ranks(ranks: Ranks, root: Path) -> dict[str, object]:
    """Two ranks train on while they save; what was saved is of the step at which the save began."""
    plain = tiny.build_model()
    model = DistributedDataParallel(plain)
    optimizer = tiny.build_optimizer(plain)
    answers: dict[str, Any] = {}

    def train_step(step: int) -> None:
        tiny.train(model, optimizer, start=step, stop=step + 1, rank=ranks.rank, world_size=2)

    def start(step: int, **changed: Any) -> BackgroundSave:
        settings = {"sharding": Sharding.DDP, "facts": tiny.build_facts(step), "ranks": ranks}
        return begin(root / "ddp", model, optimizer, step, **(settings | changed))

    train_step(0)
    answers["digest of 1"] = state_digest(model, optimizer, sharding=Sharding.DDP)
    saving = start(1, on_point=lambda point: time.sleep(0.5) if point == "mid-file" and ranks.rank else None)
    answers["polls"] = [saving.poll()]
    while not saving.poll():
        train_step(len(answers["polls"]))
        answers["polls"].append(False)
    answers["over"] = [saving.poll(), saving.is_over]

    def fail(point: str) -> None:
        if point == "mid-file" and ranks.rank:
            raise OSError(28, "No space left on device", "shard")

    saving = start(50, on_point=fail)
    try:
        saving.finish()
    except ShardwiseError as error:
        answers["failed"] = f"{type(error).__name__}: {error}"
    ranks.barrier()  # rank 0 removes what was staged
    answers["left"] = sorted(path.name for path in (root / "ddp").iterdir())
    start(51).finish()
    return answers


def main() -> None:
    torch.set_num_threads(1)
    command, root = sys.argv[1], Path(sys.argv[2])
    if command == "crash":
        _crash(root, sys.argv[3:])
    else:
        tiny._ranks(root, _two_ranks)


if __name__ == "__main__":
    main()
