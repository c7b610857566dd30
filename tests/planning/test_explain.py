"""The explanation holds what decided: the choice and its bytes, what was passed over, and every number or rule."""

import re
from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import data_of, machine, plan_of

from trainer.planning.candidates import run_hours
from trainer.planning.explain import compare_plans, explain_plan, machine_words
from trainer.planning.planner import situation_of, take_candidate
from trainer.planning.text_layout import letters, paragraph, stacked_bar, table
from trainer.spec.errors import NothingFitsError
from trainer.spec.plan import Plan
from trainer.spec.strategy import Method, Optimizer, Precision, Sharding
from trainer.spec.units import GIB, format_bytes, format_seconds


@pytest.fixture(scope="module")
def node() -> Plan:
    return plan_of("8b", "4xA100-SXM4-80GB", price=2.5)


@pytest.fixture(scope="module")
def text(node: Plan) -> str:
    return explain_plan(node)


def section(text: str, opening: str) -> str:
    return next(part for part in text.split("\n\n") if part.startswith(opening))


def test_the_heading_names_run_method_model_and_machine(text: str) -> None:
    assert text.splitlines()[0] == "test: full training of llama, 8.03B parameters, on 4 x A100-SXM4-80GB"


def test_the_choice_stands_with_its_batch_and_the_recipe_in_full(node: Plan, text: str) -> None:
    choice = " ".join(section(text, "takes").split())
    chosen = node.chosen
    assert f"takes {chosen.strategy.name}" in choice
    assert f"micro batch {chosen.micro_batch} x 2048 tokens, accumulation {chosen.accumulation}, 4 ranks" in choice
    assert "65,536 tokens a step" in choice
    for words in ("weights ", "gradients ", "adamw_fused with state in fp32", "loss head chunked of 512 tokens"):
        assert words in choice
    assert "lr 2e-05 (fine-tuning of 8.03B parameters: Llama 2 chat" in choice
    assert "data: 10,000 packed rows of at most 2,048 tokens, 20.5M tokens (counted); 100 rows held out" in choice


def test_every_part_of_the_memory_stands_in_the_bar_and_in_the_list(node: Plan, text: str) -> None:
    memory = section(text, "memory of each GPU")
    for name, num_bytes in node.chosen.memory.parts.items():
        assert f"{name}" in memory
        assert format_bytes(num_bytes) in memory
    assert format_bytes(node.chosen.memory.need_bytes) in memory
    assert "79.2 GiB usable" in memory
    assert node.chosen.memory.peak_event in memory
    bar = next(line.strip() for line in memory.splitlines() if line.strip().startswith("["))
    assert len(bar) <= 98
    assert bar.count("a") == pytest.approx(96 * node.chosen.memory.parts["weights"] / (79.15 * GIB), abs=1)


def test_speed_stands_in_tokens_hours_gpu_hours_and_money(node: Plan, text: str) -> None:
    speed = " ".join(section(text, "speed").split())
    hours = run_hours(situation_of(node), node.chosen)
    assert f"{4 * node.chosen.speed.tokens_per_s_per_gpu:,.0f} tokens/s" in speed
    assert f"{format_seconds(hours * 3600)} in all" in speed
    assert f"{hours * 4:.3g} GPU-hours" in speed
    assert f"cost {hours * 4 * 2.5:.2f} at 2.5 a GPU-hour" in speed


def test_all_methods_stand_in_one_table(node: Plan, text: str) -> None:
    lines = section(text, "methods").splitlines()
    assert [line.split()[0] for line in lines[2:]] == [str(method) for method in Method]
    assert "taken" in lines[2]
    assert all("trains from shardwise 0.3 on" in line for line in lines[3:])


@pytest.mark.parametrize("top", [0, 1, 5])
def test_as_many_runners_up_as_asked_stand_with_their_number_for_take(node: Plan, top: int) -> None:
    part = section(explain_plan(node, top=top), "runners-up")
    lines = part.splitlines()[2:]
    assert len(lines) == top
    for number, line in enumerate(lines, start=2):
        assert line.split()[:2] == [str(number), node.candidates[number - 1].strategy.name]
        assert take_candidate(node, number).chosen.strategy.name in line


def test_every_fallback_has_its_line(node: Plan, text: str) -> None:
    lines = section(text, "if memory runs out").splitlines()[1:]
    assert len(lines) == len(node.fallbacks) > 0
    for line, fallback in zip(lines, node.fallbacks, strict=True):
        assert fallback.strategy.name in line
        assert format_bytes(fallback.memory.peak_allocated_bytes) in line


def test_every_rejected_row_is_counted_and_those_with_a_number_stand_alone(node: Plan, text: str) -> None:
    rejected = " ".join(section(text, "rejected").split())
    assert rejected.startswith(f"rejected ({len(node.rejections)} rows of the catalogue)")
    by_number = [rejection for rejection in node.rejections if rejection.rule is None]
    assert by_number
    for rejection in by_number:
        assert f"{rejection.strategy}: {rejection.reason}; would fit with {rejection.remedy}" in rejected
    counted = [int(count) for count in re.findall(r"\b(\d+) rows?\)?: ", rejected)]
    assert sum(counted) + len(by_number) == len(node.rejections)


@pytest.mark.parametrize(
    "words",
    [
        "trains from shardwise 0.3 on",
        "would train 4 different models on 4 ranks; instead: ddp",
        "fp8 (49 rows): needs compute capability 8.9; A100-SXM4-80GB has 8.0",
        "allow: [bf16_weights]",
        "1 node is fsdp",
    ],
)
def test_rules_stand_with_what_they_took_and_what_to_use_instead(text: str, words: str) -> None:
    assert words in " ".join(section(text, "rejected").split())


def test_no_line_but_a_tables_is_wider_than_asked(node: Plan) -> None:
    for width in (80, 100, 140):
        for part in explain_plan(node, width=width).split("\n\n"):
            if not part.startswith(("methods", "runners-up", "if memory", "memory of")):
                assert max(map(len, part.splitlines())) <= width


def test_notes_and_left_out_devices_are_shown() -> None:
    hardware = replace(machine("1xRTX-4090"), excluded=("GPU 1 (RTX 3060): another model",), notes=("a note",))
    notes = section(explain_plan(plan_of("1b", hardware)), "notes")
    assert "not used: GPU 1 (RTX 3060): another model" in notes
    assert "a note" in notes


def test_a_cpu_plan_speaks_of_ranks_and_no_gpu() -> None:
    text = explain_plan(plan_of("tiny", "2xCPU", data=data_of(seq_len=512, num_eval_rows=0, source="estimated")))
    assert "on 2 ranks on Test CPU, 512 GiB RAM each" in text
    assert "memory of each rank" in text
    assert "GPU-hours" not in section(text, "speed")
    assert "(estimated from file sizes); nothing held out" in " ".join(text.split())


@pytest.mark.parametrize(
    ("model", "spec", "facts", "words"),
    [
        ("1b", "1xRTX-4090", {}, "weights fp32, computed in bf16; gradients fp32; adamw_fused with state in fp32"),
        ("1b", "1xV100-32GB", {}, "weights fp32, computed in fp32; gradients fp32"),
        (
            "8b",
            "8xH100-SXM5-80GB",
            {"pin": {"sharding": Sharding.ZERO2}},
            "weights bf16 and fp32 masters, computed in bf16; gradients bf16; adamw_fused with state in fp32",
        ),
        (
            "8b",
            "8xH100-SXM5-80GB",
            {"pin": {"optimizer": Optimizer.DEEPSPEED_CPU_ADAM}},
            "deepspeed_cpu_adam with state in fp32 in host RAM",
        ),
        (
            "8b",
            "8xH100-SXM5-80GB",
            {"pin": {"precision": Precision.BF16}},
            "weights bf16, computed in bf16; gradients bf16; adamw_fused with state in bf16",
        ),
    ],
)
def test_the_recipe_names_the_type_of_everything(model: str, spec: str, facts: dict[str, Any], words: str) -> None:
    assert words in " ".join(explain_plan(plan_of(model, spec, **facts)).split())


def test_machines_are_compared_in_one_table() -> None:
    answers: list[tuple[str, Plan | NothingFitsError]] = []
    for spec in ("1xRTX-4060-8GB", "4xA100-SXM4-80GB", "8xH100-SXM5-80GB"):
        try:
            answers.append((spec, plan_of("8b", spec, price=2.0)))
        except NothingFitsError as error:
            answers.append((spec, error))
    lines = compare_plans(answers).splitlines()
    assert lines[0].split() == ["machine", "strategy", "batch", "memory", "tokens/s", "time", "GPU-hours", "cost"]
    assert lines[1].startswith("1xRTX-4060-8GB")
    assert "nothing fits" in lines[1]
    for line, (spec, plan) in zip(lines[2:4], answers[1:], strict=True):
        assert isinstance(plan, Plan)
        assert line.startswith(spec)
        assert plan.chosen.strategy.name in line
    assert "RTX-4060-8GB has 7.75 GiB usable" in lines[4]
    assert "smallest change" in lines[5]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("1xRTX-4090", "1 x RTX-4090"),
        ("4x8xH100-SXM5-80GB", "4 nodes of 8 x H100-SXM5-80GB"),
        ("1xCPU", "1 rank on Test CPU, 1 TiB RAM each"),
    ],
)
def test_machines_have_short_names(spec: str, words: str) -> None:
    assert machine_words(machine(spec)) == words


def test_a_bar_is_filled_by_shares_and_ends_with_what_is_free() -> None:
    assert stacked_bar([50, 25], total=100, width=8) == "[aaaabb..]"
    assert stacked_bar([50, 75], total=100, width=8) == "[aaaabbbb]"
    assert stacked_bar([1, 1, 98], total=100, width=10) == "[cccccccccc]"


def test_letters_go_round_after_z() -> None:
    assert letters(28)[-3:] == "zab"


def test_tables_align_and_paragraphs_hang() -> None:
    assert table([("a", "bb"), ("ccc", "d")], right=(1,), indent="") == ["a    bb", "ccc   d"]
    assert table([]) == []
    assert paragraph("one " * 15, width=40) == ["  " + " ".join(["one"] * 9), "    " + " ".join(["one"] * 6)]
