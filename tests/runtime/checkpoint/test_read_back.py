"""A checkpoint that was just written is compared with memory."""

import pytest
import torch
from torch import nn

from shardwise.trainer.runtime.checkpoint import Ranks
from shardwise.trainer.runtime.checkpoint.load import check_read_back
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError


def flip_a_bit_on_the_disk(folder, model, optimizer):
    shard = folder / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def change_a_weight(folder, model, optimizer):
    model.model.norm.weight.data.view(torch.int32)[0] ^= 1  # one bit, which no tolerance would see


def change_a_moment(folder, model, optimizer):
    optimizer.state[model.model.norm.weight]["exp_avg"].view(torch.int32)[0] ^= 1


def add_a_parameter(folder, model, optimizer):
    model.register_parameter("adapter", nn.Parameter(torch.zeros(3)))
    optimizer.add_param_group({"params": [model.adapter], "name": "adapters"})


@pytest.mark.parametrize(
    ("damage", "fact"),
    [
        (flip_a_bit_on_the_disk, "hashes to "),
        (change_a_weight, r"model\.norm\.weight was read back otherwise"),
        (change_a_moment, r"model\.norm\.weight \(exp_avg\) was read back otherwise"),
        (add_a_parameter, "has no adapter"),
    ],
)
def test_what_differs_from_memory_ends_the_run_with_its_name(tiny, damage, fact, tmp_path):
    model = tiny.build_model(is_tied=True)
    optimizer = tiny.build_optimizer(model)
    tiny.train(model, optimizer, start=0, stop=1)
    folder = tiny.save(tmp_path, model, optimizer, 1)
    settings = {"model": model, "optimizer": optimizer, "sharding": Sharding.NONE, "ranks": Ranks.alone()}
    check_read_back(folder, **settings)
    damage(folder, model, optimizer)
    with pytest.raises(EnvironmentFaultError, match=fact):
        check_read_back(folder, **settings)
