"""A frozen table of embeddings stays in host RAM where one GPU holds the model itself and lacks that memory."""

from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import context_for, machine, plan_of

from shardwise.trainer.planning import candidates
from shardwise.trainer.planning.candidates import candidate_of, configuration_of, priced
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.explain.first_screen import first_screen, text_of
from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.search import configurations as search
from shardwise.trainer.planning.search.fallbacks import fallbacks
from shardwise.trainer.planning.speed.step import estimate_speed
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, Method
from shardwise.trainer.spec.units import GIB

ROWS = {row.name: row for row in CATALOGUE}
ALONE = ROWS["none/bf16-mixed/adamw_fused"]
TABLE, ROW = 128256 * 4096 * 2, 4096 * 2  # bytes of the table of 8B, and of a row: 16 bit under every method
SMALL = machine("1xRTX-4060-8GB", ram_bytes=32 * GIB, vram_bytes=7 * GIB)  # a desktop has the rest
IN_RAM = "the embedding table stays in host RAM: 1.02 GiB less on the card"


def pair_of(context: PlanningContext, **settings: Any) -> tuple[Configuration, Configuration]:
    """A configuration with the table on the device, and with it in host RAM."""
    first = search.first_start(context, ALONE)
    return tuple(replace(first, embedding_on_host=is_there, **settings) for is_there in (False, True))  # type: ignore[return-value]  # two


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, Checkpointing.FULL])
def test_the_device_holds_a_table_less_and_the_host_a_table_more(method, checkpointing):
    """Also of a base in 4 bit, whose table has 16; one micro batch of rows is pinned."""
    context = context_for("8b", "1xRTX-4090", method=method)
    pair = pair_of(context, checkpointing=checkpointing, micro_batch=4, accumulation=2)
    device, host = (estimate_memory(context.shape, each, context.device) for each in pair)
    for event, num_bytes in device.events.items():
        assert num_bytes - host.events[event] == TABLE, event
    assert device.steady_allocated_bytes - host.steady_allocated_bytes == TABLE
    assert host.host_bytes - device.host_bytes == TABLE
    assert host.pinned_bytes - device.pinned_bytes == 4 * context.job.train.seq_len * ROW
    assert host.checkpoint_bytes == device.checkpoint_bytes


@pytest.mark.parametrize("accumulation", [1, 8])
def test_a_step_waits_for_each_row_that_is_gathered_and_copied(accumulation):
    context = context_for("8b", "1xRTX-4090", method=Method.LORA)
    device, host = (
        estimate_speed(context.shape, each, context.device)
        for each in pair_of(context, micro_batch=2, accumulation=accumulation)
    )
    rows = accumulation * 2 * context.job.train.seq_len * ROW
    waited = host.parts["offload_s"] - device.parts["offload_s"]
    assert waited == pytest.approx(rows / (0.8 * 32e9) + 2 * rows / 10e9, rel=0.03)
    assert waited < 0.03 * device.step_s
    assert {name: value for name, value in host.parts.items() if name != "offload_s"} == {
        name: value for name, value in device.parts.items() if name != "offload_s"
    }


def test_a_reference_looks_its_rows_up_as_well():
    context = context_for("8b", "1xRTX-4090", method=Method.LORA)
    _, alone = pair_of(context)
    paired = replace(alone, policy=replace(alone.policy, rows_per_example=2))
    once, twice = (estimate_speed(context.shape, each, context.device).parts["offload_s"] for each in (alone, paired))
    assert twice == pytest.approx(4 * once)  # two rows a pair, and two forwards


@pytest.mark.parametrize(
    ("model", "spec", "facts"),
    [
        ("1b", "1xRTX-4090", {"method": Method.LORA}), ("8b", "1xRTX-4090", {"method": Method.FULL}),
        ("8b", "1xRTX-4090", {"method": Method.GALORE}), ("8b", "2xRTX-4090", {"method": Method.LORA}),
        ("8b", "1xCPU", {"method": Method.LORA}), ("8b", "1xGB10", {"method": Method.LORA}),
        ("8b", "1xRTX-4090", {"method": Method.LORA, "allow": ()}),
        ("8b", machine("1xRTX-4090", ram_bytes=None), {"method": Method.LORA}),
        ("8b", "1xRTX-4090", {"method": Method.LORA, "pin": {"embedding_on_host": False}}),
    ],
    ids=["tied", "trained", "galore", "two cards", "cpu", "one pool", "not allowed", "unknown RAM", "pinned"],
)  # fmt: skip
def test_elsewhere_it_is_not_offered(model, spec, facts):
    context = context_for(model, spec, **facts)
    assert {search.embeddings_on_host(context, row) for row in CATALOGUE} == {(False,)}


def test_it_is_offered_to_rows_without_an_engine_and_for_code_of_transformers_alone():
    context = context_for("8b", "1xRTX-4090", method=Method.LORA)
    offered = {row.sharding for row in CATALOGUE if search.embeddings_on_host(context, row) == (False, True)}
    assert offered == {Sharding.NONE}
    for other in (
        replace(context, hooks=(Hook.BUILD_MODEL,)),
        replace(context, job=replace(context.job, model=replace(context.job.model, trust_remote_code="ORG/NAME"))),
    ):
        assert search.embeddings_on_host(other, ALONE) == (False,)


def small(**facts: Any) -> Plan:
    return plan_of("8b", SMALL, seq_len=4096, tokens_per_step=131072, **facts)


def test_8b_in_4_bit_is_trained_on_8_gb_without_an_engine_that_streams_weights():
    plan = small(method=Method.QLORA)
    chosen, context = plan.chosen, context_of(plan)
    assert (chosen.strategy.sharding, chosen.strategy.offload) == (Sharding.NONE, Offload.NONE)
    assert chosen.embedding_on_host and IN_RAM in chosen.reasons[0]
    without = small(method=Method.QLORA, pin={"embedding_on_host": False})
    assert without.chosen.strategy.offload is Offload.OPTIMIZER_PARAMS
    assert without.chosen.memory.pinned_bytes > 2 * chosen.memory.pinned_bytes
    on_card = candidate_of(context, replace(configuration_of(context, chosen), embedding_on_host=False))
    assert on_card.memory.need_bytes > chosen.memory.usable_bytes
    assert f"{on_card.memory.need_bytes / GIB:.3g} GiB" in chosen.reasons[0]
    assert "embedding table in RAM" in text_of(first_screen(plan, start=[], more=""))


def test_where_a_table_fits_it_stays_on_the_card():
    """Its lookups cost time, which is counted as if nothing hid it: so the range of the prediction is no wider."""
    plan = plan_of("8b", "1xH100-SXM5-80GB", method=Method.LORA)
    assert not any(candidate.embedding_on_host for candidate in plan.candidates)
    context = context_of(plan)
    assert [candidates.prediction_error(each) for each in pair_of(context)] == [0.10, 0.10]


@pytest.mark.parametrize("method", [Method.LORA, Method.QLORA])
def test_one_card_that_streams_weights_says_what_holding_them_would_need(method):
    plan = small(method=method, pin={"embedding_on_host": False} if method is Method.QLORA else {})
    chosen = plan.chosen
    assert (chosen.num_ranks, chosen.strategy.offload) == (1, Offload.OPTIMIZER_PARAMS)
    assert "; without it a step needs at least " in chosen.reasons[0]
    assert ("even with the embedding table in host RAM" in chosen.reasons[0]) is (method is Method.LORA)


def test_a_card_that_is_full_without_its_table_too_has_the_price_of_weights_in_host_ram():
    context = context_for("8b", SMALL, method=Method.QLORA)
    device, host = pair_of(context)
    full, roomy = 7 * GIB, 6 * GIB
    assert priced(context, device, 1.0, full) == pytest.approx(1.05)
    assert priced(context, host, 1.0, full) == pytest.approx(1.05 * candidates.BOTH_ERRORS)
    assert priced(context, device, 1.0, roomy) == priced(context, host, 1.0, roomy) == 1.0


def test_more_host_ram_never_makes_a_plan_with_the_table_there_slower():
    contexts = [context_for("8b", machine("1xRTX-4060-8GB", ram_bytes=ram * GIB), method=Method.QLORA,
                            seq_len=4096, tokens_per_step=131072) for ram in (4, 5, 6, 8, 32)]  # fmt: skip
    found = [search.best_candidate(context, ALONE) for context in contexts]
    assert found[0] is None and found[-1] is not None and found[-1].embedding_on_host
    for context, candidate in zip(contexts, found, strict=True):
        assert candidate is None or not candidates.exceeds_host(context, configuration_of(context, candidate))
    seconds = [candidate.speed.step_s for candidate in found if candidate is not None]
    assert all(more <= less for less, more in pairwise(seconds))


def test_out_of_memory_moves_the_table_before_anything_is_recomputed():
    plan = plan_of("8b", "1xRTX-4090", method=Method.QLORA, pin={"micro_batch": 1})
    assert (plan.chosen.checkpointing, plan.chosen.embedding_on_host) == (Checkpointing.NONE, False)
    first, second = plan.fallbacks[:2]
    assert (first.checkpointing, first.embedding_on_host) == (Checkpointing.NONE, True)
    assert (second.checkpointing, second.embedding_on_host) == (Checkpointing.FULL, True)
    assert plan.chosen.memory.peak_allocated_bytes - first.memory.peak_allocated_bytes == TABLE
    assert "the embedding table in RAM" in text_of(first_screen(plan, start=[], more=""))
    context = context_for("8b", "1xRTX-4090", method=Method.QLORA, allow=())
    assert not any(each.embedding_on_host for each in fallbacks(context, (plan.chosen,)))


@pytest.mark.parametrize(
    ("model", "spec", "facts", "words"),
    [
        ("1b", "1xRTX-4090", {"method": Method.LORA}, "the head of this llama"),
        ("8b", "1xH100-SXM5-80GB", {"method": Method.FULL}, "method: full trains the embeddings"),
        ("8b", "2xRTX-4090", {"method": Method.LORA}, r"is of one GPU .*--gpus 0"),
        ("8b", "1xRTX-4090", {"method": Method.LORA, "pin": {"sharding": Sharding.FSDP}}, "is of one GPU"),
    ],
    ids=["tied", "trained", "two cards", "fsdp"],
)
def test_a_pin_that_cannot_be_is_refused_with_why(model, spec, facts, words):
    pin = {"embedding_on_host": True, **facts.pop("pin", {})}
    with pytest.raises(InputError, match=rf"pin\.embedding_on_host: true cannot be used: .*{words}") as caught:
        plan_of(model, spec, pin=pin, **facts)
    assert "; use embedding_on_host: false" in str(caught.value)


def test_a_pin_leaves_to_auto_the_methods_that_freeze_the_base():
    plan = plan_of("8b", "1xH100-SXM5-80GB", pin={"embedding_on_host": True}, allow=(Allowance.OFFLOAD_CPU,))
    assert plan.chosen.method is Method.LORA and all(each.embedding_on_host for each in plan.candidates)
    assert "as the job file pins it" in plan.chosen.reasons[0]
