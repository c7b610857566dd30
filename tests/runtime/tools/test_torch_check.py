"""What the installed torch says of itself on the machine that runs this."""

import subprocess
import sys

import msgspec
import torch

from shardwise.trainer.spec.messages.worker_requests import TorchFacts


def test_the_installed_torch_answers_in_one_line():
    answer = subprocess.run(
        [sys.executable, "-P", "-m", "shardwise.trainer.runtime.tools.torch_check"],
        capture_output=True,
        text=True,
        check=True,
    )
    facts = msgspec.json.decode(answer.stdout, type=TorchFacts)
    assert (facts.version, facts.cuda) == (torch.__version__, torch.version.cuda)
    assert len(facts.devices) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
