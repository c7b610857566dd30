"""The facts of the installed torch on the machine that runs this."""

import torch

from shardwise.launch.worker import ask
from shardwise.trainer.spec.messages.worker_requests import TorchFacts


def test_the_check_describes_the_installed_torch():
    facts = ask("shardwise.trainer.runtime.tools.torch_check", None, TorchFacts, subject="the check")
    assert (facts.version, facts.cuda) == (torch.__version__, torch.version.cuda)
    assert len(facts.devices) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
