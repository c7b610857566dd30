"""Prepares the windows of a stream ahead of the ranks: `python -m trainer.runtime.data.stream.producer REQUEST.json`.

One process a machine, started by its first rank (stream_rows) and ended with it. It builds a window while at most
WINDOWS_AHEAD beyond the one in use are there, and removes those that every rank has left. A window is built under
another name and renamed, so that what can be seen of it is whole. What goes wrong is left in `error.json` for them.
"""

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.runtime.data.stream.folder import remove_held
from trainer.runtime.data.stream.values import (
    ERROR_NAME,
    START_NAME,
    WINDOWS_AHEAD,
    Failure,
    ProducerRequest,
    StreamStart,
    window_folder,
)
from trainer.runtime.data.stream.window import WindowWriter
from trainer.runtime.run.process import end_with_parent
from trainer.spec import codec
from trainer.spec.data.request import LISTING_NAME, PrepareRequest
from trainer.spec.errors import EnvironmentFaultError, ExitCode, ShardwiseError

POLL_S = 0.05
NICENESS = 5  # a step that waits for a core costs more than a window that comes later


def produce(request: ProducerRequest) -> None:
    """Builds windows for ever; ShardwiseError where one cannot be built."""
    cache_dir, folder = Path(request.cache_dir), Path(request.folder)
    writer = WindowWriter(
        codec.read(cache_dir / LISTING_NAME, PrepareRequest),
        codec.read(cache_dir / START_NAME, StreamStart),
        cache_dir,
        folder,
        request.begin,
    )
    number, oldest = request.number, request.number
    while True:
        in_use = window_in_use(folder, num_readers=request.num_readers)
        for done in range(oldest, min(in_use, number)):
            shutil.rmtree(window_folder(folder, done), ignore_errors=True)
        oldest = max(oldest, min(in_use, number))
        if number > in_use + WINDOWS_AHEAD:
            time.sleep(POLL_S)
            continue
        writer.write(number)
        number += 1


def window_in_use(folder: Path, *, num_readers: int) -> int:
    """The oldest window that a rank of this machine reads from; 0 until all have said."""
    numbers = []
    for reader in range(num_readers):
        try:
            numbers.append(int((folder / f"reader-{reader}").read_text()))
        except FileNotFoundError:
            return 0
    return min(numbers)


def main(arguments: Sequence[str]) -> int:
    """Serves the request in the first file; the exit code of what went wrong."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m trainer.runtime.data.stream.producer REQUEST.json\n")
        return ExitCode.INPUT
    request = codec.read(Path(arguments[0]), ProducerRequest)
    try:
        if os.getppid() != request.parent_pid:  # it ended before this process asked to be told
            raise SystemExit(ExitCode.ENVIRONMENT)
        _produce_or_explain(request)
    except ShardwiseError as error:
        failure = Failure(message=str(error), exit_code=int(error.exit_code))
        codec.write(Path(request.folder, ERROR_NAME), failure)
        return error.exit_code
    except SystemExit:  # asked to end: nobody reads here any more
        remove_held(Path(request.folder))
        raise
    return ExitCode.DONE


def _produce_or_explain(request: ProducerRequest) -> None:
    try:
        produce(request)
    except OSError as error:
        place = error.filename or request.folder
        raise EnvironmentFaultError(f"{place}: {error.strerror}; a stream needs room for its windows there") from error


if __name__ == "__main__":
    end_with_parent()
    os.nice(NICENESS)
    try:
        sys.exit(main(sys.argv[1:]))
    except SystemExit as ending:
        os._exit(int(ending.code or 0))  # a thread may still be in native code; nothing is left to clean up
