"""Ranks that cannot reach each other are found before the process group starts, which would wait for minutes.

Each rank opens a port on the interface that gloo or NCCL is set to, announces it in torchrun's store, and connects to
the next rank of its machine and to one rank of every other machine. A rank that has announced nothing has not started
yet and is waited for, however long its imports take; the time for a connection counts from then on.

Without torchrun's store (ranks that meet by other means) nothing is tried.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.network import (
    REACH_S,
    address_towards,
    connection_problem,
    interface_address,
    open_firewall,
    unreachable,
)

_WAIT = timedelta(days=1)  # for ranks that have not started; the watchdog ends an attempt in which one hangs before
_SETTINGS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_reach(environment: Mapping[str, str] = os.environ, *, limit_s: float = REACH_S) -> None:
    """Waits for all ranks; EnvironmentFaultError names one that listens and that this rank cannot connect to."""
    world_size = int(environment.get("WORLD_SIZE", "1"))
    if world_size == 1 or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    head, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = TCPStore(head, port, world_size, is_master=False, timeout=_WAIT, wait_for_workers=False)
    meet(PrefixStore("shardwise/reach", store), environment, towards_head=address_towards(head, port), limit_s=limit_s)


def meet(store: Store, environment: Mapping[str, str], *, towards_head: str | None, limit_s: float) -> None:
    """`check_reach` through a store of its own; `towards_head` is this machine's address on the way to rank 0."""
    rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    own = chosen_address(environment) or towards_head or ""
    name = socket.gethostname()
    with socket.create_server((own, 0), backlog=world_size) as listener:
        store.set(f"rank-{rank}", f"{own} {listener.getsockname()[1]} {name}")
        for peer in peers(rank, world_size=world_size, on_each=int(environment["LOCAL_WORLD_SIZE"])):
            address, port, host = store.get(f"rank-{peer}").decode().split(" ", 2)
            problem = connection_problem(address, int(port), limit_s=limit_s)
            if problem is not None:
                line = unreachable(
                    f"rank {rank} on {name}", f"rank {peer} on {host}", address=address, port=int(port), problem=problem
                )
                is_other_way = own != towards_head
                raise EnvironmentFaultError(
                    f"{line}\n{_OTHER_WAY if is_other_way else open_firewall(host, own_address=own)}"
                )
        if store.add("done", 1) == world_size:
            store.set("all", "")
        store.wait(["all"])  # others may have yet to connect to this port


_OTHER_WAY = (
    f"{' or '.join(_SETTINGS)} selects another interface than the one by which this rank reaches rank 0; on every "
    f"machine: unset {' '.join(_SETTINGS)}"
)


def chosen_address(environment: Mapping[str, str]) -> str | None:
    """The address of the interface that the environment selects by its name; None if it selects none so."""
    for setting in _SETTINGS:
        for name in environment.get(setting, "").removeprefix("=").split(","):
            address = interface_address(name.strip()) if name.strip() else None
            if address is not None:
                return address
    return None


def peers(rank: int, *, world_size: int, on_each: int) -> Iterator[int]:
    """The ranks that a rank connects to: the next of its machine, and of each other machine the one in its place."""
    first = rank - rank % on_each
    if on_each > 1:
        yield first + (rank - first + 1) % on_each
    yield from (other for other in range(rank % on_each, world_size, on_each) if other != rank)
