"""The closed form against the allocator: a steady step of a tiny model on this CPU, events of torch's profiler.

The contract is 5 %; the formulas count what autograd saves, so they are held to 2 %.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from estimate_factory import TINY, config, configuration, cpu, shape_of, this_cpu
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.trainer.planning.configuration import Configuration
from shardwise.trainer.planning.memory import estimate_memory, grouped
from shardwise.trainer.runtime.loop.memory_profile import MemoryProfile
from shardwise.trainer.runtime.loss import install_loss_head
from shardwise.trainer.runtime.memory.recomputation import apply_checkpointing
from shardwise.trainer.runtime.optimizers import build_optimizer
from shardwise.trainer.runtime.run.types import weight_type
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.report import MemoryFigures
from shardwise.trainer.spec.strategy import Attention, Checkpointing, LossHead, Precision

FP32, MIXED, BF16 = Precision.FP32, Precision.BF16_MIXED, Precision.BF16
FULL, EAGER, CHUNKED = Checkpointing.FULL, LossHead.EAGER, LossHead.CHUNKED
FOREACH, FUSED = Optimizer.ADAMW, Optimizer.ADAMW_FUSED
TOLERANCE = 0.02


class Case(NamedTuple):
    precision: Precision = FP32
    micro_batch: int = 4
    checkpointing: Checkpointing = Checkpointing.NONE
    loss: LossHead = CHUNKED
    optimizer: Optimizer = FOREACH
    accumulation: int = 1
    is_tied: bool = True
    seq_len: int = 128
    chunk: int | None = None
    attention: Attention = Attention.SDPA
    model_type: str = "llama"
    sharding: Sharding = Sharding.NONE


# Rows in 16 bit are short: a CPU without bf16 takes twenty times as long for a product.
CASES = [
    Case(),
    Case(micro_batch=16, checkpointing=FULL),
    Case(loss=EAGER),
    Case(loss=EAGER, checkpointing=FULL, micro_batch=8, is_tied=False),
    Case(checkpointing=FULL, chunk=256, micro_batch=8),
    Case(optimizer=FUSED, is_tied=False, checkpointing=FULL, accumulation=2),
    Case(optimizer=FUSED, micro_batch=1, seq_len=32, accumulation=2),
    Case(optimizer=FUSED, micro_batch=1, seq_len=32, loss=EAGER),
    Case(micro_batch=1, seq_len=64),
    Case(MIXED, seq_len=64),
    Case(MIXED, checkpointing=FULL, micro_batch=8, seq_len=64),
    Case(MIXED, checkpointing=FULL, loss=EAGER, is_tied=False, seq_len=64),
    Case(MIXED, accumulation=2, chunk=256, micro_batch=8, checkpointing=FULL, seq_len=64),
    Case(MIXED, optimizer=FUSED, micro_batch=1, seq_len=32, is_tied=False),
    Case(BF16, checkpointing=FULL, micro_batch=8, seq_len=64),
    Case(BF16, checkpointing=FULL, micro_batch=16, seq_len=64, chunk=32),  # in a block: few logits
    Case(BF16, loss=EAGER, seq_len=64),
    *(Case(each, loss=LossHead.FUSED, checkpointing=FULL, micro_batch=8, seq_len=64) for each in (FP32, MIXED, BF16)),
    Case(attention=Attention.EAGER, checkpointing=FULL),
    Case(model_type="qwen2", optimizer=FUSED),
    Case(MIXED, model_type="qwen3", seq_len=64),
]
DDP_CASES = [
    Case(sharding=Sharding.DDP, micro_batch=8, checkpointing=FULL),
    Case(sharding=Sharding.DDP, optimizer=FUSED, micro_batch=1, seq_len=32),
    Case(MIXED, sharding=Sharding.DDP, accumulation=2, is_tied=False, checkpointing=FULL, seq_len=64),
]


def fields_of(case: Case) -> dict[str, Any]:
    return config(2048, 128, 352, 3, 4, 2, is_tied=case.is_tied, model_type=case.model_type, head_dim=32)


def measured(case: Case) -> MemoryFigures:
    """One steady step, after a first one that creates the optimizer's state."""
    torch.manual_seed(0)
    fields = {name: value for name, value in fields_of(case).items() if name != "model_type"}
    built = AutoConfig.for_model(case.model_type, **fields)
    implementation = "eager" if case.attention is Attention.EAGER else "sdpa"
    model = AutoModelForCausalLM.from_config(built, attn_implementation=implementation, dtype=torch.float32)
    model = model.to(weight_type(case.precision))
    model.config.use_cache = False
    apply_checkpointing(model, case.checkpointing)
    install_loss_head(model, case.loss, chunk_tokens=case.chunk)
    optimizer = build_optimizer(case.optimizer, model.train(), lr=1e-4, weight_decay=0.1)
    is_ddp = case.sharding is Sharding.DDP
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if is_ddp else model

    def step() -> None:
        for index in range(case.accumulation):
            ids = torch.randint(0, 2048, (case.micro_batch, case.seq_len))
            waits = is_ddp and index < case.accumulation - 1
            with wrapped.no_sync() if waits else nullcontext():
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=case.precision is MIXED):
                    loss = wrapped(input_ids=ids, labels=ids.clone())
                loss.backward()
            del ids, loss
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    if is_ddp:
        step()  # it orders its buckets anew after the first
    profile = MemoryProfile(wrapped, optimizer, torch.device("cpu"))
    with profile.step():
        step()
    return profile.figures()


def name_of(case: Case) -> str:
    """What differs from the first case."""
    return "-".join(str(value) for value, usual in zip(case, Case(), strict=True) if value != usual) or "plain"


# transformers renamed the method that `activation_memory` calls, and still has the old name.
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_predicted_peak_is_what_the_allocator_sees(case: Case) -> None:
    check(case, measured(case))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated:FutureWarning")
@pytest.mark.parametrize("case", DDP_CASES, ids=name_of)
def test_predicted_peak_is_what_the_allocator_sees_under_ddp(case: Case) -> None:
    """DDP's buckets are as large in a group of one rank as in any."""
    check(case, measured(case))


def chosen_of(case: Case) -> Configuration:
    chosen: Configuration = configuration(
        case.sharding,
        num_ranks=1 if case.sharding is Sharding.NONE else 2,
        precision=case.precision,
        optimizer=case.optimizer,
        micro_batch=case.micro_batch,
        accumulation=case.accumulation,
        seq_len=case.seq_len,
        checkpointing=case.checkpointing,
        attention=case.attention,
        loss=case.loss,
        loss_chunk_tokens=case.chunk,
    )
    return chosen


def check(case: Case, figures: MemoryFigures) -> None:
    estimate = estimate_memory(shape_of(fields_of(case)), chosen_of(case), this_cpu())
    assert estimate.peak_allocated_bytes == pytest.approx(figures.peak_allocated_bytes, rel=TOLERANCE)
    assert estimate.steady_allocated_bytes == pytest.approx(figures.steady_allocated_bytes, rel=0.001)
    predicted, seen = grouped(estimate.parts), figures.parts
    for part in ("weights", "optimizer_state"):
        assert predicted[part] == pytest.approx(seen[part], rel=0.001)
    # Gradients and activations together: the profiler sees a gradient when it is accumulated, not when it is made.
    transient = predicted["gradients"] + predicted["activations"]
    assert transient == pytest.approx(seen["gradients"] + seen["activations"], rel=0.03)


def test_the_configurations_reach_every_kind_of_peak() -> None:
    peaks = {estimate_memory(TINY, chosen_of(case), cpu()).peak_event for case in CASES}
    assert peaks >= {
        "forward_end",
        "loss_backward",
        "head_backward",
        "block_backward_bottom",
        "gradients_complete",
        "optimizer_step",
    }
