"""The first screen of a plan: at most 20 lines of 100 columns with what decides, and exact ways to the alternatives."""

import re
from functools import cache
from typing import Any

import choices
import pytest
from msgspec.structs import replace
from planning_factory import data_of, machine, note_of, plan_of

from shardwise.trainer.planning.candidates import run_hours
from shardwise.trainer.planning.explain import first_screen as page
from shardwise.trainer.planning.explain.first_screen import MOST_LINES, alternatives, first_screen, text_of
from shardwise.trainer.planning.planner import context_of, take_candidate
from shardwise.trainer.planning.schedule import FEW_STEPS
from shardwise.trainer.planning.search.certainty import time_error
from shardwise.trainer.spec.hardware import MeasuredRates
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import GIB, format_bytes, parse_bytes

CASES = (*choices.GOLDEN, *choices.COMBINATIONS, *choices.WITHIN_8_GB)
planned = cache(choices.Case.plan)


def screen(plan: Plan, **options: Any) -> str:
    return text_of(first_screen(plan, start=["shardwise train job.yaml"], more="shardwise plan job.yaml -v", **options))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_golden_job_has_one_screen(case: choices.Case) -> None:
    plan = planned(case)
    text = screen(plan)
    lines = text.splitlines()
    assert len(lines) <= MOST_LINES == 20
    assert max(map(len, lines)) <= 100
    chosen, context = plan.chosen, context_of(plan)
    error = time_error(context, chosen)
    assert error is not None and page.time_range(run_hours(context, chosen) * 3600, error) in text
    facts = (" needed", f" of {format_bytes(chosen.memory.usable_bytes)}", f"({chosen.strategy.name})", "  other ways")
    assert all(fact in text for fact in (*facts, "  if memory runs out"))
    assert "fits, about " in " ".join(lines[:2])
    assert "shardwise train job.yaml" in lines[-2] and lines[-1].endswith(" -v")
    narrow = first_screen(plan, width=80)
    assert len(narrow) <= MOST_LINES and max(len(line.text) for line in narrow) <= 80


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_alternative_is_what_its_setting_selects(case: choices.Case) -> None:
    """`--take N` and `train.method=M` give the stated memory and time; a method is only surveyed, and may be faster."""
    plan = planned(case)
    lines = screen(plan).splitlines()
    for place, line in enumerate(lines):
        stated = " ".join(lines[place - 1 : place + 1]) if line.startswith("      ") else line
        if found := re.search(r"--take (\d+)$", line):
            other = take_candidate(plan, int(found[1]))
        elif found := re.search(r"(train\.method=\w+)$", line):
            other = case.plan(found[1])
        else:
            continue
        number, unit, size = re.findall(r" ([\d.]+) (s|min|h|days)  +([\d.]+ [GM]iB)  ", stated)[0]
        assert parse_bytes(size) == pytest.approx(other.chosen.memory.need_bytes, rel=0.05)
        seconds = run_hours(context_of(other), other.chosen) * 3600
        stated_s = float(number) * {"s": 1, "min": 60, "h": 3600, "days": 86400}[unit]
        assert seconds < 1.06 * stated_s
        assert "--take" not in line or seconds > 0.94 * stated_s


@pytest.mark.parametrize(
    ("seconds", "error", "expected"),
    [
        (36000, 0.5, "6.6 to 15 h"),
        (36000, 1.0, "5 to 20 h"),
        (90, 0.15, "78 to 104 s"),
        (864000, 0.15, "8.6 to 12 days"),
    ],
)
def test_a_range_is_rounded_away_from_its_middle(seconds: float, error: float, expected: str) -> None:
    assert page.time_range(seconds, error) == expected


def test_warnings_stay_where_there_is_no_room_for_alternatives() -> None:
    plan = plan_of("8b", "1xRTX-4060-8GB")
    warned = replace(plan, warnings=tuple(f"warning {number} " + "long " * 15 for number in range(9)))
    lines = first_screen(warned, start=["shardwise train job.yaml"], more="shardwise plan job.yaml -v")
    assert len(lines) <= MOST_LINES
    assert sum("WARNING: " in line.text for line in lines if line.tone is page.Tone.WARNING) >= 3
    assert any("-v shows all" in line.text for line in lines)


def test_the_first_alternatives_stay_where_there_is_no_room_for_all() -> None:
    plan = plan_of("1b", "1xA100-SXM4-40GB")
    shown = [alternative.setting for alternative in alternatives(plan, context_of(plan))][:3]
    for num_remarks in (5, 6, 7, 8):
        text = screen(plan, remarks=["remark"] * num_remarks)
        assert [setting for setting in shown if setting in text] == shown[: 8 - num_remarks]


def test_the_rank_of_galore_and_the_steps_down_are_named() -> None:
    assert "gradients projected to rank 256;" in screen(plan_of("1b", "1xRTX-4090", method=Method.GALORE))
    plan = plan_of("8b", "8xH100-SXM5-80GB", pin={"micro_batch": 1})
    assert "activations recomputed, then smaller buffers" in screen(plan)
    assert "the run ends" in screen(replace(plan, fallbacks=()))


def test_a_card_of_unknown_speed_has_no_range_of_times() -> None:
    hardware = machine("1xRTX-4090")
    (card,) = hardware.gpus
    plan = plan_of("tiny", replace(hardware, gpus=(replace(card, name="Stranger", spec_name=None),)))
    assert "fits, but the speed of this device is not known" in " ".join(screen(plan).split())
    assert "no run on this device" not in screen(plan) and plan.chosen.speed.mfu is None
    expectation = note_of(plan, "no run on this device")
    assert "tokens/s" not in expectation and "memory" in expectation
    assert any("not known" in note and "probe --measure" in note for note in plan.notes)


def test_a_run_that_would_learn_nothing_is_a_warning() -> None:
    few = plan_of("1b", "1xRTX-4090", data=data_of(num_rows=3), tokens_per_step=65536)
    assert few.schedule.num_steps < FEW_STEPS
    assert "WARNING: 1 optimizer step " in screen(few) and "train.tokens_per_step: auto" in screen(few)
    assert "WARNING" not in screen(plan_of("1b", "1xH100-SXM5-80GB", pin={"micro_batch": 1}))


def test_names_cannot_command_a_terminal_and_cards_that_are_not_used_have_their_reason() -> None:
    plan = replace(plan_of("1b", "1xRTX-4090"), name="job\x1b[2J\r\nname")
    assert all(line.text.isprintable() or not line.text for line in first_screen(plan))
    assert "job [2J" in screen(plan)
    spread, reason = machine("2xRTX-3090"), "GPU 1: with more than 1 a step takes longer"
    plan = plan_of("tiny", replace(spread, gpus=spread.gpus[:1], excluded=(reason,)))
    assert f"  not used: {reason}" in text_of(first_screen(plan)).splitlines()


def test_adapters_are_no_alternative_for_weights_that_do_not_exist_yet() -> None:
    scratch = screen(plan_of("1b", "1xRTX-4090", from_scratch=True))
    assert "LoRA" not in scratch and "galore" in scratch
    assert "train.method=lora" in screen(plan_of("1b", "1xRTX-4090"))


def test_the_setting_of_an_opt_in_keeps_what_the_job_allows() -> None:
    plan = plan_of("1b", "1xRTX-4090", allow=(Allowance.OFFLOAD_CPU,))
    settings = [each.setting for each in alternatives(plan, context_of(plan)) if "allow=" in each.setting]
    assert settings and all(setting.startswith("'allow=[offload_cpu,") for setting in settings)


def test_memory_has_its_own_unit_where_that_of_the_card_is_another() -> None:
    plan = plan_of("tiny", "1xRTX-4090", pin={"micro_batch": 1})
    memory = plan.chosen.memory
    used, usable = format_bytes(memory.need_bytes), format_bytes(memory.usable_bytes)
    assert used.endswith("MiB") and usable.endswith("GiB")
    assert f"card {used} needed" in screen(plan) and f" of {usable}" in screen(plan)


def test_a_method_beyond_the_host_ram_is_no_alternative() -> None:
    """Full training of 8B fits the card with its state in host RAM, which a node of 32 GiB does not have."""
    plan = plan_of("8b", machine("1xRTX-3090", ram_bytes=32 * GIB))
    (full,) = (row for row in plan.methods if row.method is Method.FULL)
    assert plan.chosen.method is not Method.FULL and full.hours is not None and not full.is_within_limits
    assert "train.method=full" not in screen(plan)
    assert full.verdict in screen(plan)


def test_a_network_that_is_assumed_is_named_with_the_time_over_a_slower_one() -> None:
    lines = screen(plan_of("8b", "4x8xH100-SXM5-80GB"))
    (line,) = [line for line in lines.splitlines() if line.startswith("  network")]
    assert "3,200 Gbit/s a node (assumed)" in line and re.search(r"over 100 Gbit/s about \d", line)
    measured = replace(machine("4x8xH100-SXM5-80GB"), rates=MeasuredRates(between_nodes_bytes_per_s=40 * 10**9))
    for hardware in (machine("4x8xH100-SXM5-80GB,network=3.2Tb"), machine("8xH100-SXM5-80GB"), measured):
        assert "network" not in screen(plan_of("8b", hardware))
