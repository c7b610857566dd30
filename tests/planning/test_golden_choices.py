"""What an expert would take, machine by machine, argued in docs/choices.md.

The claims are about the choice, never about its bytes or seconds: those move with the formulas.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from planning_factory import data_of, job_of, machine, plan_of

from shardwise.launch.plan.gather import plan_inputs, profile_data, read_inputs
from shardwise.trainer.planning.candidates import configuration_of, run_hours, upper_seconds
from shardwise.trainer.planning.planner import context_of
from shardwise.trainer.planning.search.configurations import SAME_SPEED
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import NothingFitsError
from shardwise.trainer.spec.job.sections import Allowance
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Checkpointing, Method
from shardwise.trainer.spec.units import GIB

REPOSITORY = Path(__file__).parents[2]
NOBODY = {"HOME": "/nonexistent"}


def sft(spec: str, *, ram_gib: int, **facts: Any) -> Plan:
    """8B on 20 million tokens, 32 rows of 4,096 a step, within a day."""
    job = job_of(
        **{"seq_len": 4096, "tokens_per_step": 131072, "epochs": None, "tokens": 20_000_000, "hours": 24} | facts
    )
    hardware = machine(spec, ram_bytes=ram_gib * GIB)
    return plan_of("8b", hardware, job=job, data=data_of(seq_len=4096, num_eval_rows=0))


def test_one_8_gb_card_takes_qlora_one_sequence_at_a_time_and_recomputes() -> None:
    """5.3 GiB of NF4 weights on 7.75: room for one sequence, recomputed, and no more."""
    chosen = sft("1xRTX-4060-8GB", ram_gib=16).chosen
    assert (chosen.method, chosen.micro_batch) == (Method.QLORA, 1)
    assert chosen.checkpointing is not Checkpointing.NONE


def test_one_8_gb_card_beside_32_gb_of_host_ram_can_keep_frozen_16_bit_weights_there() -> None:
    """15 GiB of bf16 shards, loaded straight to where they stay; they cross PCIe behind the products.

    Adapters of a 4-bit base on the card are as fast, so that they are what `auto` takes.
    """
    lora = sft("1xRTX-4060-8GB", ram_gib=32, method=Method.LORA, pin={"activation_offload": False}).chosen
    assert (lora.strategy.sharding, lora.strategy.offload) == (Sharding.FSDP, Offload.OPTIMIZER_PARAMS)
    assert 15 * GIB < lora.memory.pinned_bytes < 16 * GIB
    assert lora.memory.host_bytes < 5 * GIB
    chosen = sft("1xRTX-4060-8GB", ram_gib=32).chosen
    assert (chosen.method, chosen.strategy.offload) == (Method.QLORA, Offload.NONE)


def test_two_24_gb_cards_take_lora_and_share_nothing_but_gradients() -> None:
    """15 GiB of frozen weights fit each card; gathering them over PCIe in every pass would be pointless."""
    plan = sft("2xRTX-3090", ram_gib=64)
    chosen = plan.chosen
    assert (chosen.method, chosen.strategy.sharding) == (Method.LORA, Sharding.DDP)
    assert chosen.checkpointing is not Checkpointing.NONE or chosen.activation_offload
    assert "of host RAM" in plan.methods[0].verdict


@pytest.mark.parametrize(
    ("spec", "ram_gib"),
    [
        ("4xA100-SXM4-80GB", 512),
        ("8xH100-SXM5-80GB", 1024),
        ("4x8xH100-SXM5-80GB", 1024),
    ],
)
def test_data_centre_nodes_train_everything_exactly_and_recompute_nothing(spec: str, ram_gib: int) -> None:
    """120 GiB of state are shared by all cards, on the cards, and what is left holds the activations."""
    chosen = sft(spec, ram_gib=ram_gib).chosen
    assert (chosen.method, chosen.strategy.is_exact, chosen.strategy.offload) == (Method.FULL, True, Offload.NONE)
    assert chosen.strategy.sharding.shards_optimizer
    assert chosen.checkpointing is Checkpointing.NONE


def test_four_nodes_gather_nothing_across_the_network_in_every_pass() -> None:
    """One row a rank: whoever gathers weights for it waits for the network twice."""
    plan = sft("4x8xH100-SXM5-80GB", ram_gib=1024)
    assert plan.chosen.strategy.sharding not in (Sharding.ZERO3, Sharding.FSDP)
    assert (plan.chosen.micro_batch, plan.chosen.accumulation) == (1, 1)


def qlora_70b(ram_gib: int) -> Plan:
    job = job_of(method=Method.QLORA, seq_len=2048, tokens_per_step=32768, epochs=None, tokens=5_000_000, hours=72)
    hardware = machine("2xRTX-3090", ram_bytes=ram_gib * GIB)
    return plan_of("70b", hardware, job=job, data=data_of(num_eval_rows=0))


def test_70b_on_two_24_gb_cards_takes_fsdp_with_its_shards_in_host_ram() -> None:
    """The set-up that Answer.AI published: FSDP, NF4, CPU offload, every block recomputed, 64 GB of host RAM."""
    chosen = qlora_70b(60).chosen
    assert chosen.strategy.name == "fsdp+optimizer+params/bf16-mixed/adamw_fused"
    assert chosen.checkpointing is Checkpointing.FULL
    assert chosen.memory.pinned_bytes + chosen.memory.host_bytes < 60 * GIB


def test_70b_is_refused_where_its_packed_weights_do_not_fit_in_host_ram() -> None:
    with pytest.raises(NothingFitsError, match=r"needs \d+(\.\d+)? GiB of host RAM a node; 40 GiB are granted"):
        qlora_70b(40)


# --- the combination table --------------------------------------------------------------------------------------

COMBINATIONS = [
    ("8gb-1b-lora.yaml", "1xRTX-4060-8GB", Method.LORA),
    ("16gb-3b-lora.yaml", "1xRTX-4080", Method.LORA),
    ("24gb-7b-lora.yaml", "1xRTX-4090", Method.LORA),
    ("40gb-13b-lora.yaml", "1xA100-SXM4-40GB", Method.LORA),
    ("80gb-7b-full.yaml", "1xA100-SXM4-80GB", Method.FULL),
    ("8x80gb-70b-full.yaml", "8xH100-SXM5-80GB", Method.FULL),
]


def example(name: str, spec: str, *overrides: str) -> Plan:
    inputs = read_inputs(REPOSITORY / "examples" / name, overrides, hardware_spec=spec, environment=NOBODY)
    return plan_inputs(inputs, profile_data(inputs), environment=NOBODY)


@pytest.mark.parametrize(("name", "spec", "method"), COMBINATIONS)
def test_the_planners_own_choice_is_at_least_as_good_as_the_tables(name: str, spec: str, method: Method) -> None:
    """A more faithful method within the limits, or the same one and no slower."""
    row, own = example(name, spec), example(name, spec, "train.method=auto")
    assert row.chosen.method is method
    order = list(Method).index
    assert order(own.chosen.method) <= order(method)
    assert run_hours(context_of(own), own.chosen) <= own.job.limits.hours
    if own.chosen.method is method:
        seconds = [
            upper_seconds(context_of(plan), configuration_of(context_of(plan), plan.chosen), plan.chosen.speed.step_s)
            for plan in (own, row)
        ]
        assert seconds[0] <= seconds[1] * (1 + SAME_SPEED)


def test_seventy_billion_parameters_are_spread_over_all_eight_cards() -> None:
    assert example("8x80gb-70b-full.yaml", "8xH100-SXM5-80GB").chosen.strategy.sharding.shards_weights


@pytest.mark.parametrize(("ram", "offload"), [("64GiB", Offload.NVME_ALL), ("256GiB", Offload.OPTIMIZER_PARAMS)])
def test_seven_billion_parameters_train_within_8_gb_and_the_plan_says_what_that_takes(
    ram: str, offload: Offload
) -> None:
    plan = example("8gb-7b-full.yaml", "1xRTX-4060-8GB", f"limits.host_ram={ram}")
    chosen = plan.chosen
    assert (chosen.method, chosen.strategy.offload, chosen.strategy.is_exact) == (Method.FULL, offload, True)
    assert Allowance.OFFLOAD_NVME in plan.job.allow
    assert chosen.memory.device_bytes < 8 * GIB
    assert chosen.memory.pinned_bytes + chosen.memory.host_bytes > 20 * GIB
    assert (chosen.memory.nvme_bytes > 100 * GIB) is (offload is Offload.NVME_ALL)


def test_the_tables_of_the_document_are_what_the_planner_takes_now() -> None:
    command = [sys.executable, "-P", str(REPOSITORY / "benchmarks" / "choices.py"), "--check"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
