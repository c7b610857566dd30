"""Servers of notifications that hang, answer slowly or answer garbage: each delays the end of a run a bounded time."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from outcome_file import FAULTS
from report_factory import make_report

from shardwise.launch.track import notify as notify_module
from shardwise.launch.track.notify import NotifyError, NotifyTracker
from shardwise.launch.track.tracker import End

LIMIT_S = 0.5  # of a notification that is not answered here
OK = b"HTTP/1.1 200 OK\r\n"


def wait_long(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    with suppress(OSError):
        connection.recv(1)  # until the client has gone


def drip(content: bytes) -> Callable[[socket.socket], None]:
    """A byte every tenth of a second, for ever: no single read takes long."""

    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        for byte in itertools.chain(content, itertools.repeat(ord("x"))):
            connection.sendall(bytes([byte]))
            time.sleep(0.1)

    return answer


def say_ok_and_wait(connection: socket.socket) -> None:
    connection.sendall(OK)
    wait_long(connection)


def send(content: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(content)

    return answer


# What a server does with a connection, and whether the notification counts as sent.
SERVERS: dict[str, tuple[Callable[[socket.socket], None], bool]] = {
    "hangs before it reads": (lambda connection: time.sleep(60), False),
    "hangs before it answers": (wait_long, False),
    "hangs after the status": (say_ok_and_wait, False),
    "answers a byte at a time": (drip(OK), False),
    "sends headers for ever": (drip(OK + b"X: "), False),
    "closes at once": (lambda connection: None, False),
    "answers garbage": (send(b"\x00\xff garbage \x1b]0;x\x07\r\n\r\n"), False),
    "answers a status that is no number": (send(b"HTTP/1.1 many OK\r\n\r\n"), False),
    "answers 500": (send(b"HTTP/1.1 500 \x1b[31mno\r\nContent-Length: 0\r\n\r\n"), False),
    "answers 200": (send(OK + b"Content-Length: 0\r\n\r\n"), True),
    "answers 200 and megabytes": (send(OK + b"Content-Length: 4000000\r\n\r\n" + bytes(4_000_000)), True),
    "answers 200 with a body that is cut": (send(OK + b"Content-Length: 4000\r\n\r\n" + b"{"), True),
    "redirects to itself": (send(b"HTTP/1.1 307 Again\r\nLocation: /\r\nContent-Length: 0\r\n\r\n"), False),
}


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=talk, args=(connection,), daemon=True).start()

        def talk(connection: socket.socket) -> None:
            with suppress(OSError), connection:
                answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/hook/secret-path"
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.parametrize("way", SERVERS)
def test_a_notification_ends_whatever_its_server_does(way, tmp_path, monkeypatch, record_property):
    answer, is_sent = SERVERS[way]
    if not is_sent:
        monkeypatch.setattr(notify_module, "POST_TIMEOUT_S", LIMIT_S)
    outcome: list[NotifyError | None] = []
    with serving(answer) as url:

        def notify() -> None:
            try:
                NotifyTracker(tmp_path, name="bot-1", notify=(url,)).end(End(make_report()))
                outcome.append(None)
            except NotifyError as error:
                outcome.append(error)

        sender = threading.Thread(target=notify, daemon=True)
        sender.start()
        sender.join(30.0)
    record_property(
        FAULTS, {"server of notifications": {"tried": 1, "survived": len(outcome), "hung": 1 - len(outcome)}}
    )
    assert outcome, "it hangs"
    assert (outcome[0] is None) is is_sent, outcome
    if outcome[0] is not None:
        text = str(outcome[0])
        assert text.startswith("127.0.0.1 was not notified: ") and text.isprintable() and "secret" not in text
