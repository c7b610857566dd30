"""What a rank does to itself before it imports anything heavy."""

import os
import signal
from collections.abc import Iterator

import pytest

from shardwise.trainer.runtime.run.process import install_stop_flag


@pytest.fixture(autouse=True)
def handlers_given_back() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_request_to_stop_is_noted_and_ends_nothing(number: signal.Signals):
    received = []
    signal.signal(number, lambda *_: received.append(number))  # instead of the end of the tests, were it left alone
    flag = install_stop_flag()
    os.kill(os.getpid(), number)
    assert flag.is_set and not received


def test_ctrl_c_is_left_to_the_supervisor():
    flag = install_stop_flag()
    os.kill(os.getpid(), signal.SIGINT)
    assert not flag.is_set
