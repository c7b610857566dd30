"""FP8 against bf16 by matrix shape: the linear layers of models from 0.5B to 70B, by the tokens of a micro batch.

The shapes are read from the models' configs: attention's output, and the two of the feed-forward that are no transposes
of each other. Each model is a step with a process of its own (`techniques_gemm_child`): what crashes there is an error
in a row, and what was timed before it is kept.
"""

import json
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from written_page import markdown_table

from launch.measuring_process import measuring_environment, run_modules
from launch.model_files import read_preset
from on_gpu.bench import Bench
from on_gpu.pieces import Row, Step
from on_gpu.techniques_rows import MORE, measured_on, number, one_line, provenance, ratio, rows_named, times
from trainer.spec.model_shape import read_model_shape

PREFIX = "gemm"
MODELS = ("qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-3b", "llama-3.1-8b", "llama-3.1-70b")
TOKENS = (2048, 8192, 32768)
ROUNDS = 15
TIMEOUT_S = 200.0
CHILD = "on_gpu.techniques_gemm_child"
ROOT = Path(__file__).resolve().parents[2]
BF16 = "bf16"
_TINY_SHARE, _TINY_MULTIPLE = 64, 16  # of every dimension, in a rehearsal


def shapes_of(preset: str) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of the layers that are timed."""
    linears = {linear.name: linear for linear in read_model_shape(read_preset(preset)).linears}
    names = ("o_proj", "up_proj", "down_proj")
    return tuple((linears[name].num_inputs, linears[name].num_outputs) for name in names)


def steps(bench: Bench, _done: Mapping[str, Row]) -> Iterator[Step]:
    for preset in MODELS:
        yield Step(f"{PREFIX} {preset}", partial(gemm_row, bench, preset), expected_s=90)


def request_of(bench: Bench, preset: str) -> dict[str, Any]:
    """What the child is asked."""
    shapes, rounds = shapes_of(preset), ROUNDS
    tokens: tuple[int, ...] = TOKENS
    if bench.is_tiny:
        shapes = tuple((_tiny(inputs), _tiny(outputs)) for inputs, outputs in shapes)
        tokens, rounds = tuple(_tiny(number) for number in tokens), 3
    device = "cuda" if bench.hardware.gpus else "cpu"
    return {"shapes": shapes, "tokens": tokens, "rounds": rounds, "device": device}


def _tiny(size: int) -> int:
    return max(_TINY_MULTIPLE, size // _TINY_SHARE // _TINY_MULTIPLE * _TINY_MULTIPLE)


def gemm_row(bench: Bench, preset: str) -> Row:
    """Times a model's shapes in a process of their own."""
    folder = bench.work / "gemm"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "request.json").write_text(json.dumps(request_of(bench, preset)))
    answer = folder / "rows.jsonl"
    path = f"{ROOT / 'benchmarks'}:{ROOT}"
    has_ended, error = run_modules(
        CHILD,
        [[str(folder / "request.json"), str(answer)]],
        environment=measuring_environment(bench.hardware.gpus[:1], PYTHONPATH=path),
        folder=folder,
        timeout_s=TIMEOUT_S,
    )
    lines = answer.read_text().splitlines() if answer.is_file() else []
    row: Row = {"shapes": [json.loads(line) for line in lines], MORE: measured_on(bench)}
    if not has_ended:
        row["error"] = f"it took more than {TIMEOUT_S:g} s"
    elif error:
        row["error"] = error
    return row


def speedup(shape: Mapping[str, Any], kind: str) -> float | None:
    """How often faster a kind of layer is than the bf16 one beside it."""
    seconds = shape["seconds"]
    return ratio(seconds.get(BF16), seconds.get(kind))


def tables(rows: Mapping[str, Row]) -> str:
    """One table with every shape, and below it what does not run here, with its reason."""
    mine = rows_named(rows, (f"{PREFIX} {preset}" for preset in MODELS))
    kinds = sorted({kind for row in mine.values() for shape in row.get("shapes", ()) for kind in shape["seconds"]})
    others = [kind for kind in kinds if kind != BF16]
    lines = [
        _line(preset.removeprefix(f"{PREFIX} "), shape, others)
        for preset, row in mine.items()
        for shape in row.get("shapes", ())
    ]
    header = ["model", "inputs x outputs", "tokens", "bf16, ms", "TFLOP/s"]
    for kind in others:
        header += [f"{kind}, ms", "TFLOP/s", "ratio"]
    about = (
        "A linear layer with bf16 weights, forward and both products of the backward, the layers in turn; medians of "
        f"{ROUNDS} rounds on drawn tensors, 3 in a rehearsal. A ratio is of bf16's time. Whole layers are timed, casts "
        "included; `compiled` is torch.compile's, which fuses them."
    )
    text = [f"### FP8 against bf16 by matrix shape\n\n{about}\n\n{provenance(mine.values())}\n"]
    if lines:
        text.append(markdown_table(header, lines))
    told = _refusals(mine)
    return "\n".join([*text, *([told] if told else [])])


def _line(preset: str, shape: Mapping[str, Any], kinds: list[str]) -> list[str]:
    cells = [preset, f"{shape['inputs']:,} x {shape['outputs']:,}", f"{shape['tokens']:,}", *_time_cells(shape, BF16)]
    for kind in kinds:
        cells += [*_time_cells(shape, kind), times(speedup(shape, kind))]
    return cells


def _time_cells(shape: Mapping[str, Any], kind: str) -> list[str]:
    seconds = shape["seconds"].get(kind)
    if seconds is None:
        return ["-", "-"]
    return [f"{seconds * 1e3:.3f}", number(shape["flops"] / seconds / 1e12)]


def _refusals(rows: Mapping[str, Row]) -> str:
    """A line for each reason why a kind of layer, or the end of a process, is not there."""
    reasons: dict[str, list[str]] = {}
    for name, row in rows.items():
        if "error" in row:
            reasons.setdefault(f"{name}: {one_line(row['error'])}", [])
        for shape in row.get("shapes", ()):
            for kind, reason in shape["refused"].items():
                found = reasons.setdefault(one_line(reason), [])
                if kind not in found:
                    found.append(kind)
    return "".join(f"- {', '.join(kinds)}{': ' if kinds else ''}{reason}\n" for reason, kinds in reasons.items())
