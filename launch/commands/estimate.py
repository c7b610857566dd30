"""`shardwise estimate`: reads cases, one JSON object a line, and writes results, one a line, in the same order.

Lines are processed one at a time, so memory does not grow with the file, and a program that writes one case and waits
gets its result. A line that cannot be processed gets an error message, and the next one follows; the exit code reports
if there was one. Names of models are looked up here, because planning reads no files; nothing is downloaded.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from shardwise.launch.inputs.model_files import find_known_model, read_model_config, similar_model
from shardwise.launch.options import EstimateOptions
from shardwise.launch.terminal import Console
from shardwise.trainer.planning.cases import estimate_case
from shardwise.trainer.spec.errors import ExitCode, InputError
from shardwise.trainer.spec.job.sections import Job, ModelJob
from shardwise.trainer.spec.units import MIB, format_bytes

STDIN = Path("-")
MAX_LINE_BYTES = 4 * MIB  # a case has a few hundred bytes; an endless line must not fill the memory
_TOO_LONG = f"the line is longer than {format_bytes(MAX_LINE_BYTES)}"
_DECODER = msgspec.json.Decoder()


def run_estimate(options: EstimateOptions, console: Console) -> ExitCode:
    """Writes a result for every case of the file, or of stdin for `-`; INPUT if one of them is an error."""
    path = options.cases
    if path == STDIN:
        return _result_stream(sys.stdin.buffer, console)
    try:
        stream = path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    with stream:
        return _result_stream(stream, console)


def estimate_line(line: bytes) -> dict[str, Any]:
    """The result of one line; an invalid line has an error as its result."""
    case: object = None
    try:
        case = _DECODER.decode(line)
        if not isinstance(case, dict):
            return _refusal(None, f"a case is a JSON object, not {line.strip()[:40].decode(errors='replace')}")
        return estimate_case(_with_config(case))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _refusal(None, f"not JSON: {error}")
    except InputError as error:
        return _refusal(case, str(error))


def _result_stream(lines: BinaryIO, console: Console) -> ExitCode:
    exit_code = ExitCode.DONE
    for line in _lines(lines):
        result = _refusal(None, _TOO_LONG) if line is None else estimate_line(line)
        if "error" in result:
            exit_code = ExitCode.INPUT
        console.json(result, is_indented=False)
    return exit_code


def _lines(stream: BinaryIO) -> Iterator[bytes | None]:
    """Lines that are not blank; None for one that is too long, whose rest is skipped."""
    while line := stream.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
            while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                pass
            yield None
        elif not line.isspace():
            yield line


def _refusal(case: object, reason: str) -> dict[str, Any]:
    name = case.get("id") if isinstance(case, dict) else None
    return {"id": name, "error": " ".join(reason.split())}


def _with_config(case: dict[str, Any]) -> Mapping[str, Any]:
    """The case with the config of the model it names, as `name` or in place of the config."""
    model = case.get("model")
    if "name" in case:
        if model is not None:
            raise InputError("model and name exclude each other; name a preset or a path, or give the config")
        name = case["name"]
    elif isinstance(model, str):
        name = model
    elif isinstance(model, dict) and model.keys() == {"name"}:
        name = model["name"]
    else:
        return case
    if not isinstance(name, str):
        raise InputError("name: expected a preset or a path, got something else")
    return {key: value for key, value in case.items() if key != "name"} | {"model": _config_of(name)}


@lru_cache(maxsize=64)
def _config_of(name: str) -> dict[str, Any]:
    if not Path(name).expanduser().exists():
        known = find_known_model(name)
        if known is None:
            meant = similar_model(name) or "a preset such as llama-3.1-8b"
            raise InputError(f"{name} is no preset, no known hub id and no file or folder here; did you mean {meant}?")
        return known.config
    # Only the shape is of interest, so no tokenizer is looked for.
    return read_model_config(Job(model=ModelJob(config=name, tokenizer="train"))).config
