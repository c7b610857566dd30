"""The dry run on a CPU that is not there, against the allocator of the one that is: a steady step of a tiny model."""

from typing import NamedTuple

import pytest
import torch
from block_kinds import KINDS
from estimate_factory import config
from transformers import PreTrainedModel

from shardwise.trainer.runtime.loop.memory_profile import MemoryProfile
from shardwise.trainer.runtime.models.build import make_trainable, model_from_config
from shardwise.trainer.runtime.optimizers import build_optimizer
from shardwise.trainer.runtime.run.types import weight_type
from shardwise.trainer.simulation.dry_run import simulate
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.messages.worker_requests import SimulationRequest
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Precision

VOCAB = 4096
TOLERANCE = 0.0005
KINDS_TOLERANCE = 0.02
FULL, EAGER, CHUNKED = Checkpointing.FULL, LossHead.EAGER, LossHead.CHUNKED
FUSED = Optimizer.ADAMW_FUSED
FP32, MIXED, BF16 = Precision.FP32, Precision.BF16_MIXED, Precision.BF16


class Case(NamedTuple):
    precision: Precision = FP32
    checkpointing: Checkpointing = Checkpointing.NONE
    loss: LossHead = CHUNKED
    optimizer: Optimizer = Optimizer.ADAMW
    accumulation: int = 1
    is_tied: bool = True
    model_type: str = "llama"
    attention: Attention = Attention.SDPA


CASES = [
    Case(), Case(accumulation=2, optimizer=FUSED, loss=EAGER, is_tied=False),
    Case(MIXED, checkpointing=FULL, loss=EAGER), Case(MIXED, accumulation=2, is_tied=False),
    Case(BF16, optimizer=FUSED, model_type="qwen2"),
    Case(attention=Attention.EAGER, checkpointing=FULL, model_type="qwen3"),
]  # fmt: skip


def check(request: SimulationRequest, tolerance: float) -> None:
    """A dry run has the bytes of a second step, as the allocator counts them."""
    torch.manual_seed(0)
    dtype = weight_type(request.precision)
    model = model_from_config(request.model_config, dtype=dtype, attention=request.attention)
    make_trainable(model, request.checkpointing, request.loss, loss_chunk_tokens=request.loss_chunk_tokens)
    optimizer = build_optimizer(request.optimizer, model, lr=1e-4, weight_decay=0.1)
    vocab = request.model_config["vocab_size"]
    batches = [torch.randint(0, vocab, (request.micro_batch, request.seq_len)) for _ in range(request.accumulation)]
    _step(model, optimizer, batches, request.precision)
    profile = MemoryProfile(model, optimizer, torch.device("cpu"))
    with profile.step():
        _step(model, optimizer, batches, request.precision)
    figures, simulation = profile.figures(), simulate(request)
    assert simulation.steady_allocated_bytes == pytest.approx(figures.steady_allocated_bytes, rel=tolerance)
    assert simulation.peak_allocated_bytes == pytest.approx(figures.peak_allocated_bytes, rel=tolerance)


def _step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor], precision: Precision
) -> None:
    for ids in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision is MIXED):
            loss = model(input_ids=ids, labels=ids)
        loss.backward()
        del loss
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# transformers renamed the method that `activation_memory` calls, and still has the old name.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("case", CASES)
def test_the_dry_run_sees_what_the_allocator_sees(case: Case) -> None:
    request = SimulationRequest(
        model_config=config(VOCAB, 192, 512, 2, 6, 2, is_tied=case.is_tied, model_type=case.model_type, head_dim=32),
        precision=case.precision, optimizer=case.optimizer, micro_batch=4, seq_len=128, accumulation=case.accumulation,
        checkpointing=case.checkpointing, attention=case.attention, loss=case.loss, device_kind=DeviceKind.CPU,
    )  # fmt: skip
    check(request, TOLERANCE)


LONG = (pytest.mark.long, pytest.mark.products)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith("latent") else LONG) for name in KINDS]
)
@pytest.mark.parametrize("checkpointing", [Checkpointing.NONE, pytest.param(FULL, marks=LONG)])
def test_the_dry_run_sees_what_the_allocator_sees_of_every_kind_of_block(name, checkpointing):
    request = SimulationRequest(
        model_config=KINDS[name], precision=FP32 if checkpointing is Checkpointing.NONE else MIXED, micro_batch=4,
        seq_len=128, checkpointing=checkpointing, loss=CHUNKED, device_kind=DeviceKind.CPU,
        attention=Attention.EAGER if name.startswith("sinks") else Attention.SDPA,
    )  # fmt: skip
    check(request, KINDS_TOLERANCE)
