"""The supervisor and its agents: authentication, messages and lost machines; real sockets on this machine."""

import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.nodes import channel as nodes
from shardwise.launch.nodes.agent import Head, run_agent
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.errors import EnvironmentFaultError

STOP = nodes.Command(order=nodes.Order.STOP)
LIMIT_S = 120  # a machine may be busy


@pytest.fixture
def server(tmp_path: Path):
    with nodes.NodeServer(tmp_path, num_nodes=2, on_line=print) as opened:
        yield opened


@pytest.fixture
def call(server, tmp_path):
    channels: list[nodes.Channel] = []

    def greet(rank: int, *, token: str | None = None, address: str = "127.0.0.1") -> nodes.Channel:
        content = codec.read(nodes.nodes_path(tmp_path), nodes.NodesFile)
        channel = nodes.Channel(socket.create_connection(("127.0.0.1", content.port)), nodes.FromSupervisor)
        channels.append(channel)
        channel.send(nodes.Token(token=token or content.token))
        channel.send(nodes.Hello(node_rank=rank, host=f"n{rank}", address=address))
        return channel

    yield greet
    for channel in channels:
        channel.close()


def poll_until(server: nodes.NodeServer, claim: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := claim()):
        assert time.monotonic() < deadline
        server.poll()
        time.sleep(0.01)
    return found


def test_machines_authenticate_with_a_file_that_only_the_user_reads(server, call, tmp_path):
    assert stat.S_IMODE(nodes.nodes_path(tmp_path).stat().st_mode) == 0o600
    channels = [call(rank) for rank in (1, 0)]
    poll_until(server, lambda: len(server.nodes) == 2)
    server.send(STOP)
    assert [channel.receive(LIMIT_S) for channel in channels] == [[STOP], [STOP]]


@pytest.mark.parametrize(
    "words",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b'{"type":"command","order":"stop"}\n',
        b"x" * nodes.MAX_TOKEN_LINE_BYTES,
        b'{"type":"hello","node_rank":1,"host":"n1","address":"127.0.0.1"}\n',
    ],
    ids=["http", "no hello", "endless", "no token"],
)
def test_an_unauthenticated_client_is_disconnected(server, call, words):
    friend, stranger = call(0), call(1, token="0" * 32)
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.settimeout(0.02)
        left = words
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert time.monotonic() < deadline
            server.poll()
            try:
                if left:
                    left = left[client.send(left) :]
                elif not client.recv(10):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
    poll_until(server, lambda: 0 in server.nodes)
    poll_until(server, lambda: not server._pending)
    assert friend.is_open and list(server.nodes) == [0] and stranger.receive(0.5) == []


def test_more_idle_clients_than_descriptors_neither_end_the_server_nor_keep_an_agent_out(server, call):
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(3000, before[1]), before[1]))
    idle: list[socket.socket] = []
    try:
        for _ in range(1100):
            idle.append(socket.create_connection(("127.0.0.1", server.port)))
            server.poll()
        assert len(server._pending) == nodes.MAX_PENDING
        call(1)
        poll_until(server, lambda: 1 in server.nodes)
    finally:
        for client in idle:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(("rank", "address"), [(-1, "127.0.0.1"), (2, "127.0.0.1"), (1, "n1; reboot\x1b[2J")])
def test_a_machine_that_cannot_be_is_refused(server, call, rank, address):
    refused = call(rank, address=address)
    poll_until(server, lambda: not refused.receive() and not refused.is_open)
    assert server.nodes == {}


def test_the_port_is_open_on_the_interface_that_is_used_alone(tmp_path):
    with nodes.NodeServer(tmp_path, num_nodes=2, address="127.0.0.2", on_line=print) as server:
        socket.create_connection(("127.0.0.2", server.port)).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
        assert server.own_address == "127.0.0.2"


def test_a_second_agent_of_a_rank_and_a_second_server_of_a_port_are_refused(server, call, tmp_path):
    call(1)
    poll_until(server, lambda: 1 in server.nodes)
    (refusal,) = poll_until(server, call(1).receive)
    assert isinstance(refusal, nodes.Bye) and refusal.exit_code == 2
    assert "node 1 is n1" in refusal.text and "--node-rank" in refusal.text
    with pytest.raises(EnvironmentFaultError, match=f"port {server.port} .*HOST:PORT"):
        nodes.NodeServer(tmp_path / "other", num_nodes=2, port=server.port, on_line=print)
    server.close()
    assert not nodes.nodes_path(tmp_path).exists()


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_lost_machine_is_named_and_may_come_back_before_its_loss_was_noticed(server, call, comes_back):
    lost = call(1)
    poll_until(server, lambda: 1 in server.nodes)
    lost.close()
    if comes_back:
        call(1)
    time.sleep(0.1)  # both events wait for one look
    poll_until(server, lambda: bool(server.lost))
    poll_until(server, lambda: (1 in server.nodes) is comes_back)
    assert server.lost == ["n1 (node 1) was lost: its connection ended"]


def test_machines_that_do_not_come_are_named_and_ranks_meet_where_the_others_reached_the_first(server, call):
    call(0)
    poll_until(server, lambda: 0 in server.nodes)
    assert (server.wait_for_all(limit_s=0.05, is_over=lambda: None) or "").startswith("node 1 of 2 ")
    ended = server.wait_for_all(limit_s=60, is_over=lambda: "srun ended") or ""
    assert ended.startswith("node 1 of 2 ") and ended.endswith("srun ended")
    assert server.wait_for_all(limit_s=60, is_over=lambda: None, here=1) is None
    call(1)
    poll_until(server, lambda: len(server.nodes) == 2)
    server.nodes[1].peer_address = "10.0.0.5"  # as a second machine would have called it
    assert nodes.head_address(server.nodes) == "10.0.0.5"
    server.dismiss(0, only=1)
    assert nodes.head_address(server.nodes) == "127.0.0.1"


def test_an_agent_without_a_supervisor_names_the_missing_file_or_the_port_it_cannot_reach(tmp_path):
    facts = [r"\.nodes\.json.*\n.*--run-dir"]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        facts.append(f"127.0.0.1 port {closed.getsockname()[1]} .*Connection refused")
        content = nodes.NodesFile(host="n0", port=closed.getsockname()[1], token="t")
    for fact in facts:
        with pytest.raises(EnvironmentFaultError, match=fact):
            run_agent(tmp_path, head=Head("127.0.0.1"), node_rank=1, stop=StopRequest(), on_line=print, wait_s=0)
        codec.write(nodes.nodes_path(tmp_path), content)


AGENT = """
import sys
from pathlib import Path
from shardwise.launch.nodes.agent import Head, run_agent
from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.trainer.spec.errors import ShardwiseError
stop = StopRequest()
with stop.listening():
    try:
        code = run_agent(Path(sys.argv[1]), head=Head("127.0.0.1"), node_rank=1, stop=stop, on_line=print, wait_s=30)
    except ShardwiseError as error:
        print(error)
        code = error.exit_code
sys.exit(int(code))
"""


@pytest.fixture
def agent(server, tmp_path):
    process = subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    poll_until(server, lambda: 1 in server.nodes)
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("is_dismissed", [True, False])
def test_a_machine_ends_as_the_run_does_and_does_not_outlive_the_supervisor(server, agent, is_dismissed):
    if is_dismissed:
        server.dismiss(75, "the run ended: preempted at step 4")
    else:
        server.nodes[1].channel.close()
    out, _ = agent.communicate(timeout=LIMIT_S)
    assert agent.returncode == (75 if is_dismissed else 4)
    assert out == "the run ended: preempted at step 4\n" if is_dismissed else "the supervisor of this run" in out


def test_a_machine_refuses_an_attempt_that_it_cannot_read_and_a_stop_of_it_is_one_for_the_run(server, agent, tmp_path):
    server.send(nodes.Start(attempt_dir=str(tmp_path / "attempts/1"), head="127.0.0.1", port=1, cache=str(tmp_path)))
    poll_until(server, lambda: server.nodes[1].inbox)
    ((node, refused),) = server.take()
    assert node.rank == 1 and refused.exit_code == 2 and "plan.json: cannot be read" in refused.refusal
    agent.terminate()
    poll_until(server, lambda: server.nodes[1].inbox)
    assert [message for _, message in server.take()] == [nodes.StopRequested(signal_number=signal.SIGUSR1)]
