"""A checkpoint that was just written is held against memory."""

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from shardwise.trainer.runtime.checkpoint import Ranks
from shardwise.trainer.runtime.checkpoint.verify import check_read_back
from shardwise.trainer.spec.errors import EnvironmentFaultError
from shardwise.trainer.spec.strategy import Sharding


@pytest.fixture
def trained(tiny: ModuleType) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = tiny.build_model(is_tied=True)
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=1)
    return model, optimizer


def read_back(folder: Path, trained: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = trained
    check_read_back(folder, model=model, optimizer=optimizer, sharding=Sharding.NONE, ranks=Ranks.alone())


def test_what_was_written_is_there(
    tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    read_back(tiny.save(tmp_path, *trained, 1), trained)


def test_a_flipped_bit_on_the_disk_is_told(
    tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    folder = tiny.save(tmp_path, *trained, 1)
    shard = folder / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(EnvironmentFaultError, match=r"hashes to .*;\nthis checkpoint could not be resumed from"):
        read_back(folder, trained)


@pytest.mark.parametrize("what", ["weight", "exp_avg"])
def test_a_weight_or_a_moment_that_is_another_is_told(
    what: str, tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    folder = tiny.save(tmp_path, *trained, 1)
    model, optimizer = trained
    name, parameter = next((name, each) for name, each in model.named_parameters() if each.ndim == 1)
    changed = parameter.data if what == "weight" else optimizer.state[parameter]["exp_avg"]
    changed.view(torch.int32)[0] ^= 1  # one bit, which no tolerance would see
    title = name if what == "weight" else f"{name} ({what})"
    with pytest.raises(EnvironmentFaultError, match=re.escape(f"{title} was read back otherwise than it was written")):
        read_back(folder, trained)


def test_a_parameter_that_was_left_out_is_told(
    tiny: ModuleType, trained: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    folder = tiny.save(tmp_path, *trained, 1)
    model, optimizer = trained
    model.register_parameter("adapter", nn.Parameter(torch.zeros(3)))
    optimizer.add_param_group({"params": [model.adapter], "name": "adapters"})
    with pytest.raises(EnvironmentFaultError, match="has no adapter"):
        read_back(folder, (model, optimizer))
