"""One optimizer step in one process: what accumulation, dropout and clipping may and may not change."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from attempt_runs import reset_accelerate
from engine_plan_factory import TINY_LLAMA
from rank_factory import SEED, rank_plan
from torch import nn

from shardwise.trainer.runtime.data.batches import MicroBatch, step_micro_batches
from shardwise.trainer.runtime.data.cache import TokenRows
from shardwise.trainer.runtime.engines.accelerator import build_accelerator
from shardwise.trainer.runtime.loop.step import StepResult, run_step, seed_dropout
from shardwise.trainer.runtime.models.build import build_model
from shardwise.trainer.runtime.optimizers import build_optimizer
from shardwise.trainer.runtime.run.clock import Clock
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import InputError
from shardwise.trainer.spec.hardware import Hardware, Host
from shardwise.trainer.spec.plan import Plan


def prepared(plan: Plan) -> tuple[Accelerator, nn.Module, Any]:
    reset_accelerate()
    accelerator, model = build_accelerator(plan, ds_config=None), build_model(plan)
    optimizer = build_optimizer(plan.chosen.strategy.optimizer, model, lr=1.0, weight_decay=0.1)
    return accelerator, *accelerator.prepare(model, optimizer)


def micro_batches_of(plan: Plan, step: int, *, num_rows: int | None = None) -> tuple[list[MicroBatch], int]:
    """Of a step, or `num_rows` of it in one."""
    accumulation = plan.chosen.accumulation if num_rows is None else 1
    found, num_targets = step_micro_batches(
        TokenRows.open(Path(plan.data.cache_dir), "train"), step=step, seed=SEED, rank=0, num_ranks=1,
        sequences_per_step=num_rows or plan.schedule.sequences_per_step, micro_batch=plan.chosen.micro_batch,
        accumulation=accumulation,
    )  # fmt: skip
    return list(found), num_targets


def run_steps(plan: Plan, steps: range, *, clip: float = 1.0, lr: float = 1e-3) -> tuple[list[StepResult], nn.Module]:
    accelerator, model, optimizer = prepared(plan)
    results = []
    for step in steps:
        micro_batches, num_targets = micro_batches_of(plan, step)
        results.append(
            run_step(
                accelerator, model, optimizer, micro_batches, num_terms=num_targets, step=step, seed=SEED, lr=lr,
                clip=clip, clock=Clock(accelerator.device),
            )
        )  # fmt: skip
    assert all(parameter.grad is None for parameter in model.parameters())
    return results, model


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(1, 8), (3, 3)])
def test_the_loss_does_not_depend_on_how_rows_fall_on_micro_batches(cache_dir, micro_batch, accumulation):
    whole, model = run_steps(rank_plan(cache_dir, micro_batch=8, accumulation=1), range(4))
    parts, other = run_steps(rank_plan(cache_dir, micro_batch=micro_batch, accumulation=accumulation), range(4))
    assert [result.loss for result in parts] == pytest.approx([result.loss for result in whole], abs=1e-6)
    assert [result.grad_norm for result in parts] == pytest.approx([result.grad_norm for result in whole], abs=1e-5)
    assert [result.num_targets for result in parts] == [result.num_targets for result in whole]
    for ours, theirs in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_a_step_with_dropout_can_be_repeated_bit_by_bit_from_anywhere(cache_dir):
    with_dropout = {**TINY_LLAMA, "attention_dropout": 0.5}
    plan = rank_plan(cache_dir, micro_batch=4, accumulation=2, model_config=with_dropout)
    first, _ = run_steps(plan, range(2))
    torch.randn(1000)  # what else draws numbers does not matter
    again, _ = run_steps(plan, range(2))
    without, _ = run_steps(rank_plan(cache_dir, micro_batch=4, accumulation=2), range(2))
    assert [result.loss for result in first] == [result.loss for result in again]
    assert first[0].loss != without[0].loss, "dropout is on"


def test_the_seed_of_a_micro_batch_is_that_of_torchs_own_seeding_on_every_device_of_a_rank(monkeypatch):
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    seed_dropout(1, 2, 3)
    sampled, number = torch.rand(4), torch.initial_seed()
    assert seeded == [number]
    torch.default_generator.manual_seed(0)
    torch.manual_seed(number)
    assert torch.equal(torch.rand(4), sampled)


def losses_of_repeated_micro_batch(cache_dir: Path, steps: tuple[int, ...], *, dropout: float) -> list[list[float]]:
    """For each step the losses of one micro batch that is run three times; the weights stay as they are."""
    config = {**TINY_LLAMA, "attention_dropout": dropout}
    plan = rank_plan(cache_dir, micro_batch=4, accumulation=3, model_config=config)
    accelerator, model, optimizer = prepared(plan)
    losses: list[float] = []
    model.register_forward_hook(lambda _model, _inputs, loss: losses.append(float(loss.detach())))
    (micro_batch,), num_targets = micro_batches_of(plan, 0, num_rows=4)
    for step in steps:
        run_step(
            accelerator, model, optimizer, [micro_batch] * 3, num_terms=3 * num_targets, step=step, seed=SEED, lr=0.0,
            clip=1.0, clock=Clock(accelerator.device),
        )  # fmt: skip
    return [losses[start : start + 3] for start in range(0, len(losses), 3)]


def test_masks_differ_between_micro_batches_and_steps_and_come_back_with_the_step(cache_dir):
    first, second, again = losses_of_repeated_micro_batch(cache_dir, (1, 2, 1), dropout=0.5)
    assert len({*first, *second}) == 6, "six masks"
    assert again == first
    without = losses_of_repeated_micro_batch(cache_dir, (1, 2), dropout=0.0)
    assert len({loss for step in without for loss in step}) == 1, "nothing but the masks makes a difference"


@pytest.mark.parametrize("lr", [0.0, 1e-3])
def test_the_learning_rate_of_the_step_is_the_one_that_updates(cache_dir, lr):
    plan = rank_plan(cache_dir, micro_batch=8, accumulation=1)
    _, moved = run_steps(plan, range(1), lr=lr)
    changes = [
        (after - before).abs().max().item()
        for after, before in zip(moved.parameters(), build_model(plan).parameters(), strict=True)
    ]
    assert max(changes) == pytest.approx(lr, rel=0.2), "Adam's first step is the learning rate, plus the decay"


def test_the_norm_is_reported_before_clipping_and_no_clip_is_no_clip(cache_dir):
    plan = rank_plan(cache_dir, micro_batch=8, accumulation=1)
    clipped, small = run_steps(plan, range(1), clip=1e-9)
    free, moved = run_steps(plan, range(1), clip=0.0)
    assert clipped[0].grad_norm == free[0].grad_norm
    assert free[0].grad_norm is not None and free[0].grad_norm > 0.1
    change = [(a - b).abs().max().item() for a, b in zip(small.parameters(), moved.parameters(), strict=True)]
    assert max(change) > 1e-4, "clipping to nothing keeps Adam's epsilon from being negligible"


def hybrid(num_nodes: int, on_each: int) -> dict[str, Any]:
    host = Host(cpu_name=None, num_cores=8, ram_bytes=None, ram_available_bytes=None)
    hardware = Hardware(gpus=(), host=host, num_nodes=num_nodes, num_cpu_devices=on_each)
    return {"sharding": Sharding.HSDP, "num_ranks": hardware.num_devices, "hardware": hardware}


@pytest.mark.parametrize(
    ("plan", "fact"),
    [
        (hybrid(num_nodes=1, on_each=4), "the plan has 1 over 4 on 4 ranks; use fsdp"),
        (hybrid(num_nodes=4, on_each=1), "the plan has 4 over 1 on 4 ranks; use ddp"),
        ({"num_ranks": 2}, "none drives one device, the plan has 2 ranks"),
    ],
)
def test_what_would_silently_be_something_else_is_refused(cache_dir, plan, fact):
    with pytest.raises(InputError, match=fact):
        build_accelerator(rank_plan(cache_dir, **plan), ds_config=None)
