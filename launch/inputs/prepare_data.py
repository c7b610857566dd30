"""Starts the data preparation in a process of its own, where it was not prepared before.

Tokenising needs libraries that `launch` never imports. `python -m trainer.runtime.data.prepare` is asked with a value
in a file and answers with one; its lines of progress are passed on, and its exit code becomes the error of that code
again.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

from launch.inputs.data_files import list_files
from launch.inputs.prepared_index import find_prepared, write_index
from trainer.spec import codec
from trainer.spec.data.profile import DataProfile
from trainer.spec.data.request import LISTING_NAME, PrepareRequest
from trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, ShardwiseError

GRACE_S = 5.0
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # a user's trainer.py in the working directory must not shadow ours
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",  # stderr holds the error and nothing else
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "true",
    "HF_HUB_OFFLINE": "1",
}


def prepare_data(
    request: PrepareRequest,
    *,
    python: str = sys.executable,
    on_progress: Callable[[str], None],
    grace_s: float = GRACE_S,
) -> DataProfile:
    """The profile of the prepared data; raises the ShardwiseError that the subprocess ended with.

    On an interrupt the subprocess has `grace_s` to clean up.
    """
    listed = list_files(request)
    profile = find_prepared(listed)
    if profile is None:
        started_ns = time.time_ns()
        profile = _run(listed, python, on_progress, grace_s)
        write_index(listed, profile, started_ns)
    if profile.is_stream:
        assert profile.cache_dir is not None
        codec.write(Path(profile.cache_dir, LISTING_NAME), listed)  # where its files are now, for the windows to come
    return profile


def _run(listed: PrepareRequest, python: str, on_progress: Callable[[str], None], grace_s: float) -> DataProfile:
    with tempfile.TemporaryDirectory(prefix="shardwise-data-") as folder:
        request_path, answer_path = Path(folder, "request.json"), Path(folder, "answer.json")
        codec.write(request_path, listed)
        with Path(folder, "errors.txt").open("w+", encoding="utf-8") as errors:
            exit_code = _relay(
                [python, "-m", "trainer.runtime.data.prepare", str(request_path), str(answer_path)],
                errors,
                on_progress,
                _ENVIRONMENT if listed.window_bytes is None else _ENVIRONMENT | _online(),
                grace_s,
            )
            errors.seek(0)
            if exit_code != 0:
                raise _error_of(exit_code, errors.read())
        return codec.read(answer_path, DataProfile)


def _online() -> dict[str, str]:
    """A stream fetches files of the hub while it is read, unless the user's own environment says no."""
    return {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "0")}


def _relay(
    command: list[str],
    errors: IO[str],
    on_progress: Callable[[str], None],
    environment: Mapping[str, str],
    grace_s: float,
) -> int:
    """Runs the command, passing on its lines; ended with it when this process is interrupted."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | environment,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches us alone, and we end it
        )
    except OSError as error:
        raise EnvironmentFaultError(f"{command[0]}: cannot be started: {error.strerror}") from error
    assert process.stdout is not None
    try:
        for line in process.stdout:
            on_progress(line.rstrip("\n"))
        return process.wait()
    finally:
        process.stdout.close()
        _end(process, grace_s)


def _end(process: subprocess.Popen[str], grace_s: float) -> None:
    """Asks a process that still runs to clean up and go, and kills it if it does not."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _error_of(exit_code: int, errors: str) -> ShardwiseError:
    lines = [line for line in errors.splitlines() if line.strip()]
    message = "\n".join(lines[-3:]) or "no message"
    if exit_code == ExitCode.INPUT:
        return InputError(message)
    if exit_code == ExitCode.ENVIRONMENT:
        return EnvironmentFaultError(message)
    if exit_code < 0:
        name = signal.Signals(-exit_code).name
        return EnvironmentFaultError(
            f"the data preparation was ended by {name}; SIGKILL often means that host memory ran out"
        )
    return ShardwiseError(f"the data preparation failed with exit code {exit_code}:\n{message}")
