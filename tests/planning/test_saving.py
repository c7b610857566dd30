"""How big a checkpoint is, and whether it is written while training goes on; what the plan says of both."""

import pytest
from msgspec.structs import replace
from planning_factory import job_of, machine, plan_of

from shardwise.trainer.planning.explain.plan_page import explain_plan
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.rank_files import SavingChoice, saving_choice
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Method
from shardwise.trainer.spec.units import GIB

LLAMA_1B = 1_235_814_400


def choice_of(plan: Plan, *, asked: bool | None = None) -> SavingChoice:
    checkpoint = replace(plan.job.checkpoint, is_async=asked)
    plan = replace(plan, job=replace(plan.job, checkpoint=checkpoint))
    return saving_choice(plan, plan.chosen)


def test_a_checkpoint_is_the_masters_and_the_state_of_what_is_trained() -> None:
    full = plan_of("1b", "1xH100-SXM5-80GB", method=Method.FULL, pin={"optimizer": Optimizer.ADAMW_FUSED})
    assert full.chosen.memory.checkpoint_bytes == 12 * LLAMA_1B
    sharded = plan_of("1b", "8xH100-SXM5-80GB", method=Method.FULL, pin={"optimizer": Optimizer.ADAMW_FUSED})
    assert sharded.chosen.memory.checkpoint_bytes == 12 * LLAMA_1B
    adapters = plan_of("1b", "1xH100-SXM5-80GB", method=Method.LORA)
    assert 0 < adapters.chosen.memory.checkpoint_bytes < 12 * LLAMA_1B / 20


def test_a_gpu_whose_node_has_the_room_saves_beside_its_work() -> None:
    choice = choice_of(plan_of("1b", "1xH100-SXM5-80GB", method=Method.FULL))
    assert choice.is_background
    assert choice.snapshot_bytes == 12 * LLAMA_1B


def test_nodes_share_the_copy() -> None:
    choice = choice_of(plan_of("1b", "4x8xH100-SXM5-80GB", method=Method.FULL))
    assert choice.snapshot_bytes == 3 * LLAMA_1B


@pytest.mark.parametrize(
    ("asked", "ram", "spec", "reason"),
    [
        (False, 1024, "1xH100-SXM5-80GB", "checkpoint.async is false"),
        (None, 12, "1xH100-SXM5-80GB", "the copy needs 13.8 GiB of host RAM, 8.04 GiB are free"),
        (True, 12, "1xH100-SXM5-80GB", "the copy needs 13.8 GiB of host RAM, 8.04 GiB are free"),
        (None, None, "1xH100-SXM5-80GB", "the RAM of the host is not known"),
    ],
)
def test_who_waits_says_why(asked: bool | None, ram: int | None, spec: str, reason: str) -> None:
    plan = plan_of("1b", "1xH100-SXM5-80GB", method=Method.FULL)
    hardware = machine(spec, ram_bytes=None if ram is None else ram * GIB)
    choice = choice_of(replace(plan, hardware=hardware), asked=asked)
    assert not choice.is_background and choice.snapshot_bytes == 0
    assert choice.reason == reason


def test_who_asks_for_it_gets_it_where_the_ram_is_not_known() -> None:
    plan = plan_of("1b", "1xH100-SXM5-80GB", method=Method.FULL)
    assert choice_of(replace(plan, hardware=machine("1xH100-SXM5-80GB", ram_bytes=None)), asked=True).is_background


def test_cores_that_train_do_not_write_unless_asked_to() -> None:
    plan = plan_of("tiny", "1xH100-SXM5-80GB")
    on_cpu = replace(plan, hardware=replace(plan.hardware, gpus=()), device_kind=DeviceKind.CPU)
    assert "cores" in choice_of(on_cpu).reason
    assert choice_of(on_cpu, asked=True).is_background


def test_the_plan_says_how_big_how_often_and_how() -> None:
    said = " ".join(explain_plan(plan_of("1b", "1xH100-SXM5-80GB", method=Method.FULL)).split())
    assert "checkpoints of 13.8 GiB every " in said
    assert " or 20 min, for at most 3% of the time; " in said and "a copy of 13.8 GiB" in said
    job = replace(job_of(method=Method.FULL), checkpoint=replace(job_of().checkpoint, is_async=False))
    said = " ".join(explain_plan(plan_of("1b", "1xH100-SXM5-80GB", job=job)).split())
    assert "checkpoint.async is false" in said
