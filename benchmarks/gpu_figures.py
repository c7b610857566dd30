"""What the pages state of runs on GPUs, from the files under results/: a table of accuracy.md, and sentences of others.

`python benchmarks/gpu_figures.py --write` renews the table. `tests/test_gpu_figures.py` compares each sentence of
`statements` with its page, and finds figures of such runs that no sentence here covers.
"""

import json
import statistics
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from on_gpu.predicted import CAPPED, CASES
from on_gpu.tables import markdown_table, percent
from written_page import run_page

from shardwise.launch import api
from shardwise.trainer.spec.units import GIB

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "accuracy.md"
H100, H200 = "nvidia-h100-80gb-hbm3-2026-11-27", "nvidia-h200-2026-11-27"
_PRECISIONS = ("fp8", "fp32", "fp16-mixed")


@cache
def results(name: str) -> dict[str, Any]:
    """The parts of a results file."""
    parts: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())["parts"]
    return parts


def peak_differences() -> dict[str, list[float]]:
    """Peaks of our own trainer on one H100 relative to their predictions, by the property that no published row has."""
    found: dict[str, list[float]] = {}
    for name, row in results(H100)["engines"].items():
        if row["outcome"] != "ran" or (kind := _kind(name, row["result"]["strategy"])) is None:
            continue
        predicted, measured = (
            row["result"][side]["memory"]["peak_allocated_bytes"] for side in ("predicted", "measured")
        )
        found.setdefault(kind, []).append(measured / predicted - 1)
    return found


def _kind(name: str, strategy: str) -> str | None:
    """As `not_compared` of the planner has it; None where published rows cover the kind."""
    sharding, precision, optimizer = strategy.split("/")
    properties = (
        (sharding.startswith("zero"), "ZeRO"),
        ("+" in sharding, "offload"),
        (optimizer.startswith("paged") and name != "qlora", "paged optimizer state"),
        (name == "activation_offload", "activations in host RAM"),
        (name.startswith("galore"), "GaLore"),
        (precision in _PRECISIONS, precision),
    )
    return next((kind for applies, kind in properties if applies), None)


def tables() -> Mapping[str, str]:
    """The generated table of the page."""
    rows = [
        [kind, str(len(found)), percent(statistics.median(found)), percent(min(found)), percent(max(found))]
        for kind, found in peak_differences().items()
    ]
    return {"own": markdown_table(["peak allocated", "runs", "median", "lowest", "highest"], rows)}


@cache
def present_errors() -> tuple[float, ...]:
    """Speeds that the planner predicts now for the timed cases, relative to the measured ones."""
    measured, found = results(H100)["predicted"], []
    for case in (case for case in CASES if case.name in measured):
        settings = {
            **case.settings,
            "pin.micro_batch": case.micro_batch,
            "train.tokens_per_step": (case.micro_batch or 1) * case.seq_len,
        }
        given = [f"{path}={value}" for path, value in settings.items()]
        plan = api.plan(None, *given, model=case.model, seq_len=case.seq_len, hardware="1xH100-SXM5-80GB")
        rate = measured[case.name]["result"]["measured"]["speed"]["tokens_per_s_per_gpu"]
        found.append(plan.chosen.speed.tokens_per_s_per_gpu / rate - 1)
    return tuple(found)


def statements() -> dict[str, list[str]]:
    """Sentences, or parts of them, by the page that has them."""
    engines, peers, fp8 = results(H100)["engines"], results(H100)["peers"], results(H100)["fp8"]
    ran = sum(row["outcome"] == "ran" for row in engines.values())
    timed = results(H100)["predicted"].values()
    peaks, speeds = (sorted(map(abs, _errors(timed, *path))) for path in (_PEAK, _SPEED))
    present = sorted(present_errors())
    worst, typical = max(map(abs, present)), statistics.median(map(abs, present))
    own, equal, trl = (
        peers[f"8B, LoRA: {name}"]
        for name in ("shardwise, its own choice", "shardwise, same settings", "TRL SFTTrainer")
    )
    gain = _rate(fp8["fp8 current"]) / _rate(fp8["bf16-mixed"])
    others = results(H200)["peers"]
    return {
        "README.md": [
            f"On one H100 {ran} of {len(engines)} engines and methods ran as planned.",
            f"Peak memory of {_number(len(peaks))} runs was within {_percent(peaks[-1])} of the prediction, "
            f"speed within {_percent(speeds[-1])}, and within {_percent(worst)} once these runs had corrected it.",
            f"LoRA of 8B reached {own['tokens_per_s']:,.0f} tokens/s in {_gib(own)} GiB, "
            f"TRL {trl['tokens_per_s']:,.0f} in {_gib(trl)}; with equal settings "
            f"{equal['tokens_per_s']:,.0f} in {_gib(equal)}; FP8 {gain:.2f} times bf16",
        ],
        "docs/techniques.md": [f"Peaks of {ran} configurations on an H100"],
        "docs/benchmarks.md": [
            f"now the speeds of the {_number(len(present))} cases are predicted {_percent(-present[0])} too low to "
            f"{_percent(present[-1])} too high, {_percent(typical)} in the median.",
            f"`predicted` has {_number(len(peaks))} cases of {len(CASES)}, `caps` {len(results(H100)['caps'])} runs of "
            f"{2 * len(CAPPED)}",
            f"QLoRA of 8B, shardwise's own choice, "
            f"{others['8B, QLoRA: shardwise, its own choice']['tokens_per_s']:,.0f} tokens/s",
            f"TRL with all parameters of 8B in bf16, "
            f"{others['8B, all parameters: TRL SFTTrainer']['tokens_per_s']:,.0f} tokens/s",
        ],
    }  # fmt: skip


_PEAK, _SPEED = ("memory", "peak_allocated_bytes"), ("speed", "tokens_per_s_per_gpu")


def _errors(rows: Any, group: str, figure: str) -> list[float]:  # noqa: ANN401  # of a results file
    """The predictions that were made before the runs, relative to the measurements."""
    return [row["result"]["predicted"][group][figure] / row["result"]["measured"][group][figure] - 1 for row in rows]


def _rate(row: dict[str, Any]) -> float:
    rate: float = row["result"]["measured"]["speed"]["tokens_per_s_per_gpu"]
    return rate


def _gib(row: dict[str, Any]) -> str:
    return f"{row['peak_allocated_bytes'] / GIB:.1f}"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _number(count: int) -> str:
    return {6: "six"}.get(count, str(count))


if __name__ == "__main__":
    sys.exit(run_page(DOCUMENT, tables, command=__file__, summary=__doc__ or ""))
