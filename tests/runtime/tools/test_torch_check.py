"""The facts of the installed torch on the machine that runs this."""

import pytest
import torch

from shardwise.launch.worker import ask
from shardwise.trainer.runtime.tools.torch_check import _expands_segments
from shardwise.trainer.spec.messages.worker_requests import TorchFacts


def test_the_check_describes_the_installed_torch():
    facts = ask("shardwise.trainer.runtime.tools.torch_check", None, TorchFacts, subject="the check")
    assert (facts.version, facts.cuda) == (torch.__version__, torch.version.cuda)
    assert len(facts.devices) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


@pytest.mark.parametrize(
    ("kinds", "expands"), [([], None), ([True, True], True), ([True, False], False), ([True, None], None)]
)
def test_the_allocator_expands_segments_where_every_segment_is_an_expandable_one(kinds, expands, monkeypatch):
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: [{"is_expandable": kind} for kind in kinds])
    assert _expands_segments() is expands
