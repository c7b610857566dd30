"""`shardwise export`: a folder that others load, written and compared by a subprocess with torch; and its upload."""

import json
import sys
from pathlib import Path

from launch.inputs.hub import check_target, upload
from launch.options import ExportOptions
from launch.rundir.paths import committed_checkpoints
from launch.terminal import Console
from launch.worker import ask
from trainer.spec.errors import ExitCode, InputError
from trainer.spec.messages.import_request import WeightType
from trainer.spec.messages.worker_requests import ExportFormat, ExportRequest, Lines


def run_export(options: ExportOptions, console: Console) -> ExitCode:
    """Writes the folder and, where asked for, uploads it; whether it may be uploaded is asked first."""
    notes = Console(sys.stderr) if options.as_json else console
    check_run(options.run_dir)
    _check_output(options.output)
    if options.public and options.push is None:
        raise InputError("--public: says how --push uploads; add --push USER/NAME, or leave it out")
    target = check_target(options.push, is_public=options.public) if options.push is not None else None
    for line in _export(options):
        notes.line(line)
    address = None
    if target is not None:
        address = upload(options.output, target)
        notes.line(f"uploaded to {address}, {'public' if target.is_public else 'private'}")
    if options.as_json:
        pushed = {} if address is None else {"pushed": address}
        console.line(json.dumps({"export": str(options.output), **pushed}))
    else:
        notes.line(f"wrote {options.output}; its README.md says how to load it")
    return ExitCode.DONE


def check_run(run_dir: Path) -> None:
    """InputError where a folder is no run, or one that has saved nothing yet."""
    if not (run_dir / "plan.json").is_file():
        raise InputError(f"{run_dir}: is not a run directory: it has no plan.json")
    if not committed_checkpoints(run_dir):
        raise InputError(f"{run_dir}: has no checkpoint to export yet")


def _check_output(output: Path) -> None:
    """InputError for a folder that holds anything: nothing is overwritten."""
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
        checkpoint=options.checkpoint,
        checks=options.check,
        hides_paths=options.push is not None,
    )
    hint = "an export needs memory for the weights, and for one layer in fp32"
    return ask("trainer.runtime.export.run", request, Lines, subject="the export", memory_hint=hint).lines
