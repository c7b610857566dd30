"""Two gloo ranks of the tiny run that save every second step, one or both killed at a random moment, and resumed.

    python rank_kills.py reference ROOT STEPS     never killed; ROOT/digests.json: the state by step
    python rank_kills.py kill ROOT SEED ...       ROOT/SEED/outcome.json: who was killed, what was there, where it led

Every other seed saves in the background. A rank whose peer is gone is ended as well, as its supervisor would.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import tiny_run as tiny
import torch
from torch.nn.parallel import DistributedDataParallel

from shardwise.trainer.runtime.checkpoint import Ranks, find_checkpoint
from shardwise.trainer.runtime.checkpoint.load import begin_resumption
from shardwise.trainer.runtime.checkpoint.save import BackgroundSave, Save
from shardwise.trainer.spec.strategy import Sharding

MOST_STEPS = 400  # of a run that nobody kills
STEPS_AFTER = 4


def run(ranks: Ranks, root: Path, *, last: int, in_background: bool, digests: dict[int, str] | None = None) -> None:
    """Trains from the newest checkpoint, or the start, to step `last`; tells in `committed` what is safe by then."""
    resumption = begin_resumption(root / "checkpoints", check=lambda checkpoint: None, on_skip=_fail, ranks=ranks)
    plain = tiny.build_model(seed=0 if resumption is None else 40 + ranks.rank)
    model = DistributedDataParallel(plain)
    optimizer = tiny.build_optimizer(plain)
    start = 0
    if resumption is not None:
        resumption.load(model, optimizer, sharding=Sharding.DDP)
        start = resumption.checkpoint.step
    saving: BackgroundSave | None = None
    for step in range(start + 1, last + 1):
        tiny.train(model, optimizer, start=step - 1, stop=step, rank=ranks.rank, world_size=2)
        if saving is not None and saving.poll():
            _commit(root, ranks, saving.step)
            saving = None
        if digests is not None:
            digests[step] = tiny.digest(plain, optimizer)
        if step % 2:
            continue
        if saving is not None:
            saving.finish()
            _commit(root, ranks, saving.step)
        save = Save(
            root / "checkpoints", model=model, optimizer=optimizer, sharding=Sharding.DDP,
            facts=tiny.build_facts(step, sharding=Sharding.DDP, world_size=2), ranks=ranks, keep=2,
        )  # fmt: skip
        if in_background:
            saving = BackgroundSave(save)
        else:
            save.run()
            _commit(root, ranks, step)
    if saving is not None:
        saving.finish()


def _commit(root: Path, ranks: Ranks, step: int) -> None:
    if ranks.is_first:
        (root / "committed").write_text(str(step))


def _fail(line: str) -> None:
    raise AssertionError(line)


def reference(root: Path, last: int) -> None:
    def body(ranks: Ranks) -> None:
        digests: dict[int, str] = {}
        run(ranks, root, last=last, in_background=False, digests=digests)
        if ranks.is_first:
            (root / "digests.json").write_text(json.dumps(digests))

    tiny.wait_for_ranks(root, tiny.fork_ranks(root, body))


def kill(root: Path, seed: str) -> None:
    """One run that is killed and resumed."""
    root.mkdir(parents=True)
    moments = random.Random(seed)
    in_background = bool(int(seed) % 2)
    victims = moments.choice([(0,), (1,), (0, 1)])
    children = tiny.fork_ranks(root, lambda ranks: run(ranks, root, last=MOST_STEPS, in_background=in_background))
    time.sleep(moments.uniform(0.1, 1.2))
    for victim in victims:
        os.kill(children[victim], signal.SIGKILL)
    time.sleep(0.02)  # the other one may well be inside a collective, or a write
    for child in children:
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            continue
        os.waitpid(child, 0)
    committed = root / "committed"
    outcome: dict[str, object] = {
        "victims": victims,
        "in_background": in_background,
        "told": int(committed.read_text() or 0) if committed.exists() else 0,
    }
    checkpoint = find_checkpoint(root / "checkpoints", on_skip=_fail)
    outcome["newest"] = 0 if checkpoint is None else checkpoint.step
    if checkpoint is not None:
        outcome["digest"] = tiny.digest(*tiny.resume(checkpoint))
    last = int(str(outcome["newest"])) + STEPS_AFTER
    tiny.wait_for_ranks(
        root, tiny.fork_ranks(root, lambda ranks: run(ranks, root, last=last, in_background=in_background))
    )
    resumed = find_checkpoint(root / "checkpoints", on_skip=_fail)
    assert resumed is not None and resumed.step == last
    outcome["digest_after"] = tiny.digest(*tiny.resume(resumed))
    outcome["left"] = sorted(path.name for path in (root / "checkpoints").iterdir())
    (root / "outcome.json").write_text(json.dumps(outcome))


def main() -> None:
    torch.set_num_threads(1)
    command, root = sys.argv[1], Path(sys.argv[2])
    if command == "reference":
        root.mkdir(parents=True)
        reference(root, int(sys.argv[3]))
    else:
        for seed in sys.argv[3:]:
            kill(root / seed, seed)


if __name__ == "__main__":
    main()
