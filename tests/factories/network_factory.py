"""Networks that lack something: a port that drops packets, a thread whose network has no loopback."""

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

CLONE_NEWNET = 0x40000000
needs_own_network = pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own needs root")


@contextmanager
def port_that_drops() -> Iterator[tuple[str, int]]:
    """An address at which something listens and the kernel drops every packet: its queue of connections is full."""
    with socket.socket() as listener, socket.socket() as first:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        first.connect(listener.getsockname())
        yield listener.getsockname()


def without_loopback(claim: Callable[[], object]) -> None:
    raised: list[BaseException] = []

    def run() -> None:
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.unshare(CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            claim()
        except BaseException as error:  # noqa: BLE001  # raised again below
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
