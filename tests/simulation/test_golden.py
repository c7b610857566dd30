"""The file of known dry runs: its coverage, and that a run of today has the same result."""

from pathlib import Path

import pytest
from dry_run_factory import GoldenResult, GoldenRow, read_golden, run_dry
from msgspec.structs import replace

from shardwise.trainer.spec.engines import Sharding

GOLDEN = Path(__file__).parents[1] / "golden" / "dry_run.jsonl"
ROWS = {row.name: row for row in read_golden(GOLDEN)}
AGAIN = (  # small models that take some seconds each, in this order in one process
    "pythia-1b zero3 n8 bf16-mixed chunked b4 s2048 ckpt-full adamw_fused",
    "gpt2 bf16 eager b8 s1024 ckpt-full adamw_fused",  # after ZeRO-3, whose patches of torch must be gone
)
MORE = (
    "qwen2.5-0.5b lora r8-q_proj+v_proj bf16-mixed chunked b4 s1024",
    "qwen2.5-0.5b bf16-mixed chunked b4 s2048 offload",
    "pythia-1b bf16-mixed chunked b4 s2048",
    "pythia-1b zero2 n8 fp32 chunked b1 s1024 ckpt-full",
    "pythia-1b zero3 n8 bf16-mixed chunked b4 s2048 ckpt-full adamw_fused",  # another stage in the same process
)


def result_of(row: GoldenRow) -> GoldenResult:
    assert row.result is not None, f"{row.name} has no result: make golden"
    return row.result


def test_names_are_unique_and_every_row_has_a_result() -> None:
    assert len(read_golden(GOLDEN)) == len(ROWS) >= 70
    assert {row.request.sharding for row in ROWS.values()} == set(Sharding)
    for result in map(result_of, ROWS.values()):
        assert sum(result.parts.values()) == result.peak_allocated_bytes


@pytest.mark.parametrize("names", [AGAIN, pytest.param(MORE, marks=[pytest.mark.long, pytest.mark.products])])
def test_known_dry_runs_come_out_again(names: tuple[str, ...], tmp_path: Path) -> None:
    """To the byte: nothing in them depends on the machine."""
    for name, found in run_dry(tmp_path, {name: ROWS[name].request for name in names}).items():
        assert found == replace(result_of(ROWS[name]), versions=found.versions), name
