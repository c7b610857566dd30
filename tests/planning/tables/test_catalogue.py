"""The catalogue holds each strategy once, under a name, with the file its engine reads."""

from collections import Counter
from pathlib import Path

import pytest

from shardwise.trainer.planning.tables.catalogue import CATALOGUE, ENGINE_CONFIGS, LAYOUTS, optimizers_of
from shardwise.trainer.spec.strategy import Offload, Optimizer, Precision, Sharding, Strategy


def row_of(name: str) -> Strategy:
    return next(row for row in CATALOGUE if row.name == name)


def test_every_row_has_a_name_of_its_own() -> None:
    names = Counter(row.name for row in CATALOGUE)
    assert [name for name, count in names.items() if count > 1] == []


def test_every_row_is_one_combination_of_axes() -> None:
    combinations = {(row.sharding, row.offload, row.optimizer, row.precision) for row in CATALOGUE}
    assert len(combinations) == len(CATALOGUE)


def test_files_and_layouts_match_one_to_one() -> None:
    assert len(set(ENGINE_CONFIGS.values())) == len(ENGINE_CONFIGS) == 12
    for row in CATALOGUE:
        assert row.base_config == ENGINE_CONFIGS.get((row.sharding, row.offload))
    assert {row.base_config for row in CATALOGUE} - {None} == set(ENGINE_CONFIGS.values())
    root = Path(__file__).parents[3]
    files = [*root.glob("ds_configs/*.json"), *root.glob("fsdp_configs/*.yaml")]
    assert {str(file.relative_to(root)) for file in files} == set(ENGINE_CONFIGS.values())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_stands_in_the_docs_with_its_file(layout: tuple[Sharding, Offload]) -> None:
    docs = (Path(__file__).parents[3] / "docs" / "strategies.md").read_text()
    sharding, offload = layout
    file = f"`{ENGINE_CONFIGS[layout]}`" if layout in ENGINE_CONFIGS else "-"
    assert f"| {sharding} | {offload} | {file} |" in docs


def test_only_strategies_without_an_engine_need_no_file() -> None:
    without = {(row.sharding, row.offload) for row in CATALOGUE if row.base_config is None}
    assert without == {(Sharding.NONE, Offload.NONE), (Sharding.DDP, Offload.NONE)}


@pytest.mark.parametrize("pair", ENGINE_CONFIGS, ids=str)
def test_a_file_lies_in_the_folder_of_its_engine(pair: tuple[Sharding, Offload]) -> None:
    folder = "ds_configs/" if pair[0].uses_deepspeed else "fsdp_configs/"
    assert ENGINE_CONFIGS[pair].startswith(folder)


def test_every_member_of_an_axis_has_a_row() -> None:
    assert {row.sharding for row in CATALOGUE} == set(Sharding)
    assert {row.precision for row in CATALOGUE} == set(Precision)
    assert {row.optimizer for row in CATALOGUE} == set(Optimizer)
    assert {row.offload for row in CATALOGUE} == set(Offload)


@pytest.mark.parametrize(
    ("name", "is_exact"),
    [
        ("none/fp32/adamw_fused", True),
        ("zero3/bf16-mixed/adamw", True),
        ("ddp/fp16-mixed/adamw_fused", True),
        ("zero2+optimizer/bf16-mixed/deepspeed_cpu_adam", True),
        ("none/bf16-mixed/paged_adamw", True),  # paging moves state, it changes none
        ("none/bf16/adamw_fused", False),
        ("none/fp8/adamw_fused", False),
        ("none/bf16-mixed/adamw_8bit", False),
        ("none/fp32/sgd", False),
        ("none/fp32/adafactor", False),
        ("ddp/fp32/lion", False),
    ],
)
def test_a_row_is_exact_where_it_is_adamw_with_full_master_weights(name: str, *, is_exact: bool) -> None:
    assert row_of(name).is_exact is is_exact


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_deepspeed_offload_uses_its_cpu_adam_and_nothing_else_does(layout: tuple[Sharding, Offload]) -> None:
    sharding, offload = layout
    is_cpu_adam = optimizers_of(sharding, offload) == (Optimizer.DEEPSPEED_CPU_ADAM,)
    assert is_cpu_adam is (sharding.uses_deepspeed and offload is not Offload.NONE)


@pytest.mark.parametrize("optimizer", [Optimizer.ADAFACTOR, Optimizer.MUON, Optimizer.LAMB_8BIT])
def test_optimizers_that_need_whole_matrices_are_not_offered_on_shards(optimizer: Optimizer) -> None:
    shardings = {row.sharding for row in CATALOGUE if row.optimizer is optimizer}
    assert shardings == {Sharding.NONE, Sharding.DDP}
