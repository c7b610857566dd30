"""Saving and loading a checkpoint, compared with torch's distributed checkpoint and Accelerate's `save_state`.

One process, fp32 weights and AdamW's moments of the same model, alternating in every round. The time of a save includes
`sync` for all three, which Accelerate does not call itself; a load reads files that are no longer in the page cache.
shardwise also hashes every byte and checks for NaN on saving and loading, which the others do not. The last figure is
the stall of a background save, as a share of a synchronous one.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from shardwise.trainer.runtime.checkpoint.save import Save

ROOT = Path(__file__).resolve().parent.parent
ROUNDS = 15  # in some of them, disks of rented machines are half as fast
TARGET = 1.1  # times the faster of the others
OURS = "shardwise"
MODEL: dict[str, Any] = {
    "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
    "num_attention_heads": 12, "num_key_value_heads": 12, "max_position_embeddings": 128, "use_cache": False,
}  # fmt: skip


def bench_checkpoints() -> list[dict[str, object]]:
    """MB/s of saving and of loading, and the time of each as a multiple of the faster of the others."""
    command = [sys.executable, str(Path(__file__)), "measure"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"checkpoints ended with {done.returncode}:\n{done.stderr[-2000:]}")
    measured = json.loads(done.stdout.splitlines()[-1])
    rows: list[dict[str, object]] = []
    for what in ("save", "load"):
        seconds: dict[str, list[float]] = measured[what]
        fastest = min((name for name in seconds if name != OURS), key=lambda name: statistics.median(seconds[name]))
        for name, values in seconds.items():
            ratio = statistics.median(own / other for own, other in zip(values, seconds[fastest], strict=True))
            rows.append(
                {
                    "what": what,
                    "by": name,
                    "mb_per_s": round(measured["num_bytes"] / 1e6 / statistics.median(values)),
                    "times_the_faster_other": round(ratio, 2),
                    "share_of_a_save": "",
                    "target": f"at most {TARGET}" if name == OURS else "",
                    "verdict": "" if name != OURS else "met" if ratio <= TARGET else "MISSED",
                }
            )
    stall = statistics.median(
        stalled / waited for stalled, waited in zip(measured["stall"], measured["save"][OURS], strict=True)
    )
    empty: dict[str, object] = dict.fromkeys(rows[0], "")
    return [*rows, empty | {"what": "stall in the background", "by": OURS, "share_of_a_save": round(stall, 3)}]


def _measure() -> None:
    import torch
    from accelerate import Accelerator
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = LlamaForCausalLM(LlamaConfig(**MODEL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    inner = optimizer.optimizer
    num_bytes = 3 * sum(parameter.numel() * 4 for parameter in model.parameters())

    def states() -> dict[str, object]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, moments = get_state_dict(model, inner)
        return {"model": weights, "optimizer": moments}

    savers: dict[str, Callable[[Path], object]] = {
        OURS: lambda folder: _save(folder, model, inner).run(),
        "torch DCP": lambda folder: save(states(), checkpoint_id=folder),
        "Accelerate": lambda folder: accelerator.save_state(str(folder)),
    }
    loaders: dict[str, Callable[[Path], object]] = {
        OURS: lambda folder: _load(folder, model, inner),
        "torch DCP": lambda folder: load(states(), checkpoint_id=folder),
        "Accelerate": lambda folder: accelerator.load_state(str(folder)),
    }
    found: dict[str, Any] = {"num_bytes": num_bytes, "stall": []}
    found |= {what: {name: [] for name in savers} for what in ("save", "load")}
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-", dir=_disk()) as name:
        for number in range(ROUNDS + 1):  # the first is a warm-up
            order = [*savers][number % 3 :] + [*savers][: number % 3]  # each follows each of the others
            for who in order:
                folder = Path(name) / who
                shutil.rmtree(folder, ignore_errors=True)
                os.sync()
                with _timed(found["save"][who], counts=number > 0):
                    savers[who](folder)
                    os.sync()
            for who in order:
                for path in (Path(name) / who).rglob("*"):
                    _forget(path)
                with _timed(found["load"][who], counts=number > 0):
                    loaders[who](Path(name) / who)
            _stall(found["stall"], Path(name) / "background", model, inner, counts=number > 0)
    print(json.dumps(found))


def _save(folder: Path, model: "nn.Module", optimizer: "Optimizer") -> "Save":
    from shardwise.trainer.runtime.checkpoint.manifest import CheckpointFacts
    from shardwise.trainer.runtime.checkpoint.ranks import Ranks
    from shardwise.trainer.runtime.checkpoint.save import Save
    from shardwise.trainer.spec.engines import Sharding
    from shardwise.trainer.spec.optimizers import Optimizer
    from shardwise.trainer.spec.strategy import Precision

    facts = CheckpointFacts(
        run_name="bench", step=1, tokens_seen=1, seed=0, sequences_per_step=1, tokens_per_step=1,
        model_config_sha256="0" * 64, data_fingerprint="none", optimizer=Optimizer.ADAMW, sharding=Sharding.NONE,
        world_size=1, precision=Precision.FP32,
    )  # fmt: skip
    return Save(
        folder, model=model, optimizer=optimizer, sharding=Sharding.NONE, facts=facts, ranks=Ranks.alone(), keep=1
    )


def _load(folder: Path, model: "nn.Module", optimizer: "Optimizer") -> None:
    from shardwise.trainer.runtime.checkpoint.load import begin_resumption
    from shardwise.trainer.spec.engines import Sharding

    resumption = begin_resumption(folder, check=lambda checkpoint: None, on_skip=print)
    assert resumption is not None
    resumption.load(model, optimizer, sharding=Sharding.NONE)


def _stall(stalls: list[float], folder: Path, model: "nn.Module", optimizer: "Optimizer", *, counts: bool) -> None:
    from shardwise.trainer.runtime.checkpoint.save import BackgroundSave

    shutil.rmtree(folder, ignore_errors=True)
    with _timed(stalls, counts=counts):
        save = BackgroundSave(_save(folder, model, optimizer))
    save.finish()


@contextmanager
def _timed(seconds: list[float], *, counts: bool) -> Iterator[None]:
    started = time.perf_counter()
    yield
    if counts:
        seconds.append(time.perf_counter() - started)


def _disk() -> str | None:
    """The folder for checkpoints, if set: /tmp may be in memory."""
    return os.environ.get("SHARDWISE_BENCH_DIR")


def _forget(path: Path) -> None:
    if path.is_file():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    _measure()
