"""Each rule refuses what it is for, says why and on what evidence, and gives way where a person pins the mechanism."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from architecture_factory import TINY
from msgspec.structs import replace
from pasted_pip import requirements_in
from planning_factory import context_for, fp8_gain_of, job_of, machine, note_of, plan_of, shape_of

from shardwise.trainer.planning.device import device_of
from shardwise.trainer.planning.planner import check_pins
from shardwise.trainer.planning.rules.incompatible import LAYOUTS, ROWS, SETTINGS
from shardwise.trainer.planning.rules.rule import OF_THE_JOB, RULES, Rule, broken_by_job, may_run, obstacle_to, refuse
from shardwise.trainer.planning.rules.rule_input import Incompatibility, RuleInput, first_broken
from shardwise.trainer.planning.search.configurations import first_configuration
from shardwise.trainer.planning.tables.catalogue import CATALOGUE
from shardwise.trainer.spec.engines import Offload, Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import Allowance, GaloreJob, LoraJob, NvmeLimit
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Attention, Checkpointing, Fp8Recipe, LossHead, Method, Precision, Strategy
from shardwise.trainer.spec.units import GIB

GEMMA = replace(shape_of("1b"), model_type="gemma3_text")
ROWS_BY_NAME = {row.name: row for row in CATALOGUE}
OFFLOADED = "zero2+optimizer/bf16-mixed/deepspeed_cpu_adam"
ON_NVME = "zero3+nvme_all/bf16-mixed/deepspeed_cpu_adam"
GALORE, QLORA = {"method": Method.GALORE}, {"method": Method.QLORA}
WITH_TE = machine("1xRTX-4090", libraries=("transformer_engine",))
WITH_TORCHAO = machine("1xRTX-4090", libraries=("torchao",))
SLOW_FP8 = {"allow": (Allowance.FP8,), "fp8_gain": fp8_gain_of(0.93)}

# rule, machine, what the job says, a row it refuses, what its reason holds
OF_A_CONTEXT: list[tuple[str, Any, dict[str, Any], str, str]] = [
    ("pinned", "8xH100-SXM5-80GB", {"pin": {"sharding": Sharding.DDP}}, "zero2/bf16-mixed/adamw", "pin.sharding: ddp"),
    ("several_ranks_share_nothing", "2xRTX-4090", {}, "none/bf16-mixed/adamw_fused", "2 different models"),
    ("one_memory_for_both", "1xGB10", {}, OFFLOADED, "frees nothing on GB10"),
    ("one_memory_for_paged_state", "1xGB10", {}, "none/bf16-mixed/paged_adamw", "pages nothing out of GB10"),
    ("one_rank_has_no_peer", "1xRTX-4090", {}, "ddp/bf16-mixed/adamw_fused", "there is one"),
    ("hsdp_needs_groups", "3xH100-SXM5-80GB", {}, "hsdp/bf16-mixed/adamw_fused", "3 ranks have none"),
    ("hsdp_needs_groups", "2x1xH100-SXM5-80GB", {}, "hsdp/bf16-mixed/adamw_fused", "2 ranks have none"),
    ("bf16_needs_ampere", "1xV100-16GB", {}, "none/bf16-mixed/adamw_fused", "8.0; V100-16GB has 7.0"),
    ("fp8_needs_ada", "1xT4", {}, "none/fp8/adamw_fused", "8.9; T4 has 7.5"),
    ("zero_multiplies_fp16_in_hardware", "2xCPU", {}, "zero3/fp16-mixed/adamw", "no avx512_fp16"),
    ("fp8_needs_ada", "1xA100-SXM4-80GB", {}, "none/fp8/adamw_fused", "8.9; A100-SXM4-80GB has 8.0"),
    ("fsdp_offload_needs_cuda", "2xCPU", {}, "fsdp+optimizer+params/fp32/adamw", "needs an accelerator"),
    ("galore_is_around_adam_or_adafactor", "1xRTX-4090", GALORE, "none/bf16-mixed/lion", "not lion"),
    ("galore_inner_optimizer", "1xRTX-4090", GALORE, "none/bf16-mixed/paged_adamw", "not paged_adamw"),
    ("galore_needs_whole_gradients", "2xRTX-4090", GALORE, "fsdp/bf16-mixed/adamw", "fsdp cuts them"),
    ("galore_8bit_needs_cuda", "1xCPU", GALORE, "none/fp32/adamw_8bit", "is a CPU"),
    ("nvme_takes_fp32_partitions", "1xRTX-4090", {}, "zero3+nvme_all/bf16/deepspeed_cpu_adam", "as fp32 and stops"),
    ("qlora_needs_whole_weights", "2xRTX-4090", QLORA, "zero3/bf16-mixed/adamw_fused", "4-bit blocks"),
    ("fp8_multiplies_no_4_bit_weights", WITH_TE, QLORA, "none/fp8/adamw_fused", "4-bit ones"),
    ("frozen_base_has_no_update", "1xRTX-4090", {"method": Method.LORA}, "none/bf16-mixed/lomo", "small adapters"),
    ("recipe_needs_torchao", "1xRTX-4090", {}, "none/fp8/adamw_fused", "which is not installed"),
    ("fp8_not_allowed", WITH_TE, {}, "none/fp8/adamw_fused", "does not allow it"),
    ("fp8_does_not_pay", WITH_TE, SLOW_FP8, "none/fp8/adamw_fused", "measured 0.93x of bf16"),
    ("fp8_products_are_too_small", WITH_TE, {"shape": shape_of("tiny"), "allow": (Allowance.FP8,)},
     "none/fp8/adamw_fused", "too small for its casts"),
    ("fp8_without_compile", WITH_TORCHAO, {"allow": (Allowance.FP8,), "pin": {"compile": False}},
     "none/fp8/adamw_fused", "pin.compile: false"),
    ("nvme_not_allowed", "1xRTX-4090", {}, ON_NVME, "wears the disk"),
    ("nvme_needs_a_path", "1xRTX-4090", {"allow": (Allowance.OFFLOAD_NVME,)}, ON_NVME, "a folder"),
    ("cpu_offload_not_allowed", "1xRTX-4090", {"allow": ()}, OFFLOADED, "host RAM"),
    ("host_ram_unknown", machine("1xRTX-4090", ram_bytes=None), {}, OFFLOADED, "host RAM is unknown"),
    ("paged_not_allowed", "1xRTX-4090", {"allow": ()}, "none/bf16-mixed/paged_adamw", "pages its state"),
    ("8bit_not_allowed", "1xRTX-4090", {}, "none/bf16-mixed/adamw_8bit", "8-bit state"),
    ("approximation_not_allowed", "1xRTX-4090", {}, "none/bf16-mixed/adafactor", "is not AdamW"),
    ("sgd_is_never_chosen", "1xRTX-4090", {}, "none/bf16-mixed/sgd", "sgd trains transformers poorly"),
    ("bf16_weights_not_allowed", "1xRTX-4090", {}, "none/bf16/adamw_fused", "no fp32 master weights"),
    ("offload_to_itself", "1xCPU", {}, "zero2+optimizer/fp32/deepspeed_cpu_adam", "the device is the CPU"),
    ("paged_to_itself", "1xCPU", {}, "none/fp32/paged_adamw", "pages nothing"),
    ("fused_form_is_faster", "1xRTX-4090", {}, "none/bf16-mixed/adamw", "a kernel for each operation"),
    ("adapters_have_little_state", "1xRTX-4090", {"method": Method.LORA}, OFFLOADED, "is small"),
    ("bf16_is_slow_here", "1xCPU", {}, "none/bf16-mixed/adamw_fused", "no amx_bf16"),
    ("fp16_is_slow_here", "1xCPU", {}, "none/fp16-mixed/adamw_fused", "is a CPU"),
    ("fp16_overflows", "1xT4", {"shape": GEMMA}, "none/fp16-mixed/adamw_fused", "65,504"),
    ("bf16_needs_no_scaler", "1xRTX-4090", {}, "none/fp16-mixed/adamw_fused", "loss scaling"),
    ("fp32_is_slow_here", "1xRTX-4090", {}, "none/fp32/adamw_fused", "slower here than bf16-mixed"),
    # No pin makes the impossible possible.
    ("bf16_needs_ampere", "1xV100-16GB", {"pin": {"precision": Precision.BF16_MIXED}}, "none/bf16-mixed/adamw_fused",
     "V100-16GB has 7.0"),
]  # fmt: skip

NOT_PINNED: dict[str, Any] = {"method": Method.FULL, "num_ranks": 1, "shape": shape_of("8b")}
PLAIN = "none/bf16-mixed/adamw_fused"
FP8 = "none/fp8/adamw_fused"


def strategy(name: str) -> Strategy:
    """A row by its name, also one that the catalogue does not have."""
    layout, precision, optimizer = name.split("/")
    sharding, _, offload = layout.partition("+")
    return Strategy(
        name=name, sharding=Sharding(sharding), offload=Offload(offload or "none"), optimizer=Optimizer(optimizer),
        precision=Precision(precision), is_exact=False,
    )  # fmt: skip


def rule_input(row: str, spec: str = "1xH100-SXM5-80GB", **settled: Any) -> RuleInput:
    return RuleInput(strategy=strategy(row), **(NOT_PINNED | {"device": device_of(machine(spec))} | settled))


PASCAL = replace(device_of(machine("1xV100-16GB")), name="Tesla P40", compute_capability=(6, 1))
MIXTURE = read_model_shape(TINY["mixtral"])


# rule, what breaks it, the same with one value changed so that it does not
RULE_INPUTS: list[tuple[str, RuleInput, RuleInput]] = [
    ("only_zero3_moves_parameters", rule_input("zero2+nvme_all/bf16-mixed/adamw"), rule_input(ON_NVME)),
    ("offload_needs_an_engine", rule_input("ddp+optimizer/bf16-mixed/adamw"), rule_input(OFFLOADED)),
    ("offload_has_a_better_layout", rule_input("zero1+optimizer/fp32/deepspeed_cpu_adam"), rule_input(OFFLOADED)),
    ("cpu_adam_needs_an_offload", rule_input("zero2/fp32/deepspeed_cpu_adam"), rule_input(OFFLOADED)),
    ("cpu_adam_is_of_deepspeed", rule_input("fsdp+optimizer+params/fp32/deepspeed_cpu_adam"), rule_input(OFFLOADED)),
    ("zero_offload_updates_with_cpu_adam", rule_input("zero2+optimizer/fp32/lion"), rule_input(OFFLOADED)),
    ("fsdp_offload_updates_with_adamw", rule_input("fsdp+optimizer+params/fp32/lion"),
     rule_input("fsdp+optimizer+params/fp32/adamw")),
    ("dora_needs_layers_of_their_own", rule_input(PLAIN, method=Method.LORA, lora=LoraJob(dora=True), shape=MIXTURE),
     rule_input(PLAIN, method=Method.LORA, lora=LoraJob(dora=True, targets=("q_proj",)), shape=MIXTURE)),
    ("lomo_needs_one_rank", rule_input("fsdp/bf16/lomo"), rule_input("none/bf16/lomo")),
    ("bitsandbytes_takes_plain_tensors", rule_input("fsdp/bf16/lion_8bit"), rule_input("zero3/bf16/lion_8bit")),
    ("lamb_needs_whole_tensors", rule_input("zero1/bf16/lamb_8bit"), rule_input("ddp/bf16/lamb_8bit")),
    ("matrix_updates_need_whole_matrices", rule_input("zero2/bf16/muon"), rule_input("ddp/bf16/muon")),
    ("fp16_needs_tensor_cores", rule_input("none/fp16-mixed/adamw", device=PASCAL),
     rule_input("none/fp16-mixed/adamw", "1xV100-16GB")),
    ("zero_multiplies_fp16_in_hardware", rule_input("zero2/fp16-mixed/adamw", "2xCPU", cpu_flags=frozenset({"avx2"})),
     rule_input("zero2/fp16-mixed/adamw", "2xCPU", cpu_flags=frozenset({"avx2", "avx512_fp16"}))),
    ("flash_needs_turing", rule_input("none/fp16-mixed/adamw", "1xV100-16GB", attention=Attention.FLASH),
     rule_input("none/fp16-mixed/adamw", "1xV100-16GB", attention=Attention.SDPA)),
    ("flash_needs_ampere", rule_input("none/fp16-mixed/adamw", "1xT4", attention=Attention.FLASH),
     rule_input("none/bf16-mixed/adamw", attention=Attention.FLASH)),
    ("flash_needs_16_bit", rule_input("none/fp32/adamw", attention=Attention.FLASH),
     rule_input("none/bf16/adamw", attention=Attention.FLASH)),
    ("backward_update_adds_nothing_up", rule_input("none/bf16/lomo", accumulation=2),
     rule_input("none/bf16/lomo", accumulation=1)),
    ("backward_update_adds_nothing_up",
     rule_input(PLAIN, method=Method.GALORE, galore=GaloreJob(layerwise=True), accumulation=2),
     rule_input(PLAIN, method=Method.GALORE, accumulation=2)),
    ("deepspeed_makes_the_update", rule_input("zero2/bf16/adamw", optimizer_in_backward=True),
     rule_input("fsdp/bf16/adamw", optimizer_in_backward=True)),
    ("backward_update_needs_reduced_gradients", rule_input("ddp/bf16/adamw", optimizer_in_backward=True),
     rule_input("fsdp_grad_op/bf16/adamw", optimizer_in_backward=True)),
    ("backward_update_is_of_whole_weights", rule_input(PLAIN, method=Method.LORA, optimizer_in_backward=True),
     rule_input(PLAIN, optimizer_in_backward=True)),
    ("backward_update_meets_no_scaler", rule_input("none/fp16-mixed/adalomo"), rule_input("none/fp16-mixed/adamw")),
    ("fused_linear_needs_cuda", rule_input(PLAIN, "1xCPU", loss=LossHead.FUSED_LINEAR),
     rule_input(PLAIN, loss=LossHead.FUSED_LINEAR)),
    ("fused_linear_needs_liger", rule_input(PLAIN, loss=LossHead.FUSED_LINEAR, libraries=frozenset()),
     rule_input(PLAIN, loss=LossHead.FUSED_LINEAR, libraries=frozenset({"liger-kernel"}))),
    ("recipe_needs_blackwell", rule_input(FP8, fp8_recipe=Fp8Recipe.MXFP8),
     rule_input(FP8, "1xB200", fp8_recipe=Fp8Recipe.MXFP8)),
    ("block_recipe_needs_hopper", rule_input(FP8, "1xL4", fp8_recipe=Fp8Recipe.BLOCK),
     rule_input(FP8, fp8_recipe=Fp8Recipe.BLOCK)),
    ("rowwise_recipe_needs_hopper", rule_input(FP8, "1xL4", fp8_recipe=Fp8Recipe.TORCHAO_ROWWISE),
     rule_input(FP8, "1xL4", fp8_recipe=Fp8Recipe.TORCHAO_TENSORWISE)),
    ("delayed_meets_no_recomputation", rule_input(FP8, fp8_recipe=Fp8Recipe.DELAYED, checkpointing=Checkpointing.FULL),
     rule_input(FP8, fp8_recipe=Fp8Recipe.CURRENT, checkpointing=Checkpointing.FULL)),
    ("fp8_needs_tiles", rule_input(FP8, fp8_recipe=Fp8Recipe.BLOCK, shape=shape_of("tiny")),
     rule_input(FP8, fp8_recipe=Fp8Recipe.CURRENT, shape=shape_of("tiny"))),
    ("recipe_needs_torchao",
     rule_input(FP8, fp8_recipe=Fp8Recipe.TORCHAO_TENSORWISE, libraries=frozenset({"transformer-engine"})),
     rule_input(FP8, fp8_recipe=Fp8Recipe.CURRENT, libraries=frozenset({"transformer-engine"}))),
    ("recipe_needs_transformer_engine", rule_input(FP8, fp8_recipe=Fp8Recipe.DELAYED, libraries=frozenset({"torchao"})),
     rule_input(FP8, fp8_recipe=Fp8Recipe.TORCHAO_ROWWISE, libraries=frozenset({"torchao"}))),
    ("compiled_blocks_hold_no_gathering_hooks", rule_input("zero3/bf16/adamw", compile=True),
     rule_input("zero2/bf16/adamw", compile=True)),
    ("compiled_blocks_hold_no_hooks_on_routers", rule_input(PLAIN, compile=True, router_aux_loss=0.01),
     rule_input(PLAIN, router_aux_loss=0.01)),
    ("compiled_blocks_are_fused", rule_input(PLAIN, fused_kernels=True, compile=True),
     rule_input(PLAIN, fused_kernels=True)),
    ("fused_kernels_need_liger", rule_input(PLAIN, fused_kernels=True, libraries=frozenset({"triton"})),
     rule_input(PLAIN, fused_kernels=True, libraries=frozenset({"liger-kernel"}))),
    ("fused_kernels_know_the_model", rule_input(PLAIN, fused_kernels=True, shape=GEMMA),
     rule_input(PLAIN, fused_kernels=True, shape=shape_of("1b"))),
    ("selective_saves_what_rotary_overwrites",
     rule_input(PLAIN, fused_kernels=True, checkpointing=Checkpointing.SELECTIVE),
     rule_input(PLAIN, fused_kernels=True, checkpointing=Checkpointing.FULL)),
    ("fused_adapters_need_adapters", rule_input(PLAIN, fused_adapters=True),
     rule_input(PLAIN, method=Method.QLORA, fused_adapters=True)),
    ("fused_adapters_are_products_alone",
     rule_input(PLAIN, method=Method.LORA, fused_adapters=True, lora=LoraJob(dropout=0.1)),
     rule_input(PLAIN, method=Method.LORA, fused_adapters=True, lora=LoraJob(rslora=True))),
    ("fused_adapters_are_products_alone",
     rule_input(PLAIN, method=Method.LORA, fused_adapters=True, lora=LoraJob(dora=True)),
     rule_input(PLAIN, method=Method.LORA, lora=LoraJob(dora=True))),
    ("fused_adapters_add_to_16_bit_products", rule_input(FP8, method=Method.LORA, fused_adapters=True),
     rule_input(PLAIN, method=Method.LORA, fused_adapters=True)),
    ("compiled_blocks_fuse_adapters", rule_input(PLAIN, method=Method.LORA, fused_adapters=True, compile=True),
     rule_input(PLAIN, method=Method.LORA, fused_adapters=True)),
    ("selective_saves_what_adapters_add_to",
     rule_input(PLAIN, method=Method.LORA, fused_adapters=True, checkpointing=Checkpointing.SELECTIVE),
     rule_input(PLAIN, method=Method.LORA, fused_adapters=True, checkpointing=Checkpointing.ATTENTION)),
    ("fused_adapters_read_whole_weights",
     rule_input("zero3/bf16-mixed/adamw_fused", "2xRTX-4090", method=Method.LORA, fused_adapters=True),
     rule_input("zero2/bf16-mixed/adamw_fused", "2xRTX-4090", method=Method.LORA, fused_adapters=True)),
    ("compiled_head_is_of_slices", rule_input(PLAIN, compiled_head=True, loss=LossHead.FUSED),
     rule_input(PLAIN, compiled_head=True, loss=LossHead.CHUNKED)),
    ("shard_group_is_of_hsdp", rule_input("fsdp/bf16-mixed/adamw_fused", "8xH100-SXM5-80GB", shard_group=4),
     rule_input("hsdp/bf16-mixed/adamw_fused", "8xH100-SXM5-80GB", shard_group=4)),
    ("reduction_of_micro_batches_is_of_fsdp",
     rule_input("zero3/bf16-mixed/adamw_fused", "8xH100-SXM5-80GB", reduce_every_micro_batch=True),
     rule_input("fsdp/bf16-mixed/adamw_fused", "8xH100-SXM5-80GB", reduce_every_micro_batch=True)),
    ("prefetch_of_two_blocks_is_of_fsdp",
     rule_input("zero3/bf16-mixed/adamw_fused", "8xH100-SXM5-80GB", prefetch_two_blocks=True),
     rule_input("hsdp/bf16-mixed/adamw_fused", "8xH100-SXM5-80GB", prefetch_two_blocks=True)),
    ("shard_group_divides_the_ranks",
     rule_input("hsdp/bf16-mixed/adamw_fused", "3x8xH100-SXM5-80GB", num_ranks=24, shard_group=12),
     rule_input("hsdp/bf16-mixed/adamw_fused", "3x8xH100-SXM5-80GB", num_ranks=24, shard_group=8)),
    ("selective_keeps_on_the_device", rule_input(PLAIN, checkpointing=Checkpointing.SELECTIVE, activation_offload=True),
     rule_input(PLAIN, checkpointing=Checkpointing.FULL, activation_offload=True)),
    ("activations_are_on_the_host", rule_input(PLAIN, "1xCPU", activation_offload=True),
     rule_input(PLAIN, activation_offload=True)),
    ("embedding_on_host_is_frozen", rule_input(PLAIN, embedding_on_host=True),
     rule_input(PLAIN, method=Method.LORA, embedding_on_host=True)),
    ("embedding_on_host_is_no_head",
     rule_input(PLAIN, method=Method.LORA, embedding_on_host=True, shape=shape_of("1b")),
     rule_input(PLAIN, method=Method.QLORA, embedding_on_host=True)),
    ("embedding_on_host_is_of_one_rank",
     rule_input("ddp/bf16-mixed/adamw_fused", "2xRTX-4090", method=Method.LORA, embedding_on_host=True),
     rule_input(PLAIN, method=Method.LORA, embedding_on_host=True)),
    ("embedding_is_on_the_host", rule_input(PLAIN, "1xCPU", method=Method.LORA, embedding_on_host=True),
     rule_input(PLAIN, method=Method.LORA, embedding_on_host=True)),
]  # fmt: skip
INCOMPATIBILITIES: tuple[Incompatibility, ...] = (*LAYOUTS, *ROWS, *SETTINGS)


@pytest.mark.parametrize(("rule", "spec", "facts", "row", "words"), OF_A_CONTEXT)
def test_a_rule_refuses_its_row_and_says_why(rule: str, spec: Any, facts: dict[str, Any], row: str, words: str) -> None:
    refusal = refuse(context_for("8b", spec, **facts), ROWS_BY_NAME[row])
    assert refusal is not None and refusal.rule == rule
    assert words in refusal.reason


@pytest.mark.parametrize(
    ("name", "broken", "sound"), RULE_INPUTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_an_incompatibility_is_between_two_values(name: str, broken: RuleInput, sound: RuleInput) -> None:
    """One value changed, and the rule no longer holds; reason and remedy are filled."""
    (rule,) = (each for each in INCOMPATIBILITIES if each.name == name)
    assert rule.is_broken(broken)
    assert not rule.is_broken(sound)
    for words in (rule.reason_of(broken), rule.instead_of(broken) or ""):
        assert "{" not in words and "None" not in words


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("fused_linear_needs_liger", "liger-kernel"),
        ("recipe_needs_torchao", "torchao"),
        ("recipe_needs_transformer_engine", "transformer-engine"),
    ],
)
def test_what_a_rule_would_have_installed_can_be_pasted(name: str, library: str, tmp_path: Path) -> None:
    (broken,) = (case[1] for case in RULE_INPUTS if case[0] == name)
    (rule,) = (each for each in INCOMPATIBILITIES if each.name == name)
    assert set(requirements_in(rule.instead_of(broken) or "", tmp_path)) == {library}


def test_every_rule_is_tested_above() -> None:
    tested = {case[0] for case in OF_A_CONTEXT} | {case[0] for case in RULE_INPUTS}
    assert tested == {rule.name for rule in RULES} | {rule.name for rule in INCOMPATIBILITIES}


def test_what_the_catalogue_leaves_out_has_a_reason_and_what_it_has_none() -> None:
    known = {(row.sharding, row.offload, row.optimizer) for row in CATALOGUE}
    for sharding, offload, optimizer in product(Sharding, Offload, Optimizer):
        name = f"{sharding}{'' if offload is Offload.NONE else f'+{offload}'}/fp32/{optimizer}"
        broken = first_broken(LAYOUTS, rule_input(name))
        assert (broken is None) is ((sharding, offload, optimizer) in known), name


def test_neither_a_row_alone_nor_plain_settings_break_a_rule_on_settings() -> None:
    """So that the planner and a search need not ask: recomputation and heads in plain torch go with every row."""
    heads, kernels = (LossHead.EAGER, LossHead.CHUNKED, LossHead.FUSED), (Attention.SDPA, Attention.EAGER)
    for spec, row in product(("1xCPU", "1xV100-32GB", "1xH100-SXM5-80GB"), CATALOGUE):
        if row.optimizer in (Optimizer.LOMO, Optimizer.ADALOMO):
            continue
        alone = rule_input(row.name, spec, libraries=frozenset())
        assert first_broken(SETTINGS, alone) is None
        if row not in CATALOGUE[::3] or row.precision is Precision.FP8:
            continue
        for checkpointing, loss, attention in product(Checkpointing, heads, kernels):
            settled = replace(alone, accumulation=4, checkpointing=checkpointing, loss=loss, attention=attention)
            assert first_broken(SETTINGS, settled) is None


@pytest.mark.parametrize("spec", ["1xCPU", "2xCPU", "1xT4", "1xRTX-4090", "8xH100-SXM5-80GB", "2x8xA100-SXM4-80GB"])
def test_a_row_may_run_where_no_rule_refuses_it(spec: str) -> None:
    for method, pin in product(Method, ({}, {"precision": Precision.FP8}, {"checkpointing": Checkpointing.ATTENTION})):
        context = context_for("8b", spec, method=method, pin=pin, allow=tuple(Allowance))
        for row in CATALOGUE:
            refusal = refuse(context, row)
            assert may_run(context, row) is (refusal is None)
            if refusal is not None:
                assert refusal.reason and "{" not in refusal.reason + (refusal.instead or "")


@pytest.mark.parametrize(
    ("spec", "facts", "given", "row"),
    [
        ("1xRTX-4090", {}, {"pin": {"precision": Precision.FP32}}, "none/fp32/adamw_fused"),
        ("1xRTX-4090", {}, {"pin": {"precision": Precision.BF16}}, "none/bf16/adamw_fused"),
        ("1xCPU", {}, {"pin": {"precision": Precision.BF16_MIXED}}, "none/bf16-mixed/adamw_fused"),
        ("1xCPU", {}, {"pin": {"precision": Precision.FP16_MIXED}}, "none/fp16-mixed/adamw_fused"),
        ("1xCPU", {}, {"pin": {"optimizer": Optimizer.PAGED_ADAMW}}, "none/fp32/paged_adamw"),
        ("1xRTX-4090", {}, {"pin": {"optimizer": Optimizer.SGD}}, "none/bf16-mixed/sgd"),
        ("2xCPU", {}, {"pin": {"offload": Offload.OPTIMIZER}}, "zero2+optimizer/fp32/deepspeed_cpu_adam"),
        ("1xRTX-4090", {"allow": ()}, {"pin": {"offload": Offload.OPTIMIZER}}, OFFLOADED),
        (machine("1xRTX-4090", ram_bytes=None), {}, {"host_ram": 256 * GIB}, OFFLOADED),
        ("1xT4", {"shape": GEMMA}, {"pin": {"precision": Precision.FP16_MIXED}}, "none/fp16-mixed/adamw_fused"),
    ],
)
def test_a_pin_or_a_limit_of_the_job_opens_what_would_be_refused_without(spec, facts, given, row):
    assert refuse(context_for("tiny", spec, **facts), ROWS_BY_NAME[row]) is not None
    assert refuse(context_for("tiny", spec, **facts, **given), ROWS_BY_NAME[row]) is None


@pytest.mark.parametrize(
    ("spec", "pin", "rule", "refused", "taken"),
    [
        ("1xCPU", {"loss": LossHead.FUSED_LINEAR}, "fused_linear_needs_cuda", "none/fp32/adamw_fused", None),
        ("2xRTX-4090", {"optimizer_in_backward": True}, "deepspeed_makes_the_update", "zero2/bf16-mixed/adamw_fused",
         "fsdp/bf16-mixed/adamw_fused"),
        ("1xRTX-4090", {"optimizer": Optimizer.LOMO, "micro_batch": 1}, "backward_update_adds_nothing_up",
         "none/bf16-mixed/lomo", None),
    ],
)  # fmt: skip
def test_a_pinned_setting_refuses_the_rows_that_cannot_serve_it(spec, pin, rule, refused, taken):
    context = context_for("8b", spec, pin=pin, tokens_per_step=65536)
    refusal = refuse(context, ROWS_BY_NAME[refused])
    assert refusal.rule == rule
    if taken is not None:
        assert refuse(context, ROWS_BY_NAME[taken]) is None


@pytest.mark.parametrize(
    ("model", "spec", "pin", "words"),
    [
        ("tiny", "1xCPU", {"loss": LossHead.FUSED_LINEAR}, r"pin\.loss: fused_linear .*Liger"),
        ("8b", "8xH100-SXM5-80GB", {"sharding": Sharding.FSDP, "optimizer": Optimizer.MUON},
         r"pin\.sharding: fsdp, pin\.optimizer: muon.*whole matrices"),
    ],
)  # fmt: skip
def test_a_pin_that_no_row_serves_is_an_error_with_its_reason(model, spec, pin, words):
    with pytest.raises(InputError, match=words):
        check_pins(context_for(model, spec, pin=pin))


def test_a_setting_of_a_row_is_asked_after_what_it_adds_to_the_row() -> None:
    """What a search asks of every setting; the row itself is taken."""
    context = context_for("8b", "1xRTX-4090", seq_len=2048, tokens_per_step=8192)
    row = ROWS_BY_NAME["none/bf16-mixed/lomo"]
    start = first_configuration(context, row, checkpointing=Checkpointing.FULL, loss=LossHead.CHUNKED)
    at_once = replace(start, micro_batch=4, accumulation=1)
    assert obstacle_to(context, at_once) is None
    for changes, name in (
        ({"micro_batch": 1, "accumulation": 4}, "backward_update_adds_nothing_up"),
        ({"activation_offload": True, "checkpointing": Checkpointing.SELECTIVE}, "selective_keeps_on_the_device"),
    ):
        broken = obstacle_to(context, replace(at_once, **changes))
        assert broken is not None and broken.name == name


def test_a_plan_states_what_it_writes_to_nvme() -> None:
    job = job_of(allow=(Allowance.OFFLOAD_NVME,), method=Method.FULL, pin={"offload": Offload.NVME_OPTIMIZER})
    limits = replace(job.limits, nvme=NvmeLimit(path="/scratch", size=1000 * GIB))
    plan = plan_of("8b", "1xRTX-3090", job=replace(job, limits=limits))
    note = note_of(plan, "to the NVMe disk")
    assert "writes 96 GB" in note  # 12 bytes a parameter
    assert f"{12 * 8.03e9 * plan.schedule.num_steps / 1e12:.3g} TB" in note


@pytest.mark.parametrize("rule", OF_THE_JOB, ids=lambda rule: rule.name)
@pytest.mark.parametrize("spec", ["1xT4", "8xH100-SXM5-80GB", "1xCPU"])
@pytest.mark.parametrize("method", [Method.FULL, Method.LORA])
def test_a_rule_of_the_job_reads_the_one_setting_that_it_names(rule: Rule, spec: str, method: Method) -> None:
    """`broken_by_job` applies it once for all rows with one value of that setting."""
    context = context_for("tiny", spec, method=method, job=job_of(allow=()))
    verdicts: dict[str, bool] = {}
    for row in CATALOGUE:
        is_broken = rule.is_broken(context, row)
        assert verdicts.setdefault(getattr(row, rule.axis), is_broken) is is_broken
        assert not is_broken or broken_by_job(context, row) is not None
