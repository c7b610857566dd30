"""Messages between the supervisor and the agents of a run on several machines: lines of JSON over TCP.

    supervisor, on the first machine  <-- one connection each -->  an agent on every machine, the first included

torchrun connects the ranks, and the shared run directory holds heartbeats, reports and logs. The connection carries the
rest: starts and stops, the end of each machine's launcher, and the loss of a machine. A connection ends with its
machine, its network or its process, so each side notices the end of the other at once.

`RUN/.nodes.json` holds port and token and is readable by the user alone: a client that knows the token runs as the user
and sees the run directory. Its first line is the token, at most `MAX_TOKEN_LINE_BYTES` long, and within `HELLO_S`; of
clients that have not sent it, the oldest are disconnected if there are more than `MAX_PENDING`. The port is open on the
interface of the name by which the other machines find this one.
"""

import contextlib
import hmac
import ipaddress
import secrets
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self

import msgspec

from shardwise.launch.attempt.watchdog import CallStack
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode
from shardwise.trainer.spec.hardware import Hardware
from shardwise.trainer.spec.value import Value

NODES_NAME = ".nodes.json"
MAX_LINE_BYTES = 4 << 20  # a probe of a large node is some hundred KiB
MAX_TOKEN_LINE_BYTES = 512
MAX_PENDING = 64  # clients that have not authenticated
HELLO_S = 10.0  # for a client to authenticate
_RECEIVE_BYTES = 1 << 16
_POLL_S = 0.05


class NodesFile(Value, frozen=True, kw_only=True):
    """Content of `.nodes.json`: the address of the supervisor of a run."""

    host: str  # its own name for itself
    port: int
    token: str


class Token(Value, frozen=True, kw_only=True, tag="token"):
    """The first message of an agent."""

    token: str


class Hello(Value, frozen=True, kw_only=True, tag="hello"):
    """The second message of an agent."""

    node_rank: int
    host: str
    address: str  # of the interface that leads to the supervisor
    hardware: Hardware | None = None  # if the supervisor has not probed the machine


class Note(Value, frozen=True, kw_only=True, tag="note"):
    """A line for the user."""

    text: str


class Stacks(Value, frozen=True, kw_only=True, tag="stacks"):
    """Reply to `Order.DUMP_STACKS`."""

    stacks: dict[int, CallStack]  # by rank


class Ended(Value, frozen=True, kw_only=True, tag="ended"):
    """The launcher ended, or could not start; no process of the attempt is alive on this machine."""

    attempt_dir: str  # as in Start: a message may refer to an attempt that is over
    return_code: int | None = None  # None: the agent ended it
    num_oom_kills: int | None = None
    files: tuple[str, ...] = ()  # in the attempt's folder, written on this machine
    refusal: str | None = None  # why the attempt cannot start here
    exit_code: int = 0  # of the refusal


class Listening(Value, frozen=True, kw_only=True, tag="listening"):
    """The launcher of rank 0 accepts connections."""

    attempt_dir: str  # as in Start


class StopRequested(Value, frozen=True, kw_only=True, tag="stop_requested"):
    """This machine received a stop request."""

    signal_number: int


class Start(Value, frozen=True, kw_only=True, tag="start"):
    """Start the launcher of this attempt."""

    attempt_dir: str
    head: str  # address of rank 0
    port: int
    cache: str


class Order(StrEnum):
    """An action of the agent on the ranks of the attempt."""

    STOP = "stop"  # with a checkpoint
    DUMP_STACKS = "dump_stacks"
    TRY_HEAD = "try_head"  # the launcher of rank 0 accepts connections: see that this machine gets one
    END = "end"  # now; more attempts may follow


class Command(Value, frozen=True, kw_only=True, tag="command"):
    """An order to every agent."""

    order: Order


class Bye(Value, frozen=True, kw_only=True, tag="bye"):
    """The run is over."""

    exit_code: int
    text: str = ""


FromAgent = Token | Hello | Note | Stacks | Listening | Ended | StopRequested
FromSupervisor = Start | Command | Bye


class Channel:
    """One connection with complete messages in both directions; no call waits without a limit."""

    def __init__(self, connection: socket.socket, kind: object, *, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        """`kind` is the union of messages that the other side may send."""
        self.connection = connection
        self.max_line_bytes = max_line_bytes
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
        """Returns False, with the channel closed, if the other side has closed the connection."""
        if not self.is_open:
            return False
        try:
            self.connection.sendall(msgspec.json.encode(message) + b"\n")
        except OSError:
            self.close()
        return self.is_open

    def receive(self, wait_s: float = 0.0) -> list[Value]:
        """The messages that have arrived, after waiting at most `wait_s` for one; closes the channel at its end."""
        if self.is_open and self._has_content(wait_s):
            try:
                content = self.connection.recv(min(_RECEIVE_BYTES, self.max_line_bytes))
            except OSError:
                content = b""
            self._rest += content
            if not content:
                self.close()
        *lines, self._rest = self._rest.split(b"\n")
        try:
            messages = [self._decoder.decode(line) for line in lines]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # an unauthenticated client
            messages = []
            self.close()
        if len(self._rest) >= self.max_line_bytes:
            self.close()
        return messages

    def _has_content(self, wait_s: float) -> bool:
        poll = select.poll()  # `select` refuses descriptors above 1023
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(1000 * wait_s))

    def close(self) -> None:
        self.is_open = False
        self._rest = b""
        self.connection.close()


@dataclass(slots=True)
class Node:
    """A machine whose agent has authenticated."""

    hello: Hello
    channel: Channel
    peer_address: str  # the address of this machine at which the agent connected
    inbox: list[Value] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.hello.node_rank

    @property
    def name(self) -> str:
        """`n2 (node 1)`."""
        return f"{self.hello.host} (node {self.rank})"


@dataclass(slots=True, eq=False)
class _Client:
    """A client that has not authenticated."""

    channel: Channel
    address: str  # of this machine at which it connected
    end_s: float  # of its time, on the monotonic clock
    has_token: bool = False


class NodeServer:
    """The supervisor's side of the connections; only `wait_for_all` waits."""

    def __init__(
        self, run_dir: Path, *, num_nodes: int, address: str = "", port: int = 0, on_line: Callable[[str], None]
    ) -> None:
        """Opens the port at `address`, or at all of this machine, and writes `RUN/.nodes.json`.

        EnvironmentFaultError if either fails.
        """
        self.num_nodes = num_nodes
        self.own_address = address or "127.0.0.1"  # for the agent of this machine
        self.nodes: dict[int, Node] = {}
        self.lost: list[str] = []  # machines whose connection ended, in sentences
        self._on_line = on_line
        self._pending: list[_Client] = []
        self._path = nodes_path(run_dir)
        try:
            self._listener = socket.create_server((address, port), backlog=num_nodes + MAX_PENDING)
        except OSError as error:
            raise EnvironmentFaultError(
                f"--head: port {port} of this machine cannot be listened on: {error.strerror}; name another: HOST:PORT"
            ) from error
        self._listener.settimeout(0.0)
        self.port: int = self._listener.getsockname()[1]
        self._token = secrets.token_hex(16)
        content = NodesFile(host=socket.gethostname(), port=self.port, token=self._token)
        try:
            codec.write_bytes(self._path, codec.encode(content), mode=0o600)
        except OSError as error:
            self._listener.close()
            raise EnvironmentFaultError(f"{self._path}: cannot be written: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_for_all(self, *, limit_s: float, is_over: Callable[[], str | None], here: int | None = None) -> str | None:
        """Waits for an agent of every machine but `here`; returns a sentence on those that are missing then.

        `is_over` returns the reason if no further machine can connect.
        """
        end = time.monotonic() + limit_s
        expected = set(range(self.num_nodes)) - {here}
        while not expected <= self.nodes.keys():
            self.poll()
            reason = is_over()
            if reason is not None or time.monotonic() > end:
                missing = ", ".join(str(rank) for rank in sorted(expected - self.nodes.keys()))
                reason = reason or f"no connection within {limit_s:.0f} s"
                return f"node {missing} of {self.num_nodes} did not connect: {reason}"
            time.sleep(_POLL_S)
        return None

    def poll(self) -> None:
        """Accepts connections and messages, and notes lost machines."""
        for rank, node in list(self.nodes.items()):
            self._store(node, node.channel.receive())
            if not node.channel.is_open:
                del self.nodes[rank]
                self.lost.append(f"{node.name} was lost: its connection ended")
        self._accept()  # after the lost ones: a machine that was restarted at once may connect again
        for client in list(self._pending):
            self._authenticate(client)

    def send(self, message: Value) -> None:
        """Sends a message to every agent."""
        for node in self.nodes.values():
            node.channel.send(message)

    def take(self) -> list[tuple[Node, Value]]:
        """The messages since the last call."""
        present = [(node, message) for node in self.nodes.values() for message in node.inbox]
        for node in self.nodes.values():
            node.inbox = []
        return present

    def dismiss(self, exit_code: int, text: str = "", *, only: int | None = None) -> None:
        """Ends the connection to every agent, or to one; the port stays open."""
        for rank in [*self.nodes] if only is None else [*self.nodes.keys() & {only}]:
            channel = self.nodes.pop(rank).channel
            channel.receive()  # data left unread would be an error on the other side
            channel.send(Bye(exit_code=exit_code, text=text))
            channel.close()

    def close(self) -> None:
        """Ends every connection and removes the file."""
        for channel in (*(node.channel for node in self.nodes.values()), *(client.channel for client in self._pending)):
            channel.close()
        self._listener.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            address = connection.getsockname()[0]
            channel = Channel(connection, FromAgent, max_line_bytes=MAX_TOKEN_LINE_BYTES)
            self._pending.append(_Client(channel, address, time.monotonic() + HELLO_S))
            for client in self._pending[:-MAX_PENDING]:
                client.channel.close()
            del self._pending[:-MAX_PENDING]

    def _authenticate(self, client: _Client) -> None:
        """The token first, as long as lines are short; then the Hello, which has the hardware."""
        channel, messages = client.channel, client.channel.receive()
        if messages and not client.has_token:
            token, *messages = messages
            if not isinstance(token, Token) or not hmac.compare_digest(token.token.encode(), self._token.encode()):
                channel.close()
            client.has_token, channel.max_line_bytes = True, MAX_LINE_BYTES
        if not messages and channel.is_open and time.monotonic() <= client.end_s:
            return
        self._pending.remove(client)
        hello = messages[0] if messages and channel.is_open else None
        if not isinstance(hello, Hello) or not 0 <= hello.node_rank < self.num_nodes or not _is_address(hello.address):
            channel.close()
            return
        present = self.nodes.get(hello.node_rank)
        if present is not None:
            text = f"node {hello.node_rank} is {present.hello.host} already; give every machine its own --node-rank"
            channel.send(Bye(exit_code=int(ExitCode.INPUT), text=text))
            channel.close()
            return
        node = self.nodes[hello.node_rank] = Node(hello, channel, client.address)
        self._store(node, messages[1:])

    def _store(self, node: Node, messages: Sequence[Value]) -> None:
        for message in messages:
            if isinstance(message, Note):
                self._on_line(f"{node.hello.host}: {message.text}")
            else:
                node.inbox.append(message)


def head_address(nodes: dict[int, Node]) -> str:
    """Address of rank 0: the one at which the other machines reached this machine, which runs rank 0.

    A machine's own name is often resolved to 127.0.1.1, which no other machine can reach.
    """
    others = [node.peer_address for rank, node in sorted(nodes.items()) if rank != 0]
    return others[0] if others else nodes[0].hello.address


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def nodes_path(run_dir: Path) -> Path:
    """The file of a run with the address of its supervisor."""
    return run_dir / NODES_NAME
