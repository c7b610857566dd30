"""How far the closed form of each model type is from known dry runs, and the table of the package that says so.

python tests/factories/closed_forms.py      writes trainer/presets/closed_forms.json from tests/golden/dry_run.jsonl
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import msgspec
from dry_run_factory import GoldenResult, GoldenRow, read_golden
from estimate_factory import configuration, gpu

from shardwise.trainer import FOLDER
from shardwise.trainer.planning.configuration import Configuration, PolicyChoices
from shardwise.trainer.planning.memory import estimate_memory
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.messages.worker_requests import SimulationRequest
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import MemoryEstimate

GOLDEN = Path(__file__).parents[1] / "golden" / "dry_run.jsonl"
TABLE = FOLDER / "trainer" / "presets" / "closed_forms.json"
_STEP = 1e-4  # of the table


def answer_of(row: GoldenRow) -> GoldenResult:
    assert row.result is not None
    return row.result


def configuration_of(request: SimulationRequest) -> Configuration:
    chosen: Configuration = configuration(
        request.sharding, precision=request.precision, optimizer=request.optimizer, num_ranks=request.num_ranks,
        ranks_per_node=request.ranks_per_node, method=request.method, micro_batch=request.micro_batch,
        accumulation=request.accumulation, seq_len=request.seq_len, checkpointing=request.checkpointing,
        attention=request.attention, loss=request.loss, loss_chunk_tokens=request.loss_chunk_tokens,
        activation_offload=request.activation_offload, lora=request.lora, quant=request.quant,
        reduce_every_micro_batch=request.reduce_every_micro_batch, bf16_reduction=request.bf16_reduction,
        embedding_on_host=request.embedding_on_host,
        prefetch_two_blocks=request.prefetch_two_blocks,
        fused_adapters=request.fused_adapters,
        policy=PolicyChoices(rows_per_example=request.rows_per_example, document_tokens=request.document_tokens),
    )  # fmt: skip
    return chosen


def predicted(row: GoldenRow) -> tuple[MemoryEstimate, int]:
    found = estimate_memory(read_model_shape(row.request.model_config), configuration_of(row.request), gpu("8xH200"))
    return found, found.parts.get("workspace", 0)


def peak_error(row: GoldenRow) -> float:
    found, workspace = predicted(row)
    return (found.peak_allocated_bytes - workspace) / answer_of(row).peak_allocated_bytes - 1


def sums_tied_tables_at_the_peak(row: GoldenRow) -> bool:
    """True where a dry run counts a table that no device holds."""
    return read_model_shape(row.request.model_config).is_tied and answer_of(row).peak_event == "gradients_complete"


def furthest(rows: Iterable[GoldenRow]) -> dict[str, float]:
    """The largest error of each model type, rounded up; DeepSpeed's buckets are no property of a model."""
    found: dict[str, float] = defaultdict(float)
    for row in rows:
        if not row.request.sharding.uses_deepspeed and not sums_tied_tables_at_the_peak(row):
            name = row.request.model_config["model_type"]
            found[name] = max(found[name], abs(peak_error(row)))
    return {name: round(math.ceil(error / _STEP) * _STEP, 4) for name, error in sorted(found.items())}


if __name__ == "__main__":
    codec.write_bytes(TABLE, msgspec.json.format(msgspec.json.encode(furthest(read_golden(GOLDEN)))) + b"\n")
