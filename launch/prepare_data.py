"""Starts the data preparation in a process of its own, and finds what was prepared before without starting anything.

Tokenising needs libraries that `launch` never imports. `python -m trainer.runtime.prepare` is asked with a value in a
file and answers with one; its lines of progress are passed on, and its exit code becomes the error of that code again.

What was prepared is found again through an index: a key over the paths, sizes and times of all files and over the
settings, pointing to the fingerprint of the content. So an unchanged source is not read, and a touched one is only
read, not tokenised. The index is a cache of a cache: without it everything works, slower.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import IO

import msgspec

from launch.data_files import list_files, source_bytes
from trainer.spec import codec
from trainer.spec.data_profile import DataProfile
from trainer.spec.data_request import PrepareRequest
from trainer.spec.errors import EnvironmentFaultError, ExitCode, InputError, ShardwiseError
from trainer.spec.value import Value

__all__ = ["find_prepared", "prepare_data", "source_bytes"]

GRACE_S = 5.0
RACY_NS = 2 * 10**9
_INDEX_FORMAT = 3
_FILES = ("layout.json", "tokens.bin", "starts.bin", "train_rows.npy", "eval_rows.npy")
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # a user's trainer.py in the working directory must not shadow ours
    "PYTHONUNBUFFERED": "1",
    "PYTHONWARNINGS": "ignore",  # stderr holds the error and nothing else
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "true",
    "HF_HUB_OFFLINE": "1",
}


class PreparedIndex(Value, frozen=True, kw_only=True):
    """Where the prepared form of unchanged files is."""

    fingerprint: str


def prepare_data(
    request: PrepareRequest, *, python: str = sys.executable, on_progress: Callable[[str], None]
) -> DataProfile:
    """The profile of the prepared data; raises the ShardwiseError that the subprocess ended with."""
    listed = list_files(request)
    found = _find(listed)
    if found is not None:
        return found
    started_ns = time.time_ns()
    profile = _run(listed, python, on_progress)
    _write_index(listed, profile, started_ns)
    return profile


def find_prepared(request: PrepareRequest) -> DataProfile | None:
    """The profile of data that was prepared before and whose files are unchanged since; reads no source."""
    return _find(list_files(request))


def _find(listed: PrepareRequest) -> DataProfile | None:
    root = Path(listed.cache_root, "data")
    index_path = _index_path(listed)
    try:
        index = codec.read(index_path, PreparedIndex)
        folder = root / index.fingerprint
        profile = codec.read(folder / "profile.json", DataProfile)
    except InputError:  # never prepared, or removed since, or of another version
        return None
    is_whole = all((folder / name).is_file() for name in _FILES)
    return msgspec.structs.replace(profile, cache_dir=str(folder)) if is_whole else None


def _index_path(listed: PrepareRequest) -> Path:
    request = msgspec.json.encode(msgspec.structs.replace(listed, cache_root="", sources=(), eval_source=None))
    key = blake2b(f"{_INDEX_FORMAT}\n".encode() + request, digest_size=16)
    if listed.tokenizer is not None:
        for path in sorted(_files_in(Path(listed.tokenizer))):
            status = path.stat()
            key.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return Path(listed.cache_root, "data", "index", f"{key.hexdigest()}.json")


def _files_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(f"model.tokenizer: {folder} is not a folder")
    return [path for path in folder.iterdir() if path.is_file()]


def _write_index(listed: PrepareRequest, profile: DataProfile, started_ns: int) -> None:
    """Remembers the fingerprint, unless a file is so young that a second change could hide behind the same time."""
    youngest_ns = max(file.mtime_ns for file in (*listed.files, *listed.eval_files))
    if youngest_ns > started_ns - RACY_NS:
        return
    path = _index_path(listed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        codec.write(path, PreparedIndex(fingerprint=profile.fingerprint))
    except OSError:  # the data is prepared; the next start reads the files again
        return


def _run(listed: PrepareRequest, python: str, on_progress: Callable[[str], None]) -> DataProfile:
    with tempfile.TemporaryDirectory(prefix="shardwise-data-") as folder:
        request_path, answer_path = Path(folder, "request.json"), Path(folder, "answer.json")
        codec.write(request_path, listed)
        with Path(folder, "errors.txt").open("w+", encoding="utf-8") as errors:
            exit_code = _relay(
                [python, "-m", "trainer.runtime.prepare", str(request_path), str(answer_path)], errors, on_progress
            )
            errors.seek(0)
            if exit_code != 0:
                raise _error_of(exit_code, errors.read())
        return codec.read(answer_path, DataProfile)


def _relay(command: list[str], errors: IO[str], on_progress: Callable[[str], None]) -> int:
    """Runs the command, passing on its lines; ended with it when this process is interrupted."""
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | _ENVIRONMENT,
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
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Asks a process that still runs to clean up and go, and kills it if it does not."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(GRACE_S)
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
