"""Messages between the supervisor and the agents of a run on several machines: lines of JSON over TCP.

    supervisor, on the first machine  <-- one connection each -->  an agent on every machine, the first included

A connection ends with its machine, its network or its process, so each side notices at once that the other is gone.
`RUN/.nodes.json` holds port and token and is readable by the user alone: a client that knows the token runs as the user
and sees the run directory. Clients that send longer lines than `MAX_LINE_BYTES`, or anything else before a valid Hello,
are disconnected.
"""

import contextlib
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import msgspec

from trainer.spec import codec
from trainer.spec.errors import EnvironmentFaultError
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


HELLO_S = 10.0  # for a connection to say who it is
_POLL_S = 0.05


@dataclass(slots=True)
class Node:
    """A machine that an agent speaks for."""

    hello: Hello
    channel: Channel
    peer_address: str  # that it was called at: of this machine's interface towards it
    inbox: list[Value] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.hello.node_rank

    @property
    def words(self) -> str:
        return f"{self.hello.host} (node {self.rank})"


class NodeServer:
    """Listens for the agents of one run; nothing here waits unless it says so."""

    def __init__(self, run_dir: Path, *, num_nodes: int, port: int = 0, on_line: Callable[[str], None]) -> None:
        """Opens the port and writes `RUN/.nodes.json`; EnvironmentFaultError where either cannot be."""
        self.num_nodes = num_nodes
        self.nodes: dict[int, Node] = {}
        self.gone: list[str] = []  # machines that were lost, in words
        self._on_line = on_line
        self._strangers: list[tuple[Channel, str, float]] = []  # who said nothing yet, with the end of its time
        self._path = nodes_path(run_dir)
        try:
            self._listener = socket.create_server(("", port), backlog=num_nodes + 8)
        except OSError as error:
            raise EnvironmentFaultError(
                f"--head: port {port} of this machine cannot be listened on: {error.strerror}; name another: HOST:PORT"
            ) from error
        self._listener.settimeout(0.0)
        self.port: int = self._listener.getsockname()[1]
        self._token = new_token()
        try:
            self._write_file()
        except EnvironmentFaultError:
            self._listener.close()
            raise

    def _write_file(self) -> None:
        content = NodesFile(host=socket.gethostname(), port=self.port, token=self._token, num_nodes=self.num_nodes)
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(codec.encode(content))
            temporary.replace(self._path)
        except OSError as error:
            raise EnvironmentFaultError(f"{self._path}: cannot be written: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for_all(self, *, limit_s: float, is_over: Callable[[], str | None], here: int | None = None) -> str | None:
        """Waits for an agent of every machine but `here`; names those that are missing then, in a sentence.

        `is_over` says why nobody can come any more.
        """
        end = time.monotonic() + limit_s
        wanted = set(range(self.num_nodes)) - {here}
        while not wanted <= self.nodes.keys():
            self.poll()
            reason = is_over()
            if reason is not None or time.monotonic() > end:
                missing = ", ".join(str(rank) for rank in sorted(wanted - self.nodes.keys()))
                return (
                    f"node {missing} of {self.num_nodes} did not come: {reason or f'not heard of for {limit_s:.0f} s'}"
                )
            time.sleep(_POLL_S)
        return None

    def poll(self) -> None:
        """Takes who and what has come, and notes who is gone."""
        for rank, node in list(self.nodes.items()):
            self._take_in(node, node.channel.receive())
            if not node.channel.is_open:
                del self.nodes[rank]
                self.gone.append(f"{node.words} was lost: its connection ended")
        self._accept()  # after the lost ones: a machine that was started again at once takes its place
        for stranger in list(self._strangers):
            self._hear(stranger)

    def send(self, message: Value) -> None:
        """Says the same to everybody."""
        for node in self.nodes.values():
            node.channel.send(message)

    def take(self) -> list[tuple[Node, Value]]:
        """What came since the last time."""
        taken = [(node, message) for node in self.nodes.values() for message in node.inbox]
        for node in self.nodes.values():
            node.inbox = []
        return taken

    def dismiss(self, exit_code: int, words: str = "", *, only: int | None = None) -> None:
        """Says goodbye to every agent, or to one, and forgets it; the port stays open."""
        for rank in [*self.nodes] if only is None else [*self.nodes.keys() & {only}]:
            channel = self.nodes.pop(rank).channel
            channel.receive()  # what is left unread would have the other side told of an error instead
            channel.send(Bye(exit_code=exit_code, words=words))
            channel.close()

    def close(self) -> None:
        """Ends every connection and takes the file away."""
        for channel in (*(node.channel for node in self.nodes.values()), *(each[0] for each in self._strangers)):
            channel.close()
        self._listener.close()
        with suppress(OSError):
            self._path.unlink()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            called_at = connection.getsockname()[0]
            self._strangers.append((Channel(connection, FromAgent), called_at, time.monotonic() + HELLO_S))

    def _hear(self, stranger: tuple[Channel, str, float]) -> None:
        channel, called_at, end = stranger
        messages = channel.receive()
        if messages or not channel.is_open or time.monotonic() > end:
            self._strangers.remove(stranger)
            hello = messages[0] if messages else None
            if not isinstance(hello, Hello) or hello.token != self._token or hello.node_rank >= self.num_nodes:
                channel.close()
                return
            taken = self.nodes.get(hello.node_rank)
            if taken is not None:
                words = f"node {hello.node_rank} is {taken.hello.host} already; give every machine its own --node-rank"
                channel.send(Bye(exit_code=2, words=words))
                channel.close()
                return
            node = self.nodes[hello.node_rank] = Node(hello, channel, called_at)
            self._take_in(node, messages[1:])

    def _take_in(self, node: Node, messages: Sequence[Value]) -> None:
        for message in messages:
            if isinstance(message, Note):
                self._on_line(f"{node.hello.host}: {message.words}")
            else:
                node.inbox.append(message)


def meeting_place(nodes: dict[int, Node]) -> str:
    """Address of rank 0: where the other machines reached this one, which is rank 0's own.

    By its own name for itself a machine is often only known to itself (127.0.1.1).
    """
    others = [node.peer_address for rank, node in sorted(nodes.items()) if rank != 0]
    return others[0] if others else nodes[0].hello.address
