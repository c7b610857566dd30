"""A step that ends before its time, by a lost node or not; the ends of the machines of an attempt."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from network_factory import port_that_drops
from workplace_factory import wait_for

from shardwise.launch.attempt.supervisor import StopRequest
from shardwise.launch.nodes import channel
from shardwise.launch.nodes.agent import head_refusal
from shardwise.launch.nodes.ranks import Cluster, ClusterRanks, Step
from shardwise.trainer.spec.errors import EnvironmentFaultError, ExitCode

SLURM = "slurmstepd-n1: error: *** STEP 1.1 ON n1 CANCELLED DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"
REFUSED = "n2: n1 port 9 cannot be reached: Connection refused\nsrun: error: n2: task 1: Exited with exit code 4"


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("srun: error: Node failure on n2", None),
        (SLURM, None),
        ("srun: unrecognized option '--overlap'", "unrecognized option"),
        (REFUSED, "4"),
    ],
)
def test_a_lost_node_is_left_to_slurm_and_another_failure_of_the_step_ends_the_run(tmp_path, words, fact):
    program = f"import sys; sys.stderr.write({words!r} + chr(10)); sys.exit(1)"
    step = Step([sys.executable, "-c", program], environment={}, log=tmp_path / "logs" / "agents.log")
    wait_for(lambda: step.poll() is not None, "the end of the step")
    match = f"the nodes could not be started: python.*{fact}.*\nlog: "
    with pytest.raises(EnvironmentFaultError, match=match) if fact else nullcontext():
        step.check_nodes()


def test_a_running_step_has_no_failure_and_can_be_ended(tmp_path):
    step = Step([sys.executable, "-c", "import time; time.sleep(60)"], environment={}, log=tmp_path / "agents.log")
    assert step.failure is None
    step.check_nodes()
    step.end(grace_s=0.01)
    assert step.poll() == -15


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[ClusterRanks, channel.Channel, int]]:
    """The ranks of attempt 2 on one machine, the end of its channel there, and the port of the supervisor."""
    here, there = socket.socketpair()
    agent, hello = (
        channel.Channel(there, channel.FromSupervisor),
        channel.Hello(node_rank=0, host="n0", address="127.0.0.1"),
    )
    with channel.NodeServer(tmp_path, num_nodes=1, on_line=print) as server:
        server.nodes[0] = channel.Node(hello, channel.Channel(here, channel.FromAgent), "127.0.0.1")

        def start_step(attempt_dir: Path) -> Step:
            return Step(["true"], environment=os.environ, log=attempt_dir / "logs" / "agents.log")

        cluster = Cluster(server, start_step, is_slurm=False, cache=tmp_path, on_line=print)
        ranks = ClusterRanks(cluster, attempt_dir=tmp_path / "2", stop=StopRequest())
        yield ranks, agent, server.port
        ranks.end()
    agent.close()


def test_the_end_of_an_attempt_is_not_that_of_the_next(started, tmp_path):
    """A machine's message on the attempt before may come late."""
    ranks, agent, _ = started
    agent.send(channel.Ended(attempt_dir=str(tmp_path / "1"), return_code=1))
    assert ranks.poll() is None
    agent.send(channel.Ended(attempt_dir=str(tmp_path / "2"), return_code=7))
    assert ranks.poll() == 7


def test_every_machine_tries_the_launcher_of_rank_0_once_it_listens_and_one_that_cannot_connect_ends_the_run(
    started, tmp_path
):
    ranks, agent, open_port = started
    (start,) = agent.receive(60)
    assert isinstance(start, channel.Start)
    agent.send(channel.Listening(attempt_dir=str(tmp_path / "1")))  # late, of the attempt before
    assert ranks.poll() is None and agent.receive(0.1) == []
    agent.send(channel.Listening(attempt_dir=start.attempt_dir))
    assert ranks.poll() is None and agent.receive(60) == [channel.Command(order=channel.Order.TRY_HEAD)]
    with port_that_drops() as (address, port):
        dropped = channel.Start(attempt_dir=start.attempt_dir, head=address, port=port, cache=start.cache)
        refusal = head_refusal(dropped, range(8, 16), limit_s=0.4)
    assert refusal is not None
    agent.send(channel.Ended(attempt_dir=start.attempt_dir, refusal=refusal, exit_code=int(ExitCode.ENVIRONMENT)))
    match = f"n0: ranks 8 to 15 cannot reach rank 0 at {address} port {port}: timed out\n.*sudo iptables"
    with pytest.raises(EnvironmentFaultError, match=match):
        ranks.poll()
    reached = channel.Start(attempt_dir=start.attempt_dir, head="127.0.0.1", port=open_port, cache=start.cache)
    assert head_refusal(reached, range(8, 16), limit_s=60) is None
