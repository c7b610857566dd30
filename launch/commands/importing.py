"""`shardwise import`: a foreign checkpoint as a plain Hugging Face folder, made by a subprocess with torch.

What `--config` and `--base` name is found as `model.config` and `model.name` of a job are: a preset, a folder, a hub
id.
"""

import json
import sys
from collections.abc import Callable

from launch.inputs.model_files import ModelFiles, download_model, find_config, read_model_config
from launch.options import ImportOptions
from launch.terminal import Console
from launch.worker import ask
from trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from trainer.spec.job.sections import Job, ModelJob
from trainer.spec.messages.import_request import Imported, ImportKind, ImportRequest, WeightType
from trainer.spec.units import format_bytes


def run_import(options: ImportOptions, console: Console) -> ExitCode:
    """Writes the folder and says what it was made of and what was left out."""
    notes = Console(sys.stderr) if options.as_json else console
    imported = ask(
        "trainer.runtime.importing.run",
        _request(options),
        Imported,
        subject="the import",
        environment={"DS_ACCELERATOR": "cpu"},
        on_line=notes.line,
        memory_hint="an import needs memory for the largest tensor, three times in fp32",
    )
    notes.line(f"{options.checkpoint}: {imported.source}")
    size = format_bytes(imported.num_bytes)
    notes.line(f"{imported.num_tensors} tensors, {size}, most of them {imported.dtype}; all there, all finite")
    for note in imported.notes:
        notes.line(note)
    if options.as_json:
        console.line(json.dumps({"import": str(options.output), "kind": imported.kind, "notes": imported.notes}))
    else:
        notes.line(f"wrote {options.output}; train from it with model.name: {options.output}")
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
