"""The file of known dry runs: its coverage, and that a run of today has the same result."""

from pathlib import Path

import pytest
from dry_run_factory import GoldenResult, GoldenRow, read_golden, run_dry
from msgspec.structs import replace

from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Checkpointing, LossHead, Method, Precision

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
    for row in ROWS.values():
        result = result_of(row)
        assert sum(result.parts.values()) == result.peak_allocated_bytes


def test_every_axis_of_the_dry_run_is_covered() -> None:
    requests = [row.request for row in ROWS.values()]
    assert len({request.model_config["model_type"] for request in requests}) >= 8
    assert {request.method for request in requests} == {Method.FULL, Method.LORA, Method.QLORA}
    assert {request.precision for request in requests} == set(Precision) - {Precision.FP8}
    assert {request.loss for request in requests} == {LossHead.EAGER, LossHead.CHUNKED}
    assert {request.checkpointing for request in requests} == set(Checkpointing) - {Checkpointing.EVERY_N}
    assert {request.optimizer for request in requests} == {Optimizer.ADAMW, Optimizer.ADAMW_FUSED, Optimizer.SGD}
    assert {request.sharding for request in requests} == set(Sharding)
    for axis in ("activation_offload", "document_tokens"):  # plain and sharded, recomputed and not
        found = [request for request in requests if getattr(request, axis)]
        assert {request.sharding for request in found} >= {Sharding.NONE, Sharding.FSDP}, axis
        assert {request.checkpointing for request in found} >= {Checkpointing.NONE, Checkpointing.FULL}, axis
    sharded = {(request.num_ranks, request.accumulation) for request in requests if request.sharding.uses_fsdp}
    assert {ranks for ranks, _ in sharded} >= {8, 64, 512}
    assert {(ranks, 2) for ranks in (8, 64, 512)} <= sharded


@pytest.mark.parametrize("names", [AGAIN, pytest.param(MORE, marks=[pytest.mark.long, pytest.mark.products])])
def test_known_dry_runs_come_out_again(names: tuple[str, ...], tmp_path: Path) -> None:
    """To the byte: nothing in them depends on the machine."""
    for name, found in run_dry(tmp_path, {name: ROWS[name].request for name in names}).items():
        assert found == replace(result_of(ROWS[name]), versions=found.versions), name
