"""How big a checkpoint is, and whether it is written while training goes on; what the plan says of both."""

import pytest
from msgspec.structs import replace
from planning_factory import machine, plan_of

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
    return saving_choice(plan.job, plan.hardware, plan.chosen)


def test_a_checkpoint_is_the_masters_and_the_state_of_what_is_trained() -> None:
    for spec in ("1xH100-SXM5-80GB", "8xH100-SXM5-80GB"):
        full = plan_of("1b", spec, method=Method.FULL, pin={"optimizer": Optimizer.ADAMW_FUSED})
        assert full.chosen.memory.checkpoint_bytes == 12 * LLAMA_1B
    adapters = plan_of("1b", "1xH100-SXM5-80GB", method=Method.LORA)
    assert 0 < adapters.chosen.memory.checkpoint_bytes < 12 * LLAMA_1B / 20


@pytest.mark.parametrize(
    ("spec", "num_bytes"), [("1xH100-SXM5-80GB", 12 * LLAMA_1B), ("4x8xH100-SXM5-80GB", 3 * LLAMA_1B)]
)
def test_a_node_with_room_for_its_share_of_the_copy_saves_beside_its_work(spec: str, num_bytes: int) -> None:
    choice = choice_of(plan_of("1b", spec, method=Method.FULL))
    assert (choice.is_background, choice.snapshot_bytes) == (True, num_bytes)


@pytest.mark.parametrize(
    ("asked", "ram", "reason"),
    [
        (False, 1024, "checkpoint.async is false"),
        (None, 12, "the copy needs 13.8 GiB of host RAM, 8.04 GiB are free"),
        (True, 12, "the copy needs 13.8 GiB of host RAM, 8.04 GiB are free"),
        (None, None, "the RAM of the host is not known"),
    ],
)
def test_who_waits_says_why_and_who_asks_for_it_gets_it_where_the_ram_is_not_known(asked, ram, reason):
    hardware = machine("1xH100-SXM5-80GB", ram_bytes=None if ram is None else ram * GIB)
    plan = replace(plan_of("1b", "1xH100-SXM5-80GB", method=Method.FULL), hardware=hardware)
    choice = choice_of(plan, asked=asked)
    assert (choice.is_background, choice.snapshot_bytes, choice.reason) == (False, 0, reason)
    assert ram is not None or choice_of(plan, asked=True).is_background


def test_cores_that_train_do_not_write_unless_asked_to() -> None:
    plan = plan_of("tiny", "1xH100-SXM5-80GB")
    on_cpu = replace(plan, hardware=replace(plan.hardware, gpus=()), device_kind=DeviceKind.CPU)
    assert "cores" in choice_of(on_cpu).reason
    assert choice_of(on_cpu, asked=True).is_background
