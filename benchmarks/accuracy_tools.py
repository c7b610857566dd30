"""Predictions of two other tools for the rows of `accuracy`, by their own functions.

`accelerate estimate-memory` (accelerate/commands/estimate.py) builds the model with AutoModel on the meta device in
fp32 and returns "Training using Adam" from its size S as the largest of `estimate_training_usage(S, dtype)`: 4 S in
float32, 2 S in float16, nothing in int8 and int4. It does not consider sharding, adapters, batch or sequence. A row
is estimated in the type of its precision; qlora in int4, for which there is no estimate. For sharded rows the same
figure divided by the ranks is scored too.

DeepSpeed (`estimate_zero2_model_states_mem_needs` and the one of ZeRO-3) estimates from the number of parameters, those
of the largest layer and the number of GPUs, in mixed precision with Adam. The closest call for a row is that of ZeRO-3
without offload if the row shards weights, and that of ZeRO-2 on one GPU. Both cover model states and exclude
activations, as documented; neither tool predicts speed.
"""

import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import metadata
from typing import Any, NamedTuple

from accuracy import GIB, Row, errors, percentile

TYPES = {"fp32": "float32", "fp16-mixed": "float16", "bf16-mixed": "float16", "bf16": "float16", "fp8": "float16"}


class ToolEstimate(NamedTuple):
    """Bytes per GPU by a tool; None if it has no estimate."""

    need_bytes: float | None
    fits: bool | None


def tool_versions() -> dict[str, str]:
    """The versions of the called libraries."""
    return {name: metadata.version(name) for name in ("accelerate", "deepspeed", "transformers")}


def score_tools(rows: Sequence[Row]) -> list[dict[str, object]]:
    """One line per tool, ours first: its errors on the same measurements."""
    lines = [_line("shardwise", rows, [ToolEstimate(_our_peak(row), row.prediction["fits"]) for row in rows])]
    for name, need in TOOLS.items():
        lines.append(_line(name, rows, [_estimate(need(row), row) for row in rows]))
    return lines


def _our_peak(row: Row) -> float:
    return float(row.prediction["memory"]["peak_allocated_bytes"])


def _estimate(need_bytes: float | None, row: Row) -> ToolEstimate:
    from shardwise.trainer.planning.cases import read_case

    if need_bytes is None:
        return ToolEstimate(None, None)
    return ToolEstimate(need_bytes, need_bytes <= read_case(row.case).device.usable_bytes)


def _line(name: str, rows: Sequence[Row], estimates: Sequence[ToolEstimate]) -> dict[str, object]:
    off: dict[str, list[float]] = {"full": [], "lora": [], "qlora": []}
    crashed: list[bool] = []
    ran: list[bool] = []
    for row, estimate in zip(rows, estimates, strict=True):
        if estimate.fits is not None:
            (crashed if row.truth.get("oom") else ran).append(estimate.fits)
        if estimate.need_bytes is not None and "peak_allocated_gib" in row.truth:
            error = estimate.need_bytes / GIB / row.truth["peak_allocated_gib"] - 1
            off[row.case["train"]["method"]].append(abs(error))
    every = [error for errors in off.values() for error in errors]
    return {
        "tool": name,
        "peaks": len(every),
        "median": f"{percentile(every, 0.5):.1%}",
        "p90": f"{percentile(every, 0.9):.1%}",
        **{f"{method}, median": f"{statistics.median(e):.1%}" if e else "not predicted" for method, e in off.items()},
        "OOM called fitting": f"{sum(crashed)} of {len(crashed)}",
        "success called not fitting": f"{sum(not fits for fits in ran)} of {len(ran)}",
        "tokens/s, median": _speed(rows) if name == "shardwise" else "not predicted",
    }


def _speed(rows: Sequence[Row]) -> str:
    counter = "tokens_per_s_per_gpu"
    return f"{statistics.median(abs(error) for _, error in errors(rows, counter)):.1%}"


def _num_gpus(row: Row) -> int:
    return int(row.case["hardware"]["gpus_per_node"] * row.case["hardware"]["nodes"])


def accelerate_training_bytes(row: Row) -> float | None:
    """The column "Training using Adam" of `accelerate estimate-memory`; None if it prints N/A."""
    from accelerate.commands.estimate import estimate_training_usage

    train = row.case["train"]
    kind = "int4" if train["method"] == "qlora" else TYPES[train["precision"]]
    total, *_ = _sizes(_key(row.case["model"]))
    usage = max(estimate_training_usage(total, kind).values())
    return None if usage == -1 else float(usage)


def accelerate_training_bytes_by_rank(row: Row) -> float | None:
    """The same divided by the GPUs, as if everything were sharded."""
    usage = accelerate_training_bytes(row)
    return None if usage is None else usage / _num_gpus(row)


def deepspeed_zero2_bytes(row: Row) -> float:
    """Bytes per GPU by DeepSpeed's estimate for ZeRO-2 without offload."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    _, parameters, _ = _sizes(_key(row.case["model"]))
    hardware = row.case["hardware"]
    _, need = estimate_zero2_model_states_mem_needs(
        total_params=parameters,
        num_gpus_per_node=hardware["gpus_per_node"],
        num_nodes=hardware["nodes"],
        cpu_offload=False,
    )
    return float(need)


def deepspeed_zero3_bytes(row: Row) -> float:
    """Bytes per GPU by DeepSpeed's estimate for ZeRO-3 without offload."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    _, parameters, largest_layer = _sizes(_key(row.case["model"]))
    hardware = row.case["hardware"]
    _, need, _ = estimate_zero3_model_states_mem_needs(
        total_params=parameters,
        largest_layer_params=largest_layer,
        num_gpus_per_node=hardware["gpus_per_node"],
        num_nodes=hardware["nodes"],
        cpu_offload=False,
        cpu_offload_params=False,
    )
    return float(need)


def deepspeed_closest_bytes(row: Row) -> float:
    """ZeRO-3's estimate if a row shards its weights, ZeRO-2's on one GPU."""
    return deepspeed_zero2_bytes(row) if _num_gpus(row) == 1 else deepspeed_zero3_bytes(row)


TOOLS: dict[str, Callable[[Row], float | None]] = {
    "accelerate estimate-memory": accelerate_training_bytes,
    "the same, divided by the GPUs": accelerate_training_bytes_by_rank,
    "DeepSpeed, closest call": deepspeed_closest_bytes,
    "DeepSpeed, ZeRO-2 for every row": deepspeed_zero2_bytes,
    "DeepSpeed, ZeRO-3 for every row": deepspeed_zero3_bytes,
}


def _key(config: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(config.items()))


@lru_cache
def _sizes(config: tuple[tuple[str, Any], ...]) -> tuple[int, int, int]:
    """Bytes of the fp32 model by accelerate's functions; its parameters and those of the largest layer as trained."""
    import torch
    from accelerate import init_empty_weights
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    fields = dict(config)
    described = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with init_empty_weights():
        bare = AutoModel.from_config(described, dtype=torch.float32)
        trained = AutoModelForCausalLM.from_config(described, dtype=torch.float32)
    total, _ = calculate_maximum_sizes(bare)
    # DeepSpeed's own count distinguishes tensors by their address, which meta tensors do not have.
    layers = (sum(p.numel() for p in module.parameters(recurse=False)) for module in trained.modules())
    return total, sum(p.numel() for p in trained.parameters()), max(layers)
