"""A tiny Llama and steps of an optimizer on it: on real text, on random tokens, or on no gradient at all."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from engine_plan_factory import TINY_LLAMA
from msgspec.structs import replace
from rank_factory import SEED, SEQ_LEN, rank_plan
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer as TorchOptimizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from shardwise.trainer.planning.schedule import default_rate
from shardwise.trainer.runtime.data.batches import step_micro_batches
from shardwise.trainer.runtime.data.cache import TokenRows
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.runtime.optimizers import build_optimizer, set_learning_rate, updates_in_backward
from shardwise.trainer.spec.job.sections import GaloreJob
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import learning_rate
from shardwise.trainer.spec.strategy import Method

GALORE = GaloreJob(rank=8, update_gap=20)
NUM_STEPS = 40
SEQUENCES = 8
# Of TINY_LLAMA: tensors of 4,096 elements and more, and those below (keys, values, norms).
NUM_LARGE, NUM_SMALL = 12, 9


def tiny_llama(**config: Any) -> LlamaForCausalLM:
    torch.manual_seed(SEED)
    fields = {**TINY_LLAMA, "max_position_embeddings": SEQ_LEN, **config}
    fields.pop("model_type")
    return LlamaForCausalLM(LlamaConfig(**fields))


def random_gradients(model: nn.Module, *, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def random_loss(model: PreTrainedModel, *, step: int) -> Tensor:
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(step))
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def assert_same_weights(model: nn.Module, other: nn.Module, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """To the bit, where no tolerance is given."""
    torch.testing.assert_close(dict(model.named_parameters()), dict(other.named_parameters()), rtol=rtol, atol=atol)


def train_steps(model: PreTrainedModel, optimizer: TorchOptimizer, steps: range, *, lr: float) -> None:
    for step in steps:
        set_learning_rate(optimizer, lr)
        random_loss(model, step=step).backward()
        if not updates_in_backward(optimizer):
            optimizer.step()
            optimizer.zero_grad()


def losses_on_text(cache_dir: Path, optimizer: Optimizer, *, galore: GaloreJob | None = None) -> Iterator[float]:
    """The losses of forty steps from scratch, at the rate that a job of this size would take, under its schedule."""
    plan = rank_plan(cache_dir, num_steps=NUM_STEPS, sequences_per_step=SEQUENCES)
    model = build_model(plan)
    rate = default_rate(
        optimizer=optimizer, method=Method.FULL if galore is None else Method.GALORE, is_from_scratch=True,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
    )  # fmt: skip
    schedule = replace(plan.schedule, lr=rate.lr, warmup_steps=1)
    built = build_optimizer(optimizer, model, lr=rate.lr, weight_decay=0.1, galore=galore)
    rows = TokenRows.open(cache_dir, "train")
    for step in range(NUM_STEPS):
        set_learning_rate(built, learning_rate(schedule, plan.job.train, step + 1))
        (batch,), num_targets = step_micro_batches(
            rows, step=step, seed=SEED, sequences_per_step=SEQUENCES, rank=0, num_ranks=1,
            micro_batch=SEQUENCES, accumulation=1,
        )  # fmt: skip
        loss = model(input_ids=batch.input_ids, labels=batch.labels) / num_targets
        loss.backward()
        if not updates_in_backward(built):
            torch.nn.utils.clip_grad_norm_(model.parameters(), plan.job.train.clip)
            built.step()
            built.zero_grad()
        yield float(loss.detach())
