"""The `shardwise` command. Parses, calls one function a command, maps errors to exit codes; decides nothing itself.

Each command imports what it needs when it runs: `probe`, `plan`, `report` load no torch.
"""

import atexit
import errno
import gc
import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, cast

from shardwise.trainer.spec.errors import ExitCode, ShardwiseError
from shardwise.trainer.spec.job.expressions import compiled_when_used

with compiled_when_used():  # argparse imports gettext
    from shardwise.launch.options import parse_command_line
    from shardwise.launch.terminal import Console, write_error
    from shardwise.trainer.spec.secrets import RedactedStream, redacted_output

# Objects made before the collector looks for cycles. Python's 700 cost a start ten milliseconds and find next to none.
GC_THRESHOLD = 100_000
# A full or read-only disk, or a limit (RLIMIT_FSIZE, RLIMIT_NOFILE, RLIMIT_NPROC).
_REFUSED = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM}
)


def _print_traceback() -> None:
    import traceback  # three milliseconds of every start, for --debug

    traceback.print_exc()


def run_and_exit() -> NoReturn:
    """The process of a command. Without threads to wait for it ends at once: to free every object takes 20 ms."""
    exit_code = main()
    if "threading" not in sys.modules:
        atexit._run_exitfuncs()
        with suppress(AttributeError, OSError):  # a stream that is closed or full, which Python reports
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)
    sys.exit(exit_code)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Secrets of the environment are redacted in all output."""
    _open_closed_descriptors()
    with redacted_output():
        return _exit_code(argv)


def _open_closed_descriptors() -> None:
    """Opens /dev/null in place of a closed standard stream, or the next file would be taken for one."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number


def _exit_code(argv: Sequence[str] | None) -> int:
    gc.set_threshold(GC_THRESHOLD)
    arguments = list(sys.argv[1:] if argv is None else argv)
    is_debug = "--debug" in arguments
    try:
        return int(_run([argument for argument in arguments if argument != "--debug"]))
    except ShardwiseError as error:
        if is_debug:
            _print_traceback()
        write_error(f"shardwise: {error}")
        return int(error.exit_code)
    except KeyboardInterrupt:
        write_error("shardwise: interrupted")
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        return int(ExitCode.DONE)
    except (OSError, UnicodeEncodeError) as error:
        if is_debug:
            _print_traceback()
        write_error(f"shardwise: {_fault_text(error)}")
        is_input = isinstance(error, UnicodeEncodeError) or error.errno == errno.ENAMETOOLONG
        return int(ExitCode.INPUT if is_input else ExitCode.ENVIRONMENT)
    except Exception as error:  # noqa: BLE001 - the last resort: an internal error must still end in one line
        if is_debug:
            _print_traceback()
        write_error(
            f"shardwise: internal error: {type(error).__name__}: {error}\n"
            "please report it with the traceback that --debug shows"
        )
        return int(ExitCode.INTERNAL)


def _run(arguments: list[str]) -> ExitCode:
    command, options = parse_command_line(arguments)
    module, _, function = command.run.partition(":")
    consoles = (Console(), Console(sys.stderr)) if command.has_notes else (Console(),)
    cast("RedactedStream", sys.stdout).is_needed = command.needs_output
    exit_code: ExitCode = getattr(importlib.import_module(f"shardwise.launch.{module}"), function)(options, *consoles)
    return exit_code


def _fault_text(error: OSError | UnicodeEncodeError) -> str:
    """A file that the machine refuses, or a name that cannot be stored, in a line."""
    if isinstance(error, UnicodeEncodeError):
        place = error.object[max(0, error.start - 60) : error.end + 20]
        return f"{place!r} is not UTF-8, and cannot be stored or sent; rename the file or the folder"
    place = "" if error.filename is None else f"{str(error.filename)[-200:]}: "
    hint = "; see df -h and ulimit -a" if error.errno in _REFUSED else ""
    return f"{place}{error.strerror or error}{hint}"


if __name__ == "__main__":
    run_and_exit()
