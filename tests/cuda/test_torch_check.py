"""The trial of `trainer.runtime.tools.torch_check` with the installed torch, on cards that are not there."""

import os

import pytest
from cuda_stand_in import machine_environment, needs_no_cuda
from gpu_machines import GPU_MACHINES, machine_with

from shardwise.launch.worker import ask
from shardwise.trainer.spec.messages.worker_requests import TorchFacts

pytestmark = needs_no_cuda
EXPANDABLE = "expandable_segments:True"


def trial(name: str, folder, setting: str = EXPANDABLE) -> TorchFacts:
    environment = {**os.environ, **machine_environment(GPU_MACHINES[name], folder), "PYTORCH_ALLOC_CONF": setting}
    module = "shardwise.trainer.runtime.tools.torch_check"
    return ask(module, None, TorchFacts, subject="the check", inherited=environment)


def test_a_card_that_works(tmp_path):
    facts = trial("t4", tmp_path)
    assert [device.problem for device in facts.devices] == [None]
    assert facts.cuda == "13.0" and facts.architectures == machine_with().architectures


def test_a_card_without_code_for_it_fails_at_the_product(tmp_path):
    assert "no kernel image" in str(trial("v100", tmp_path).devices[0].problem)


@pytest.mark.parametrize(("setting", "works"), [(EXPANDABLE, False), ("", True)])
def test_a_driver_that_cannot_map_memory_fails_under_the_setting_alone(tmp_path, setting, works):
    problem = trial("vgpu", tmp_path, setting).devices[0].problem
    assert (problem is None) is works and (works or "CUDA driver error" in str(problem))


def test_a_driver_that_is_too_old_is_told_in_torch_s_words(tmp_path):
    facts = trial("old_driver", tmp_path)
    assert facts.devices == () and facts.problem
