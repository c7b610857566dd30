"""The loss that balances experts is transformers' own, on padded and packed micro batches, and is reported apart."""

from typing import Any

import pytest
import torch
import zoo
from msgspec.structs import replace
from planning_factory import data_of, job_of, shape_of
from torch import Tensor, nn

from shardwise.trainer.planning.planner import check_job
from shardwise.trainer.runtime.data.batches import MicroBatch
from shardwise.trainer.runtime.loop.step import BalancedTokenLoss
from shardwise.trainer.runtime.loss import IGNORED, install_loss_head
from shardwise.trainer.runtime.models.router_loss import RouterLoss, row_mask
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.job.sections import DataFormat
from shardwise.trainer.spec.strategy import LossHead

COEFFICIENT = 0.05
CPU = torch.device("cpu")
IDS = torch.randint(3, 200, (2, 24), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def padded() -> MicroBatch:
    """Two rows of 24 and of 15 tokens; the second row is padded."""
    labels = IDS.clone()
    labels[1, 15:] = IGNORED
    labels[:, 0] = IGNORED
    return MicroBatch(IDS, labels, int((labels != IGNORED).sum()), num_tokens=39, row_lengths=(24, 15))


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss", "granitemoehybrid"])
def test_a_padded_micro_batch_has_the_loss_and_the_gradients_of_transformers(model_type):
    model: Any = zoo.model_of(model_type)
    batch = padded()
    mask = row_mask(batch.row_lengths, 24, CPU)
    model.router_aux_loss_coef = COEFFICIENT
    theirs = model(input_ids=IDS, attention_mask=mask, labels=batch.labels, output_router_logits=True, use_cache=False)
    (theirs.loss * batch.num_targets).backward()
    expected = gradients(model)
    install_loss_head(model, LossHead.CHUNKED, chunk_tokens=16)
    objective = BalancedTokenLoss(RouterLoss(model), COEFFICIENT)
    terms = objective(model, batch, CPU)
    assert terms.added is not None
    (terms.loss + terms.added).backward()
    assert torch.allclose(terms.figures[0] / batch.num_targets, theirs.aux_loss.detach(), rtol=1e-5)
    assert torch.allclose((terms.loss + terms.added) / batch.num_targets, theirs.loss, rtol=1e-5)
    ours = gradients(model)
    assert ours.keys() == expected.keys()
    worst = max(float((ours[name] - expected[name]).norm() / (expected[name].norm() + 1e-6)) for name in ours)
    assert worst < 1e-3


def test_a_packed_row_counts_each_token_once_as_if_its_documents_stood_alone():
    model: Any = zoo.model_of("qwen3_moe")
    install_loss_head(model, LossHead.CHUNKED, chunk_tokens=16)
    routers = RouterLoss(model)
    positions = torch.cat([torch.arange(9), torch.arange(15)]).repeat(2, 1)
    routers.begin()
    model(input_ids=IDS, labels=IDS, position_ids=positions, document_bounds=(0, 9, 24, 33, 48))
    together = routers.end(None)
    logits: list[list[Tensor]] = []
    for document in (IDS[:1, :9], IDS[:1, 9:], IDS[1:, :9], IDS[1:, 9:]):
        routers.begin()
        model(input_ids=document, labels=document)
        logits.append(list(routers._logits or ()))
        routers.end(None)
    routers.begin()
    assert routers._logits is not None
    routers._logits += [torch.cat(layer) for layer in zip(*logits, strict=True)]
    assert torch.allclose(together, routers.end(None), rtol=1e-5)


def test_logits_are_collected_in_training_forwards_alone():
    model: Any = zoo.model_of("mixtral")
    routers = RouterLoss(model)
    model(input_ids=IDS, use_cache=False)
    with pytest.raises(AssertionError, match="no router has run"):
        routers.end(None)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "llama"])
def test_a_model_without_such_a_loss_is_refused(model_type):
    with pytest.raises(InputError, match=f"transformers has no such loss for {model_type}"):
        RouterLoss(zoo.model_of(model_type))


def test_a_plan_refuses_the_setting_where_nothing_can_be_added():
    job = job_of()
    job = replace(job, train=replace(job.train, router_aux_loss=0.01))
    shape = replace(shape_of("tiny"), max_positions=None)
    with pytest.raises(InputError, match="llama has no experts; remove it"):
        check_job(job, shape, data_of(), ())
    with pytest.raises(InputError, match="balance their experts by a bias"):
        check_job(job, replace(shape, num_experts=8), data_of(), ())
    balanced = replace(shape, num_experts=8, has_router_loss=True)
    check_job(job, balanced, data_of(), ())
    with pytest.raises(InputError, match="dpo exclude each other"):
        check_job(job, balanced, data_of(format=DataFormat.PREFERENCE), ())
