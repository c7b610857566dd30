"""The choices of docs/strategies.md, which gives the reason for each machine."""

from collections.abc import Iterator
from functools import cache

import choices
import pytest
from choices import COMBINATIONS, GOLDEN, PUBLISHED, WITHIN_8_GB, Case, Published
from written_page import with_tables

from shardwise.trainer.planning.candidates import configuration_of, run_hours, upper_seconds
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.search.configurations import SAME_SPEED
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import NothingFitsError
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, Method
from shardwise.trainer.spec.units import GIB

ONE_8_GB, TWO_24_GB, FOUR_A100, EIGHT_H100, FOUR_NODES, QLORA_70B = GOLDEN
FULL_70B = COMBINATIONS[-1]
KEEPS_ALL, RECOMPUTES = {Checkpointing.NONE}, set(Checkpointing) - {Checkpointing.NONE}
SHARES_STATE = {each for each in Sharding if each.shards_optimizer}
GATHERS = {each for each in Sharding if each.shards_weights}


@pytest.fixture(scope="module", autouse=True)
def plans_are_made_once() -> Iterator[None]:
    """One for each job and machine, also for the tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Case, "plan", cache(Case.plan))
        yield


@pytest.mark.parametrize(
    ("case", "method", "shardings", "offload", "checkpointings"),
    [
        # 5.3 GiB of NF4 weights fit 7 once the table of 1 GiB stays in host RAM, where the inputs of blocks go too.
        (ONE_8_GB, Method.QLORA, {Sharding.NONE}, Offload.NONE, RECOMPUTES),
        # 15 GiB of frozen weights fit each card; gathering them over PCIe in every pass would be pointless.
        (TWO_24_GB, Method.LORA, {Sharding.DDP}, Offload.NONE, set(Checkpointing)),
        # 120 GiB of state are shared by all cards, on the cards, and what is left holds the activations.
        (FOUR_A100, Method.FULL, SHARES_STATE, Offload.NONE, KEEPS_ALL),
        (EIGHT_H100, Method.FULL, SHARES_STATE, Offload.NONE, KEEPS_ALL),
        # One row a rank: whoever gathers weights for it waits for the network twice.
        (FOUR_NODES, Method.FULL, SHARES_STATE - {Sharding.ZERO3, Sharding.FSDP}, Offload.NONE, KEEPS_ALL),
        # The set-up that Answer.AI published: FSDP, NF4, CPU offload, every block recomputed, 64 GB of host RAM.
        (QLORA_70B, Method.QLORA, {Sharding.FSDP}, Offload.OPTIMIZER_PARAMS, {Checkpointing.FULL}),
        # Seventy billion parameters are spread over all eight cards.
        (FULL_70B, Method.FULL, GATHERS, Offload.OPTIMIZER_PARAMS, RECOMPUTES),
    ],
    ids=lambda value: value.name if isinstance(value, Case) else "",
)
def test_an_expert_would_take_the_same(case, method, shardings, offload, checkpointings):
    chosen = case.plan().chosen
    assert (chosen.method, chosen.strategy.offload) == (method, offload)
    assert chosen.strategy.sharding in shardings and chosen.checkpointing in checkpointings
    assert chosen.strategy.is_exact or method is not Method.FULL or case is FULL_70B


def test_frozen_16_bit_weights_can_be_kept_in_32_gb_of_host_ram() -> None:
    """15 GiB of bf16 shards, loaded straight to where they stay; they cross PCIe behind the products."""
    chosen = ONE_8_GB.plan("train.method=lora", "pin.activation_offload=false").chosen
    assert (chosen.strategy.sharding, chosen.strategy.offload) == (Sharding.FSDP, Offload.OPTIMIZER_PARAMS)
    assert 15 * GIB < chosen.memory.pinned_bytes < 16 * GIB
    assert chosen.memory.host_bytes < 5 * GIB


def test_70b_is_refused_where_its_packed_weights_do_not_fit_in_host_ram() -> None:
    memory = QLORA_70B.plan().chosen.memory
    assert memory.pinned_bytes + memory.host_bytes < 60 * GIB
    with pytest.raises(NothingFitsError, match=r"needs \d+(\.\d+)? GiB of host RAM a node; 40 GiB are granted"):
        QLORA_70B.plan("limits.host_ram=40GiB")


def is_no_slower(plan: Plan, other: Plan) -> bool:
    seconds, others = (
        upper_seconds(context_of(each), configuration_of(context_of(each), each.chosen), each.chosen.speed.step_s)
        for each in (plan, other)
    )
    return seconds <= others * (1 + SAME_SPEED)


@pytest.mark.parametrize("case", COMBINATIONS, ids=lambda case: case.name)
def test_the_planners_own_choice_is_at_least_as_good_as_the_tables(case: Case) -> None:
    """A more faithful method within the limits, or the same one and no slower."""
    row, own = case.plan(), case.plan("train.method=auto")
    order = list(Method).index
    assert order(own.chosen.method) <= order(row.chosen.method)
    assert run_hours(context_of(own), own.chosen) <= own.job.limits.hours
    assert own.chosen.method is not row.chosen.method or is_no_slower(own, row)


@pytest.mark.parametrize("run", PUBLISHED, ids=lambda run: run.name)
def test_the_own_choice_is_never_slower_than_what_others_published(run: Published) -> None:
    pinned, own = (run.plan(is_pinned=is_pinned) for is_pinned in (True, False))
    assert is_no_slower(own, pinned)
    assert own.chosen.speed.step_s <= (1 + SAME_SPEED) * pinned.chosen.speed.step_s


@pytest.mark.parametrize(
    ("case", "offload"), [(WITHIN_8_GB[0], Offload.NVME_ALL), (WITHIN_8_GB[1], Offload.OPTIMIZER_PARAMS)]
)
def test_seven_billion_parameters_train_within_8_gb_and_the_plan_says_what_that_takes(case, offload):
    plan = case.plan()
    chosen = plan.chosen
    assert (chosen.method, chosen.strategy.offload, chosen.strategy.is_exact) == (Method.FULL, offload, True)
    assert Allowance.OFFLOAD_NVME in plan.job.allow
    assert chosen.memory.device_bytes < 8 * GIB
    assert chosen.memory.pinned_bytes + chosen.memory.host_bytes > 20 * GIB
    assert (chosen.memory.nvme_bytes > 100 * GIB) is (offload is Offload.NVME_ALL)


def test_the_tables_of_the_document_are_what_the_planner_takes_now() -> None:
    """Renewed by `python benchmarks/choices.py --write`."""
    page = choices.DOCUMENT.read_text(encoding="utf-8")
    assert with_tables(page, choices.tables()) == page
