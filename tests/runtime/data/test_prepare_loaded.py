"""Why the optimizer's parameters are put back after Accelerate prepared a model that was loaded into its shards."""

import torch
from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters
from torch import nn


def test_w37_accelerate_confuses_parameters_without_elements():
    before, after = ([nn.Parameter(torch.empty(0)) for _ in range(2)] for _ in range(2))
    mapping = {parameter.data_ptr(): sharded for parameter, sharded in zip(before, after, strict=True)}
    optimizer = torch.optim.SGD(before)
    for parameter in before:
        vars(parameter)["data_ptr"] = parameter.data_ptr()  # as Accelerator._prepare_fsdp2 does
    fsdp2_switch_optimizer_parameters(optimizer, mapping)
    assert [parameter is after[1] for parameter in optimizer.param_groups[0]["params"]] == [True, True]
