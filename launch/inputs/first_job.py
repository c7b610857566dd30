"""The job file that `shardwise init` writes: five lines, each with its alternatives."""

import re
import sys
from pathlib import PurePath

from shardwise.launch.inputs.model_files import preset_names, read_preset
from shardwise.launch.job.yaml_text import write_scalar
from shardwise.trainer.spec.model.readers import read_model_shape


def job_template(*, model: str, data: str) -> str:
    """A commented job for this model and this data; `model` is a hub id, a folder, a config.json or a preset."""
    starts_from_scratch = model.endswith(".json") or (
        model in preset_names() and read_preset(model).get("_name_or_path") is None
    )
    what = {"config": model, "tokenizer": "train"} if starts_from_scratch else {"name": model}
    why = (
        "from scratch, with a tokenizer made from the data (name: starts from weights)"
        if starts_from_scratch
        else "weights to start from (config: starts from scratch)"
    )
    seq_len = min(2048, _max_positions(model))
    lines = (
        ("model", write_scalar(what), why),
        ("data", write_scalar({"train": data}), "a file, a folder, or a list of {source: ..., weight: 1.0}"),
        ("train", f"{{seq_len: {seq_len}, epochs: 1}}", "tokens a row; or steps: N, or tokens: 2G"),
        ("limits", "{hours: 24}", "the plan must finish within"),
        ("output", write_scalar(f"runs/{_run_name(model)}"), "each run gets a directory beside this name"),
    )
    width = max(len(f"{name}: {value}") for name, value, _ in lines)
    return (
        "# A shardwise job. Every other setting has a default; `shardwise schema` lists them all.\n"
        "# Next: shardwise plan with this file shows what would run, shardwise train runs it.\n"
        + "".join(f"{f'{name}: {value}':<{min(width, 70)}}  # {note}\n" for name, value, note in lines)
    )


def _max_positions(model: str) -> int:
    """Longest row of a preset; no limit for another model."""
    positions = read_model_shape(read_preset(model)).max_positions if model in preset_names() else None
    return positions or sys.maxsize


def _run_name(model: str) -> str:
    path = PurePath(model)
    stem = path.stem if path.suffix == ".json" else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.").lower() or "job"
