"""`shardwise export`: a folder that others load, written and compared by a subprocess with torch; and its upload."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from launch.inputs.hub import check_target, upload
from launch.rundir.paths import committed_checkpoints
from launch.terminal import Console
from trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, ShardwiseError

_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # a user's trainer.py in the working directory must not shadow ours
    "PYTHONWARNINGS": "ignore",  # stderr holds the error and nothing else
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
}


class ExportOptions(NamedTuple):
    """What the command line said."""

    run_dir: Path
    output: Path
    merge: bool = False
    format: str = "hf"
    dtype: str | None = None
    checkpoint: str | None = None
    check: bool = True
    push: str | None = None
    public: bool = False
    as_json: bool = False


def run_export(options: ExportOptions) -> ExitCode:
    """Writes the folder and, where asked for, uploads it; whether it may be uploaded is asked first."""
    console = Console(sys.stderr if options.as_json else None)
    check_run(options.run_dir)
    _check_output(options.output)
    if options.public and options.push is None:
        raise InputError("--public: says how --push uploads; add --push USER/NAME, or leave it out")
    target = check_target(options.push, is_public=options.public) if options.push is not None else None
    for line in _export(options):
        console.line(line)
    address = None
    if target is not None:
        address = upload(options.output, target)
        console.line(f"uploaded to {address}, {'public' if target.is_public else 'private'}")
    if options.as_json:
        pushed = {} if address is None else {"pushed": address}
        Console().line(json.dumps({"export": str(options.output), **pushed}))
    else:
        console.line(f"wrote {options.output}; its README.md says how to load it")
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


def _export(options: ExportOptions) -> list[str]:
    """The lines of the subprocess; raises the error that it ended with."""
    words = ["--format", options.format]
    words += ["--checkpoint", options.checkpoint] if options.checkpoint is not None else []
    words += ["--dtype", options.dtype] if options.dtype is not None else []
    words += ["--merge"] if options.merge else []
    words += [] if options.check else ["--no-check"]
    words += ["--hide-paths"] if options.push is not None else []
    answer = subprocess.run(
        [sys.executable, "-P", "-m", "trainer.runtime.export.run", str(options.run_dir), str(options.output), *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env=os.environ | _ENVIRONMENT,
    )
    if answer.returncode != 0:
        raise _error_of(answer.returncode, answer.stderr)
    return answer.stdout.strip().splitlines()


def _error_of(exit_code: int, errors: str) -> ShardwiseError:
    lines = [line for line in errors.splitlines() if line.strip()]
    if exit_code == ExitCode.INPUT:
        return InputError("\n".join(lines[-3:]))
    if exit_code == ExitCode.ENVIRONMENT:
        return EnvironmentFaultError("\n".join(lines[-3:]))
    if exit_code < 0:
        return EnvironmentFaultError(
            f"the export was ended by signal {-exit_code}; 9 often means that host memory ran out:\n"
            "an export needs that of the weights, and of one layer in fp32"
        )
    return EnvironmentFaultError(f"export failed: {(lines or ['no output'])[-1]}")
