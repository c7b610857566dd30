"""A part of a trace in a fork: its value, its error, and where it runs."""

import os

import pytest

from shardwise.trainer.simulation.forked import in_fork
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import DeviceKind


@pytest.mark.parametrize("may_fork", [False, True])
def test_the_value_is_that_of_the_function(may_fork):
    value = in_fork(lambda: (os.getpid(), DeviceKind.CPU), tuple[int, DeviceKind], may_fork=may_fork)
    process, kind = value()
    assert kind is DeviceKind.CPU
    assert (process == os.getpid()) is not (may_fork and len(os.sched_getaffinity(0)) > 1)


@pytest.mark.parametrize("end", [InputError("a field"), SystemExit(3), None])
def test_a_fork_that_fails_or_dies_is_repeated_here(end, capfd):
    here = os.getpid()

    def function() -> str:
        if os.getpid() != here:
            if end is None:
                os.kill(os.getpid(), 9)
            raise end
        return "done"

    assert in_fork(function, str, may_fork=True)() == "done"
    assert capfd.readouterr().err == ""


def test_the_error_of_the_function_is_raised_here():
    def refuse() -> str:
        raise InputError("a field")

    with pytest.raises(InputError, match="a field"):
        in_fork(refuse, str, may_fork=True)()
