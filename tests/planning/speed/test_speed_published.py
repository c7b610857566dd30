"""Predicted throughputs against measured ones, of rows that no constant was fitted on; the documented constants."""

import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from estimate_factory import config

from shardwise.trainer.planning.cases import PredictionCase, read_case
from shardwise.trainer.planning.speed import constants as speed_constants
from shardwise.trainer.planning.speed.step import estimate_speed

ROOT = Path(__file__).parents[3]
CONSTANTS = {
    name: value for name, value in vars(speed_constants).items() if name.isupper() and isinstance(value, float)
}


def predicted(case: PredictionCase) -> float:
    return estimate_speed(case.shape, case.configuration, case.device).tokens_per_s_per_gpu


def mpt(hidden: int, layers: int, heads: int, seq_len: int) -> dict[str, Any]:
    return {"model_type": "mpt", "d_model": hidden, "n_layers": layers, "n_heads": heads, "expansion_ratio": 4,
            "vocab_size": 50368, "max_seq_len": seq_len}  # fmt: skip


LLAMA_3_8B = config(128256, 4096, 14336, 32, 32, 8)
LLAMA_2_7B = config(32000, 4096, 11008, 32, 32, 32)
# llm-foundry scripts/train/benchmarking/README.md, its tables of A100s: hidden, layers, heads, tokens a row, GPUs,
# micro batch, accumulation, recomputed, measured. On 40 GB gradients travel in 16 bit and a node has 1600 Gb/s.
A100_80GB = [
    (5120, 40, 40, 32768, 8, 1, 3, True, 1016), (5120, 40, 40, 2048, 8, 2, 3, False, 2262),
    (4096, 32, 32, 65536, 8, 1, 2, True, 1013), (4096, 32, 32, 4096, 8, 16, 2, True, 3684),
    (4096, 32, 32, 2048, 8, 6, 2, False, 4641), (2560, 32, 20, 16384, 8, 1, 6, False, 5529),
    (2560, 32, 20, 512, 8, 40, 6, False, 12127), (2048, 24, 16, 8192, 8, 3, 4, False, 13814),
    (1024, 24, 16, 2048, 8, 32, 2, False, 58782),
]  # fmt: skip
A100_40GB = [
    (8192, 80, 64, 2048, 128, 4, 1, True, 376), (7168, 48, 56, 2048, 32, 4, 1, True, 857),
    (5120, 40, 40, 2048, 16, 10, 1, True, 1993), (4096, 32, 32, 2048, 128, 18, 1, True, 3623),
    (4096, 32, 32, 16384, 8, 1, 4, True, 2249), (2560, 32, 20, 2048, 64, 6, 1, False, 9736),
]  # fmt: skip


def foundry(gpu: str, row: tuple[Any, ...]) -> tuple[dict[str, Any], float]:
    hidden, layers, heads, seq_len, gpus, micro_batch, accumulation, is_recomputed, measured = row
    train = {
        "sharding": "fsdp", "precision": "bf16-mixed", "micro_batch": micro_batch, "seq_len": seq_len,
        "grad_accum": accumulation, "checkpointing": "full" if is_recomputed else "none", "attention": "flash",
    }  # fmt: skip
    model = mpt(hidden, layers, heads, seq_len)
    made = case(model, gpu, train, "llm-foundry", gpus=gpus)
    if "40GB" in gpu:
        made["recipe"] = {"reduce_dtype": "bf16", "node_network_bytes_per_s": 200e9}
    return made, measured


def case(model: dict[str, Any], gpu: str, train: dict[str, Any], reference: str, *, gpus: int = 1) -> dict[str, Any]:
    full = {"method": "full", "optimizer": "adamw", "loss": "eager", "offload": "none", **train}
    hardware = {"gpu": gpu, "gpus_per_node": min(gpus, 8), "nodes": -(-gpus // 8)}
    return {"id": "held out", "model": model, "hardware": hardware, "train": full, "stack": reference}


def titan(gpus: int, measured: float, **train: Any) -> tuple[dict[str, Any], float]:
    fields = {
        "sharding": "fsdp", "precision": "bf16-mixed", "micro_batch": 2, "seq_len": 8192, "checkpointing": "selective",
        "attention": "sdpa", "optimizer": "adamw_fused", **train,
    }  # fmt: skip
    return case(LLAMA_3_8B, "H100-96GB-HBM2e", fields, "torchtitan", gpus=gpus), measured


HELD_OUT = [
    *(foundry("A100-SXM4-80GB", row) for row in A100_80GB),
    *(foundry("A100-SXM4-40GB", row) for row in A100_40GB),
    # torchtitan benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3
    titan(8, 5762), titan(8, 6667, compile=True), titan(8, 8532, compile=True, precision="fp8"), titan(128, 5605),
    titan(128, 6514, compile=True), titan(128, 8380, compile=True, precision="fp8"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "measured"), HELD_OUT)
def test_rows_that_nothing_was_fitted_on_are_within_a_sixth(row: dict[str, Any], measured: float) -> None:
    assert predicted(read_case(row)) == pytest.approx(measured, rel=0.17)


def test_rows_that_nothing_was_fitted_on_are_met_on_average() -> None:
    assert median(abs(predicted(read_case(row)) / measured - 1) for row, measured in HELD_OUT) < 0.05


# AnswerDotAI/fsdp_qlora benchmarks_03_2024.md: 1,024 rows on two cards, (card, method, sharding, micro batch, seconds)
CONSUMER = [
    ("RTX-4090", "lora", "ddp", 4, 437), ("RTX-4090", "lora", "fsdp", 6, 481), ("RTX-4090", "qlora", "ddp", 8, 450),
    ("RTX-4090", "qlora", "fsdp", 10, 466), ("RTX-3090", "qlora", "ddp", 8, 875), ("RTX-3090", "lora", "ddp", 4, 881),
    ("RTX-3090", "qlora", "fsdp", 10, 936),
]  # fmt: skip


@pytest.mark.parametrize(("card", "method", "sharding", "micro_batch", "seconds"), CONSUMER)
def test_cards_for_games_are_met_within_a_quarter(card, method, sharding, micro_batch, seconds):
    train = {
        "method": method, "sharding": sharding, "precision": "bf16", "micro_batch": micro_batch, "seq_len": 2048,
        "checkpointing": "full", "attention": "sdpa", "lora_rank": 64,
    }  # fmt: skip
    found = predicted(read_case(case(LLAMA_2_7B, card, train, "fsdp_qlora", gpus=2)))
    assert found == pytest.approx(1024 * 2048 / seconds / 2, rel=0.25)


def test_the_docs_list_every_constant_with_its_value() -> None:
    table = (ROOT / "docs" / "speed-model.md").read_text()
    listed = dict(re.findall(r"^\| `([A-Z0-9_]+)` \| ([0-9.e+-]+) \|", table, re.MULTILINE))
    assert {name: float(value) for name, value in listed.items()} == {
        name: pytest.approx(value, rel=1e-3) for name, value in CONSTANTS.items()
    }
