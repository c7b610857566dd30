"""Each rule refuses what it is for, says why, and gives way where a person pins the mechanism."""

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from planning_factory import machine, situation_for

from trainer.planning.catalogue import CATALOGUE
from trainer.planning.not_yet import NOT_YET, version_that_trains
from trainer.planning.rules import RULES, refuse
from trainer.spec.job import Allowance, Limits, NvmeLimit
from trainer.spec.strategy import Method, Offload, Optimizer, Precision, Sharding
from trainer.spec.units import GIB

ROWS = {row.name: row for row in CATALOGUE}
OFFLOADED = "zero2+optimizer/bf16-mixed/deepspeed_cpu_adam"
ON_NVME = "zero3+nvme_all/bf16-mixed/deepspeed_cpu_adam"

# rule, machine, what the job says, a row it refuses, what its reason holds
BROKEN: list[tuple[str, Any, dict[str, Any], str, str]] = [
    ("pinned", "8xH100-SXM5-80GB", {"pin": {"sharding": Sharding.DDP}}, "zero2/bf16-mixed/adamw", "pin.sharding: ddp"),
    ("several_ranks_share_nothing", "2xRTX-4090", {}, "none/bf16-mixed/adamw_fused", "2 different models"),
    ("one_rank_has_no_peer", "1xRTX-4090", {}, "ddp/bf16-mixed/adamw_fused", "there is one"),
    ("one_rank_has_no_peer", "1xRTX-4090", {}, "zero3/bf16-mixed/adamw_fused", "there is one"),
    ("hsdp_needs_nodes", "8xH100-SXM5-80GB", {}, "hsdp/bf16-mixed/adamw_fused", "1 node is fsdp"),
    ("bf16_needs_ampere", "1xV100-16GB", {}, "none/bf16-mixed/adamw_fused", "8.0; V100-16GB has 7.0"),
    ("bf16_needs_ampere", "1xT4", {}, "none/fp8/adamw_fused", "8.0; T4 has 7.5"),
    ("fp16_needs_tensor_cores", "1xCPU", {}, "none/fp16-mixed/adamw_fused", "is a CPU"),
    ("fp8_needs_ada", "1xA100-SXM4-80GB", {}, "none/fp8/adamw_fused", "8.9; A100-SXM4-80GB has 8.0"),
    ("fsdp_offload_needs_cuda", "2xCPU", {}, "fsdp+optimizer+params/fp32/adamw", "needs an accelerator"),
    ("not_yet", "1xRTX-4090", {}, "none/bf16-mixed/adamw_8bit", "adamw_8bit trains from shardwise 0.3 on"),
    ("not_yet", "4x8xH100-SXM5-80GB", {}, "hsdp/bf16-mixed/adamw_fused", "hsdp trains from shardwise 0.6 on"),
    ("not_yet", "1xV100-16GB", {}, "none/fp16-mixed/adamw_fused", "fp16-mixed trains from shardwise 0.3 on"),
    ("not_yet", "2xRTX-4090", {}, "zero2/bf16/adamw_fused", "zero2 with bf16 trains from shardwise 0.3 on"),
    ("not_yet", "2xRTX-4090", {}, OFFLOADED.replace("bf16-mixed", "bf16"), "zero2 with bf16 trains from"),
    ("cpu_offload_not_allowed", "1xRTX-4090", {"allow": ()}, OFFLOADED, "host RAM"),
    ("host_ram_unknown", machine("1xRTX-4090", ram_bytes=None), {}, OFFLOADED, "host RAM is unknown"),
    ("sgd_is_never_chosen", "1xRTX-4090", {}, "none/bf16-mixed/sgd", "sgd trains transformers poorly"),
    ("bf16_weights_not_allowed", "1xRTX-4090", {}, "none/bf16/adamw_fused", "no fp32 master weights"),
    ("offload_to_itself", "1xCPU", {}, "zero2+optimizer/fp32/deepspeed_cpu_adam", "the device is the CPU"),
    ("bf16_is_slow_here", "1xCPU", {}, "none/bf16-mixed/adamw_fused", "no amx_bf16"),
    ("fp32_is_slow_here", "1xRTX-4090", {}, "none/fp32/adamw_fused", "slower here than bf16-mixed"),
]  # fmt: skip

# The rules whose rows this version cannot train yet stand behind `not_yet`.
BEHIND: list[tuple[str, Any, dict[str, Any], str]] = [
    ("galore_inner_optimizer", "1xRTX-4090", {"method": Method.GALORE}, "none/bf16-mixed/lion"),
    ("galore_needs_whole_gradients", "2xRTX-4090", {"method": Method.GALORE}, "fsdp/bf16-mixed/adamw"),
    ("qlora_needs_whole_weights", "2xRTX-4090", {"method": Method.QLORA}, "zero3/bf16-mixed/adamw_fused"),
    ("frozen_base_has_no_update", "1xRTX-4090", {"method": Method.LORA}, "none/bf16-mixed/lomo"),
    ("fp8_needs_transformer_engine", "1xRTX-4090", {}, "none/fp8/adamw_fused"),
    ("fp8_not_allowed", machine("1xRTX-4090", libraries=("transformer_engine",)), {}, "none/fp8/adamw_fused"),
    ("nvme_not_allowed", "1xRTX-4090", {}, ON_NVME),
    ("nvme_needs_a_path", "1xRTX-4090", {"allow": (Allowance.OFFLOAD_NVME,)}, ON_NVME),
    ("paged_not_allowed", "1xRTX-4090", {"allow": ()}, "none/bf16-mixed/paged_adamw"),
    ("8bit_not_allowed", "1xRTX-4090", {}, "none/bf16-mixed/adamw_8bit"),
    ("approximation_not_allowed", "1xRTX-4090", {}, "none/bf16-mixed/adafactor"),
    ("bf16_needs_no_scaler", "1xRTX-4090", {}, "none/fp16-mixed/adamw_fused"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "spec", "facts", "row", "words"), BROKEN)
def test_a_rule_refuses_its_row_and_says_why(rule: str, spec: Any, facts: dict[str, Any], row: str, words: str) -> None:
    situation = situation_for("8b", spec, **facts)
    ignoring = rule != "not_yet"
    refusal = refuse(situation, ROWS[row], ignoring_version=ignoring)
    assert refusal is not None
    assert refusal.rule == rule
    assert words in refusal.reason


@pytest.mark.parametrize(("rule", "spec", "facts", "row"), BEHIND)
def test_rules_of_later_versions_are_ready(rule: str, spec: Any, facts: dict[str, Any], row: str) -> None:
    refusal = refuse(situation_for("8b", spec, **facts), ROWS[row], ignoring_version=True)
    assert refusal is not None
    assert refusal.rule == rule


def test_every_rule_is_tested_above() -> None:
    assert {rule.name for rule in RULES} == {case[0] for case in BROKEN} | {case[0] for case in BEHIND}


def test_every_rule_stands_in_the_docs() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    assert [rule.name for rule in RULES if f"| `{rule.name}` |" not in docs] == []
    assert docs.count("\n| `") == len(RULES)


def test_a_reason_is_filled_for_every_row_of_every_machine() -> None:
    for spec in ("1xCPU", "2xCPU", "1xV100-16GB", "8xA100-SXM4-80GB", "2x8xH100-SXM5-80GB"):
        situation = situation_for("8b", spec)
        for row in CATALOGUE:
            refusal = refuse(situation, row)
            if refusal is not None:
                assert refusal.reason
                assert "{" not in refusal.reason + (refusal.instead or "")


@pytest.mark.parametrize(
    ("spec", "pin", "row"),
    [
        ("1xRTX-4090", {"precision": Precision.FP32}, "none/fp32/adamw_fused"),
        ("1xRTX-4090", {"precision": Precision.BF16}, "none/bf16/adamw_fused"),
        ("1xCPU", {"precision": Precision.BF16_MIXED}, "none/bf16-mixed/adamw_fused"),
        ("1xRTX-4090", {"optimizer": Optimizer.SGD}, "none/bf16-mixed/sgd"),
        ("2xCPU", {"offload": Offload.OPTIMIZER}, "zero2+optimizer/fp32/deepspeed_cpu_adam"),
    ],
)
def test_a_pin_overrides_what_would_only_be_slower_or_riskier(spec: str, pin: dict[str, Any], row: str) -> None:
    assert refuse(situation_for("tiny", spec), ROWS[row]) is not None
    assert refuse(situation_for("tiny", spec, pin=pin), ROWS[row]) is None


def test_a_pin_overrides_a_missing_allowance() -> None:
    row = ROWS["zero3+optimizer/bf16-mixed/deepspeed_cpu_adam"]
    assert refuse(situation_for("8b", "1xRTX-4090", allow=()), row) is not None
    assert refuse(situation_for("8b", "1xRTX-4090", allow=(), pin={"offload": Offload.OPTIMIZER}), row) is None


def test_no_pin_makes_the_impossible_possible() -> None:
    pinned = situation_for("8b", "1xV100-16GB", pin={"precision": Precision.BF16_MIXED})
    refusal = refuse(pinned, ROWS["none/bf16-mixed/adamw_fused"])
    assert refusal is not None
    assert refusal.rule == "bf16_needs_ampere"


def test_offload_is_taken_once_host_ram_is_given() -> None:
    row = ROWS["zero2+optimizer/bf16-mixed/deepspeed_cpu_adam"]
    unknown = machine("1xRTX-4090", ram_bytes=None)
    assert refuse(situation_for("8b", unknown), row) is not None
    assert refuse(situation_for("8b", unknown, host_ram=256 * GIB), row) is None


def test_nvme_is_taken_with_leave_and_a_path() -> None:
    situation = situation_for("8b", "1xRTX-4090", allow=(Allowance.OFFLOAD_NVME,))
    limits = Limits(nvme=NvmeLimit(path="/scratch", size=1000 * GIB))
    allowed = replace(situation, job=replace(situation.job, limits=limits))
    row = ROWS["zero3+nvme_all/bf16-mixed/deepspeed_cpu_adam"]
    assert refuse(allowed, row, ignoring_version=True) is None
    assert allowed.nvme_bytes == 1000 * GIB


@pytest.mark.parametrize(
    "row",
    [
        "none/fp32/adamw_fused",
        "ddp/bf16-mixed/adamw",
        "zero1/fp32/sgd",
        "zero2/bf16-mixed/adamw_fused",
        "zero3/bf16-mixed/adamw_fused",
        "none/bf16/adamw_fused",
        "fsdp/bf16/adamw_fused",
        "fsdp_grad_op/fp32/adamw",
        "zero2+optimizer/bf16-mixed/deepspeed_cpu_adam",
        "zero3+optimizer/bf16-mixed/deepspeed_cpu_adam",
    ],
)
def test_what_this_version_trains_is_not_marked_as_late(row: str) -> None:
    strategy = ROWS[row]
    for axis in ("sharding", "offload", "optimizer", "precision"):
        assert version_that_trains(axis, getattr(strategy, axis)) is None
    assert version_that_trains("sharding+precision", (strategy.sharding, strategy.precision)) is None


def test_the_table_of_versions_names_real_axes_and_members() -> None:
    seen: set[tuple[str, object]] = set()
    for late in NOT_YET:
        for member in late.members:
            assert (late.axis, member) not in seen
            seen.add((late.axis, member))
    assert ("method", Method.QLORA) in seen
    assert ("method", Method.FULL) not in seen


def test_what_comes_later_stands_in_the_docs_with_its_version() -> None:
    """Whole members of an axis by name, `every optimizer but` by those that are left, pairs as they are spelled."""
    docs = (Path(__file__).parents[2] / "docs" / "strategies.md").read_text()
    lines = docs.split("## What comes later")[1].split("##")[0].splitlines()
    for late in NOT_YET:
        named = " ".join(line for line in lines if line.endswith(f"| {late.version} |"))
        for member in late.members:
            if late.axis == "saved_sharding":
                assert "checkpoints and `--resume` under ZeRO and FSDP" in named
            elif late.axis == "optimizer":
                assert "every optimizer but adamw, adamw_fused, sgd, deepspeed_cpu_adam" in named
            elif isinstance(member, tuple):
                assert "bf16 under ZeRO" in named
            else:
                assert (late.axis if member is True else str(member)) in named
    trained = {optimizer for optimizer in Optimizer if version_that_trains("optimizer", optimizer) is None}
    assert trained == {Optimizer.ADAMW, Optimizer.ADAMW_FUSED, Optimizer.SGD, Optimizer.DEEPSPEED_CPU_ADAM}


def test_every_engine_but_hsdp_is_left_on_a_node() -> None:
    situation = situation_for("8b", "8xH100-SXM5-80GB")
    left = {row.sharding for row in CATALOGUE if refuse(situation, row) is None}
    assert left == set(Sharding) - {Sharding.NONE, Sharding.HSDP}
