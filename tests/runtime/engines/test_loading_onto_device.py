"""Whole weights that go to their device tensor by tensor have the bits of a whole build.

tests/distributed/test_sharded_loading.py measures the host memory of it.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters
from architecture_factory import TINY
from export_factory import write_base
from msgspec.structs import replace
from rank_factory import rank_plan
from torch import nn

from shardwise.trainer.runtime.engines.sharded_loading import load_onto
from shardwise.trainer.runtime.models.build import build_meta_model, build_model
from shardwise.trainer.spec.job.sections import LoraJob
from shardwise.trainer.spec.model.readers import read_model_shape
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Attention, Method, Precision

CPU = torch.device("cpu")
DORA = {"lora": LoraJob(rank=2, dora=True)}


def plan_of(config: dict[str, Any], folder: Path | None = None, **settings: Any) -> Plan:
    shape = read_model_shape(config)
    attention = Attention.SDPA if Attention.SDPA in shape.attentions else Attention.EAGER
    plan = rank_plan(Path("nowhere"), model_config=config, attention=attention, **settings)
    return replace(plan, model_path=None if folder is None else str(folder))


def assert_same_start(plan: Plan) -> None:
    meta_model, _ = build_meta_model(plan)
    load_onto(CPU, meta_model)
    models = (meta_model.model, build_model(plan))
    found, whole = (dict(each.named_parameters()) | dict(each.named_buffers()) for each in models)
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert (found[name].dtype, found[name].requires_grad) == (tensor.dtype, tensor.requires_grad), name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("config", TINY.values(), ids=TINY)
def test_weights_that_are_read_have_the_bits_of_a_whole_build(config, tmp_path):
    assert_same_start(plan_of(config, write_base(tmp_path, config), precision=Precision.BF16))


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": Precision.BF16_MIXED},
        {"precision": Precision.BF16_MIXED, "method": Method.LORA},
        {"precision": Precision.FP32, "method": Method.LORA, "train": DORA},
    ],
    ids=["full", "lora", "dora"],
)
@pytest.mark.parametrize("is_read", [True, False], ids=["read", "drawn"])
def test_so_they_have_under_every_method(settings, is_read, tmp_path):
    config = {**TINY["llama"], "tie_word_embeddings": True}
    folder = write_base(tmp_path, config, torch.bfloat16) if is_read else None
    assert_same_start(plan_of(config, folder, **settings))


def test_w37_accelerate_confuses_parameters_without_elements():
    before, after = ([nn.Parameter(torch.empty(0)) for _ in range(2)] for _ in range(2))
    mapping = {parameter.data_ptr(): sharded for parameter, sharded in zip(before, after, strict=True)}
    optimizer = torch.optim.SGD(before)
    for parameter in before:
        vars(parameter)["data_ptr"] = parameter.data_ptr()  # as Accelerator._prepare_fsdp2 does
    fsdp2_switch_optimizer_parameters(optimizer, mapping)
    assert [parameter is after[1] for parameter in optimizer.param_groups[0]["params"]] == [True, True]
