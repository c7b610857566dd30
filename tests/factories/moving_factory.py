"""Ways of a run from one engine to another: plans, the ranks that carry them out, and what is left on the disk."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from attempt_runs import losses_of
from rank_factory import offload_plan, write_attempt

from shardwise.trainer.runtime.checkpoint import CheckpointFolder
from shardwise.trainer.runtime.checkpoint.folders import open_checkpoint
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.job.sections import CheckpointJob, GaloreJob, LoraJob
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method, Precision

WORKER = Path(__file__).parents[1] / "distributed" / "engine_worker.py"
STEP = 3  # after which a run leaves the first place
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
    # The first of two ranks has 4,096 elements of a matrix, which are kept in 8 bit, and the second fewer.
    "wide_8bit": {
        "optimizer": Optimizer.ADAMW_8BIT,
        "lr": 1e-3,
        "model_config": {**EVEN_LLAMA, "intermediate_size": 127},
    },
    "galore": {"method": Method.GALORE, "train": {"galore": GaloreJob(rank=4, update_gap=2)}},
    # Large enough for DeepSpeed to swap; DeepSpeed and torch add up so many squares to different norms, so no clipping.
    "large": {"model_config": {**ODD_LLAMA, "vocab_size": 8193, "hidden_size": 65}, "clip": 0.0},
}


class Way(NamedTuple):
    """A run that goes on from place to place."""

    kind: str
    places: tuple[Place, ...]

    def __str__(self) -> str:
        return f"{self.kind}-{'-to-'.join(map(str, self.places))}"

    @property
    def num_steps(self) -> int:
        """One in each place after the first, but at least three in the last of two."""
        return STEP + max(3, len(self.places) - 1)

    @property
    def stays(self) -> bool:
        return len(set(self.places)) == 1

    def leg(self, number: int) -> str:
        """The run directory of a leg; the first is a whole run, which others begin with as well."""
        begun = "-to-".join(map(str, self.places[: number + 1]))
        return f"{self.kind}-{begun}-of-{self.num_steps}" if number == 0 else f"{self}-leg-{number}"


class Yard:
    """Runs ways in a folder, as many legs as can be in one process group."""

    def __init__(self, folder: Path, cache_dir: Path, start_ranks: Callable[[Sequence[str], int], str]) -> None:
        self.folder, self.cache_dir = folder, cache_dir
        self._start_ranks = start_ranks
        self._ran = set[str]()

    def plan(self, place: Place, kind: str = "plain", *, num_steps: int, is_resumed: bool = False) -> Plan:
        """A plan for a place, in a batch of which one or four rows are padding."""
        settings = {"model_config": ODD_LLAMA, "clip": 0.1, "lr": 1e-2, **KINDS[kind]}
        plan = offload_plan(
            self.cache_dir,
            place.sharding,
            place.offload,
            nvme=self.nvme_folder(place),
            num_ranks=place.num_ranks,
            micro_batch=3,
            accumulation={1: 3, 2: 2, 3: 1, 4: 1}[place.num_ranks],
            checkpoint_every_steps=STEP,
            num_steps=num_steps,
            **settings,
        )
        job = msgspec.structs.replace(plan.job, checkpoint=CheckpointJob(keep=num_steps))
        return msgspec.structs.replace(plan, resume=is_resumed, job=job)

    def nvme_folder(self, place: Place) -> Path:
        return self.folder / "nvme" / str(place)

    def travel(self, ways: Sequence[Way]) -> "Yard":
        """Runs all legs, each as soon as the leg before it is done, in few process groups."""
        to_go = dict.fromkeys(ways, 0)
        while to_go:
            counts = Counter(way.places[leg].num_ranks for way, leg in to_go.items())
            num_ranks = min(counts, key=lambda count: (-counts[count], count))
            arguments = list[str]()
            for way, leg in list(to_go.items()):
                while leg < len(way.places) and way.places[leg].num_ranks == num_ranks:
                    arguments += self._argument(way, leg)
                    leg += 1
                to_go[way] = leg
            to_go = {way: leg for way, leg in to_go.items() if leg < len(way.places)}
            for begin in range(0, len(arguments), MOST_AT_ONCE):
                self.start(arguments[begin : begin + MOST_AT_ONCE], num_ranks)
        return self

    def start(self, arguments: Sequence[str], num_ranks: int) -> None:
        self._start_ranks([str(WORKER), *arguments], num_ranks)

    def _argument(self, way: Way, leg: int) -> list[str]:
        """What the worker is told of a leg, if it was not run as part of another way."""
        name = way.leg(leg)
        if name in self._ran:
            return []
        self._ran.add(name)
        plan = self.plan(way.places[leg], way.kind, num_steps=way.num_steps, is_resumed=leg > 0)
        argument = str(write_attempt(self.folder / name, plan))
        if leg > 0:
            argument += f"@{self.folder / way.leg(leg - 1)}" + (f"~{STEP}" if leg == 1 else "")
        return [argument if leg in (0, len(way.places) - 1) else f"{argument}#{STEP + leg}"]

    def losses(self, name: str) -> list[float]:
        return losses_of(self.folder / name)

    def incidents(self, way: Way) -> list[str]:
        """What the reports of all legs would tell."""
        files = (self.folder / way.leg(leg) / "incidents.json" for leg in range(len(way.places)))
        return [incident for file in files for incident in json.loads(file.read_text())]

    def checkpoint(self, name: str, step: int = STEP) -> CheckpointFolder:
        return open_checkpoint(self.folder / name / "checkpoints" / f"step-{step:08d}")

    def arrivals(self, way: Way) -> list[tuple[CheckpointFolder, CheckpointFolder]]:
        """Of each leg but the first, what it was to load, and what it saved at once."""
        return [
            (self.checkpoint(way.leg(leg - 1), STEP + leg - 1), self.checkpoint(way.leg(leg), STEP + leg - 1))
            for leg in range(1, len(way.places))
        ]

    def difference(self, way: Way) -> float:
        """The largest difference of a loss on the way from that of the run that stayed in the first place."""
        losses = [loss for leg in range(1, len(way.places)) for loss in self.losses(way.leg(leg))]
        expected = self.losses(way.leg(0))[STEP:]
        assert len(losses) == len(expected) > 0
        return max(abs(one - other) for one, other in zip(losses, expected, strict=True))
