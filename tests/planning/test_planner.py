"""The decision: every row is ranked or refused, the global batch never moves, a better machine is never worse."""

import math
import re
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import CONFIGS, context_for, data_of, job_of, machine, note_of, plan_of, trial_of

from shardwise.trainer.planning import candidates
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.planner import Extent, context_of, plan_on_enough_gpus, take_candidate
from shardwise.trainer.planning.search.configurations import (
    SAME_SPEED,
    best_candidate,
    bucket_sizes,
    least_need,
    micro_batches,
)
from shardwise.trainer.planning.search.fallbacks import fallbacks, memory_remedy, nothing_fits
from shardwise.trainer.planning.tables.catalogue import CATALOGUE, LAYOUTS
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import InputError, NothingFitsError
from shardwise.trainer.spec.hardware import Disk, Hardware
from shardwise.trainer.spec.job.sections import Allowance, DpoJob, GaloreJob, Limits, LoraJob, NvmeLimit
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Candidate, Plan
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Method, Precision
from shardwise.trainer.spec.units import GIB

MACHINES = [
    ("tiny", "1xCPU"), ("tiny", "2xCPU"), ("tiny", "1xRTX-4090"), ("1b", "1xRTX-4090"), ("1b", "1xV100-32GB"),
    ("8b", "2xRTX-3090"), ("8b", "4xA100-SXM4-80GB"), ("8b", "8xH100-SXM5-80GB"), ("8b", "4x8xH100-SXM5-80GB"),
]  # fmt: skip


ROWS = {row.name: row for row in CATALOGUE}


@pytest.fixture(scope="module", params=MACHINES, ids=lambda case: f"{case[0]} on {case[1]}")
def plan(request: pytest.FixtureRequest) -> Plan:
    return plan_of(*request.param)


def test_every_row_is_a_candidate_that_fits_or_a_rejection_with_a_rule_or_a_number(plan: Plan) -> None:
    named = [c.strategy.name for c in plan.candidates] + [r.strategy for r in plan.rejections]
    assert sorted(named) == sorted(row.name for row in CATALOGUE)
    assert all(c.memory.need_bytes <= c.memory.usable_bytes for c in plan.candidates)
    assert all(r.rule is not None or any(letter.isdigit() for letter in r.reason) for r in plan.rejections)


def test_the_global_batch_is_the_users_in_every_candidate_and_fallback(plan: Plan) -> None:
    sequences = plan.schedule.sequences_per_step
    for candidate in (*plan.candidates, *plan.fallbacks):
        round_size = candidate.num_ranks * candidate.micro_batch
        assert round_size * (candidate.accumulation - 1) < sequences <= round_size * candidate.accumulation


def upper_end(context: PlanningContext, candidate: Candidate) -> float:
    return candidates.upper_seconds(context, candidates.configuration_of(context, candidate), candidate.speed.step_s)


def compared_seconds(context: PlanningContext, candidate: Candidate) -> float:
    configuration = candidates.configuration_of(context, candidate)
    seconds = candidates.compared_seconds(context, configuration, candidate.speed.step_s)
    return candidates.priced(context, configuration, seconds, candidate.memory.need_bytes)


def test_the_fastest_comes_first_by_the_upper_end_of_its_range(plan: Plan) -> None:
    context = context_of(plan)
    for earlier, later in pairwise(plan.candidates):
        seconds = [compared_seconds(context, each) for each in (earlier, later)]
        assert seconds[0] <= (1 + SAME_SPEED) * seconds[1]


def test_the_choice_has_the_least_machinery_of_those_as_fast_as_the_fastest(plan: Plan) -> None:
    context, exact = context_of(plan), [c for c in plan.candidates if c.strategy.is_exact]
    seconds = [compared_seconds(context, candidate) for candidate in exact]
    peers = [c for c, s in zip(exact, seconds, strict=True) if s <= min(seconds) * (1 + SAME_SPEED)]
    layouts = [LAYOUTS.index((c.strategy.sharding, c.strategy.offload)) for c in peers]
    assert plan.chosen in peers
    assert LAYOUTS.index((plan.chosen.strategy.sharding, plan.chosen.strategy.offload)) == min(layouts)


def fall_in_peak(plan: Plan) -> bool:
    peaks = [candidate.memory.peak_allocated_bytes for candidate in (plan.chosen, *plan.fallbacks)]
    return all(later < earlier for earlier, later in pairwise(peaks))


def test_fallbacks_fall_in_peak_and_never_change_more_of_the_update(plan: Plan) -> None:
    assert fall_in_peak(plan)
    assert all(candidate.strategy.is_exact for candidate in plan.fallbacks if plan.chosen.strategy.is_exact)


@pytest.mark.parametrize(
    ("model", "hardware", "facts", "row"),
    [
        ("tiny", "1xCPU", {}, "none/fp32/adamw_fused"),  # no peer to share with, no fast 16-bit product
        ("tiny", machine("1xCPU", cpu_flags=("avx512f", "amx_bf16")), {}, "none/bf16-mixed/adamw_fused"),
        ("tiny", "2xCPU", {}, "ddp/fp32/adamw_fused"),  # it fits on each rank, and ddp moves least between them
        ("1b", "1xV100-32GB", {"allow": ()}, "none/fp16-mixed/adamw_fused"),  # its tensor cores multiply no bf16
        ("8b", "1xA100-SXM4-80GB", {"allow": (Allowance.BF16_WEIGHTS,)}, "none/bf16/adamw_fused"),  # nothing exact fits
    ],
)
def test_the_row_that_is_chosen(model: str, hardware: Any, facts: dict[str, Any], row: str) -> None:
    assert plan_of(model, hardware, **facts).chosen.strategy.name == row


def test_a_faster_candidate_whose_prediction_is_less_certain_is_named_with_both_errors() -> None:
    """Paged state leaves room for all activations, if the driver moves pages as fast as the link can."""
    plan = plan_of("1b", "1xRTX-4090", pin={"sharding": Sharding.NONE})
    paged = min(plan.candidates, key=lambda each: each.speed.step_s)
    assert paged.strategy.optimizer is Optimizer.PAGED_ADAMW
    assert paged.speed.step_s < 0.95 * plan.chosen.speed.step_s
    note = note_of(plan, "is predicted")
    assert f"(--take {plan.candidates.index(paged) + 1})" in note
    assert note.endswith("is within 15%: the gain is less than the difference")


@pytest.mark.parametrize(
    ("num_sequences", "spec", "choices"),
    [(32, "1xCPU", (1, 2, 4, 8, 16, 32)), (24, "2xCPU", (1, 2, 3, 4, 6, 8, 12)), (33, "2xCPU", (1, 2, 4, 8, 16, 17))],
)
def test_micro_batches_are_powers_of_two_and_divisors(num_sequences: int, spec: str, choices: tuple[int, ...]) -> None:
    assert micro_batches(context_for("tiny", spec, seq_len=512, tokens_per_step=512 * num_sequences)) == choices


@pytest.mark.parametrize("name", ["zero1/fp32/adamw", "zero2/bf16-mixed/adamw", "zero3/bf16-mixed/adamw"])
def test_larger_buckets_need_more(name: str) -> None:
    context, row = context_for("8b", "2xA100-SXM4-80GB", seq_len=512), ROWS[name]
    base = candidates.configuration_of(context, plan_of("tiny", "2xCPU", pin={"sharding": row.sharding}).chosen)
    sizes = bucket_sizes(context.shape, row)
    needs = [candidates.candidate_of(context, replace(base, strategy=row, buckets=b)).memory.need_bytes for b in sizes]
    assert needs == sorted(needs) and len(sizes) > 3


def test_buckets_take_at_most_half_of_what_is_free() -> None:
    """A roomy card gets larger buckets than a full one, and neither gives them all it has."""
    pin = {"sharding": Sharding.ZERO2, "micro_batch": 1, "checkpointing": Checkpointing.FULL}
    plan = plan_of("8b", "8xH100-SXM5-80GB", pin=pin)
    smallest = plan.fallbacks[-1] if plan.fallbacks[-1].strategy == plan.chosen.strategy else plan.fallbacks[0]
    least, most = (each.memory.need_bytes for each in (smallest, plan.chosen))
    cap = least + (most - least) // 2
    full = plan_of("8b", machine("8xH100-SXM5-80GB", vram_bytes=cap), pin=pin).chosen
    elements = [each.buckets.reduce_elements for each in (smallest, full, plan.chosen) if each.buckets is not None]
    assert elements == sorted(set(elements)) and len(elements) == 3
    assert full.memory.need_bytes <= least + (cap - least) // 2 + 1


def test_money_is_hours_times_devices_times_price() -> None:
    taken = plan_of("8b", "8xH100-SXM5-80GB", price=2.0).methods[0]
    assert taken.verdict == "taken" and taken.hours is not None
    assert (taken.cost, taken.gpu_hours) == pytest.approx((taken.hours * 8 * 2.0, taken.hours * 8))


def test_offload_respects_the_host_ram_of_the_job_and_what_may_be_pinned() -> None:
    row, hardware = "zero2+optimizer/bf16-mixed/deepspeed_cpu_adam", machine("4xA100-SXM4-80GB")
    reasons = {r.strategy: r for r in plan_of("8b", hardware, host_ram=130 * GIB).rejections}
    assert "of host RAM a node; 130 GiB are granted" in reasons[row].reason
    assert (reasons[row].remedy or "").startswith("limits.host_ram: ")
    small = replace(hardware, host=replace(hardware.host, ram_bytes=132 * GIB, ram_available_bytes=131 * GIB))
    remedy = {r.strategy: r for r in plan_of("8b", small, host_ram=130 * GIB).rejections}[row].remedy or ""
    assert re.match(r"limits\.host_ram: \d+ GiB and nodes with \d+ GiB of RAM", remedy), "the machine has not so much"
    hardware = replace(hardware, host=replace(hardware.host, pinned_limit_bytes=8 * GIB))
    reasons = {r.strategy: r for r in plan_of("8b", hardware).rejections}
    assert "of pinned host RAM; the limit is 8 GiB" in reasons[row].reason


def test_the_free_space_of_the_disk_under_the_path_limits_nvme() -> None:
    context = context_for("8b", "1xRTX-4090")
    scratch = Disk(path="/scratch", filesystem="ext4", total_bytes=1000 * GIB, free_bytes=500 * GIB)
    disks = (replace(scratch, path="/", free_bytes=10 * GIB), scratch)
    hardware = replace(context.hardware, host=replace(context.hardware.host, disks=disks))
    job = replace(context.job, limits=Limits(nvme=NvmeLimit(path="/scratch/me")))
    assert replace(context, hardware=hardware, job=job).nvme_bytes == 500 * GIB
    assert context.nvme_bytes is None


FULL: dict[str, Any] = {"method": Method.FULL, "allow": ()}


@pytest.mark.parametrize(
    ("model", "hardware", "facts", "words"),
    [
        ("8b", "8xH100-SXM5-80GB", {"hours": 0.001}, r"needs .*; limits.hours is 0.001\n.*limits.hours: \d+"),
        ("8b", "8xH100-SXM5-80GB", {"cost": 0.01, "price": 2.0}, r"costs .*; limits.cost is 0.01\n.*limits.cost: \d+"),
        # State fits, activations of one 128k sequence do not.
        ("1b", "1xL40S", {**FULL, "seq_len": 131072, "tokens_per_step": 131072}, r"train\.seq_len: (32768|65536)"),
        ("8b", "1xRTX-3090", FULL, r"what would fit: lora \([\d.]+ GiB\), qlora \([\d.]+ GiB\)$"),
        ("8b", machine("1xH100-SXM5-80GB", vram_bytes=8 * GIB), FULL, r"has 8 GiB usable \(limits\.vram\)"),
        ("70b", "8xH100-SXM5-80GB", {"hours": 0.01, "host_ram": 64 * GIB, "method": Method.FULL},
         r"limits\.host_ram: \d+ GiB and limits\.hours: \d+"),
        ("8b", "8xH100-SXM5-80GB", {"hours": 0.01, "cost": 0.01, "price": 2.0},
         r"limits\.hours: \d+ and limits\.cost: \d+"),
        ("70b", "1xRTX-4060-8GB", {"host_ram": 16 * GIB, "method": Method.FULL},
         r"device with \d+ GiB usable and limits\.host_ram: \d+ GiB"),
        # The smallest change over all methods.
        ("70b", machine("2xRTX-3090", ram_bytes=24 * GIB), {},
         r"nothing fits: qlora training of 70.6B .* of host RAM a node.*\n.*GiB of RAM"),
    ],
)  # fmt: skip
def test_what_is_in_the_way_is_named_with_what_would_do(model, hardware, facts, words):
    with pytest.raises(NothingFitsError, match=words):
        plan_of(model, hardware, **facts)


@pytest.mark.parametrize(
    ("model", "spec", "sharding", "number", "larger"),
    [
        ("8b", "2xRTX-3090", Sharding.ZERO3, 8, "8xRTX-3090"),
        ("8b", "3xA100-SXM4-40GB", Sharding.FSDP, 6, "6xA100-SXM4-40GB"),
        ("8b", "3xRTX-3090", Sharding.ZERO3, 16, "2x8xRTX-3090"),  # 12 are no whole nodes
        ("70b", "3xA100-SXM4-80GB", Sharding.FSDP, 24, "3x8xA100-SXM4-80GB"),
    ],
)
def test_the_number_of_cards_that_is_offered_suffices(model, spec, sharding, number, larger):
    context, strategy = context_for(model, spec), ROWS[f"{sharding}/bf16-mixed/adamw_fused"]
    assert memory_remedy(context, least_need(context, strategy)) == f"{number} such GPUs"
    assert best_candidate(context_for(model, larger), strategy) is not None


def test_the_length_that_is_offered_suffices_at_the_same_global_batch() -> None:
    """Half the length is twice the sequences: two of them, or gradients that add up, must fit too."""
    strategy, card = ROWS["ddp/bf16-mixed/adamw_fused"], "2xA100-SXM4-80GB"
    whole, half = (context_for("1b", card, seq_len=seq_len, tokens_per_step=65536) for seq_len in (32768, 16384))
    need = least_need(half, strategy).memory.need_bytes

    def remedy(usable_bytes: int) -> str:
        context = replace(whole, device=replace(whole.device, usable_bytes=usable_bytes))
        return memory_remedy(context, least_need(context, strategy))

    assert remedy(need) == "train.seq_len: 16384"
    assert remedy(need - 1) != "train.seq_len: 16384"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"seq_len": 262144, "tokens_per_step": 262144}, r"train\.seq_len.*131072"),
        ({"pin": {"attention": Attention.FLASH}}, r"pin\.attention: flash .*flash-attn"),
        ({"pin": {"sharding": Sharding.NONE}}, r"pin\.sharding: none "),
        ({"pin": {"sharding": Sharding.HSDP, "shard_group": 3}}, r"pin\.shard_group: 3 .*write 2 or 4$"),
        ({"pin": {"shard_group": 8}}, r"pin\.shard_group: 8 "),
        ({"pin": {"sharding": Sharding.ZERO1, "offload": Offload.OPTIMIZER}},
         r"pin\.sharding: zero1, pin\.offload: optimizer.* offload none"),
        ({"pin": {"checkpointing": Checkpointing.EVERY_N, "checkpointing_n": 33}}, r"pin\.checkpointing_n.*32"),
        ({"tokens_per_step": 65536, "pin": {"micro_batch": 5}}, r"pin\.micro_batch.*32.* 8 .*4"),
    ],
)  # fmt: skip
def test_impossible_combinations_are_refused_by_setting_and_figure(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan_of("8b", "8xH100-SXM5-80GB", **facts)


def test_a_tokenizer_larger_than_the_model_is_refused_beside_all_other_problems() -> None:
    with pytest.raises(InputError, match=r"5000.*4096") as error:
        plan_of("tiny", "1xCPU", seq_len=1024, data=data_of(vocab_size=5000))
    assert len(str(error.value).splitlines()) == 2


def test_take_puts_the_nth_candidate_first_and_replans_its_fallbacks() -> None:
    plan = plan_of("8b", "4xA100-SXM4-80GB")
    taken = take_candidate(plan, 3)
    assert taken.chosen.strategy == plan.candidates[2].strategy
    assert {c.strategy.name for c in taken.candidates} == {c.strategy.name for c in plan.candidates}
    assert fall_in_peak(taken)
    assert len(taken.chosen.reasons) == 6
    shortened = replace(plan, fallbacks=plan.fallbacks[-1:])
    assert take_candidate(shortened, 1) is shortened, "fallbacks that were changed since stay"
    for number in (0, -1, 1000):
        with pytest.raises(InputError, match=rf"--take {number}: the plan has {len(plan.candidates)} candidates"):
            take_candidate(plan, number)


# 70B by QLoRA in four hours: NF4 weights are too many for one card, and over a network as slow as that between such
# nodes fsdp gathers them for longer than hsdp, which gathers between four cards. Only hsdp is in time.
SLOW_NETWORK: dict[str, Any] = {"model": "70b", "spec": "2x8xRTX-4090", "method": Method.QLORA, "hours": 4}


def test_over_a_slow_network_weights_are_gathered_inside_a_node() -> None:
    plan = plan_of(**SLOW_NETWORK)
    assert plan.chosen.strategy.sharding is Sharding.HSDP
    assert plan.hybrid_mesh == (4, 4)
    (reason,) = (reason for reason in plan.chosen.reasons if reason.startswith("hsdp"))
    assert "4 copies, each over 4 ranks: groups of 2 would need" in reason
    assert plan.fallbacks and fall_in_peak(plan), "each step needs less than the one before, also over all nodes"
    with pytest.raises(NothingFitsError, match=r"\(fsdp\S*/bf16-mixed/adamw_fused\) needs .*; limits.hours is 4"):
        plan_of(**SLOW_NETWORK, pin={"sharding": Sharding.FSDP})


PINS: tuple[dict[str, Any], ...] = (
    {"checkpointing": Checkpointing.SELECTIVE}, {"compile": True}, {"activation_offload": True},
    {"optimizer": Optimizer.ADAMW_8BIT}, {"precision": Precision.FP16_MIXED},
    {"sharding": Sharding.ZERO3, "precision": Precision.BF16},
    {"sharding": Sharding.HSDP, "checkpointing": Checkpointing.SELECTIVE},
    {"sharding": Sharding.HSDP, "shard_group": 4}, {"shard_group": 8},
)  # fmt: skip
PINS_ON_CPU: tuple[dict[str, Any], ...] = (
    *({"sharding": each} for each in (Sharding.ZERO1, Sharding.ZERO2, Sharding.ZERO3, Sharding.FSDP)),
    *({"checkpointing": each} for each in (Checkpointing.NONE, Checkpointing.EVERY_N, Checkpointing.ATTENTION)),
    {"compile": True}, {"loss": LossHead.FUSED}, {"attention": Attention.EAGER}, {"micro_batch": 2},
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "spec", "pin"),
    [*(("8b", "2x8xH100-SXM5-80GB", pin) for pin in PINS), *(("tiny", "2xCPU", pin) for pin in PINS_ON_CPU)],
)
def test_what_is_pinned_is_taken_and_kept(model: str, spec: str, pin: dict[str, Any]) -> None:
    plan = plan_of(model, spec, pin=pin)
    for each in (*plan.candidates, *plan.fallbacks):
        assert {axis: getattr(each, axis, None) or getattr(each.strategy, axis, None) for axis in pin} == pin
        assert (each.buckets is not None) is each.strategy.sharding.uses_deepspeed


def test_auto_takes_the_first_method_within_the_limits() -> None:
    """8B on 24 GB: with state in host RAM while the clock allows it, else the next method that is fast enough."""
    small = machine("1xRTX-4090", ram_bytes=64 * GIB)
    assert plan_of("8b", small).chosen.method is Method.LORA
    large = machine("1xRTX-4090", ram_bytes=512 * GIB)
    patient = plan_of("8b", large)
    assert patient.chosen.method is Method.FULL
    limit = 0.99 * next(row.hours for row in patient.methods if row.hours is not None)
    hurried = plan_of("8b", large, hours=limit)
    assert hurried.chosen.method.freezes_base
    assert f"limits.hours is {limit:g}" in hurried.methods[0].verdict


def test_an_update_that_is_not_exact_is_chosen_only_if_it_gains_a_tenth() -> None:
    """Lion moves fewer bytes and gains little; bf16 weights need no copies and gain much."""
    approximate, rounded = (
        plan_of("1b", "1xA100-SXM4-80GB", allow=(allowance,), tokens_per_step=2048)
        for allowance in (Allowance.OPTIMIZER_APPROX, Allowance.BF16_WEIGHTS)
    )
    assert approximate.chosen.is_exact
    assert min(each.speed.step_s for each in approximate.candidates) < 0.99 * approximate.chosen.speed.step_s
    assert rounded.chosen.strategy.precision is Precision.BF16


def test_an_uncertain_prediction_must_be_faster_by_what_it_is_less_certain() -> None:
    plan = plan_of("8b", "4xA100-SXM4-80GB")
    paged = next(c for c in plan.candidates if c.strategy.optimizer is Optimizer.PAGED_ADAMW)
    configurations = [candidates.configuration_of(context_of(plan), each) for each in (plan.chosen, paged)]
    errors = [candidates.prediction_error(each) for each in configurations]
    assert errors == [candidates.UNCOMPARED_ERROR, candidates.PAGING_ERROR]
    assert plan.chosen.strategy.optimizer is Optimizer.ADAMW_FUSED


def test_cards_that_make_a_step_slower_or_a_plan_impossible_are_left_out() -> None:
    """One row a step keeps one card busy; ranks with a row each may wait for gradients longer than they compute."""

    def planned(model: str, hardware: Hardware, **facts: Any) -> Plan:
        return plan_on_enough_gpus(partial(plan_of, model, **facts), hardware)

    idle = planned("1b", machine("4xL4"), method=Method.LORA, tokens_per_step=2048)
    assert (idle.chosen.num_ranks, len(idle.hardware.gpus)) == (1, 1)
    assert idle.hardware.excluded[-1].startswith("GPU 1, 2, 3: ")
    assert planned("1b", machine("4xL4"), method=Method.LORA, tokens_per_step=8192).chosen.num_ranks == 4
    slow = planned("1b", machine("4xL4"), method=Method.GALORE, seq_len=512, tokens_per_step=2048)
    assert (slow.chosen.num_ranks, slow.hardware.excluded[-1]) == (2, "GPU 2, 3: with more than 2 a step takes longer")
    small = {"method": Method.GALORE, "seq_len": 512, "tokens_per_step": 2048}
    assert planned("1b", machine("4xL4"), pin={"sharding": Sharding.DDP}, **small).chosen.num_ranks == 4
    short = machine("8xA100-SXM4-80GB", ram_bytes=30 * GIB)
    assert planned("1b", short, method=Method.FULL).chosen.num_ranks == 4
    both = planned("1b", machine("8xL4", ram_bytes=30 * GIB), method=Method.GALORE, seq_len=512, tokens_per_step=2048)
    assert both.chosen.num_ranks == 2
    reasons = [reason.partition("more than ")[2] for reason in both.hardware.excluded]
    assert reasons == ["4 nothing fits", "2 a step takes longer"]
    with pytest.raises(NothingFitsError, match=r"full training of 70\.6B"):
        planned("70b", short, method=Method.FULL)


@pytest.mark.parametrize(("model", "spec"), [*MACHINES, ("70b", "8xH100-SXM5-80GB"), ("70b", "1xRTX-4090")])
def test_a_part_of_a_plan_is_what_the_whole_plan_has(model: str, spec: str) -> None:
    try:
        whole = plan_on_enough_gpus(partial(plan_of, model), machine(spec))
    except NothingFitsError as error:
        with pytest.raises(NothingFitsError, match=re.escape(str(error))):
            plan_on_enough_gpus(partial(plan_of, model), machine(spec), extent=Extent.SCREEN)
        return
    of_rules = tuple(rejection for rejection in whole.rejections if rejection.rule is not None)
    screen = plan_on_enough_gpus(partial(plan_of, model), machine(spec), extent=Extent.SCREEN)
    assert screen == replace(whole, rejections=of_rules)
    assert plan_of(model, screen.hardware, extent=Extent.CHOICE).candidates == screen.candidates[:1]


@pytest.mark.parametrize(
    ("model", "spec", "facts"),
    [
        ("70b", "8xH100-SXM5-80GB", {}),
        ("8b", "2xRTX-3090", {"method": None}),
        ("8b", "4xL4", {"method": None, "tokens_per_step": 4096}),
        ("1b", "4xL4", {"method": Method.GALORE, "seq_len": 512, "tokens_per_step": 2048}),
        ("1b", "8xL4", {"method": None, "tokens_per_step": 2048}),
        ("1b", "8xL4", {"method": None, "hours": None, "seq_len": 512, "tokens_per_step": 2048, "tokens": 600_000_000}),
    ],
)
def test_what_cannot_be_faster_on_fewer_cards_is_not_searched_and_changes_nothing(model, spec, facts):
    def whole(hardware: Hardware, **_: object) -> Plan:
        return plan_of(model, hardware, **facts)

    found = plan_on_enough_gpus(partial(plan_of, model, **facts), machine(spec))
    assert found == plan_on_enough_gpus(whole, machine(spec))


def test_a_higher_cap_is_offered_where_the_card_has_more_and_suffices() -> None:
    with pytest.raises(NothingFitsError) as error:
        plan_of("1b", machine("1xH100-SXM5-80GB", vram_bytes=GIB), allow=())
    offered = re.search(r"limits\.vram \(or --vram\): (\d+) GiB", str(error.value))
    plan_of("1b", machine("1xH100-SXM5-80GB", vram_bytes=int(offered[1]) * GIB), allow=())


def test_time_alone_is_offered_where_another_row_lacks_only_time() -> None:
    """A faster row that also wants more host RAM than there is would still be too slow with it."""
    context = context_for("8b", "8xH100-SXM5-80GB", hours=0.001, host_ram=512 * GIB)
    slow = plan_of("8b", "8xH100-SXM5-80GB", host_ram=512 * GIB).chosen
    memory, speed = replace(slow.memory, host_bytes=1024 * GIB), replace(slow.speed, step_s=slow.speed.step_s / 2)
    fast, hours = replace(slow, memory=memory, speed=speed), math.ceil(candidates.run_hours(context, slow))
    assert str(nothing_fits(context, [fast, slow], [])).endswith(f"would fit with limits.hours: {hours}")


def test_what_a_trial_measured_ranks_before_what_was_predicted_and_what_ran_out_of_memory_is_rejected() -> None:
    """Even where it turned out slow: a prediction of the others may be wrong in the same direction."""
    first, *_, last = plan_of("tiny", "2xCPU").candidates
    assert plan_of("tiny", "2xCPU", trials=(trial_of(last, 1e4),)).chosen.strategy == last.strategy
    plan = plan_of("tiny", "2xCPU", trials=(trial_of(first, None, ran_out_of_memory=True),))
    assert plan.chosen.strategy != first.strategy
    reasons = {r.reason for r in plan.rejections if r.strategy == first.strategy.name}
    assert reasons == {f"ran out of memory in a trial at micro batch {first.micro_batch}"}


def test_the_faster_of_two_trials_is_chosen_however_little_it_is() -> None:
    """Predictions that differ by less than one per cent are one, measurements are not."""
    first, second = plan_of("tiny", "1xCPU").candidates[:2]

    def chosen(step_s: float) -> str:
        trials = (trial_of(first, 1.0), trial_of(second, step_s))
        return plan_of("tiny", "1xCPU", trials=trials).chosen.strategy.name

    assert chosen(0.999) == second.strategy.name
    assert chosen(1.001) == first.strategy.name
    assert chosen(1.0) == first.strategy.name


def test_the_table_shows_all_four_methods_and_takes_one() -> None:
    methods = plan_of("8b", "8xH100-SXM5-80GB").methods
    assert [row.method for row in methods] == list(Method)
    assert [row.verdict for row in methods] == ["taken", "does not fit", "fits", "fits"]
    by_method = {row.method: row.memory_bytes or 0 for row in methods}
    assert by_method[Method.GALORE] > by_method[Method.LORA] > 0 < by_method[Method.QLORA]
    # GaLore cannot be sharded, and a pin leaves only shards.
    methods = plan_of("8b", "8xH100-SXM5-80GB", pin={"sharding": Sharding.ZERO3}).methods
    (galore,) = (row for row in methods if row.method is Method.GALORE)
    assert galore.memory_bytes is None and galore.verdict.startswith("no strategy on this machine supports it")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"job": job_of(seq_len=512, tokens_per_step=8000)}, "no multiple of seq_len 512"),
        ({"seq_len": 512, "tokens_per_step": 512 * 33, "pin": {"micro_batch": 16}}, "31 of 64 rows of each step are"),
        ({"data": data_of(seq_len=512, source="estimated")}, "estimate of its tokens"),
        ({"data": data_of(seq_len=512, notes=("three rows were skipped",))}, "three rows were skipped"),
        ({"model": "1b", "spec": "8xH100-SXM5-80GB", "tokens_per_step": 4096}, "2 sequences for 8 ranks"),
        ({"spec": machine("8xH100-SXM5-80GB", ram_bytes=None)}, "host RAM of the nodes is unknown"),
        (
            {"job": job_of(seq_len=512, method=Method.FULL, lora=LoraJob(rank=8, dora=True))},
            "train.lora.rank and train.lora.dora has no",
        ),
        (
            {"job": job_of(seq_len=512, method=Method.LORA, galore=GaloreJob(rank=8))},
            "train.galore.rank has no effect: the method is lora",
        ),
        (
            {"job": job_of(seq_len=512, dpo=DpoJob(beta=0.3))},
            "train.dpo.beta has no effect: these rows are no preferences",
        ),
        ({"job": job_of(seq_len=512, lr=1.0)}, "times the usual"),
        (
            {"model": "1b", "spec": machine("1xH100-SXM5-80GB", ram_bytes=3 * GIB)},
            "of host RAM that a run may use here",
        ),
    ],
)
def test_notes_say_what_a_reader_must_know(facts: dict[str, Any], words: str) -> None:
    plan = plan_of(**{"model": "tiny", "spec": "2xCPU"} | facts)
    assert any(words in note for note in (*plan.warnings, *plan.notes))


@pytest.mark.parametrize(
    ("size", "words"), [(None, "its free space is unknown"), (GIB, "1 GiB are granted"), (900 * GIB, "")]
)
def test_nvme_is_a_budget(size: int | None, words: str) -> None:
    context = context_for("8b", "1xRTX-4090", allow=(Allowance.OFFLOAD_NVME,))
    job = replace(context.job, limits=Limits(hours=1e6, nvme=NvmeLimit(path="/scratch", size=size)))
    context = replace(context, job=job)
    over = candidates.excess(context, least_need(context, ROWS["zero3+nvme_all/bf16-mixed/deepspeed_cpu_adam"]))
    assert (over is None) if not words else (over is not None and words in over.reason)


def test_a_pinned_micro_batch_is_never_halved_but_buffers_may_shrink() -> None:
    plan = plan_of("8b", "8xH100-SXM5-80GB", pin={"micro_batch": 2, "sharding": Sharding.ZERO3})
    assert plan.fallbacks
    assert {fallback.micro_batch for fallback in plan.fallbacks} == {2}
    sizes = [f.buckets.reduce_elements for f in plan.fallbacks if f.buckets is not None]
    assert min(sizes) < plan.chosen.buckets.reduce_elements


def test_fallbacks_pass_over_halves_that_need_more() -> None:
    """8B on 8 cards under FSDP: a share of 4 keeps no gradients beside its own; 2 and 1 add up 4 B x 8.03B of them."""
    pin = {"sharding": Sharding.FSDP, "compile": False, "reduce_every_micro_batch": False}
    plan = plan_of("8b", "8xH100-SXM5-80GB", pin=pin)
    steps = [(c.micro_batch, c.accumulation, c.checkpointing) for c in (plan.chosen, *plan.fallbacks)]
    assert steps[:3] == [(4, 1, Checkpointing.NONE), (1, 4, Checkpointing.NONE), (1, 4, Checkpointing.FULL)]
    assert steps[-1] == (4, 1, Checkpointing.FULL)


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize(("model", "spec"), MACHINES)
def test_a_card_is_filled_for_a_twentieth_of_the_time_alone(model: str, spec: str, method: Method) -> None:
    """Published runs that left less than 3 % of a card were 17 to 46 % slower than predicted."""
    try:
        plan = plan_of(model, spec, method=method)
    except NothingFitsError:
        return
    context, (chosen, *others) = context_of(plan), plan.candidates
    roomy = 0.97 * chosen.memory.usable_bytes
    if context.is_cpu or chosen.memory.need_bytes <= roomy:
        return
    for other in others:
        if other.memory.need_bytes <= roomy and not other.strategy.optimizer.facts.is_paged:
            assert upper_end(context, other) > 1.03 * upper_end(context, chosen), other.strategy.name


def takes_host(candidate: Candidate) -> bool:
    row = candidate.strategy
    return row.offload is not Offload.NONE or candidate.activation_offload or row.optimizer.facts.is_paged


@pytest.mark.parametrize("spec", ["2xA100-SXM4-80GB", "4xA100-SXM4-40GB", "8xL40S"])
def test_several_cards_take_host_ram_only_for_more_than_the_errors_of_both_predictions(spec: str) -> None:
    plan = plan_of("8b", spec, method=Method.FULL, seq_len=4096, tokens_per_step=524288)
    context = context_of(plan)

    def error(candidate: Candidate) -> float:
        return 1 + candidates.prediction_error(candidates.configuration_of(context, candidate))

    assert not takes_host(plan.chosen)
    for other in filter(takes_host, plan.candidates):
        gain = plan.chosen.speed.step_s / other.speed.step_s
        assert gain * error(plan.chosen) < 1.02 * (1 + candidates.UNCOMPARED_ERROR) ** 2 * error(other)


def test_auto_is_lora_on_a_small_card_where_full_training_has_its_state_in_host_ram() -> None:
    plan = plan_of("1b", "1xRTX-4060-8GB")
    full = plan_of("1b", "1xRTX-4060-8GB", method=Method.FULL)
    assert (plan.chosen.method, full.chosen.strategy.offload is Offload.NONE) == (Method.LORA, False)
    assert "train.method=full" in note_of(plan, "train.method auto")
    larger = plan_of("1b", "1xRTX-3090")
    assert larger.chosen.method is Method.FULL and not any("train.method auto" in note for note in larger.notes)
    scratch = plan_of("1b", "1xRTX-4060-8GB", job=job_of(from_scratch=True))
    assert scratch.chosen.method is Method.FULL


@pytest.mark.parametrize(
    ("num_layers", "spec", "expected"),
    [
        pytest.param(150, "8xRTX-4090", Method.QLORA, id="QLoRA is twice as fast"),
        pytest.param(60, "4xRTX-3090", Method.LORA, id="QLoRA is a tenth faster, within the errors"),
        pytest.param(90, "4xA100-SXM4-40GB", Method.LORA, id="NVLink gathers a block while another computes"),
    ],
)
def test_lora_that_gathers_its_base_over_pcie_is_qlora_where_that_is_clearly_faster(num_layers, spec, expected) -> None:
    model = CONFIGS["8b"] | {"num_hidden_layers": num_layers}
    auto, lora = (
        plan_of(model, machine(spec, ram_bytes=64 * GIB), method=method, seq_len=4096, tokens_per_step=131072).chosen
        for method in (None, Method.LORA)
    )
    assert lora.strategy.sharding.shards_weights and not lora.strategy.offload.moves_parameters
    assert auto.method is expected


def test_a_plan_says_what_would_fill_the_card() -> None:
    plan = plan_of("1b", "1xRTX-4080", method=Method.LORA, seq_len=4096, tokens_per_step=131072)
    assert plan.chosen.memory.need_bytes < 0.97 * plan.chosen.memory.usable_bytes
    assert any("faster but fill 98% of the card" in reason for reason in plan.chosen.reasons)


def test_fallbacks_reduce_every_micro_batch_before_anything_is_recomputed() -> None:
    plan = plan_of("8b", "8xH100-SXM5-80GB", pin={"sharding": Sharding.FSDP, "compile": False})
    links = (plan.chosen, *plan.fallbacks)
    steps = [(c.micro_batch, c.accumulation, c.checkpointing, c.reduce_every_micro_batch) for c in links]
    assert steps[:3] == [(size, 4 // size, Checkpointing.NONE, size < 4) for size in (4, 2, 1)]


def test_whole_logits_fall_back_to_slices() -> None:
    """Where nothing else may shrink, slices of a vocabulary of 128k lower the peak."""
    free = {"sharding": Sharding.ZERO3, "micro_batch": 4, "checkpointing": Checkpointing.FULL}
    chosen = plan_of("8b", "8xH100-SXM5-80GB", pin={**free, "loss": LossHead.EAGER}).chosen
    chain = fallbacks(context_for("8b", "8xH100-SXM5-80GB", pin=free), (chosen,))
    assert chain[0].loss is LossHead.CHUNKED
    assert (chain[0].strategy, chain[0].micro_batch) == (chosen.strategy, 4)


def test_an_exact_plan_never_falls_back_to_another_update() -> None:
    context = context_for("8b", "8xH100-SXM5-80GB", allow=(Allowance.BF16_WEIGHTS,))
    exact, approximate = (
        plan_of("8b", "8xH100-SXM5-80GB", pin={"sharding": sharding, "precision": precision}).chosen
        for sharding, precision in ((Sharding.ZERO1, Precision.BF16_MIXED), (Sharding.FSDP, Precision.BF16))
    )
    layouts = {link.strategy.sharding for link in fallbacks(context, (exact, approximate))}
    assert layouts == {Sharding.ZERO1}
    assert Sharding.FSDP in {link.strategy.sharding for link in fallbacks(context, (approximate, exact))}


def test_a_day_is_a_wish_where_no_limit_is_stated() -> None:
    """8B on 8 GB: LoRA and QLoRA take 12 and 10 hours for 20 million tokens."""
    card = machine("1xRTX-4060-8GB", ram_bytes=32 * GIB)

    def plan(millions: int, hours: float | None) -> Plan:
        tokens, on_card = millions * 10**6, {"embedding_on_host": False}
        job = job_of(seq_len=4096, tokens_per_step=131072, epochs=None, tokens=tokens, hours=hours, pin=on_card)
        return plan_of("8b", card, job=job, data=data_of(seq_len=4096, num_eval_rows=0))

    day, week = plan(20, None), plan(200, None)
    assert not any("limits.hours" in warning for warning in day.warnings)
    assert any("limits.hours" in warning for warning in week.warnings)
    fitting = [row for row in week.methods if row.verdict in ("taken", "fits")]
    assert all(row.hours > candidates.WISHED_HOURS for row in fitting)
    assert week.chosen.method is min(fitting, key=lambda row: row.hours).method
    with pytest.raises(NothingFitsError, match=r"limits.hours is 24\n.*limits.hours: \d+"):
        plan(200, 24)


def test_an_engine_for_its_offload_on_one_card_says_what_a_step_needs_without() -> None:
    lora = plan_of("8b", machine("1xRTX-3060-12GB", ram_bytes=32 * GIB), method=Method.LORA)
    need = re.search(r"without it a step needs at least ([\d.]+) GiB, ([\d.]+) GiB are usable", lora.chosen.reasons[0])
    assert need is not None
    assert float(need[1]) > float(need[2])
    pinned = plan_of("1b", "1xRTX-4090", allow=(Allowance.OFFLOAD_CPU,), pin={"offload": Offload.OPTIMIZER})
    assert pinned.chosen.reasons[0].endswith("(optimizer)")


def test_where_one_memory_serves_both_nothing_moves_and_the_process_in_it_counts() -> None:
    """8B trained whole needs 147 GiB; paging half of that into the same pool frees nothing."""
    chip = machine("1xGB10", ram_bytes=None)
    with pytest.raises(NothingFitsError, match=r"adamw_fused\); GB10 has 113 GiB usable"):
        plan_of("8b", chip, method=Method.FULL)
    lora = plan_of("8b", chip, method=Method.LORA)
    other = replace(chip, gpus=(replace(chip.gpus[0], spec_name="H200"),))
    beside = plan_of("8b", replace(other, vram_cap_bytes=112 * GIB), method=Method.LORA, pin={"micro_batch": 1})
    alike = plan_of("8b", chip, method=Method.LORA, pin={"micro_batch": 1})
    assert (lora.chosen.memory.host_bytes, lora.chosen.memory.pinned_bytes) == (0, 0)
    assert not any("host RAM" in warning for warning in lora.warnings)
    in_ram = beside.chosen.memory.host_bytes + beside.chosen.memory.pinned_bytes
    assert in_ram > GIB
    assert alike.chosen.memory.need_bytes - beside.chosen.memory.need_bytes == pytest.approx(in_ram, abs=GIB)
    for pin in ({"optimizer": Optimizer.PAGED_ADAMW}, {"offload": Offload.OPTIMIZER}):
        with pytest.raises(InputError, match="whose memory is the RAM of the machine"):
            plan_of("1b", chip, method=Method.FULL, pin=pin)
