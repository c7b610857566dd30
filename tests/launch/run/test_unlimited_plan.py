"""A rung that does not fit is held to the machine that it does not fit on."""

from msgspec.structs import replace
from planning_factory import machine, plan_of

from shardwise.launch.run.ladder import held_to
from shardwise.trainer.planning.device import device_of
from shardwise.trainer.spec.units import GIB


def test_a_cpu_without_a_cap_is_capped_at_what_is_usable():
    plan, here = plan_of("tiny", "1xCPU"), machine("1xCPU")
    held = held_to(plan, here)
    assert held.hardware.vram_cap_bytes == held.chosen.memory.usable_bytes == device_of(here).usable_bytes


def test_a_cap_that_was_asked_for_stays():
    here = replace(machine("1xCPU"), vram_cap_bytes=GIB)
    held = held_to(plan_of("tiny", "1xCPU"), here)
    assert held.hardware == here and held.chosen.memory.usable_bytes == GIB


def test_a_card_limits_itself():
    here = machine("1xRTX-4090")
    held = held_to(plan_of("tiny", "8xH100-SXM5-80GB"), here)
    assert held.hardware == here
    assert held.chosen.memory.usable_bytes == device_of(here).usable_bytes < 24 * GIB
    assert len(held.candidates) == 1
