"""FP8 is planned by an installed library and what timing the model's own blocks found, or the plan says why not."""

from typing import Any

import pytest
from estimate_factory import config
from msgspec.structs import replace
from planning_factory import context_for, fp8_gain_of, machine, note_of, plan_of, shape_of

from shardwise.trainer.planning.candidates import candidate_of, configuration_of
from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.context import PlanningContext
from shardwise.trainer.planning.explain.first_screen import first_screen, text_of
from shardwise.trainer.planning.explain.plan_page import explain_plan
from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.rules.rule import refuse
from shardwise.trainer.planning.search.configurations import first_start
from shardwise.trainer.planning.speed.rates import rates_of
from shardwise.trainer.planning.speed.step import fp8_share, step_seconds
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.fp8 import FP8_RECIPES, converted_shapes, linear_shapes
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import LEAST_FP8_GAIN, Candidate, Fp8Gain, MemoryEstimate, Plan
from shardwise.trainer.spec.strategy import Checkpointing, Fp8Recipe, Method, Precision
from shardwise.trainer.spec.units import MIB

TENSORWISE, ROWWISE, CURRENT = Fp8Recipe.TORCHAO_TENSORWISE, Fp8Recipe.TORCHAO_ROWWISE, Fp8Recipe.CURRENT
BOTH = ("torchao", "transformer-engine")


def hoppers(*libraries: str, cards: str = "8xH100-SXM5-80GB") -> Hardware:
    return machine(cards, libraries=libraries)


HOPPERS = hoppers(*BOTH)
# 8B on them trains for less than these minutes only in FP8.
IN_A_HURRY: dict[str, Any] = {"allow": (Allowance.FP8,), "hours": 0.075}
AT_EASE: dict[str, Any] = {"allow": (Allowance.FP8,)}
PINNED: dict[str, Any] = {"pin": {"precision": Precision.FP8}}
(FSDP,) = (row for row in CATALOGUE if row.name == "fsdp/fp8/adamw_fused")
NOT_TIMED = Fp8Gain(recipe=TENSORWISE, tokens=4096, problem="it took more than 120 s")


def plan(gain: Fp8Gain | None, facts: dict[str, Any]) -> Plan:
    return plan_of("8b", HOPPERS, fp8_gain=gain, **facts)


def in_fp8(candidates: tuple[Candidate, ...]) -> list[Candidate]:
    return [candidate for candidate in candidates if candidate.strategy.precision is Precision.FP8]


def why_fp8(made: Plan) -> str:
    (reason,) = [reason for reason in made.chosen.reasons if reason.startswith("fp8: ")]
    return reason


@pytest.mark.parametrize(
    ("libraries", "pin", "recipe", "compiled"),
    [
        (("torchao",), {}, TENSORWISE, True), (("transformer-engine",), {}, CURRENT, False),
        (BOTH, {}, TENSORWISE, True), (BOTH, {"compile": False}, CURRENT, False),
        (BOTH, {"fp8_recipe": ROWWISE}, ROWWISE, True),
        (("torchao",), {"precision": Precision.FP8, "compile": False}, TENSORWISE, False),
    ],
)  # fmt: skip
def test_the_recipe_is_that_of_an_installed_library_in_the_form_it_is_made_for(libraries, pin, recipe, compiled):
    made = plan_of("8b", hoppers(*libraries), **{**AT_EASE, "pin": {"sharding": "fsdp", **pin}})
    forms = {(candidate.fp8_recipe, candidate.compile) for candidate in in_fp8(made.candidates)}
    assert forms == {(recipe, compiled)}


def test_under_zero3_blocks_do_not_compile_and_the_other_library_runs() -> None:
    zero3 = {**AT_EASE, "pin": {"sharding": "zero3"}}
    assert {each.fp8_recipe for each in in_fp8(plan_of("8b", HOPPERS, **zero3).candidates)} == {CURRENT}
    alone = plan_of("8b", hoppers("torchao"), **zero3)
    assert not in_fp8(alone.candidates)
    assert "under zero3 hooks inside them" in text_of(first_screen(alone))


@pytest.mark.parametrize(
    ("model", "hardware", "facts", "words"),
    [
        ("8b", hoppers(), {}, "needs torchao, which is not installed"),
        ("8b", hoppers(*BOTH, cards="1xA100-SXM4-80GB"), {"method": Method.LORA}, "compute capability 8.9"),
        ("tiny", HOPPERS, {}, "too small for its casts"),
        ("8b", hoppers("torchao"), {"pin": {"compile": False}}, "use pin.compile: true"),
        ("8b", HOPPERS, {"method": Method.QLORA}, "4-bit ones"),
        ("8b", HOPPERS, {"fp8_gain": fp8_gain_of(0.93)}, "torchao_tensorwise measured 0.93x of bf16"),
    ],
)
def test_where_it_is_allowed_and_cannot_be_used_the_first_screen_says_why(model, hardware, facts, words) -> None:
    made = plan_of(model, hardware, **{**AT_EASE, **facts})
    assert not in_fp8(made.candidates)
    screen = text_of(first_screen(made))
    assert "fp8 is allowed and not used: " in screen and words in " ".join(screen.split())
    installs = [line for line in screen.splitlines() if line.endswith("-m pip install 'shardwise[torchao]'")]
    assert len(installs) == (hardware.libraries == {})
    assert "fp8 is allowed" not in text_of(
        first_screen(plan_of(model, hardware, **{**facts, "allow": (), "fp8_gain": None}))
    )


def test_where_it_pays_it_is_taken_with_the_figure() -> None:
    made = plan(fp8_gain_of(1.31), IN_A_HURRY)
    assert made.chosen.strategy.precision is Precision.FP8 and made.chosen.compile
    assert "measured 1.31x" in why_fp8(made) and "torchao 0.18.0, compiled" in why_fp8(made)
    assert why_fp8(made) in " ".join(explain_plan(made).split())
    made = plan(None, IN_A_HURRY)
    assert made.chosen.strategy.precision is Precision.FP8
    assert "assumed" in why_fp8(made) and "`shardwise train`" in why_fp8(made)


@pytest.mark.parametrize(
    ("gain", "words"),
    [
        (fp8_gain_of(0.93), "0.93x"),
        (fp8_gain_of(LEAST_FP8_GAIN - 0.01), "1.04x"),
        (NOT_TIMED, "it took more than 120 s"),
    ],
)
def test_where_it_does_not_pay_no_row_is_in_it(gain: Fp8Gain, words: str) -> None:
    for facts in (AT_EASE, {**IN_A_HURRY, "hours": 0.1}):
        made = plan(gain, facts)
        assert in_fp8((*made.candidates, *made.fallbacks)) == []
        ((reason, remedy),) = {(row.reason, row.remedy) for row in made.rejections if row.rule == "fp8_does_not_pay"}
        assert words in reason and "bf16-mixed" in remedy


@pytest.mark.parametrize(("torchao", "te", "recipe"), [(1.3, 0.87, TENSORWISE), (1.1, 1.2, CURRENT)])
def test_the_faster_library_is_taken_and_both_figures_are_stated(torchao, te, recipe) -> None:
    of_te = fp8_gain_of(te, CURRENT, "transformer-engine 2.20.2")
    timed = sorted((fp8_gain_of(torchao), of_te), key=lambda gain: -(gain.speedup or 0))
    made = plan(replace(timed[0], others=(timed[1],)), PINNED)
    assert made.chosen.fp8_recipe is recipe and made.chosen.compile is (recipe is TENSORWISE)
    assert f"{torchao:.2f}x" in why_fp8(made) and f"{te:.2f}x" in why_fp8(made)
    assert why_fp8(made).count("transformer-engine 2.20.2, eager") == 1


def test_a_pin_keeps_it_with_the_figure() -> None:
    made = plan(fp8_gain_of(0.93), PINNED)
    assert made.chosen.strategy.precision is Precision.FP8
    assert "pins it" in why_fp8(made) and "0.93x" in why_fp8(made)
    assert "pins it" in why_fp8(plan(None, PINNED)) and "measured" not in why_fp8(plan(None, PINNED))
    assert made.chosen.speed.step_s > plan(None, PINNED).chosen.speed.step_s


def test_rows_behind_an_exact_one_have_the_figure_too() -> None:
    made = plan(fp8_gain_of(1.06), AT_EASE)
    assert in_fp8(made.candidates) and made.chosen.strategy.precision is Precision.BF16_MIXED
    assert "1.06x" in note_of(made, "fp8: ") and "torchao 0.18.0" in note_of(made, "fp8: ")
    assert "what is exact, which is taken" in " ".join(text_of(first_screen(made)).split())
    plain = plan_of("8b", HOPPERS)
    assert not [words for words in (*plain.notes, *plain.chosen.reasons) if "fp8" in words.lower()]


def fp8_configuration(
    model: str = "8b", hardware: Hardware = HOPPERS, gain: Fp8Gain | None = None, **facts: Any
) -> tuple[PlanningContext, Configuration]:
    context = context_for(model, hardware, fp8_gain=gain, **{**AT_EASE, **facts})
    return context, first_start(context, FSDP)


def in_bf16(configuration: Configuration) -> Configuration:
    strategy = replace(configuration.strategy, precision=Precision.BF16_MIXED)
    return replace(configuration, strategy=strategy, fp8_recipe=None)


def test_what_a_block_saves_is_saved_by_its_products() -> None:
    context, configuration = fp8_configuration(gain=fp8_gain_of(1.25))
    rates = rates_of(configuration, context.device)
    assert 1 / rates.matmul - 1 / rates.fp8 == pytest.approx(4e-3 * (1 - 1 / 1.25) / 2e12)
    assert rates_of(in_bf16(configuration), context.device).fp8 == rates.matmul
    # No units are faster than their datasheet, and the casts are in what was measured.
    impossible, _ = fp8_configuration(gain=fp8_gain_of(9.0))
    assert rates_of(configuration, impossible.device).fp8 == impossible.device.peak_flops_per_s(Precision.FP8)
    equal, _ = fp8_configuration(gain=fp8_gain_of(1.0))
    times = [step_seconds(equal.shape, each, equal.device) for each in (configuration, in_bf16(configuration))]
    assert times[0] == pytest.approx(times[1], rel=1e-3)


# pytorch.org, "Supercharging training using float8 and FSDP2" (2024-11): tensorwise, compiled, rows of 8,192 on H100s.
PUBLISHED = [
    (config(32000, 2048, 8192, 24, 16, 16, max_position_embeddings=8192), 128, 1.18),
    (config(128256, 4096, 14336, 32, 32, 8, max_position_embeddings=8192), 128, 1.28),
    (config(128256, 8192, 28672, 80, 64, 8, max_position_embeddings=8192), 256, 1.50),
]


def gain_of(fields: dict[str, Any], num_cards: int, recipe: Fp8Recipe) -> float:
    """Predicted tokens/s of FP8 over those of bf16 compiled, with recomputation of all blocks as published."""
    context, start = fp8_configuration(
        "8b", hoppers(*BOTH, cards=f"{num_cards // 8}x8xH100-SXM5-80GB"), shape=read_model_shape(fields), seq_len=8192,
        tokens_per_step=8192 * num_cards, pin={"fp8_recipe": recipe, "checkpointing": Checkpointing.FULL},
    )  # fmt: skip
    bf16 = replace(in_bf16(start), compile=True)
    return step_seconds(context.shape, bf16, context.device) / step_seconds(context.shape, start, context.device)


@pytest.mark.parametrize(("fields", "num_cards", "published"), PUBLISHED)
def test_gains_are_those_published_of_torchao_within_a_tenth(fields, num_cards, published) -> None:
    assert gain_of(fields, num_cards, TENSORWISE) == pytest.approx(published, rel=0.1)


def test_transformer_engine_pays_for_its_python() -> None:
    """An H100 ran 3B at 0.87 times bf16 (benchmarks/results); its products alone would gain."""
    fields = config(128256, 3072, 8192, 28, 24, 8, head_dim=128, max_position_embeddings=8192)
    context, start = fp8_configuration(
        shape=read_model_shape(fields), hardware=hoppers(*BOTH, cards="1xH100-SXM5-80GB"), seq_len=4096,
        tokens_per_step=8192, pin={"fp8_recipe": CURRENT, "checkpointing": Checkpointing.FULL, "micro_batch": 2},
    )  # fmt: skip
    start = replace(start, strategy=replace(start.strategy, sharding=Sharding.NONE))
    bf16 = replace(in_bf16(start), compile=True)
    seconds = [step_seconds(context.shape, each, context.device) for each in (bf16, start)]
    assert seconds[0] / seconds[1] == pytest.approx(0.87, rel=0.05)


def test_small_products_stay_in_16_bit_and_are_not_counted() -> None:
    shape = shape_of("8b")
    assert linear_shapes(shape) - converted_shapes(shape, TENSORWISE) == {(4096, 1024)}
    small = 2 * 4096 * 1024 / sum(linear.num_weights for linear in shape.linears)
    assert fp8_share(shape, TENSORWISE) == pytest.approx(1 - small)
    assert converted_shapes(shape_of("tiny"), TENSORWISE) == linear_shapes(shape_of("tiny")), "where all are"


@pytest.mark.parametrize(
    ("recipe", "gains"),
    [
        (TENSORWISE, {(4096, 1024): False, (4112, 1024): True, (4096, 1040): True, (2048, 2048): True}),
        (
            ROWWISE,
            {(8192, 2048): False, (1024, 8192): False, (2048, 4096): False, (2064, 4096): True, (2048, 4112): True},
        ),
    ],
)  # fmt: skip
def test_the_sizes_are_those_of_torchao(recipe, gains) -> None:
    """`_auto_filter_for_recipe` of torchao 0.18.0, read in its source."""
    assert {shape: FP8_RECIPES[recipe].gains(shape) for shape in gains} == gains


def memory_of(precision: Precision, recipe: Fp8Recipe | None, checkpointing: Checkpointing) -> MemoryEstimate:
    context, start = fp8_configuration(hardware=hoppers(*BOTH, cards="1xH100-SXM5-80GB"), pin={"compile": False})
    strategy = replace(start.strategy, sharding=Sharding.NONE, precision=precision)
    start = replace(start, strategy=strategy, fp8_recipe=recipe, checkpointing=checkpointing)
    return estimate_memory(context.shape, start, context.device)


@pytest.mark.parametrize("checkpointing", [Checkpointing.FULL, Checkpointing.NONE])
def test_no_weights_are_kept_in_fp8_between_steps(checkpointing) -> None:
    """An H100: 38.65 GB between the steps of 3B by Transformer Engine, 38.62 in bf16 (benchmarks/results)."""
    bf16 = memory_of(Precision.BF16_MIXED, None, checkpointing)
    te, torchao = (memory_of(Precision.FP8, recipe, checkpointing) for recipe in (CURRENT, TENSORWISE))
    assert torchao.steady_allocated_bytes == bf16.steady_allocated_bytes
    assert te.steady_allocated_bytes == bf16.steady_allocated_bytes + 32 * MIB, "for its products"
    assert torchao.peak_allocated_bytes < bf16.peak_allocated_bytes, "its layers save their own weights"
    if checkpointing is Checkpointing.NONE:
        assert te.peak_allocated_bytes < bf16.peak_allocated_bytes, "inputs are saved in one byte"


def test_a_plan_that_was_written_is_judged_by_the_same_figure() -> None:
    made = plan(fp8_gain_of(1.31), IN_A_HURRY)
    read = codec.decode(codec.encode(made), Plan, origin="plan.json")
    assert read.fp8_gain == fp8_gain_of(1.31)
    context = context_of(read)
    again = candidate_of(context, configuration_of(context, read.chosen))
    assert again.speed.step_s == pytest.approx(made.chosen.speed.step_s)
    slow = context_of(replace(read, fp8_gain=fp8_gain_of(0.9)))
    refusal = refuse(slow, read.chosen.strategy)
    assert refusal is not None and refusal.rule == "fp8_does_not_pay"
