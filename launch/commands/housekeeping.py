"""`shardwise init`, `probe` and `schema`: a first job file, this machine, and the schema of the job file."""

import re
import sys
from pathlib import PurePath

from shardwise.launch.options import InitOptions, ProbeOptions, SchemaOptions
from shardwise.launch.terminal import Console
from shardwise.trainer.spec.errors import ExitCode, InputError


def run_init(options: InitOptions, console: Console) -> ExitCode:
    """Writes a commented job file; raises InputError if there is one already."""
    text = job_template(model=options.model, data=options.data)
    try:
        with options.output.open("x") as stream:
            stream.write(text)
    except FileExistsError:
        raise InputError(f"{options.output}: exists already; name another file with -o") from None
    except OSError as error:
        raise InputError(f"{options.output}: cannot be written: {error.strerror}") from error
    console.line(f"wrote {options.output}; next: shardwise plan {options.output}")
    return ExitCode.DONE


def run_probe(options: ProbeOptions, console: Console) -> ExitCode:
    """Prints the machine's hardware, and writes it for `--hardware FILE`."""
    from shardwise.launch.probe.machine import describe_hardware, read_hardware
    from shardwise.trainer.spec import codec

    hardware = read_hardware(gpus=options.gpus, measure=options.measure)
    if options.output is not None:
        try:
            codec.write(options.output, hardware)
        except OSError as error:
            raise InputError(f"{options.output}: cannot be written: {error.strerror}") from error
    console.line(codec.encode(hardware).decode().rstrip() if options.as_json else describe_hardware(hardware))
    return ExitCode.DONE


def run_schema(_options: SchemaOptions, console: Console) -> ExitCode:
    """Prints the JSON Schema of the job file."""
    import json

    from shardwise.trainer.spec.job.fields import job_json_schema

    console.line(json.dumps(job_json_schema(), indent=2))
    return ExitCode.DONE


def job_template(*, model: str, data: str) -> str:
    """A commented job for this model and this data; `model` is a hub id, a folder, a config.json or a preset."""
    from shardwise.launch.inputs.model_files import preset_names, read_preset
    from shardwise.launch.job.yaml_text import write_scalar

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
        ("output", write_scalar(f"runs/{_run_name(model)}"), "each run gets a directory with this name and the time"),
    )
    width = max(len(f"{name}: {value}") for name, value, _ in lines)
    return (
        "# A shardwise job. Every other setting has a default; `shardwise schema` lists them all.\n"
        "# Next: shardwise plan with this file shows what would run, shardwise train runs it.\n"
        + "".join(f"{f'{name}: {value}':<{min(width, 70)}}  # {note}\n" for name, value, note in lines)
    )


def _max_positions(model: str) -> int:
    """Longest row of a preset; no limit for another model."""
    from shardwise.launch.inputs.model_files import preset_names, read_preset
    from shardwise.trainer.spec.model.readers import read_model_shape

    positions = read_model_shape(read_preset(model)).max_positions if model in preset_names() else None
    return positions or sys.maxsize


def _run_name(model: str) -> str:
    path = PurePath(model)
    stem = path.stem if path.suffix == ".json" else path.name
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.").lower() or "job"
