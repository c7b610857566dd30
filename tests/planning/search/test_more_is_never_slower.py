"""More host RAM, device memory, opt-ins or cards never give a worse plan: random jobs and machines.

Plans are compared as the planner compares them, by the upper end of the predicted time of a step. Two ties of one per
cent are allowed, as candidates within one per cent count as equal.
"""

import math
import random
from functools import partial
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace
from planning_factory import context_for, job_of, machine, plan_of

from shardwise.trainer.planning.candidates import compared_seconds, configuration_of, upper_seconds
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.planner import Extent, context_of, plan_on_enough_gpus
from shardwise.trainer.planning.search.choice import survey
from shardwise.trainer.planning.search.configurations import SAME_SPEED
from shardwise.trainer.spec.errors import NothingFitsError
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.plan import Candidate
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import GIB

CARDS = [
    *("RTX-4060-8GB", "RTX-3060-12GB", "RTX-3090", "RTX-4090", "T4", "L4", "A10"),
    *("V100-32GB", "A100-SXM4-40GB", "A100-SXM4-80GB", "H100-SXM5-80GB"),
]
OPT_INS = [each for each in Allowance if each not in (Allowance.COMPILE, Allowance.OFFLOAD_NVME)]
NOTHING = math.inf
BATCH = 20  # jobs of one test


class Case(NamedTuple):
    """A job and a machine; `vram` is the share of the card's memory that is free."""

    model: str
    card: str
    num_cards: int
    ram_gib: int
    vram: float
    method: Method
    allow: tuple[Allowance, ...]
    seq_len: int
    sequences: int

    @property
    def hardware(self) -> Hardware:
        return machine(f"{self.num_cards}x{self.card}", ram_bytes=self.ram_gib * GIB, libraries=("bitsandbytes",))

    @property
    def job_facts(self) -> dict[str, Any]:
        return {"seq_len": self.seq_len, "tokens_per_step": self.seq_len * self.sequences}


def case_of(rng: random.Random) -> Case:
    num_cards, seq_len = rng.choice([1, 1, 2, 4, 8]), rng.choice([512, 2048, 4096])
    return Case(
        model=rng.choice(["1b", "1b", "8b", "8b", "70b"]), card=rng.choice(CARDS), num_cards=num_cards,
        ram_gib=max(8, rng.choice([16, 32, 64, 128, 256, 512, 1024]) * num_cards // 2), vram=rng.uniform(0.5, 1.0),
        method=rng.choice(list(Method)), allow=tuple(rng.sample(OPT_INS, rng.randint(0, 3))), seq_len=seq_len,
        sequences=rng.choice([1, 4, 16, 32, 128]),
    )  # fmt: skip


def seconds_of(context: PlanningContext, chosen: Candidate) -> float:
    return compared_seconds(context, configuration_of(context, chosen), chosen.speed.step_s)


def surveyed(case: Case) -> float:
    job = job_of(allow=case.allow, **case.job_facts)
    context = context_for(case.model, case.hardware, method=case.method, job=job)
    usable = int(case.vram * context.device.usable_bytes)
    context = replace(context, device=replace(context.device, usable_bytes=usable))
    candidates = survey(context).candidates
    return seconds_of(context, candidates[0]) if candidates else NOTHING


def planned(case: Case) -> float:
    job = job_of(allow=case.allow, method=case.method, **case.job_facts)
    try:
        plan = plan_on_enough_gpus(partial(plan_of, case.model, job=job), case.hardware, extent=Extent.SCREEN)
    except NothingFitsError:
        return NOTHING
    context = context_of(plan)
    return upper_seconds(context, configuration_of(context, plan.chosen), plan.chosen.speed.step_s)


def is_worse(seconds: float, other: float) -> bool:
    return seconds > (1 + SAME_SPEED) ** 2 * other


def violations(seed: int) -> list[tuple[Case, Case]]:
    found = []
    for index in range(BATCH):
        rng = random.Random(BATCH * seed + index)
        case = case_of(rng)
        base = surveyed(case)
        larger = (
            case._replace(ram_gib=2 * case.ram_gib),
            case._replace(vram=min(1.0, 1.25 * case.vram)),
            case._replace(allow=tuple(dict.fromkeys((*case.allow, *rng.sample(OPT_INS, 2))))),
        )
        found += [(case, more) for more in larger if is_worse(surveyed(more), base)]
        more = case._replace(num_cards=2 * case.num_cards)
        if case.num_cards < 8 and is_worse(planned(more), planned(case)):
            found.append((case, more))
    return found


LONG = [pytest.mark.long, pytest.mark.products]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=LONG) for seed in range(1, 100))])
def test_nothing_more_gives_a_worse_plan(seed: int) -> None:
    assert violations(seed) == []
