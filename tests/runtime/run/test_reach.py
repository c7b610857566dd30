"""Ranks that cannot connect to each other are named; ranks that come late are waited for."""

import socket
import threading
import time
from datetime import timedelta

import pytest
from network_factory import port_that_drops
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from shardwise.trainer.runtime.run.launcher import store_at_address
from shardwise.trainer.runtime.run.reach import meet, peers
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode

LIMIT_S = 0.4  # for a connection
WAIT = timedelta(seconds=60)


def environment(rank: int, world_size: int = 2, **more: str) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    return {**{name: str(number) for name, number in numbers.items()}, "GLOO_SOCKET_IFNAME": "lo", **more}


def start(store: Store, rank: int) -> threading.Thread:
    def run() -> None:
        meet(store, environment(rank), towards_head="127.0.0.1", limit_s=LIMIT_S)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_rank_that_comes_late_is_waited_for_longer_than_a_connection_may_last():
    store = HashStore()
    first = start(store, 0)
    time.sleep(2 * LIMIT_S)
    assert first.is_alive()
    meet(store, environment(1), towards_head="127.0.0.1", limit_s=LIMIT_S)
    first.join(WAIT.seconds)
    assert not first.is_alive()


@pytest.mark.parametrize(
    ("towards_head", "remedy"),
    [
        ("127.0.0.1", "on n1: sudo iptables -I INPUT -p tcp -s 127.0.0.1 -j ACCEPT"),
        ("10.0.0.1", "unset GLOO_SOCKET_IFNAME"),
    ],
)
def test_a_rank_that_drops_packets_is_named_with_address_port_and_remedy(towards_head: str, remedy: str):
    store = HashStore()
    store.set_timeout(timedelta(seconds=5))  # of a rank that would wait for others although it cannot reach them
    with port_that_drops() as (address, port):
        store.set("rank-1", f"{address} {port} n1")
        with pytest.raises(EnvironmentFaultError) as raised:
            meet(store, environment(0), towards_head=towards_head, limit_s=LIMIT_S)
    first, second = str(raised.value).splitlines()
    assert first == f"rank 0 on {socket.gethostname()} cannot reach rank 1 on n1 at {address} port {port}: timed out"
    assert remedy in second
    assert raised.value.exit_code is ExitCode.ENVIRONMENT


@pytest.mark.parametrize(("world_size", "on_each"), [(2, 2), (2, 1), (8, 8), (6, 2), (12, 3)])
def test_every_machine_is_tried_from_every_other_and_every_rank_at_least_once(world_size: int, on_each: int):
    tried = {(rank, peer) for rank in range(world_size) for peer in peers(rank, world_size=world_size, on_each=on_each)}
    machines = {(rank // on_each, peer // on_each) for rank, peer in tried}
    num_machines = world_size // on_each
    assert machines >= {(a, b) for a in range(num_machines) for b in range(num_machines) if a != b}
    assert {peer for _, peer in tried} == set(range(world_size)) and all(rank != peer for rank, peer in tried)


def test_the_store_of_the_launcher_is_open_at_the_address_of_rank_0_alone():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    store = store_at_address("127.0.0.1", port, 1, True, WAIT, multi_tenant=True)
    client = TCPStore("127.0.0.1", port, 1, is_master=False, timeout=WAIT, wait_for_workers=False)
    client.set("name", "value")
    assert store.get("name") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=10)


def test_w67_the_store_of_torch_listens_on_every_interface():
    """A canary: once it fails, torch listens on the named address alone."""
    store = TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=WAIT, wait_for_workers=False)
    socket.create_connection(("127.0.0.2", store.port), timeout=10).close()
