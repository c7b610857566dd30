"""Moves of a run from one engine to another: plans, the ranks that carry them out, and what is left on the disk."""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from attempt_runs import losses_of
from rank_factory import offload_plan, write_attempt

from shardwise.trainer.runtime.checkpoint import CheckpointFolder
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import GaloreJob, LoraJob
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method, Precision

WORKER = Path(__file__).parents[1] / "distributed" / "moving_worker.py"
STEP, NUM_STEPS = 3, 6
MOST_AT_ONCE = 60  # attempts in one group of ranks, which has a limit of time
ODD_LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 257, "hidden_size": 25, "intermediate_size": 37, "num_hidden_layers": 2,
    "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 6,
}  # fmt: skip


EVEN_LLAMA = {
    **ODD_LLAMA,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
}  # for NF4's blocks of 64


class Place(NamedTuple):
    """What a plan runs on."""

    sharding: Sharding
    num_ranks: int
    offload: Offload = Offload.NONE

    def __str__(self) -> str:
        offload = "" if self.offload is Offload.NONE else f"+{self.offload}"
        return f"{self.sharding}{offload}-x{self.num_ranks}"


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"model_config": {**ODD_LLAMA, "tie_word_embeddings": True}},
    "lora": {"method": Method.LORA, "train": {"lora": LoraJob(rank=3, alpha=6.0)}},
    "dora": {"method": Method.LORA, "train": {"lora": LoraJob(rank=3, alpha=6.0, dora=True)}},
    "qlora": {"method": Method.QLORA, "train": {"lora": LoraJob(rank=3, alpha=6.0)}, "model_config": EVEN_LLAMA},
    "bf16": {"precision": Precision.BF16_MIXED},
    "fp16": {"precision": Precision.FP16_MIXED},
    "pure-bf16": {"precision": Precision.BF16},
    **{
        each.value: {"optimizer": each, "lr": 1e-3}
        for each in (
            Optimizer.LION,
            Optimizer.ADAMW_8BIT,
            Optimizer.LION_8BIT,
            Optimizer.ADEMAMIX_8BIT,
            Optimizer.PAGED_ADAMW,
            Optimizer.MUON,
            Optimizer.ADAFACTOR,
        )
    },
    "galore": {"method": Method.GALORE, "train": {"galore": GaloreJob(rank=4, update_gap=2)}},
    # Large enough for DeepSpeed to swap; DeepSpeed and torch add up so many squares to different norms, so no clipping.
    "large": {"model_config": {**ODD_LLAMA, "vocab_size": 8193, "hidden_size": 65}, "clip": 0.0},
}


class Move(NamedTuple):
    """From one place to another."""

    source: Place
    target: Place
    kind: str = "plain"

    def __str__(self) -> str:
        return f"{self.kind}-{self.source}-to-{self.target}"

    @property
    def left(self) -> str:
        """The run that saved."""
        return f"{self.kind}-{self.source}"


class Attempt(NamedTuple):
    """A plan to run, perhaps from another run's checkpoint, perhaps not to its end."""

    name: str
    plan: Plan
    source: Path | None = None
    last: int | None = None


class Yard:
    """Runs attempts in a folder, all of one number of ranks in one process group."""

    def __init__(self, folder: Path, cache_dir: Path, start_ranks: Callable[[Sequence[str], int], str]) -> None:
        self.folder, self.cache_dir = folder, cache_dir
        self._start_ranks = start_ranks

    def plan(
        self, place: Place, kind: str = "plain", *, is_resumed: bool = False, warmup_steps: int = 3, **changed: Any
    ) -> Plan:
        """A plan for a place; `changed` are settings of `rank_plan`."""
        settings = {"model_config": ODD_LLAMA, **KINDS[kind], **changed}
        plan = offload_plan(
            settings.pop("cache_dir", self.cache_dir),
            place.sharding,
            place.offload,
            nvme=self.nvme_folder(place),
            num_ranks=place.num_ranks,
            micro_batch=3,
            accumulation={1: 3, 2: 2, 3: 1, 4: 1}[place.num_ranks],  # of eight rows, so one or four are padding
            checkpoint_every_steps=STEP,
            num_steps=NUM_STEPS,
            **{"clip": 0.1, "lr": 1e-2, **settings},
        )
        schedule = msgspec.structs.replace(plan.schedule, warmup_steps=warmup_steps)
        return msgspec.structs.replace(plan, resume=is_resumed, schedule=schedule)

    def nvme_folder(self, place: Place) -> Path:
        return self.folder / "nvme" / str(place)

    def run(self, attempts: Iterable[Attempt]) -> None:
        """Carries the attempts out, one after another, those of fewer ranks first."""
        argv: dict[int, list[str]] = {}
        for name, plan, source, last in attempts:
            words = [str(write_attempt(self.folder / name, plan))]
            words += [f"@{source}"] if source is not None else []
            words += [f"#{last}"] if last is not None else []
            argv.setdefault(plan.chosen.num_ranks, []).append("".join(words))
        for num_ranks, arguments in sorted(argv.items()):
            for begin in range(0, len(arguments), MOST_AT_ONCE):
                self._start_ranks([str(WORKER), *arguments[begin : begin + MOST_AT_ONCE]], num_ranks)

    def leave(self, name: str) -> Path:
        """A run directory that holds the middle checkpoint of a run and nothing else."""
        retained = self.folder / "left" / name / "checkpoints"
        if not retained.is_dir():
            retained.mkdir(parents=True)
            shutil.copytree(self.folder / name / "checkpoints" / f"step-{STEP:08d}", retained / f"step-{STEP:08d}")
        return retained.parent

    def move(self, moves: Sequence[Move]) -> None:
        """Runs every source that has not run yet, then all moves."""
        kinds = {move.left: (move.source, move.kind) for move in moves if not (self.folder / move.left).is_dir()}
        self.run(Attempt(name, self.plan(*source)) for name, source in kinds.items())
        self.run(
            Attempt(str(move), self.plan(move.target, move.kind, is_resumed=True), self.leave(move.left))
            for move in moves
        )

    def losses(self, name: str) -> list[float]:
        return losses_of(self.folder / name)

    def incidents(self, name: str) -> list[str]:
        """What the report would tell."""
        return list(json.loads((self.folder / name / "incidents.json").read_text()))

    def checkpoint(self, name: str, step: int = STEP) -> CheckpointFolder:
        return open_checkpoint(self.folder / name / "checkpoints" / f"step-{step:08d}")

    def difference(self, move: Move) -> float:
        """The largest difference of a loss after the move from that of the run that stayed."""
        return greatest(self.losses(str(move)), self.losses(move.left)[STEP:])


def greatest(losses: Sequence[float], expected: Sequence[float]) -> float:
    assert len(losses) == len(expected) > 0
    return max(abs(one - other) for one, other in zip(losses, expected, strict=True))
