"""The catalogue holds each strategy once, under a name, with the file its engine reads."""

from pathlib import Path

import pytest

from shardwise.trainer.planning.tables.catalogue import CATALOGUE, LAYOUTS
from shardwise.trainer.spec.engines import Engine, Offload, Sharding
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Precision


def test_every_row_has_a_name_of_its_own_and_every_member_of_an_axis_a_row() -> None:
    assert len({row.name for row in CATALOGUE}) == len(CATALOGUE)
    for axis in (Sharding, Precision, Optimizer, Offload):
        assert {getattr(row, axis.__name__.lower()) for row in CATALOGUE} == set(axis)


def test_files_and_layouts_match_one_to_one() -> None:
    root = Path(__file__).parents[3]
    docs = (root / "docs" / "strategies.md").read_text()
    files = {(row.sharding, row.offload): row.base_config for row in CATALOGUE}
    for (sharding, offload), file in files.items():
        folder = {Engine.TORCH: "None", Engine.DEEPSPEED: "ds_configs/", Engine.FSDP: "fsdp_configs/"}
        assert str(file).startswith(folder[sharding.facts.engine])
        assert f"| {sharding} | {offload} | {f'`{file}`' if file else '-'} |" in docs
    written = [*root.glob("ds_configs/*.json"), *root.glob("fsdp_configs/*.yaml")]
    assert sorted(filter(None, files.values())) == sorted(str(file.relative_to(root)) for file in written)


def test_of_equally_fast_layouts_the_one_with_the_least_machinery_comes_first() -> None:
    names = [str(sharding) if offload is Offload.NONE else f"{sharding}+{offload}" for sharding, offload in LAYOUTS]
    assert names == [
        *("none", "ddp", "zero1", "zero2", "zero3", "fsdp_grad_op", "fsdp", "hsdp"),
        *("zero2+optimizer", "zero3+optimizer", "zero3+optimizer+params", "fsdp+optimizer+params"),
        *("zero3+nvme_optimizer", "zero3+nvme_all"),
    ]


@pytest.mark.parametrize(
    ("name", "is_exact"),
    [
        ("none/fp32/adamw_fused", True), ("zero3/bf16-mixed/adamw", True), ("ddp/fp16-mixed/adamw_fused", True),
        ("zero2+optimizer/bf16-mixed/deepspeed_cpu_adam", True),
        ("none/bf16-mixed/paged_adamw", True),  # paging moves state, it changes none
        ("none/bf16/adamw_fused", False), ("none/fp8/adamw_fused", False), ("none/bf16-mixed/adamw_8bit", False),
        ("none/fp32/sgd", False), ("none/fp32/adafactor", False), ("ddp/fp32/lion", False),
    ],
)  # fmt: skip
def test_a_row_is_exact_where_it_is_adamw_with_full_master_weights(name: str, *, is_exact: bool) -> None:
    assert [row.is_exact for row in CATALOGUE if row.name == name] == [is_exact]
