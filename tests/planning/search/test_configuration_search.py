"""The best setting of a row: nothing that fits is overlooked, and the least need is the least."""

from functools import cache, partial
from itertools import product
from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import CONFIGS, context_for, data_of, machine, plan_of

from shardwise.trainer.planning import candidates
from shardwise.trainer.planning.calibrate import Correction, Corrections, Factor
from shardwise.trainer.planning.candidates import configuration_of, predicted_memory, predicted_need, with_micro_batch
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.planner import check_job
from shardwise.trainer.planning.rules.rule import obstacle_to
from shardwise.trainer.planning.search import configurations as search
from shardwise.trainer.planning.search.fallbacks import fallbacks
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.data.profile import BatchWidth
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import MeasuredRates
from shardwise.trainer.spec.job.sections import Allowance, DataFormat
from shardwise.trainer.spec.messages.extension import Hook
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Candidate, MemoryEstimate
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method, Strategy
from shardwise.trainer.spec.units import GIB

ROWS = {row.name: row for row in CATALOGUE}
SHARDED = ["zero1", "zero2", "zero3", "fsdp_grad_op", "fsdp"]
CASES = [
    *[("tiny", "1xCPU", f"none/fp32/{optimizer}") for optimizer in ("adamw", "adamw_fused", "sgd")],
    *[("tiny", "2xCPU", f"{sharding}/fp32/adamw") for sharding in ("ddp", *SHARDED)],
    *[("1b", "1xRTX-4090", f"none/{precision}/adamw_fused") for precision in ("fp32", "bf16-mixed", "bf16")],
    *[("1b", "2xRTX-4090", f"{sharding}/bf16-mixed/adamw") for sharding in ("ddp", "zero3", "fsdp")],
    ("8b", "2xRTX-3090", "zero3+optimizer/bf16-mixed/deepspeed_cpu_adam"),
    *[("8b", "4xA100-SXM4-80GB", f"{sharding}/bf16-mixed/adamw_fused") for sharding in ("ddp", *SHARDED)],
    ("70b", "8xH100-SXM5-80GB", "fsdp/bf16-mixed/adamw_fused"),
    ("8b", "4x8xA100-SXM4-80GB", "hsdp/bf16-mixed/adamw_fused"),
]


WIDTHS = tuple(BatchWidth(micro_batch=2**n, mean_width=100.0 * 2**n, mean_width_sorted=100.0) for n in range(8))
PADDED = data_of(is_packed=False, num_documents=10_000, mean_document_tokens=100.0, batch_widths=WIDTHS)


def needs(context: PlanningContext, configuration: Configuration) -> int:
    return predicted_memory(context, configuration).need_bytes


def key_of(context: PlanningContext, configuration: Configuration) -> tuple[int, int]:
    """The key that a search minimises: the class of the upper end of a time, then the micro batch."""
    seconds = candidates.compared_seconds(
        context, configuration, candidates.predicted_speed(context, configuration).step_s
    )
    seconds = candidates.priced(context, configuration, seconds, predicted_need(context, configuration))
    return search.time_class(seconds), configuration.micro_batch


def every_setting(context: PlanningContext, strategy: Strategy) -> list[Configuration]:
    found = []
    for checkpointing, loss in product(search.checkpointings(context), search.losses(context)):
        first = search.first_configuration(context, strategy, checkpointing=checkpointing, loss=loss)
        axes = {
            "loss_chunk_tokens": search.chunk_sizes(context.shape, loss), "compile": search.compiles(context),
            "activation_offload": search.activation_offloads(context, checkpointing),
            "shard_group": search.shard_groups(context, strategy),
            "reduce_every_micro_batch": search.reductions(context, strategy),
            "embedding_on_host": search.embeddings_on_host(context, strategy),
        }  # fmt: skip
        starts = [replace(first, **dict(zip(axes, values, strict=True))) for values in product(*axes.values())]
        sizes = product(starts, search.micro_batches(context))
        found += [with_micro_batch(context, start, micro_batch) for start, micro_batch in sizes]
    return [each for each in found if obstacle_to(context, each) is None]


@cache
def settings_of(model: str, spec: str, row: str) -> dict[Configuration, MemoryEstimate]:
    context = context_for(model, spec)
    return {each: predicted_memory(context, each) for each in every_setting(context, ROWS[row])}


def cut_to(model: str, spec: str, row: str, share: float) -> PlanningContext:
    """The devices cut to where this share of the settings of a row fits."""
    by_need = sorted(memory.need_bytes for memory in settings_of(model, spec, row).values())
    return with_usable(model, spec, by_need[int(share * len(by_need))])


def best_of(context: PlanningContext, row: str) -> Candidate:
    return search.best_candidate(context, ROWS[row])


def with_usable(model: str, spec: str, usable_bytes: int, **facts: Any) -> PlanningContext:
    """The same devices, each with this much memory: a row that fits no real card can be asked too."""
    context = context_for(model, spec, **facts)
    return replace(context, device=replace(context.device, usable_bytes=usable_bytes))


def fitting_sizes(context: PlanningContext, start: Configuration) -> list[int]:
    groups = search.by_accumulation(context, start, search.micro_batches(context))
    return sorted(configuration.micro_batch for group in groups for configuration in search.fitting(context, group))


def test_a_whole_share_fits_where_half_of_it_does_not() -> None:
    """Adding up gradients takes room of its own: 8.03B x 4 B = 29.9 GiB that a single micro batch never holds."""
    pin = {"sharding": Sharding.FSDP_GRAD_OP, "checkpointing": Checkpointing.FULL}
    context = with_usable("8b", "4xA100-SXM4-80GB", 60 * GIB, pin=pin)
    row = "fsdp_grad_op/bf16-mixed/adamw_fused"
    start = search.first_configuration(
        context, ROWS[row], checkpointing=Checkpointing.FULL, loss=search.losses(context)[0]
    )
    half, whole = (with_micro_batch(context, start, micro_batch) for micro_batch in (4, 8))
    assert (half.accumulation, whole.accumulation) == (2, 1)
    assert needs(context, whole) < 60 * GIB < needs(context, half)
    best = best_of(context, row)
    assert (best.micro_batch, best.accumulation) == (8, 1)


@pytest.mark.parametrize("data", [None, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize(("model", "spec", "row"), CASES)
def test_nothing_that_fits_is_faster_than_what_is_taken(model, spec, row, data):
    """Branch and bound gives what trying everything gives, on a device that is cut to where most settings fit."""
    context = replace(cut_to(model, spec, row, 0.7), data=data)
    least = min(
        key_of(context, configuration)
        for configuration in every_setting(context, ROWS[row])
        if needs(context, configuration) <= context.device.usable_bytes
        and not candidates.exceeds_host(context, configuration)
    )
    assert key_of(context, replace(configuration_of(context, best_of(context, row)), buckets=None)) == least


@pytest.mark.parametrize("usable_gib", [6.5, 7.0, 8.5, 11.0, 15.0, 20.0])
def test_with_a_table_in_host_ram_too_nothing_that_fits_is_faster_than_what_is_taken(usable_gib: float) -> None:
    """QLoRA of 8B: the table is there on the smaller cards, where it makes room for rows, or spares moving others."""
    row = "none/bf16-mixed/adamw_fused"
    context = with_usable("8b", "1xRTX-4080", int(usable_gib * GIB), method=Method.QLORA)
    settings = every_setting(context, ROWS[row])
    fitting = [each for each in settings if needs(context, each) <= context.device.usable_bytes]
    taken = configuration_of(context, best_of(context, row))
    assert key_of(context, taken) == min(key_of(context, each) for each in fitting)
    assert taken.embedding_on_host is (usable_gib < 10)


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [("8xRTX-4090", (4, 2)), ("6xRTX-4090", (3, 2)), ("4x1xRTX-4090", (2,)), ("4x4xRTX-4090", (8, 4, 2))],
)
def test_groups_of_hybrid_sharding_divide_a_node_or_the_nodes(spec: str, sizes: tuple[int, ...]) -> None:
    hybrid, plain = (ROWS[f"{sharding}/bf16-mixed/adamw_fused"] for sharding in ("hsdp", "fsdp"))
    assert search.shard_groups(context_for("8b", spec), hybrid) == sizes
    assert search.shard_groups(context_for("8b", spec), plain) == (None,)
    pinned = context_for("8b", spec, pin={"shard_group": sizes[-1]})
    assert search.shard_groups(pinned, hybrid) == (sizes[-1],)


def test_cards_with_slow_links_share_no_more_than_they_have_to() -> None:
    """LoRA of 8B: a copy fits on two cards of 15 GiB, and over PCIe two cards exchange less than eight."""
    context = with_usable("8b", "8xRTX-4090", 15 * GIB, method=Method.LORA)
    hybrid, full = (best_of(context, f"{name}/bf16-mixed/adamw_fused") for name in ("hsdp", "fsdp"))
    assert hybrid.shard_group == 2
    assert hybrid.speed.step_s < 0.9 * full.speed.step_s
    less = with_usable("8b", "8xRTX-4090", 12 * GIB, method=Method.LORA)
    assert best_of(less, "hsdp/bf16-mixed/adamw_fused").shard_group == 4


def test_blocks_that_cannot_be_compiled_run_fused_kernels() -> None:
    row, hardware = "none/bf16-mixed/adamw_fused", machine("1xRTX-4090", libraries=("liger-kernel",))
    context = context_for("1b", hardware)
    compiled, eager = best_of(context, row), best_of(pinned_to(context, compile=False), row)
    plain = best_of(pinned_to(context, compile=False, fused_kernels=False), row)
    assert (compiled.compile, compiled.fused_kernels) == (True, False)
    assert (eager.compile, eager.fused_kernels, plain.fused_kernels) == (False, True, False)
    assert eager.speed.step_s < plain.speed.step_s
    failed = replace(context, corrections=replace(context.corrections, not_compiled="a graph broke"))
    assert best_of(failed, row).fused_kernels
    selective = best_of(pinned_to(context, compile=False, checkpointing=Checkpointing.SELECTIVE), row)
    assert not selective.fused_kernels
    with_same = replace(configuration_of(context, plain), fused_kernels=True)
    assert needs(context, with_same) < needs(context, configuration_of(context, plain))


def pinned_to(context: PlanningContext, **pin: Any) -> PlanningContext:
    return replace(context, job=replace(context.job, pin=replace(context.job.pin, **pin)))


@pytest.mark.parametrize(("seq_len", "taken"), [(16384, Checkpointing.SELECTIVE), (1024, Checkpointing.FULL)])
def test_selective_recomputation_is_taken_where_only_it_fits_and_the_host_is_fast_enough(seq_len, taken):
    """On a card that holds one row with it and no byte more."""
    row, pin = "none/bf16-mixed/adamw_fused", {"micro_batch": 1, "compile": False}
    facts: dict[str, Any] = {"pin": pin, "allow": (), "seq_len": seq_len}
    whole = context_for("1b", "1xA100-SXM4-80GB", **facts)
    start = search.first_configuration(
        whole, ROWS[row], checkpointing=Checkpointing.SELECTIVE, loss=search.losses(whole)[0]
    )
    usable = with_usable("1b", "1xA100-SXM4-80GB", needs(whole, start), **facts)
    assert best_of(usable, row).checkpointing is taken


def test_what_selective_recomputation_keeps_never_goes_to_host_ram() -> None:
    row, pin = ROWS["none/bf16-mixed/adamw_fused"], {"checkpointing": Checkpointing.SELECTIVE}
    free, pinned = context_for("1b", "1xRTX-4090"), context_for("1b", "1xRTX-4090", pin=pin)
    assert search.least_need(free, row).activation_offload
    assert search.least_need(free, row).checkpointing is Checkpointing.FULL
    assert not search.least_need(pinned, row).activation_offload
    smaller = replace(pinned.device, usable_bytes=search.least_need(pinned, row).memory.need_bytes - 1)
    assert search.best_candidate(replace(pinned, device=smaller), row) is None


def test_activations_leave_the_card_where_that_is_faster_than_recomputing_them_and_the_host_has_room() -> None:
    """LoRA of 8B parameters on a card with room for weights and little else, and on one with room for both."""

    def taken(spec: str, ram_bytes: int, rate: int | None = 25 * 10**9) -> tuple[bool, Checkpointing]:
        rates = MeasuredRates(host_to_device_bytes_per_s=rate)
        hardware = replace(machine(spec, ram_bytes=ram_bytes), rates=rates)
        context = context_for("8b", hardware, method=Method.LORA)
        best = best_of(context, "none/bf16-mixed/adamw_fused")
        return best.activation_offload, best.checkpointing

    assert taken("1xRTX-3090", 64 * GIB) == (True, Checkpointing.NONE)
    assert taken("1xRTX-3090", 8 * GIB)[1] is Checkpointing.FULL
    assert taken("1xRTX-3090", 64 * GIB, rate=None)[1] is Checkpointing.FULL  # copies that were not measured
    assert taken("1xH100-SXM5-80GB", 512 * GIB) == (False, Checkpointing.NONE)


def test_an_update_inside_the_backward_pass_is_searched_where_the_job_allows_gradients_that_are_not_clipped() -> None:
    """Exact rows use it only where they fit no other way; those that change the update where it is faster."""
    exact, rounded = ROWS["none/bf16-mixed/adamw_fused"], ROWS["none/bf16/paged_adamw_8bit"]
    facts: dict[str, Any] = {"tokens_per_step": 4096, "pin": {"compile": False}}

    def taken(row: Strategy, usable_bytes: int, *allow: Allowance) -> Candidate | None:
        return search.best_candidate(with_usable("1b", "1xA100-SXM4-80GB", usable_bytes, allow=allow, **facts), row)

    roomy, unclipped = taken(exact, 80 * GIB, Allowance.UNCLIPPED), Allowance.UNCLIPPED
    assert roomy.is_exact
    least = search.least_need(context_for("1b", "1xA100-SXM4-80GB", allow=(), **facts), exact).memory.need_bytes
    assert taken(exact, least - 1) is None
    tight = taken(exact, least - 1, unclipped)
    assert (tight.optimizer_in_backward, tight.is_exact, tight.accumulation) == (True, False, 1)
    clipped, free = taken(rounded, 12 * GIB), taken(rounded, 12 * GIB, unclipped)
    assert free.speed.step_s <= clipped.speed.step_s * (1 + search.SAME_SPEED)


@pytest.mark.parametrize(
    ("row", "pin"),
    [
        ("none/bf16-mixed/lomo", {"optimizer": Optimizer.LOMO}),
        ("none/bf16-mixed/adamw_fused", {"optimizer_in_backward": True}),
    ],
)
def test_an_update_inside_the_backward_pass_takes_a_ranks_whole_share_at_once(row: str, pin: dict[str, Any]) -> None:
    """It leaves no gradients that a second micro batch could add to."""
    context = context_for("1b", "1xA100-SXM4-80GB", pin=pin)
    share = context.sequences_per_rank
    for candidate in (search.best_candidate(context, ROWS[row]), search.least_need(context, ROWS[row])):
        assert (candidate.micro_batch, candidate.accumulation) == (share, 1)
        assert all(lower.accumulation == 1 for lower in fallbacks(context, (candidate,)))


@pytest.mark.parametrize(("model", "spec", "row"), CASES)
def test_the_need_alone_is_the_need_of_the_whole_prediction_and_the_least_is_the_least(model, spec, row):
    """And so is the host RAM."""
    context, settings = context_for(model, spec), settings_of(model, spec, row)
    for configuration, memory in settings.items():
        assert predicted_need(context, configuration) == memory.need_bytes
        need = memory.pinned_bytes + memory.host_bytes
        for granted in (need, need - 1):
            limits = replace(context.job.limits, host_ram=granted)
            limited = replace(context, job=replace(context.job, limits=limits))
            assert candidates.exceeds_host(limited, configuration) is (
                need > (limited.host_ram_bytes or 0) and not context.is_cpu
            )
    least = min(memory.need_bytes for memory in settings.values())
    assert search.least_need(context, ROWS[row]).memory.need_bytes == least
    assert best_of(with_usable(model, spec, least), row).memory.need_bytes == least
    assert search.best_candidate(with_usable(model, spec, least - 1), ROWS[row]) is None


@pytest.mark.parametrize(("model", "spec", "row"), CASES[::5])
def test_the_need_alone_is_corrected_as_the_whole_prediction_is(model: str, spec: str, row: str) -> None:
    corrections = Corrections(by_precision={ROWS[row].precision: Correction(peak=Factor(value=1.2, num_runs=3))})
    context = replace(context_for(model, spec), corrections=corrections)
    for each in settings_of(model, spec, row):
        assert predicted_need(context, each) == predicted_memory(context, each).need_bytes


SLICED: dict[str, Any] = {"checkpointing": Checkpointing.FULL, "loss": LossHead.CHUNKED}


def test_small_slices_of_logits_are_taken_where_only_they_fit_and_not_for_a_slightly_faster_step() -> None:
    """They would let a micro batch of 4 fit where larger ones leave room for 2."""
    row, pin = "none/bf16-mixed/adamw_fused", {"compile": False, "activation_offload": False, **SLICED}
    whole = context_for("1b", "1xL40S", pin=pin)
    start = search.first_configuration(whole, ROWS[row], checkpointing=Checkpointing.FULL, loss=search.losses(whole)[0])
    standard = needs(whole, start)
    for usable, taken in ((standard, 512), (standard - 1, search.MIN_CHUNK_TOKENS)):
        found = best_of(with_usable("1b", "1xL40S", usable, pin={"micro_batch": 1, **pin}), row)
        assert found.loss_chunk_tokens == taken
    context = with_usable("1b", "1xL40S", needs(whole, with_micro_batch(whole, start, 4)) - 1, pin=pin)
    assert fitting_sizes(context, replace(start, loss_chunk_tokens=search.MIN_CHUNK_TOKENS)) == [1, 2, 4]
    best = best_of(context, row)
    assert (best.micro_batch, best.loss_chunk_tokens) == (2, 512)


@pytest.mark.parametrize("model", CONFIGS)
def test_slices_come_in_two_sizes_by_the_vocabulary_and_whole_logits_in_none(model: str) -> None:
    context = context_for(model, "1xRTX-4090", seq_len=512)
    chunked, eager = search.losses(context)
    assert search.chunk_sizes(context.shape, chunked) == (1024 if model == "tiny" else 512, search.MIN_CHUNK_TOKENS)
    assert search.chunk_sizes(context.shape, eager) == (None,)
    assert search.chunk_sizes(replace(context.shape, vocab_size=2_000_000), chunked) == (search.MIN_CHUNK_TOKENS,)


def test_ligers_loss_head_is_chosen_where_it_is_installed_and_defined() -> None:
    data, machine_of = data_of(), partial(machine, libraries=("liger-kernel",))
    plan = plan_of("1b", machine_of("1xRTX-4080"), data=data, method=Method.LORA)
    without = plan_of("1b", "1xRTX-4080", data=data, method=Method.LORA)
    assert (plan.chosen.loss, without.chosen.loss) == (LossHead.FUSED_LINEAR, LossHead.EAGER)
    assert plan.chosen.speed.step_s < without.chosen.speed.step_s
    pairs = data_of(format=DataFormat.PREFERENCE, is_packed=False)
    for spec, rows, hooks in (("1xCPU", data, ()), ("1xRTX-4090", pairs, ()), ("1xRTX-4090", data, (Hook.LOSS,))):
        context = replace(context_for("1b", machine_of(spec)), data=rows, hooks=hooks)
        assert LossHead.FUSED_LINEAR not in search.losses(context)


def test_a_model_of_its_own_logits_has_whole_logits_alone_also_when_memory_runs_out() -> None:
    context = context_for("1b", machine("1xA100-SXM4-80GB", libraries=("liger-kernel",)))
    context = replace(context, shape=replace(context.shape, loss_heads=(LossHead.EAGER,)))
    assert search.losses(context) == (LossHead.EAGER,)
    candidate = search.best_candidate(context, ROWS["none/bf16-mixed/adamw_fused"])
    assert candidate is not None and candidate.loss is LossHead.EAGER
    assert {each.loss for each in fallbacks(context, (candidate,))} == {LossHead.EAGER}
    job = replace(context.job, pin=replace(context.job.pin, loss=LossHead.CHUNKED))
    with pytest.raises(
        InputError, match=r"^pin\.loss: chunked and llama exclude each other(.|\n)*use pin\.loss=eager$"
    ):
        check_job(job, context.shape, data_of(), ())


@pytest.mark.parametrize(("written", "n"), [({}, 2), ({"checkpointing_n": 4}, 4)])
def test_every_n_takes_the_n_of_the_job_and_two_where_it_says_none(written: dict[str, int], n: int) -> None:
    context = context_for("1b", "1xA100-SXM4-80GB", pin={"checkpointing": Checkpointing.EVERY_N, **written})
    row = ROWS["none/bf16-mixed/adamw_fused"]
    configuration = search.first_configuration(context, row, checkpointing=Checkpointing.EVERY_N, loss=LossHead.CHUNKED)
    assert (search.checkpointings(context), configuration.checkpoint_every_n) == ((Checkpointing.EVERY_N,), n)
    others = set(Checkpointing) - {Checkpointing.EVERY_N}
    assert {search.every_n(context_for("1b", "1xA100-SXM4-80GB"), each) for each in others} == {None}


def test_selective_is_offered_where_weights_are_trained_and_not_for_frozen_ones() -> None:
    """Of a frozen block it keeps more than the block would keep by itself."""
    full, lora = (context_for("8b", "1xA100-SXM4-80GB", method=method) for method in (Method.FULL, Method.LORA))
    assert Checkpointing.SELECTIVE in search.checkpointings(full)
    assert Checkpointing.SELECTIVE not in search.checkpointings(lora)
