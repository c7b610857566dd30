"""Servers of notifications and of wandb that hang or answer badly: each delays a run a bounded time at no loss."""

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import parse_headers
from socketserver import BaseRequestHandler, ThreadingTCPServer

import pytest
from outcome_file import FAULTS
from report_factory import make_report
from tracker_factory import Trackers, WandbMode, tracker_environment, tracker_order
from wandb_server import wandb_server

from shardwise.launch.track import notify as notify_module
from shardwise.launch.track import start as track_start
from shardwise.launch.track.notify import NotifyError, NotifyTracker
from shardwise.launch.track.tracker import End

LIMIT_S = 0.5  # of a notification that is not answered here
OK = b"HTTP/1.1 200 OK\r\n"


def receive(connection: socket.socket) -> None:
    """Reads a whole request: http.client sends its body by itself."""
    with connection.makefile("rb") as file:
        length = int(parse_headers(file)["Content-Length"] or 0) if file.readline() else 0
        file.read(length)


def wait_long(connection: socket.socket) -> None:
    with suppress(OSError):
        while connection.recv(1 << 16):  # until the client has gone
            pass


def drip(content: bytes) -> Callable[[socket.socket], None]:
    """A byte every tenth of a second, for ever: no single read takes long."""

    def answer(connection: socket.socket) -> None:
        receive(connection)
        for byte in itertools.chain(content, itertools.repeat(ord("x"))):
            connection.sendall(bytes([byte]))
            time.sleep(0.1)

    return answer


def say_ok_and_wait(connection: socket.socket) -> None:
    connection.sendall(OK)
    wait_long(connection)


def send(content: bytes) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        receive(connection)
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
    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                answer(self.request)

    with ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@pytest.mark.parametrize("way", SERVERS)
def test_a_notification_ends_whatever_its_server_does(way, tmp_path, monkeypatch, record_property):
    answer, is_sent = SERVERS[way]
    if not is_sent:
        monkeypatch.setattr(notify_module, "POST_TIMEOUT_S", LIMIT_S)
    outcome: list[NotifyError | None] = []
    with serving(answer) as url:

        def notify() -> None:
            try:
                NotifyTracker(tmp_path, name="bot-1", notify=(f"{url}/hook/secret-path",)).end(End(make_report()))
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


@pytest.mark.cold
@pytest.mark.long  # wandb waits for some seconds before each of its retries
@pytest.mark.parametrize("is_open", [False, True], ids=["from the first request on", "once the run is open"])
def test_lines_at_which_wandbs_server_hangs_are_sent_by_the_next_start(is_open, run_dir, tmp_path, monkeypatch):
    key, begun, ends = "canary" + "0123456789" * 4, threading.Event(), threading.Event()

    def start(url: str, *, end_s: float = 300.0) -> Trackers:
        monkeypatch.setattr(track_start, "END_S", end_s)  # a limit, which a start that ends by itself does not reach
        address = {"WANDB_BASE_URL": url, "WANDB_API_KEY": key, "WANDB_INIT_TIMEOUT": "3"}
        return Trackers(run_dir, tracker_order(wandb=WandbMode.ONLINE), tracker_environment(tmp_path, **address))

    def hang(*_: object) -> None:
        begun.set()
        ends.wait()

    with wandb_server() as server, serving(wait_long) as silent_url:
        with monkeypatch.context() as hanging:
            hanging.setattr(server, "store", hang)
            trackers = start(server.url, end_s=2.0) if is_open else start(silent_url)
            assert not is_open or begun.wait(300)
            shown = trackers.end()
            ends.set()
        assert bool(server.runs) is is_open and not any(run.rows for run in server.runs.values())
        shown += start(server.url).end()
    (run,) = server.runs.values()
    assert [row["_step"] for row in run.rows] == [0, 1, 2], shown
    assert "Traceback" not in shown and key not in shown + (run_dir / "logs" / "sinks.log").read_text()
