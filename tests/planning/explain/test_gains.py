"""Gains of other settings: each is that of a plan with the setting, and is stated only if it is worth a line."""

from typing import Any

from planning_factory import machine, plan_of
from report_factory import calibration_of, record_of

from shardwise.trainer.planning.candidates import run_hours
from shardwise.trainer.planning.explain.alternatives import Alternative, gains
from shardwise.trainer.planning.explain.first_screen import first_screen, text_of
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.reasons import WORTH_A_LINE
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, Method
from shardwise.trainer.spec.units import GIB

DESKTOP = machine("1xRTX-4060-Ti-16GB", ram_bytes=64 * GIB)
QLORA: dict[str, Any] = {"method": Method.QLORA, "seq_len": 4096, "tokens_per_step": 131072}


def found_in(plan: Plan) -> dict[str, Alternative]:
    return {gain.name: gain for gain in gains(context_of(plan), plan)}


def test_all_activations_move_to_host_ram_once_copies_were_measured_and_the_plan_says_what_that_could_gain() -> None:
    plan = plan_of("8b", DESKTOP, **QLORA)
    assert plan.chosen.checkpointing is Checkpointing.FULL
    gain = found_in(plan)["activations in host RAM"]
    assert gain.candidate.speed.step_s * WORTH_A_LINE < plan.chosen.speed.step_s
    assert "probe --measure" in gain.text and gain.name in text_of(first_screen(plan))
    ran = record_of(1.0, 1.0, device="RTX-4060Ti-16GB", moves_activations=True)
    learned = plan_of("8b", DESKTOP, calibration=calibration_of(ran), **QLORA)
    pinned = plan_of("8b", DESKTOP, pin={"activation_offload": True}, **QLORA)
    for other in (learned, pinned):
        assert (other.chosen.checkpointing, other.chosen.activation_offload) == (Checkpointing.NONE, True)
        assert other.chosen.micro_batch == gain.candidate.micro_batch
        assert "activations in host RAM" not in found_in(other)


def test_a_larger_global_batch_is_named_where_cards_wait_for_each_other_and_the_run_has_steps_left() -> None:
    batch = "larger global batch"
    plan = plan_of("8b", "8xRTX-4090", method=Method.FULL, tokens_per_step=65536, seq_len=2048)
    gain = found_in(plan)[batch]
    larger = plan_of("8b", "8xRTX-4090", method=Method.FULL, tokens_per_step=8 * 65536, seq_len=2048)
    assert gain.setting == "train.tokens_per_step=524288" and "times as fast" in gain.text
    assert gain.candidate.speed.step_s == larger.chosen.speed.step_s < 8 * plan.chosen.speed.step_s / 1.5
    assert gain.seconds < 3600 * run_hours(context_of(plan), plan.chosen) / 1.5
    short = plan_of("8b", "8xRTX-4090", method=Method.FULL, tokens_per_step=65536, seq_len=2048, steps=100)
    computing = plan_of("8b", "8xH100-SXM5-80GB", method=Method.FULL, tokens_per_step=524288, seq_len=2048)
    assert batch not in found_in(short) | found_in(larger) | found_in(computing)
