"""Addresses of this machine, and whether its processes reach those of the same run.

gloo, NCCL and torchrun try to connect for many minutes. Agents and ranks therefore try first, only where the other side
has announced that it listens: one that has not started yet is waited for, and is not reported.
"""

import fcntl
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

LOOPBACK = "127.0.0.1"
LOOPBACK_NAME = "lo"
REACH_S = 20.0  # for a connection to a port that is known to be open
LOOPBACK_S = 5.0
_TRY_S = 8.0  # of it for one attempt: the kernel sends four packets in that time
_PAUSE_S = 0.2
_GET_INTERFACE_FLAGS, _GET_INTERFACE_ADDRESS = 0x8913, 0x8915  # SIOCGIFFLAGS, SIOCGIFADDR of linux/sockios.h
_IS_UP = 1  # IFF_UP of linux/if.h


def interface_address(name: str) -> str | None:
    """The IPv4 address of an interface."""
    import _socket  # the part of `socket` in C: the rest, its enumerations, costs every start five milliseconds

    reply = _ask_interface(name, _GET_INTERFACE_ADDRESS)
    return None if reply is None else _socket.inet_ntoa(reply[20:24])


def is_interface_up(name: str) -> bool:
    """True if it exists and was switched on."""
    reply = _ask_interface(name, _GET_INTERFACE_FLAGS)
    return reply is not None and bool(struct.unpack("H", reply[16:18])[0] & _IS_UP)


def _ask_interface(name: str, request: int) -> bytes | None:
    import _socket

    probe = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    try:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None
    finally:
        probe.close()


def connection_problem(
    address: str, port: int, *, limit_s: float = REACH_S, is_over: Callable[[], bool] = lambda: False
) -> str | None:
    """Why a port that is open cannot be connected to within `limit_s`; None if it can be, or once `is_over()`.

    Any failure is tried again until then: packets get lost, and a network may come up a few seconds late.
    """
    import socket

    end, problem = time.monotonic() + limit_s, None
    while not is_over():
        left_s = end - time.monotonic()
        if left_s <= 0:
            return problem
        try:
            socket.create_connection((address, port), timeout=min(_TRY_S, left_s)).close()
        except OSError as error:
            problem = error.strerror or str(error)
        else:
            return None
        time.sleep(_PAUSE_S)
    return None


class LoopbackProblem(NamedTuple):
    """Why processes of this machine cannot meet at its loopback."""

    place: str  # the address, with the port that was tried
    problem: str
    remedy: str  # a command


LOOPBACK_DOWN = LoopbackProblem(
    f"{LOOPBACK}, any port", f"the loopback interface {LOOPBACK_NAME} is down", f"sudo ip link set {LOOPBACK_NAME} up"
)


def loopback_problem(*, limit_s: float = LOOPBACK_S) -> LoopbackProblem | None:
    """None if a connection to a port of the loopback can be made within `limit_s`."""
    import socket

    if not is_interface_up(LOOPBACK_NAME):
        return LOOPBACK_DOWN
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
        problem = connection_problem(LOOPBACK, port, limit_s=limit_s)
    remedy = f"sudo iptables -I INPUT -i {LOOPBACK_NAME} -j ACCEPT"
    return None if problem is None else LoopbackProblem(f"{LOOPBACK} port {port}", problem, remedy)


def unreachable(who: str, peer: str, *, address: str, port: int, problem: str) -> str:
    """The first line of the message on a process that cannot connect to another one."""
    return f"{who} cannot reach {peer} at {address} port {port}: {problem}"


def open_firewall(host: str, *, own_address: str | None) -> str:
    """The command that has `host` accept connections of this machine, by the address that it sees."""
    source = "" if own_address is None else f" -s {own_address}"
    return f"often a firewall; on {host}: sudo iptables -I INPUT -p tcp{source} -j ACCEPT"


def address_towards(address: str, port: int) -> str | None:
    """The address of this machine on the way to another one; nothing is sent. None without a way."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        try:
            route.connect((address, port))
        except OSError:
            return None
        own: str = route.getsockname()[0]
    return own
