"""A step that ends before its time: whether a node is gone, or the same would happen again."""

import sys
import time
from pathlib import Path

import pytest

from shardwise.launch.nodes.ranks import Step
from shardwise.trainer.spec.errors import EnvironmentFaultError


def ended_step(log: Path, words: str) -> Step:
    """A step whose program says `words` and ends with code 1."""
    program = f"import sys; sys.stderr.write({words!r}); sys.exit(1)"
    step = Step([sys.executable, "-c", program], environment={}, log=log / "logs" / "agents.log")
    deadline = time.monotonic() + 20
    while step.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return step


@pytest.mark.parametrize(
    "words",
    [
        "srun: error: Node failure on n2\n",
        "slurmstepd-n1: error: *** STEP 1.1 ON n1 CANCELLED DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***\n",
    ],
)
def test_a_lost_node_is_left_to_slurm(tmp_path, words):
    ended_step(tmp_path, words).check_nodes()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("srun: unrecognized option '--overlap'\n", "unrecognized option"),
        (
            "n2: n1 port 9 cannot be reached: Connection refused\nsrun: error: n2: task 1: Exited with exit code 4\n",
            "4",
        ),
    ],
)
def test_another_failure_of_the_step_ends_the_run(tmp_path, words, told):
    with pytest.raises(EnvironmentFaultError, match=f"the nodes could not be started: python.*{told}.*\nlog: "):
        ended_step(tmp_path, words).check_nodes()


def test_a_running_step_has_no_failure_and_can_be_ended(tmp_path):
    step = Step([sys.executable, "-c", "import time; time.sleep(60)"], environment={}, log=tmp_path / "agents.log")
    assert step.failure is None
    step.check_nodes()
    step.end(grace_s=0.01)
    assert step.poll() == -15
