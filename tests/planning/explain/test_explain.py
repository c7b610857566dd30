"""The explanation holds what decided: the choice and its bytes, what was passed over, and every number or rule."""

import re
from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import data_of, machine, plan_of, shape_of

from shardwise.trainer.planning.candidates import run_hours, run_totals
from shardwise.trainer.planning.device import machine_text
from shardwise.trainer.planning.explain import comparison
from shardwise.trainer.planning.explain.plan_page import explain_plan, kv_cache_bytes, readable
from shardwise.trainer.planning.page.content import Page, Table, page_text
from shardwise.trainer.planning.planner import context_of, take_candidate
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import NothingFitsError, ShardwiseError
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, Method
from shardwise.trainer.spec.units import GIB, format_bytes, format_seconds

EVERY_N = Checkpointing.EVERY_N


@pytest.fixture(scope="module")
def node() -> Plan:
    return plan_of("8b", "4xA100-SXM4-80GB", price=2.5)


@pytest.fixture(scope="module")
def text(node: Plan) -> str:
    return explain_plan(node)


def section(text: str, opening: str) -> str:
    return next(part for part in text.split("\n\n") if part.startswith(opening))


def test_the_choice_stands_with_its_batch_and_the_recipe_in_full(node: Plan, text: str) -> None:
    choice, chosen = " ".join(section(text, "chosen").split()), node.chosen
    facts = (
        *(f"chosen: {chosen.strategy.name}", "65,536 tokens a step", "weights ", "gradients ", "loss head eager, "),
        f"micro batch {chosen.micro_batch} x 2048 tokens, accumulation {chosen.accumulation}, 4 ranks",
        "adamw_fused with state in fp32",
        "lr 2e-05 (fine-tuning of 8.03B parameters: Llama 2 chat",
    )
    assert [fact for fact in facts if fact not in choice] == []
    data = choice[choice.index("data: ") :]
    assert all(fact in data for fact in ("10,000 ", "2,048 tokens", "20.5M tokens (counted)", "100 rows"))


def test_ranks_without_a_sequence_count_no_tokens() -> None:
    """Two sequences a step for eight ranks: tokens a second are those of the step, not those of eight busy ranks."""
    plan = plan_of("1b", "8xH100-SXM5-80GB", tokens_per_step=4096)
    rate = 4096 / plan.chosen.speed.step_s
    text = explain_plan(plan)
    assert section(text, "speed").startswith(f"speed: {rate:,.0f} tokens/s, {rate / 8:,.0f} a GPU, ")
    assert plan.chosen.speed.tokens_per_s_per_gpu == pytest.approx(rate / 8)


def test_every_part_of_the_memory_stands_in_the_bar_and_speed_in_tokens_hours_and_money(node: Plan, text: str) -> None:
    memory, found = section(text, "memory of each GPU"), node.chosen.memory
    for name, num_bytes in found.parts.items():
        assert readable(name) in " ".join(memory.split()) and format_bytes(num_bytes) in memory
    low, high = format_bytes(found.low_bytes), format_bytes(found.high_bytes)
    needed = f"{format_bytes(found.need_bytes).split()[0]} needed"
    facts = [needed, "of 79.2 GiB", readable(found.peak_event), f"low {low}, high {high}"]
    assert all(fact in " ".join(memory.split()) for fact in facts)
    bar = next(line.strip() for line in memory.splitlines() if line.strip().startswith("["))
    assert len(bar) <= 98
    assert bar.count("a") == pytest.approx(96 * found.parts["weights"] / (79.15 * GIB), abs=1)
    speed = " ".join(section(text, "speed").split())
    hours = run_hours(context_of(node), node.chosen)
    facts = [
        f"{4 * node.chosen.speed.tokens_per_s_per_gpu:,.0f} tokens/s",
        f"{format_seconds(hours * 3600)} in all",
        f"{hours * 4:.3g} GPU-hours",
        f"cost {hours * 4 * 2.5:.2f} at 2.5 a GPU-hour",
        f"{hours * 4 * 0.4:.3g} kWh (board watts x GPUs x hours, PUE 1, host not counted)",  # 400 W a board
    ]
    assert [fact for fact in facts if fact not in speed] == []


def test_blocks_with_a_window_keep_no_more_than_it() -> None:
    whole = shape_of("8b")
    windowed = replace(whole, sliding_window=4096, num_sliding_layers=24)
    block = 2 * 8 * 128 * 2
    assert kv_cache_bytes(whole, 131072) == 32 * 131072 * block
    assert kv_cache_bytes(windowed, 131072) == (8 * 131072 + 24 * 4096) * block
    assert kv_cache_bytes(windowed, 100) == kv_cache_bytes(whole, 100)


def test_what_leave_would_buy_stands_beside_the_plan() -> None:
    lines = section(explain_plan(plan_of("1b", "1xRTX-4090", allow=())), "what opting in would gain").splitlines()
    (eight_bit,) = (line for line in lines if line.split()[0] == "optimizer_8bit")
    assert "changes the update" in eight_bit
    given = explain_plan(plan_of("1b", "1xRTX-4090", allow=tuple(Allowance)))
    assert "what opting in would gain" not in given


def test_all_methods_stand_in_one_table_and_every_fallback_has_its_line(node: Plan, text: str) -> None:
    _, heads, *lines = section(text, "methods").splitlines()
    assert heads.split() == ["method", "memory", "time", "GPU-hours", "kWh", "cost"]
    assert lines[0].endswith("  taken")
    for line, row in zip(lines, node.methods, strict=True):
        assert line.split()[0] == row.method and line.endswith(row.verdict)
        assert row.kwh is None or f"{row.kwh:.3g}" in line
    assert node.methods[0].kwh is not None
    lines = section(text, "if memory runs out").splitlines()[2:]
    assert len(lines) == len(node.fallbacks) > 0
    for line, fallback in zip(lines, node.fallbacks, strict=True):
        assert fallback.strategy.name in line
        assert format_bytes(fallback.memory.peak_allocated_bytes) in line


@pytest.mark.parametrize("top", [0, 1, 5])
def test_as_many_runners_up_as_asked_stand_with_their_number_for_take(node: Plan, top: int) -> None:
    words = section(explain_plan(node, top=top, width=200), "runners-up").splitlines()[2:]
    assert len(words) == top
    for line in words:
        number, name, *_, ratio, _ = line.split()
        taken = take_candidate(node, int(number)).chosen
        assert name == taken.strategy.name
        assert ratio == f"{taken.speed.step_s / node.chosen.speed.step_s:.2f}x"


def test_every_rejected_row_is_counted_and_those_with_a_number_stand_alone(node: Plan, text: str) -> None:
    rejected = " ".join(section(text, "rejected").split())
    assert rejected.startswith(f"rejected ({len(node.rejections)} rows of the catalogue)")
    by_number = [rejection for rejection in node.rejections if rejection.rule is None]
    assert by_number
    for rejection in by_number:
        assert re.search(re.escape(rejection.strategy) + r"[:,]", rejected)
        assert f": {rejection.reason}; would fit with {rejection.remedy}" in rejected
    counted = [int(count) for count in re.findall(r"\b(\d+) rows?\)?: ", rejected)]
    assert sum(counted) + len(by_number) == len(node.rejections)


@pytest.mark.parametrize("width", [80, 140])
def test_no_line_is_wider_than_asked(width: int) -> None:
    """Of wide tables the column with the strategy or the verdict stands in lines of its own."""
    plans = [
        plan_of("8b", "4xA100-SXM4-80GB", price=2.5),
        plan_of("8b", machine("1xRTX-4060-8GB", ram_bytes=256 * GIB), seq_len=1024),
        plan_of("70b", machine("64x8xH100-SXM5-80GB", ram_bytes=4096 * GIB), tokens_per_step=4194304, price=123.4),
    ]
    for plan in plans:
        assert max(map(len, explain_plan(plan, width=width, top=20).splitlines())) <= width
    compared = comparison.compare_plans([(plan.name, plan) for plan in plans], width=width)
    assert max(map(len, compared.splitlines())) <= width


def test_a_cpu_plan_speaks_of_ranks_and_no_gpu() -> None:
    assert machine_text(machine("4x8xH100-SXM5-80GB")) == "4 nodes of 8 x H100-SXM5-80GB"
    text = explain_plan(plan_of("tiny", "2xCPU", data=data_of(seq_len=512, num_eval_rows=0, source="estimated")))
    assert "on 2 ranks on Test CPU, 512 GiB RAM each" in text
    assert "memory of each rank" in text
    assert "GPU-hours" not in section(text, "speed")
    assert "(estimated from file sizes); nothing held out" in " ".join(text.split())


@pytest.mark.parametrize(
    ("model", "spec", "facts", "words"),
    [
        ("1b", "1xRTX-4090", {"allow": ()}, "computed in bf16; gradients fp32; adamw_fused with state in fp32"),
        ("1b", "1xV100-32GB", {"allow": ()}, "weights fp32, computed in fp16; gradients fp32"),
        ("1b", "1xA100-SXM4-80GB", {"pin": {"checkpointing": EVERY_N}}, "8 of 16 (pin.checkpointing_n)"),
        ("1b", "1xA100-SXM4-80GB", {"pin": {"checkpointing": EVERY_N, "checkpointing_n": 5}},
         "every 5 blocks is recomputed, 3 of 16"),
        ("8b", "8xH100-SXM5-80GB", {"pin": {"sharding": Sharding.ZERO2}},
         "weights bf16 and fp32 masters, computed in bf16; gradients bf16, added up over ranks in fp32; adamw_fused"),
        ("8b", "8xH100-SXM5-80GB", {"pin": {"optimizer": Optimizer.DEEPSPEED_CPU_ADAM}},
         "deepspeed_cpu_adam with state in fp32 in host RAM"),
        ("8b", "1xRTX-3090", {"method": Method.QLORA},
         "weights nf4, embeddings, head and norms bf16 (frozen), adapters fp32, computed in bf16; gradients fp32"),
        ("8b", "1xA100-SXM4-80GB", {"allow": (Allowance.OPTIMIZER_8BIT,), "pin": {"optimizer": Optimizer.ADAMW_8BIT}},
         "adamw_8bit with state in 8 bit"),
    ],
)  # fmt: skip
def test_the_recipe_names_the_type_of_everything(model: str, spec: str, facts: dict[str, Any], words: str) -> None:
    assert words in " ".join(explain_plan(plan_of(model, spec, **facts)).split())


def test_machines_are_compared_in_one_table() -> None:
    facts: dict[str, Any] = {"price": 2.0, "method": Method.FULL, "allow": ()}
    with pytest.raises(NothingFitsError) as caught:
        plan_of("8b", "1xRTX-4060-8GB", **facts)
    plans = [(spec, plan_of("8b", spec, **facts)) for spec in ("4xA100-SXM4-80GB", "8xH100-SXM5-80GB")]
    _, heads, *lines = comparison.compare_plans([("1xRTX-4060-8GB", caught.value), *plans], width=200).splitlines()
    assert heads.split()[:4] == ["machine", "method", "batch", "memory"] and heads.endswith("  strategy")
    assert "tokens/s time GPU-hours kWh cost" in " ".join(heads.split())
    assert lines[0].startswith("  1xRTX-4060-8GB") and "nothing fits" in lines[0]
    for line, (spec, plan) in zip(lines[1:3], plans, strict=True):
        assert line.startswith(f"  {spec}") and plan.chosen.strategy.name in line
    told = " ".join(" ".join(lines[3:]).split())
    assert "RTX-4060-8GB has 7.75 GiB usable" in told and "would fit with a device" in told


def test_the_verdict_names_the_fastest_and_the_cheapest_machine() -> None:
    plans = {spec: plan_of("1b", spec, price=2.0) for spec in ("1xRTX-4090", "8xH100-SXM5-80GB")}
    told = " ".join(comparison.compare_plans(list(plans.items())).split())
    hours = {spec: run_hours(context_of(plan), plan.chosen) for spec, plan in plans.items()}
    costs = {spec: 2 * int(spec[0]) * each for spec, each in hours.items()}
    cheapest = min(costs, key=costs.__getitem__)
    assert f"fastest: 8xH100-SXM5-80GB ({format_seconds(3600 * hours['8xH100-SXM5-80GB'])})" in told
    assert f"cheapest: {cheapest} ({costs[cheapest]:.2f})" in told and "least energy: " in told
    free = [(spec, plan_of("1b", spec)) for spec in hours]
    assert "fewest GPU-hours: " in comparison.compare_plans(free)
    assert "fastest" not in comparison.compare_plans(free[:1])


@pytest.mark.parametrize(
    ("allowed", "asked", "expected"),
    [
        (1, 1, (1,)), (2, 1, (1, 2)), (3, 2, (1, 2, 3)), (4, 3, (1, 2, 3, 4)), (8, 1, (1, 2, 4, 8)),
        (16, 1, (1, 2, 4, 8, 16)), (128, 1, (1, 2, 4, 8, 16)), (128, 64, (8, 16, 32, 64, 128)),
        (100, 6, (2, 4, 6, 8, 16)),
    ],
)  # fmt: skip
def test_counts_double_up_to_what_is_allowed_near_what_is_asked(allowed, asked, expected):
    counts = comparison.counts_to_try(allowed, asked)
    assert counts == expected
    assert asked in counts and len(counts) <= comparison.MOST_COUNTS and max(counts) <= allowed


def test_more_nodes_are_compared_with_the_fewest_that_fit_and_the_same_method():
    facts: dict[str, Any] = {"tokens_per_step": 2**20}
    one, four = (plan_of("8b", f"{nodes}x8xA100-SXM4-80GB", **facts) for nodes in (1, 4))
    lora = plan_of("8b", "8x8xA100-SXM4-80GB", method=Method.LORA, **facts)
    failed = NothingFitsError("nothing fits: needs 90 GiB")
    results: dict[int, Plan | ShardwiseError] = {1: failed, 2: one, 4: four, 8: lora}
    ratios = comparison.speedups(results)
    assert ratios.keys() == {2, 4} and ratios[2] == 1 and 3 < ratios[4] < 4
    assert comparison.speedups({1: failed}) == {}
    section = comparison.node_counts_section(results, place="gpu", allowed=8, sentences=("on 2 nodes: one job",))
    assert section.title == f"nodes: 4 are {ratios[4]:.3g}x as fast as 2; gpu allows 8"
    text = page_text(Page(title="t", sections=(section,)), width=200)
    rows = {line.split()[0]: line for line in text.splitlines() if line.split()[1:2] in (["node"], ["nodes"])}
    assert f"{run_totals(context_of(four), four.chosen).gpu_hours:.3g}" in rows["4"] and "lora" in rows["8"]
    assert "nothing fits" in rows["1"] and "needs 90 GiB" in text and text.endswith("on 2 nodes: one job")
    alone = comparison.node_counts_section({1: failed}, place="gpu", allowed=1, sentences=())
    assert alone.title == "nodes: gpu allows 1" and not any(isinstance(block, Table) for block in alone.blocks)
