"""Runs a user's extensions file: the file that the plan names, only with the content that the plan recorded.

An error inside the file is the user's: the message names file, line and function, and `--debug` shows the rest.
`on_step` alone never ends a run: its error becomes an incident, and it is not called again.
"""

import importlib.util
import sys
import traceback
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.messages.extension import Extension, Hook

_MODULE = "shardwise_extensions"


class Hooks:
    """The functions of one extensions file."""

    def __init__(self, extension: Extension, module: ModuleType) -> None:
        self._extension = extension
        self._module = module

    def has(self, hook: Hook) -> bool:
        """True if the file defines it."""
        return hook in self._extension.hooks

    def call(self, hook: Hook, *arguments: Any) -> Any:  # noqa: ANN401  # the user's own
        """Result of the user's function; InputError with the line that raised."""
        function: Callable[..., Any] = getattr(self._module, hook)
        try:
            return function(*arguments)
        except Exception as error:
            raise InputError(f"extensions: {hook} raised {_summary(error, self._extension)}") from error


def load_hooks(extension: Extension | None) -> Hooks | None:
    """Runs the file once and returns its functions; None without one. InputError where it changed or cannot run."""
    if extension is None:
        return None
    path = Path(extension.path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"extensions: {path} cannot be read: {error.strerror}") from error
    if sha256(content).hexdigest() != extension.sha256:
        raise InputError(f"extensions: {path} changed since the plan was made; start again")
    spec = importlib.util.spec_from_loader(_MODULE, loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[_MODULE] = module  # dataclasses and pickling look a function's module up
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)  # noqa: S102  # the file the job names, see above
    except Exception as error:
        raise InputError(f"extensions: {path} cannot be imported: {_summary(error, extension)}") from error
    return Hooks(extension, module)


def _summary(error: BaseException, extension: Extension) -> str:
    """Type, message and the last line of the user's file on the way."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == extension.path]
    where = f" ({Path(extension.path).name}, line {lines[-1]})" if lines else ""
    message = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if message else ''}{message}{where}"
