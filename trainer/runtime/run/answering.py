"""The worker's side of `launch.worker.ask`: a request is read from a file, the answer is written to another.

    python -m MODULE REQUEST.json ANSWER.json

Progress goes to stdout, a line at a time. An error goes to stderr and to ANSWER.error, because libraries write to
stderr as well; the exit code is that of the error.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from shardwise.trainer.runtime.run.process import end_with_parent
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode, ShardwiseError
from shardwise.trainer.spec.value import Value

R = TypeVar("R", bound=Value)


def answer(
    arguments: Sequence[str], request_type: type[R], work: Callable[[R], Value], *, clean: Callable[[str], str] = str
) -> int:
    """Writes `work(request)` to the second file of `arguments`; returns the exit code.

    `clean` makes a message that quotes foreign files safe for a terminal.
    """
    if len(arguments) != 2:
        sys.stderr.write("give two files: REQUEST.json ANSWER.json\n")
        return ExitCode.INPUT
    request_path, answer_path = map(Path, arguments)
    try:
        codec.write(answer_path, _answered(request_path, request_type, work))
    except ShardwiseError as error:
        message = clean(str(error)) + "\n"
        sys.stderr.write(message)
        if answer_path.parent.is_dir():
            answer_path.with_suffix(".error").write_text(message)
        return error.exit_code
    return ExitCode.DONE


def answer_and_exit(request_type: type[R], work: Callable[[R], Value]) -> None:
    """`answer` for the arguments of this process, which ends with its parent."""
    end_with_parent()
    sys.exit(answer(sys.argv[1:], request_type, work))


def report_progress(line: str) -> None:
    """Sends a line of progress to the process that asked."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _answered(path: Path, request_type: type[R], work: Callable[[R], Value]) -> Value:
    request = codec.read(path, request_type)
    try:
        return work(request)
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise EnvironmentFaultError(f"{place}{error.strerror or error}") from error
