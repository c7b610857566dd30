"""What the supervisor and the agents of a run on several machines say to each other: lines of JSON over TCP.

    supervisor, on the first machine  <-- one connection each -->  an agent on every machine, the first included

A connection ends with its machine, its network or its process, so each side sees at once that the other is gone.
`RUN/.nodes.json` holds port and token, for the user alone: an agent that has read it is the user's, and sees the run
directory. A line is at most `MAX_LINE_BYTES` long; whoever sends more, or something else first, is cut off.
"""

import contextlib
import secrets
import select
import socket
from pathlib import Path

import msgspec

from trainer.spec.hardware import Hardware
from trainer.spec.value import Value

NODES_NAME = ".nodes.json"
MAX_LINE_BYTES = 4 << 20  # a probe of a large node is some hundred KiB
_RECEIVE_BYTES = 1 << 16


class NodesFile(Value, frozen=True, kw_only=True):
    """Where the supervisor of a run listens."""

    host: str  # its own name for itself
    port: int
    token: str
    num_nodes: int


class Hello(Value, frozen=True, kw_only=True, tag="hello"):
    """An agent's first words."""

    token: str
    node_rank: int
    host: str
    address: str  # of the interface that leads to the supervisor
    interface: str | None  # its name, where it has one
    hardware: Hardware | None = None  # where the supervisor has not asked before


class Start(Value, frozen=True, kw_only=True, tag="start"):
    """Start the launcher of this attempt."""

    attempt_dir: str
    head: str  # address of rank 0
    port: int
    cache: str


class Tell(Value, frozen=True, tag="tell"):
    """Ask the ranks to stop."""


class AskStacks(Value, frozen=True, tag="ask_stacks"):
    """Ask the ranks where they are."""


class End(Value, frozen=True, tag="end"):
    """End the ranks of this attempt; more attempts may come."""


class Bye(Value, frozen=True, kw_only=True, tag="bye"):
    """The run is over."""

    exit_code: int
    words: str = ""


class Note(Value, frozen=True, kw_only=True, tag="note"):
    """A line for a person."""

    words: str


class StackOf(Value, frozen=True, kw_only=True):
    """What a rank was doing."""

    rank: int
    frame: str | None
    is_waiting: bool
    state: str | None


class Stacks(Value, frozen=True, kw_only=True, tag="stacks"):
    """The answer to AskStacks."""

    stacks: tuple[StackOf, ...]


class Failed(Value, frozen=True, kw_only=True, tag="failed"):
    """A rank of this machine reported a failure, or is gone without a report."""

    attempt_dir: str  # as Start named it: an agent may speak late of an attempt that is over


class Ended(Value, frozen=True, kw_only=True, tag="ended"):
    """The launcher ended, and nothing of the attempt is alive on this machine."""

    attempt_dir: str  # as Start named it
    return_code: int | None  # None: the agent ended it
    num_oom_kills: int | None
    files: tuple[str, ...]  # in the attempt's folder, written on this machine


class Refused(Value, frozen=True, kw_only=True, tag="refused"):
    """The attempt cannot start on this machine."""

    words: str
    exit_code: int


class StopAsked(Value, frozen=True, kw_only=True, tag="stop_asked"):
    """This machine was asked to end."""

    is_interrupt: bool  # by Ctrl-C


FromAgent = Hello | Note | Stacks | Failed | Ended | Refused | StopAsked
FromSupervisor = Start | Tell | AskStacks | End | Bye


def new_token() -> str:
    """A word that nobody guesses."""
    return secrets.token_hex(16)


class Channel:
    """One connection: whole messages in both directions, nothing that waits for ever."""

    def __init__(self, connection: socket.socket, kind: object) -> None:
        """`kind` is the union of messages that the other side may send."""
        self.connection = connection
        self.is_open = True
        self._decoder = msgspec.json.Decoder(kind)
        self._rest = b""
        connection.settimeout(10.0)
        with contextlib.suppress(OSError):  # a machine without power sends nothing, not even an end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)

    def send(self, message: Value) -> bool:
        """False, and the channel closed, where the other side is gone."""
        if not self.is_open:
            return False
        try:
            self.connection.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:
            self.close()
        return self.is_open

    def receive(self, wait_s: float = 0.0) -> list[Value]:
        """The messages that have come, after waiting for one at most `wait_s`; closes where there will be no more."""
        if self.is_open and select.select([self.connection], [], [], wait_s)[0]:
            try:
                content = self.connection.recv(_RECEIVE_BYTES)
            except OSError:
                content = b""
            self._rest += content
            if not content:
                self.close()
        *lines, self._rest = self._rest.split(b"\n")
        try:
            messages = [self._decoder.decode(line) for line in lines]
        except (msgspec.DecodeError, UnicodeDecodeError):  # a stranger
            messages = []
            self.close()
        if len(self._rest) > MAX_LINE_BYTES:
            self.close()
        return messages

    def close(self) -> None:
        self.is_open = False
        self._rest = b""
        self.connection.close()


def nodes_path(run_dir: Path) -> Path:
    """The file of a run that says where its supervisor listens."""
    return run_dir / NODES_NAME
