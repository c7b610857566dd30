"""`shardwise import`: a foreign checkpoint as a plain Hugging Face folder, made by a subprocess with torch.

What `--config` and `--base` name is found as `model.config` and `model.name` of a job are: a preset, a folder, a hub
id.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from launch.inputs.model_files import ModelFiles, download_model, find_config, read_model_config
from launch.terminal import Console
from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, ShardwiseError
from trainer.spec.job.sections import Job, ModelJob
from trainer.spec.messages.import_request import Imported, ImportKind, ImportRequest, WeightType
from trainer.spec.units import format_bytes

_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # a user's trainer.py in the working directory must not shadow ours
    "PYTHONWARNINGS": "ignore",  # stderr holds the error and nothing else
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
}


class ImportOptions(NamedTuple):
    """What the command line said."""

    checkpoint: Path
    output: Path
    kind: str | None = None
    config: str | None = None
    base: str | None = None
    dtype: str | None = None
    as_json: bool = False


def run_import(options: ImportOptions) -> ExitCode:
    """Writes the folder and says what it was made of and what was left out."""
    console = Console(sys.stderr if options.as_json else None)
    imported = _import(_request(options), console.line)
    console.line(f"{options.checkpoint}: {imported.source}")
    size = format_bytes(imported.num_bytes)
    console.line(f"{imported.num_tensors} tensors, {size}, most of them {imported.dtype}; all there, all finite")
    for note in imported.notes:
        console.line(note)
    if options.as_json:
        Console().line(json.dumps({"import": str(options.output), "kind": imported.kind, "notes": imported.notes}))
    else:
        console.line(f"wrote {options.output}; train from it with model.name: {options.output}")
    return ExitCode.DONE


def _request(options: ImportOptions) -> ImportRequest:
    """What the subprocess is asked; InputError for paths that are not there, and for an output that is."""
    if not options.checkpoint.is_dir():
        what = "is a file" if options.checkpoint.exists() else "is not there"
        raise InputError(f"{options.checkpoint}: {what}; name the folder of the checkpoint")
    if options.output.is_symlink() or options.output.exists():
        raise InputError(f"{options.output}: exists already; name a folder that does not")
    if options.base is not None and options.config is not None:
        raise InputError("--config: the merged model has the config of its base; leave it out beside --base")
    described = _named("--config", options.config, find_config)
    base = _named("--base", options.base, _base)
    return ImportRequest(
        checkpoint=str(options.checkpoint.resolve()),
        out=str(options.output.absolute()),
        kind=ImportKind(options.kind) if options.kind is not None else None,
        config=described.config if described is not None else None,
        config_origin=described.config_origin if described is not None else None,
        tokenizer=described.tokenizer_path if described is not None else None,
        base=base.model_path if base is not None else None,
        dtype=WeightType(options.dtype) if options.dtype is not None else None,
    )


def _base(name: str) -> ModelFiles:
    job = Job(model=ModelJob(name=name))
    return download_model(job, read_model_config(job))


def _named(option: str, name: str | None, find: Callable[[str], ModelFiles]) -> ModelFiles | None:
    """What an option names, found as a setting of a job is; its errors name the option."""
    if name is None:
        return None
    try:
        return find(name)
    except (InputError, EnvironmentFaultError) as error:
        text = str(error)
        for setting in ("model.config:", "model.name:"):
            text = text.replace(setting, f"{option}:")
        kind = InputError if isinstance(error, InputError) else EnvironmentFaultError
        raise kind(text) from error


def _import(request: ImportRequest, on_progress: Callable[[str], None]) -> Imported:
    """The answer of the subprocess; raises the error that it ended with."""
    with tempfile.TemporaryDirectory(prefix="shardwise-import-") as folder:
        asked, answered, errors = (Path(folder, name) for name in ("request.json", "answer.json", "errors.txt"))
        codec.write(asked, request)
        with (
            errors.open("wb") as stream,
            subprocess.Popen(
                [sys.executable, "-P", "-m", "trainer.runtime.importing.run", str(asked), str(answered)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                errors="replace",
                env=os.environ | _ENVIRONMENT,
            ) as process,
        ):
            assert process.stdout is not None
            for line in process.stdout:
                on_progress(line.rstrip("\n"))
        if process.returncode != 0:
            raise _error_of(process.returncode, errors.read_text(errors="replace"))
        return codec.read(answered, Imported)


def _error_of(exit_code: int, errors: str) -> ShardwiseError:
    lines = [line for line in errors.splitlines() if line.strip()]
    if exit_code == ExitCode.INPUT:
        return InputError("\n".join(lines[-3:]))
    if exit_code == ExitCode.ENVIRONMENT:
        return EnvironmentFaultError("\n".join(lines[-3:]))
    if exit_code < 0:
        return EnvironmentFaultError(
            f"the import was ended by signal {-exit_code}; 9 often means that host memory ran out:\n"
            "an import needs that of the largest tensor, three times in fp32"
        )
    return EnvironmentFaultError(f"import failed: {(lines or ['no output'])[-1]}")
