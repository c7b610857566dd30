"""A tiny Llama trained by a plain loop, for the tests of this folder; as a program, what must die or be several ranks.

    python tiny_run.py crash ROOT NAME ...        one child for each waiting-POINT or background-POINT, killed there
    python tiny_run.py ranks ROOT                 two gloo ranks through every case, results in ROOT/results-R.json
    python tiny_run.py background-ranks ROOT      the same, training on while they save
    python tiny_run.py reference ROOT             two ranks that are never killed, the state by step as their results
    python tiny_run.py kill ROOT SEED ...         one or both of two ranks killed at a random moment, and resumed

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
from contextlib import suppress
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
from shardwise.trainer.runtime.checkpoint.folders import OnPoint
from shardwise.trainer.runtime.checkpoint.load import begin_resumption
from shardwise.trainer.runtime.checkpoint.save import BackgroundSave
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import ShardwiseError
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Precision

VOCABULARY, SEQ_LEN, SEQUENCES = 127, 16, 4
MOST_STEPS = 120  # of two ranks that are not killed


def build_model(seed: int = 0, **changed: Any) -> nn.Module:
    """Odd sizes on purpose: nothing divides by 2."""
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 18, "intermediate_size": 37, "num_hidden_layers": 1,
        "num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": SEQ_LEN, "use_cache": False,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**(config | changed)))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def build_optimizer(model: nn.Module, *, is_sgd: bool = False) -> torch.optim.Optimizer:
    """AdamW in two groups, or SGD with momentum."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1, "name": "decay"},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0, "name": "no_decay"},
    ]
    if is_sgd:
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), foreach=True)


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
    fields: dict[str, Any] = {
        "run_name": "tiny", "step": at, "tokens_seen": at * SEQUENCES * SEQ_LEN, "seed": 0,
        "sequences_per_step": SEQUENCES, "tokens_per_step": SEQUENCES * SEQ_LEN, "model_config_sha256": "ab" * 32,
        "data_fingerprint": "rows-1", "optimizer": Optimizer.ADAMW, "sharding": Sharding.NONE, "world_size": 1,
        "precision": Precision.FP32,
    }  # fmt: skip
    return CheckpointFacts(**(fields | changed))


def _save(root: Path, model: nn.Module, optimizer: object, step: int, **changed: Any) -> Save:
    settings: dict[str, Any] = {"sharding": Sharding.NONE, "facts": build_facts(step), "ranks": Ranks.alone()}
    return Save(root, model=model, optimizer=optimizer, **({"keep": 2} | settings | changed))


def save(root: Path, model: nn.Module, optimizer: object, step: int, **changed: Any) -> Path:
    return _save(root, model, optimizer, step, **changed).run()


def begin(root: Path, model: nn.Module, optimizer: object, step: int, **changed: Any) -> BackgroundSave:
    return BackgroundSave(_save(root, model, optimizer, step, **changed))


def digest(model: nn.Module, optimizer: object) -> str:
    return state_digest(model, optimizer, sharding=Sharding.NONE)


def resume(checkpoint: CheckpointFolder) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build_model(seed=99)
    import_weights(model, checkpoint)
    optimizer = build_optimizer(model)
    import_state(model, optimizer, checkpoint, sharding=Sharding.NONE)
    return model, optimizer


def _ignore(point: str) -> None:
    """Lets a save go on."""


def run_until(
    root: Path, last: int, *, ranks: Ranks | None = None, keep: int = 2, in_background: bool = False,
    on_point_of_4: OnPoint = _ignore, on_step: Callable[[int, str], None] | None = None,
    on_commit: Callable[[int], None] = lambda step: None,
) -> str:  # fmt: skip
    """Trains from the newest checkpoint, or the start, to step `last` and saves every second step; the last digest."""
    ranks = ranks or Ranks.alone()
    sharding = Sharding.DDP if ranks.world_size > 1 else Sharding.NONE
    resumption = begin_resumption(root, check=lambda found: None, on_skip=lambda line: None, ranks=ranks)
    plain = build_model(seed=0 if resumption is None else 40 + ranks.rank)
    model = DistributedDataParallel(plain) if ranks.world_size > 1 else plain
    optimizer, start, saving = build_optimizer(plain), 0, None
    if resumption is not None:
        resumption.load(model, optimizer, sharding=sharding)
        start = resumption.checkpoint.step
    for step in range(start + 1, last + 1):
        train(model, optimizer, start=step - 1, stop=step, rank=ranks.rank, world_size=ranks.world_size)
        if saving is not None and saving.poll():
            on_commit(saving.step)
            saving = None
        if on_step is not None:
            on_step(step, digest(plain, optimizer))
        if step % 2:
            continue
        if saving is not None:
            saving.finish()
            on_commit(saving.step)
        save = Save(
            root, model=model, optimizer=optimizer, sharding=sharding, ranks=ranks, keep=keep,
            facts=build_facts(step, sharding=sharding, world_size=ranks.world_size),
            on_point=on_point_of_4 if step == 4 else _ignore,
        )  # fmt: skip
        if in_background:
            saving = BackgroundSave(save)
        else:
            save.run()
            on_commit(step)
    if saving is not None:
        saving.finish()
    return digest(plain, optimizer)


def _crash(root: Path, names: list[str]) -> None:
    """One child for each `waiting-POINT` or `background-POINT`; a point `random-N` is a random moment.

    Of an odd N the moment comes after the first commit, of an even one it may come before.
    """
    for name in names:
        how, _, point = name.partition("-")
        child = os.fork()
        if child == 0:
            _crash_child(root / name, point, in_background=how == "background")
            os._exit(0)
        if point.startswith("random-"):
            while int(point.removeprefix("random-")) % 2 and not any((root / name).glob("step-*")):
                assert os.waitpid(child, os.WNOHANG) == (0, 0)
                time.sleep(0.001)
            time.sleep(random.Random(point).uniform(0.0, 0.2))
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _crash_child(folder: Path, point: str, *, in_background: bool) -> None:
    if point == "damaged-moved":
        run_until(folder, 4)
        (folder / "step-00000004" / "MANIFEST.json").write_text("{")
    last, keep = 200 if point.startswith("random-") else 6, 1 if point in ("pruning", "pruned") else 2

    def die(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    run_until(folder, last, in_background=in_background, keep=keep, on_point_of_4=die)


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
    """Ends the program with the number of ranks that failed, and their errors; returns if none did."""
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    if failed:
        sys.stderr.write("\n".join(path.read_text() for path in root.glob("error-*.txt")))
        sys.exit(failed)


def _ranks(root: Path, case: Callable[[Ranks, Path], dict[str, object]]) -> None:
    root.mkdir(parents=True, exist_ok=True)

    def body(ranks: Ranks) -> None:
        results = case(ranks, root)
        (root / f"results-{ranks.rank}.json").write_text(json.dumps(results))
        dist.destroy_process_group()

    wait_for_ranks(root, fork_ranks(root, body))


def _every_case(ranks: Ranks, root: Path) -> dict[str, object]:
    results: dict[str, object] = {}
    plain = build_model(seed=40)
    model = DistributedDataParallel(plain)
    optimizer = build_optimizer(plain)
    train(model, optimizer, start=0, stop=1, rank=ranks.rank, world_size=2)

    def attempt(step: int, optimizer: object = optimizer) -> str:
        try:
            return str(save(root / "ddp", model, optimizer, step, sharding=Sharding.DDP, ranks=ranks))
        except ShardwiseError as error:
            return f"{type(error).__name__}: {error}"

    results["saved"] = attempt(6)
    results["saved_again"] = attempt(6)
    if ranks.rank == 1:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    results["full"] = attempt(7)
    if ranks.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    norm = next(reversed(list(plain.parameters())))  # among the last in the file order: rank 1's share
    before = norm.detach().clone()
    norm.data.view(-1)[-1] = float("nan")
    results["non_finite"] = attempt(8)
    norm.data.copy_(before)
    results["unknown_optimizer"] = attempt(9, optimizer=torch.optim.RMSprop(plain.parameters()))
    results["left"] = names(root / "ddp")
    ranks.barrier()
    (root / "ddp" / "step-00000009").mkdir(exist_ok=True)
    ranks.barrier()
    skipped: list[str] = []
    find_checkpoint(root / "ddp", on_skip=skipped.append, ranks=ranks)
    results["skipped"] = skipped
    results["after"] = attempt(10)
    if ranks.is_first:
        shutil.rmtree(root / "ddp" / "step-00000010")
    ranks.barrier()
    results["agree"] = [ranks.all_agree(True), ranks.all_agree(ranks.is_first)]
    results["heard"] = [ranks.broadcast(b"from 0" if ranks.is_first else b"").decode(), ranks.broadcast(b"").decode()]
    results["exchanged"] = [content.decode() for content in ranks.exchange(b"x" * ranks.rank)]
    results["gathered"] = [content.decode() for content in ranks.gather(b"y" * (2 - ranks.rank))]
    return results


def _background_ranks(ranks: Ranks, root: Path) -> dict[str, object]:
    """What was saved is of the step at which the save began."""
    plain = build_model()
    model = DistributedDataParallel(plain)
    optimizer = build_optimizer(plain)
    results: dict[str, Any] = {}

    def train_step(step: int) -> None:
        train(model, optimizer, start=step, stop=step + 1, rank=ranks.rank, world_size=2)

    def start(step: int, **changed: Any) -> BackgroundSave:
        return begin(root / "ddp", model, optimizer, step, sharding=Sharding.DDP, ranks=ranks, **changed)

    def fail(point: str) -> None:
        if point == "mid-file" and ranks.rank:
            raise OSError(28, "No space left on device", "shard")

    train_step(0)
    results["digest of 1"] = state_digest(model, optimizer, sharding=Sharding.DDP)
    saving = start(1, on_point=lambda point: time.sleep(0.5) if point == "mid-file" and ranks.rank else None)
    results["polls"] = [saving.poll()]
    while not saving.poll():
        train_step(len(results["polls"]))
        results["polls"].append(False)
    results["over"] = [saving.poll(), saving.is_over]
    saving = start(50, on_point=fail)
    try:
        saving.finish()
    except ShardwiseError as error:
        results["failed"] = f"{type(error).__name__}: {error}"
    ranks.barrier()  # rank 0 removes what was staged
    results["left"] = names(root / "ddp")
    start(51).finish()
    return results


def _reference(ranks: Ranks, root: Path) -> dict[str, object]:
    digests: dict[str, object] = {}
    run_until(
        root / "checkpoints", MOST_STEPS + 4, ranks=ranks, on_step=lambda step, at: digests.update({str(step): at})
    )
    return digests


def _kill(root: Path, seed: str) -> None:
    """One run that is killed and resumed; a rank whose peer has ended is ended as well, as its supervisor would."""
    root.mkdir(parents=True)
    moments, checkpoints, committed = random.Random(seed), root / "checkpoints", root / "committed"
    in_background = bool(int(seed) % 2)
    victims = moments.choice([(0,), (1,), (0, 1)])

    def run(ranks: Ranks, last: int) -> None:
        def commit(step: int) -> None:
            if ranks.is_first:
                committed.write_text(str(step))

        run_until(checkpoints, last, ranks=ranks, in_background=in_background, on_commit=commit)

    children = fork_ranks(root, lambda ranks: run(ranks, MOST_STEPS))
    deadline = time.monotonic() + 120
    while int(seed) % 3 and not committed.exists() and time.monotonic() < deadline:
        time.sleep(0.001)  # a busy machine may need long for the first steps
    time.sleep(moments.uniform(0.02, 0.4))
    for victim in victims:
        os.kill(children[victim], signal.SIGKILL)
    time.sleep(0.02)  # the other one may well be inside a collective, or a write
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    num_committed = int(committed.read_text() or 0) if committed.exists() else 0
    checkpoint = find_checkpoint(checkpoints, on_skip=_fail)
    newest = 0 if checkpoint is None else checkpoint.step
    found = None if checkpoint is None else digest(*resume(checkpoint))
    wait_for_ranks(root, fork_ranks(root, lambda ranks: run(ranks, newest + 4)))
    resumed = find_checkpoint(checkpoints, on_skip=_fail)
    assert resumed is not None and resumed.step == newest + 4
    outcome = {
        "victims": victims, "in_background": in_background, "committed": num_committed, "newest": newest,
        "digest": found, "digest_after": digest(*resume(resumed)), "left": names(checkpoints),
    }  # fmt: skip
    (root / "outcome.json").write_text(json.dumps(outcome))


def _fail(line: str) -> None:
    raise AssertionError(line)


def main() -> None:
    torch.set_num_threads(1)
    command, root, *rest = sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]
    cases = {"ranks": _every_case, "background-ranks": _background_ranks, "reference": _reference}
    if command == "crash":
        _crash(root, rest)
    elif command == "kill":
        for seed in rest:
            _kill(root / seed, seed)
    else:
        _ranks(root, cases[command])


if __name__ == "__main__":
    main()
