"""A part of a trace in a fork of its process, so that two processors share the work."""

import os
from collections.abc import Callable
from typing import TypeVar

import msgspec

from shardwise.trainer.runtime.run.process import end_with_parent

T = TypeVar("T")


def in_fork(function: Callable[[], T], kind: type[T], *, may_fork: bool) -> Callable[[], T]:
    """Starts `function` in a fork, and returns the function that waits for its value; without one it is called then.

    The value comes as JSON of type `kind`. A fork that fails is repeated by this process, which so raises the error.
    `may_fork` is for a process that has run no kernel of PyTorch with several threads: a fork would lack the threads.
    """
    if not may_fork or len(os.sched_getaffinity(0)) < 2:
        return function
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        exit_code = 1
        try:
            end_with_parent()
            with open(writing, "wb") as stream:  # noqa: PTH123 - a descriptor
                stream.write(msgspec.json.encode(function()))
            exit_code = 0
        finally:
            os._exit(exit_code)  # no handler of the parent's runs twice
    os.close(writing)

    def value() -> T:
        with open(reading, "rb") as stream:  # noqa: PTH123 - a descriptor
            content = stream.read()
        _, status = os.waitpid(child, 0)
        return msgspec.json.decode(content, type=kind) if status == 0 else function()

    return value
