"""`shardwise export`, `import` and `chat`: conversion of models from and to a run, and replies, by a worker with torch.

`--config` and `--base` of an import name a preset, a folder or a hub id, as `model.config` and `model.name` of a job
do. A chat uses the terminal or the pipe of this process. Ctrl-C reaches both processes; the worker ends a reply or
itself, and this process waits for it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwise.launch.inputs.hub import check_target, upload
from shardwise.launch.inputs.model_files import ModelFiles, download_model, find_config, read_model_config
from shardwise.launch.options import ChatOptions, ExportOptions, ImportOptions
from shardwise.launch.rundir.paths import committed_checkpoints, no_run
from shardwise.launch.terminal import Console
from shardwise.launch.worker import ask
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError
from shardwise.trainer.spec.job.sections import Job, ModelJob
from shardwise.trainer.spec.messages.worker_requests import (
    ExportFormat,
    ExportRequest,
    GgufType,
    Imported,
    ImportKind,
    ImportRequest,
    Lines,
    WeightType,
)
from shardwise.trainer.spec.units import format_bytes

_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # a user's trainer.py in the working directory must not shadow ours
    "PYTHONWARNINGS": "ignore",  # warnings of libraries are no part of a chat
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
}


def run_export(options: ExportOptions, console: Console) -> ExitCode:
    """Writes the folder and, with --push, uploads it; permission to upload is checked first."""
    notes = Console(sys.stderr) if options.as_json else console
    check_run(options.run_dir)
    _check_output(options.output)
    if options.public and options.push is None:
        raise InputError("--public: has an effect only with --push; add --push USER/NAME, or remove it")
    target = check_target(options.push, is_public=options.public) if options.push is not None else None
    for line in _export(options):
        notes.line(line)
    address = None
    if target is not None:
        address = upload(options.output, target)
        notes.line(f"uploaded to {address}, {'public' if target.is_public else 'private'}")
    if options.as_json:
        pushed = {} if address is None else {"pushed": address}
        console.json({"export": str(options.output), **pushed}, is_indented=False)
    else:
        notes.line(f"wrote {options.output}; its README.md shows how to load it")
    return ExitCode.DONE


def check_run(run_dir: Path) -> None:
    """Raises InputError if a folder is not a run, or has no checkpoint yet."""
    if not (run_dir / "plan.json").is_file():
        raise no_run(run_dir)
    if not committed_checkpoints(run_dir):
        raise InputError(f"{run_dir}: has no checkpoint to export yet")


def _check_output(output: Path) -> None:
    """InputError for a folder that holds anything: nothing is overwritten."""
    if output.is_symlink():
        raise InputError(f"{output}: is a link; name a folder that does not exist")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: exists already; name a folder that does not")


def _export(options: ExportOptions) -> tuple[str, ...]:
    """Lines of the worker that writes the folder."""
    request = ExportRequest(
        run_dir=str(options.run_dir),
        out=str(options.output),
        merge=options.merge,
        format=ExportFormat(options.format),
        dtype=WeightType(options.dtype) if options.dtype is not None else None,
        quant=GgufType(options.quant) if options.quant is not None else None,
        checkpoint=options.checkpoint,
        checks=options.check,
        hides_paths=options.push is not None,
    )
    hint = "an export needs memory for the weights, and for one layer in fp32"
    return ask("shardwise.trainer.runtime.export.run", request, Lines, subject="the export", memory_hint=hint).lines


def run_import(options: ImportOptions, console: Console) -> ExitCode:
    """Writes the folder and reports its sources and what was left out."""
    notes = Console(sys.stderr) if options.as_json else console
    imported = ask(
        "shardwise.trainer.runtime.importing.run",
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
        console.json({"import": str(options.output), "kind": imported.kind, "notes": imported.notes}, is_indented=False)
    else:
        notes.line(f"wrote {options.output}; train from it with model.name: {options.output}")
    return ExitCode.DONE


def _request(options: ImportOptions) -> ImportRequest:
    """The request to the worker; raises InputError for missing paths and for an output that exists."""
    if not options.checkpoint.is_dir():
        what = "is a file" if options.checkpoint.exists() else "is not there"
        raise InputError(f"{options.checkpoint}: {what}; name the folder of the checkpoint")
    if options.output.is_symlink() or options.output.exists():
        raise InputError(f"{options.output}: exists already; name a folder that does not")
    if options.base is not None and options.config is not None:
        raise InputError("--config: the merged model has the config of its base; remove it")
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
    """The model that an option names, found as for a setting of a job; errors name the option."""
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


def run_chat(options: ChatOptions, _console: Console) -> ExitCode:
    """Chats until the input ends; returns the exit code of the worker, which has reported any error."""
    argv, environment = chat_process(options)
    before = signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which the subprocess would inherit
    try:
        exit_code = subprocess.call(argv, env=environment)
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        return ExitCode(exit_code)
    except ValueError:
        raise EnvironmentFaultError(f"chat: the process that held the model ended with {exit_code}") from None


class ChatReply(NamedTuple):
    """A reply, and how it was made: `runs/x/export on cpu, by the tokenizer's chat template`."""

    text: str
    note: str


def reply_to(texts: Sequence[str], options: ChatOptions) -> ChatReply:
    """The model's reply to the last text, from a process of its own; ShardwiseError if there is none.

    The texts before it are earlier questions and replies in turn.
    """
    argv, environment = chat_process(options)
    done = subprocess.run(
        [*argv, "--turns"],
        env=environment,
        input=msgspec.json.encode(list(texts)).decode(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != ExitCode.DONE:
        error = done.stderr.strip().rpartition("shardwise: ")[2] or f"chat ended with {done.returncode}"
        raise (InputError if done.returncode == ExitCode.INPUT else EnvironmentFaultError)(error)
    return ChatReply(done.stdout.strip(), done.stderr.strip())


def chat_process(options: ChatOptions) -> tuple[list[str], dict[str, str]]:
    """Command line and environment of the process that holds the model; InputError where there is no model."""
    export = options.run_dir / "export"
    if export.is_symlink():
        raise InputError(f"{export}: is a link, not the export of this run; remove it, or name its folder's own run")
    has_export = export.is_dir() and options.checkpoint is None
    if not has_export or not (options.run_dir / "plan.json").is_file():
        check_run(options.run_dir)
    arguments = ["--max-new-tokens", str(options.max_new_tokens)]
    arguments += ["--checkpoint", options.checkpoint] if options.checkpoint is not None else []
    arguments += ["--temperature", str(options.temperature)] if options.temperature is not None else []
    arguments += [f"--system={options.system}"] if options.system is not None else []
    argv = [sys.executable, "-P", "-m", "shardwise.trainer.runtime.tools.chat", str(options.run_dir), *arguments]
    return argv, os.environ | _ENVIRONMENT
