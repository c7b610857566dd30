"""A tiny Llama trained by a plain loop, for the tests of this folder; as a program, what must die or be several ranks.

    python tiny_run.py crash ROOT POINT ...    one child per point, killed there (`random-N`: at a random moment)
    python tiny_run.py ranks ROOT              two gloo ranks through every case, answers in ROOT/answers-R.json
    python tiny_run.py lost-rank ROOT          two gloo ranks, the second killed in the middle of its file

Learning rate and batch are functions of the step, as in the real loop, so a resumed run has nothing else to restore.
Children are forked: torch and transformers are imported once.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from shardwise.trainer.runtime.checkpoint import (
    CheckpointFacts,
    CheckpointFolder,
    Ranks,
    Save,
    find_checkpoint,
    import_state,
    import_weights,
    state_digest,
)
from shardwise.trainer.spec.errors import ShardwiseError
from shardwise.trainer.spec.strategy import Optimizer, Precision, Sharding

VOCABULARY, SEQ_LEN, SEQUENCES = 127, 16, 4
CRASH_STEPS = (2, 4, 6)  # of the run that is killed: whole at 2, killed in the save of 4


def build_model(seed: int = 0, *, is_tied: bool = False) -> nn.Module:
    """Odd sizes on purpose: nothing divides by 2."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=18, intermediate_size=37, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=SEQ_LEN, tie_word_embeddings=is_tied, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def build_optimizer(model: nn.Module, kind: str = "foreach") -> torch.optim.Optimizer:
    """Two groups; AdamW as `foreach`, `fused` or `amsgrad`, or SGD as `sgd` or `momentum`."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1, "name": "decay"},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "name": "no_decay"},
    ]
    if kind in ("sgd", "momentum"):
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9 if kind == "momentum" else 0.0)
    settings = {"foreach": {"foreach": True}, "fused": {"fused": True}, "amsgrad": {"amsgrad": True}}[kind]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), **settings)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, start: int, stop: int, rank: int = 0, world_size: int = 1
) -> list[float]:
    """Losses of steps [start, stop) of the same global batch, split over the ranks."""
    losses = []
    for step in range(start, stop):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (step + 1) / 4)
        generator = torch.Generator().manual_seed(1000 + step)
        rows = torch.randint(0, VOCABULARY, (SEQUENCES, SEQ_LEN), generator=generator)[rank::world_size]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def build_facts(at: int, /, **changed: Any) -> CheckpointFacts:
    """Facts of the tiny run after so many steps."""
    fields: dict[str, Any] = {
        "run_name": "tiny", "step": at, "tokens_seen": at * SEQUENCES * SEQ_LEN, "seed": 0,
        "sequences_per_step": SEQUENCES, "tokens_per_step": SEQUENCES * SEQ_LEN, "model_config_sha256": "ab" * 32,
        "data_fingerprint": "rows-1", "optimizer": Optimizer.ADAMW, "sharding": Sharding.NONE, "world_size": 1,
        "precision": Precision.FP32,
    }  # fmt: skip
    return CheckpointFacts(**(fields | changed))


def save(root: Path, model: nn.Module, optimizer: object, step: int, **changed: Any) -> Path:
    """Saves the tiny run as a single process, keeping 2."""
    settings: dict[str, Any] = {
        "sharding": Sharding.NONE, "facts": build_facts(step), "ranks": Ranks.alone(), "keep": 2,
    }  # fmt: skip
    return Save(root, model=model, optimizer=optimizer, **(settings | changed)).run()


def digest(model: nn.Module, optimizer: object) -> str:
    return state_digest(model, optimizer, sharding=Sharding.NONE)


def resume(checkpoint: CheckpointFolder, kind: str = "foreach") -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of other random weights and a fresh optimizer, both filled from the checkpoint."""
    model = build_model(seed=99)
    import_weights(model, checkpoint)
    optimizer = build_optimizer(model, kind)
    import_state(model, optimizer, checkpoint, sharding=Sharding.NONE)
    return model, optimizer


def run_until(
    root: Path, last: int, *, on_point_at: tuple[int, Callable[[str], None]] | None = None, keep: int = 1
) -> str:
    """Trains from the newest checkpoint (or the start) to step `last`, saving every second step; the digest there."""
    checkpoint = find_checkpoint(root, on_skip=lambda line: None)
    if checkpoint is None:
        model = build_model()
        optimizer, start = build_optimizer(model), 0
    else:
        model, optimizer = resume(checkpoint)
        start = checkpoint.step
    for step in range(start, last, 2):
        train(model, optimizer, start=step, stop=step + 2)
        point_step, on_point = on_point_at or (0, lambda point: None)
        save(root, model, optimizer, step + 2, keep=keep, on_point=on_point if point_step in (0, step + 2) else _ignore)
    return digest(model, optimizer)


def _ignore(point: str) -> None:
    """Lets a save go on."""


def _die_at(point: str) -> Callable[[str], None]:
    def on_point(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_point


def _crash(root: Path, points: list[str]) -> None:
    for point in points:
        folder = root / point
        child = os.fork()
        if child == 0:
            _crash_child(folder, point)
            os._exit(0)
        if point.startswith("random-"):
            moments = random.Random(point)
            time.sleep(moments.uniform(0.0, 0.6))
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _crash_child(folder: Path, point: str) -> None:
    if point.startswith("random-"):
        run_until(folder, 200)
    elif point == "damaged-moved":
        run_until(folder, 4, keep=2)
        (folder / "step-00000004" / "MANIFEST.json").write_text("{")
        run_until(folder, 4, on_point_at=(4, _die_at(point)), keep=2)
    else:
        run_until(folder, 4, on_point_at=(4, _die_at(point)))


def fork_ranks(root: Path, body: Callable[[Ranks], None]) -> list[int]:
    """Two gloo ranks in processes of their own, forked so that nothing is imported again; their process ids."""
    store = root / f"store-{time.monotonic_ns()}"
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
                body(Ranks.distributed(timeout_s=60))
                status = 0
            finally:
                if status:
                    (root / f"error-{rank}.txt").write_text(traceback.format_exc())
                os._exit(status)
        children.append(child)
    return children


def wait_for_ranks(root: Path, children: list[int]) -> None:
    """Ends the program with the number of ranks that failed, and what they said; goes on where none did."""
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    if failed:
        sys.stderr.write("\n".join(path.read_text() for path in root.glob("error-*.txt")))
        sys.exit(failed)


def _ranks(root: Path, case: Callable[[Ranks, Path], dict[str, object]]) -> None:
    """Two gloo ranks that run `case`."""

    def body(ranks: Ranks) -> None:
        answers = case(ranks, root)
        (root / f"answers-{ranks.rank}.json").write_text(json.dumps(answers))
        dist.destroy_process_group()

    wait_for_ranks(root, fork_ranks(root, body))


def _every_case(ranks: Ranks, root: Path) -> dict[str, object]:
    """ROOT/single holds a checkpoint of step 3 that one process saved."""
    answers: dict[str, object] = {}
    skipped: list[str] = []
    checkpoint = find_checkpoint(root / "single", on_skip=skipped.append, ranks=ranks)
    assert checkpoint is not None
    plain = build_model(seed=40 + ranks.rank)
    import_weights(plain, checkpoint)
    model = DistributedDataParallel(plain)
    optimizer = build_optimizer(plain)
    import_state(model, optimizer, checkpoint, sharding=Sharding.DDP)
    answers["skipped"] = skipped
    answers["imported"] = state_digest(model, optimizer, sharding=Sharding.DDP)
    answers["losses"] = train(model, optimizer, start=3, stop=6, rank=ranks.rank, world_size=2)
    answers["trained"] = state_digest(model, optimizer, sharding=Sharding.DDP)

    def attempt(step: int, folder: str = "ddp", **changed: Any) -> str:
        settings: dict[str, Any] = {
            "optimizer": optimizer, "sharding": Sharding.DDP, "facts": build_facts(step), "ranks": ranks, "keep": 2,
        }  # fmt: skip
        try:
            return str(Save(root / folder, model=model, **(settings | changed)).run())
        except ShardwiseError as error:
            return f"{type(error).__name__}: {error}"

    answers["saved"] = attempt(6)
    answers["saved_again"] = attempt(6)
    if ranks.rank == 1:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    answers["full"] = attempt(7)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    norm = next(reversed(list(plain.parameters())))  # among the last in the file order: rank 1's share
    before = norm.detach().clone()
    norm.data.view(-1)[-1] = float("nan")
    answers["non_finite"] = attempt(8)
    norm.data.copy_(before)
    answers["unknown_optimizer"] = attempt(9, optimizer=torch.optim.RMSprop(plain.parameters()))
    answers["left"] = sorted(path.name for path in (root / "ddp").iterdir())
    answers["after"] = attempt(10)
    if ranks.is_first:
        shutil.rmtree(root / "ddp" / "step-00000010")
    ranks.barrier()
    answers["agree"] = [ranks.all_agree(True), ranks.all_agree(ranks.is_first)]
    answers["heard"] = [ranks.broadcast(b"from 0" if ranks.is_first else b"").decode(), ranks.broadcast(b"").decode()]
    answers["exchanged"] = [content.decode() for content in ranks.exchange(b"x" * ranks.rank)]
    answers["gathered"] = [content.decode() for content in ranks.gather(b"y" * (2 - ranks.rank))]
    return answers


def _lost_rank(ranks: Ranks, root: Path) -> dict[str, object]:
    model = build_model()
    optimizer = build_optimizer(model)
    train(model, optimizer, start=0, stop=2)
    save_all = partial(Save, root / "ddp", model=model, optimizer=optimizer, sharding=Sharding.DDP, ranks=ranks, keep=2)
    save_all(facts=build_facts(2)).run()
    train(model, optimizer, start=2, stop=4)
    on_point = _die_at("mid-file") if ranks.rank == 1 else _ignore
    save_all(facts=build_facts(4), on_point=on_point).run()
    return {}


def main() -> None:
    torch.set_num_threads(1)
    command, root = sys.argv[1], Path(sys.argv[2])
    if command == "crash":
        _crash(root, sys.argv[3:])
    elif command == "ranks":
        _ranks(root, _every_case)
    else:
        _ranks(root, _lost_rank)


if __name__ == "__main__":
    main()
