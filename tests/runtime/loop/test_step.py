"""One step in one process: what accumulation, dropout and clipping may change; and fp16: what is scaled and skipped."""

import copy
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attempt_runs import session_of
from engine_plan_factory import TINY_LLAMA
from rank_factory import SEED, rank_plan
from torch.nn.utils import parameters_to_vector

from shardwise.trainer.runtime.data.batches import MicroBatch, step_micro_batches
from shardwise.trainer.runtime.engines.accelerator import build_accelerator
from shardwise.trainer.runtime.engines.zero import EngineScaler
from shardwise.trainer.runtime.loop.step import StepResult, run_step, seed_dropout
from shardwise.trainer.runtime.models.build import build_trainable
from shardwise.trainer.runtime.precision.mixed_precision import INIT_SCALE, AmpScaler, install_precision
from shardwise.trainer.runtime.run.clock import Clock
from shardwise.trainer.spec.engines import Sharding
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import DeviceKind, Hardware, Host
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Precision


class Training:
    def __init__(self, plan: Plan) -> None:
        with TemporaryDirectory() as folder:
            session = session_of(Path(folder), plan)
        self.plan, self.rows, self.step = plan, session.train_rows, 0
        self.accelerator, self.model, self.optimizer = session.accelerator, session.model, session.optimizer
        self.scaler = session.scaler

    def run(self, num_steps: int, *, clip: float = 1.0) -> list[StepResult]:
        return [self.run_one(clip=clip) for _ in range(num_steps)]

    def micro_batches(self) -> tuple[list[MicroBatch], int]:
        found, num_targets = step_micro_batches(
            self.rows, step=self.step, seed=SEED, sequences_per_step=self.plan.schedule.sequences_per_step, rank=0,
            num_ranks=1, micro_batch=self.plan.chosen.micro_batch, accumulation=self.plan.chosen.accumulation,
        )  # fmt: skip
        return list(found), num_targets

    def take(
        self, micro_batches: list[MicroBatch], num_terms: int, *, step: int, clip: float = 1.0, lr: float = 1e-3
    ) -> StepResult:
        return run_step(
            self.accelerator, self.model, self.optimizer, micro_batches, num_terms=num_terms, step=step, seed=SEED,
            lr=lr, clip=clip, clock=Clock(self.accelerator.device), scaler=self.scaler,
        )  # fmt: skip

    def run_one(self, *, clip: float = 1.0) -> StepResult:
        micro_batches, num_targets = self.micro_batches()
        self.step += 1
        return self.take(micro_batches, num_targets, step=self.step, clip=clip)

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(1, 8), (3, 3)])
def test_the_loss_does_not_depend_on_how_rows_fall_on_micro_batches(cache_dir, micro_batch, accumulation):
    results = []
    for shape in ((micro_batch, accumulation), (8, 1)):
        training = Training(rank_plan(cache_dir, micro_batch=shape[0], accumulation=shape[1]))
        results.append((training.run(4), training.weights()))
    (parts, found), (whole, expected) = results
    for ours, theirs in zip(parts, whole, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, abs=1e-5)
        assert ours.num_targets == theirs.num_targets
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


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


def repeated_losses(cache_dir: Path, steps: tuple[int, ...], *, dropout: float) -> list[list[float]]:
    """For each step the losses of one micro batch that is run three times; the weights stay as they are."""
    config = {**TINY_LLAMA, "attention_dropout": dropout}
    training = Training(rank_plan(cache_dir, micro_batch=4, accumulation=3, model_config=config))
    losses: list[float] = []
    training.model.register_forward_hook(lambda _model, _inputs, loss: losses.append(float(loss.detach())))
    (micro_batch, *_), _ = training.micro_batches()
    for step in steps:
        training.take([micro_batch] * 3, 3 * micro_batch.num_targets, step=step, lr=0.0)
    return [losses[start : start + 3] for start in range(0, len(losses), 3)]


def test_masks_differ_between_micro_batches_and_steps_and_come_back_with_the_step(cache_dir):
    first, second, again = repeated_losses(cache_dir, (1, 2, 1), dropout=0.5)
    assert len({*first, *second}) == 6, "six masks"
    assert again == first
    without = repeated_losses(cache_dir, (1, 2), dropout=0.0)
    assert len({loss for step in without for loss in step}) == 1, "nothing but the masks makes a difference"


def test_the_norm_is_reported_before_clipping_and_no_clip_is_no_clip(cache_dir):
    small, moved = (Training(rank_plan(cache_dir, micro_batch=8, accumulation=1)) for _ in range(2))
    clipped, free = small.run_one(clip=1e-9), moved.run_one(clip=0.0)
    assert clipped.grad_norm == free.grad_norm
    assert free.grad_norm is not None and free.grad_norm > 0.1
    change = [(a - b).abs().max().item() for a, b in zip(small.weights(), moved.weights(), strict=True)]
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


fp32_plan = partial(rank_plan, micro_batch=4, accumulation=2)
fp16_plan = partial(fp32_plan, precision=Precision.FP16_MIXED)


class Gradients:
    """The largest gradient that reaches the embeddings' output, in each backward; may spoil some."""

    def __init__(self, model: Any, *, overflow_in: Sequence[int] = ()) -> None:
        self.seen: list[float] = []
        self.overflow_in = overflow_in
        model.get_input_embeddings().register_forward_hook(self.watch)

    def watch(self, _module: torch.nn.Module, _inputs: object, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(self.note)

    def note(self, grad: torch.Tensor) -> torch.Tensor:
        self.seen.append(grad.abs().max().item())
        return grad * math.inf if len(self.seen) - 1 in self.overflow_in else grad


def test_the_backward_pass_sees_the_scale_and_the_update_does_not(cache_dir):
    plain, scaled = Training(fp32_plan(cache_dir)), Training(fp16_plan(cache_dir))
    unscaled_grads, scaled_grads = Gradients(plain.model), Gradients(scaled.model)
    plain.run(1)
    scaled.run(1)
    assert scaled_grads.seen == pytest.approx([INIT_SCALE * size for size in unscaled_grads.seen], rel=2e-2)
    torch.testing.assert_close(scaled.weights(), plain.weights(), rtol=0, atol=2.1e-3)


def test_gradients_are_clipped_at_their_own_size(cache_dir):
    """Clipped before they are scaled back, they would move nothing."""
    for plan in (fp32_plan, fp16_plan):
        training = Training(plan(cache_dir, optimizer=Optimizer.SGD, train={"weight_decay": 0.0}))
        before = parameters_to_vector(training.weights())
        training.run(1, clip=0.1)
        moved = (parameters_to_vector(training.weights()) - before).norm()
        assert moved == pytest.approx(1e-4, rel=1e-2), "learning rate 1e-3 x clip 0.1"


@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW, Optimizer.ADAMW_FUSED, Optimizer.SGD])
def test_an_overflow_skips_the_step_and_halves_the_scale(cache_dir, optimizer):
    """A fused update decides by itself, the others are not called."""
    training = Training(fp16_plan(cache_dir, optimizer=optimizer))
    Gradients(training.model, overflow_in=[3])  # the second micro batch of the second step
    first = training.run_one()
    before = training.weights()
    state = copy.deepcopy(training.optimizer.state_dict()["state"])
    skipped = training.run_one()
    assert (first.was_skipped, skipped.was_skipped) == (False, True)
    assert skipped.grad_norm is None
    assert skipped.loss_scale == INIT_SCALE, "the scale that overflowed"
    assert all(map(torch.equal, training.weights(), before))
    torch.testing.assert_close(training.optimizer.state_dict()["state"], state, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in training.model.parameters())
    third = training.run_one()
    assert (third.was_skipped, third.loss_scale) == (False, INIT_SCALE / 2)
    assert not any(torch.isnan(weight).any() for weight in training.weights())
    assert not all(map(torch.equal, training.weights(), before))


def test_the_scale_goes_on_from_that_of_another_scaler(cache_dir):
    """Two good steps of three: the next one doubles it."""
    training = Training(fp16_plan(cache_dir))
    training.scaler = AmpScaler("cpu", init_scale=1024.0, growth_interval=3)
    training.run(2)
    assert (training.scaler.loss_scale, training.scaler.growth_tracker) == (1024.0, 2)
    training.scaler = AmpScaler("cpu", init_scale=4.0, growth_interval=3)
    training.scaler.restore(1024.0, 2)
    assert (training.scaler.loss_scale, training.scaler.growth_tracker) == (1024.0, 2)
    assert [result.loss_scale for result in training.run(2)] == [1024.0, 2048.0]


def test_deepspeeds_scale_goes_on_and_a_count_of_its_is_no_count_of_torchs():
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    inner, other = (
        DynamicLossScaler(init_scale=1024.0, scale_window=3, min_scale=1, delayed_shift=1, consecutive_hysteresis=False)
        for _ in range(2)
    )
    first, second = (SimpleNamespace(optimizer=SimpleNamespace(loss_scaler=each)) for each in (inner, other))
    inner.cur_scale, inner.cur_iter, inner.last_overflow_iter = 512.0, 2, 1  # as after an overflow in the second step
    for _ in range(3):
        inner.update_scale(False)
    assert EngineScaler(first).growth_tracker == 3
    EngineScaler(second).restore(inner.cur_scale, 3)
    for _ in range(5):
        for each in (inner, other):
            each.update_scale(False)
        assert inner.cur_scale == other.cur_scale
    assert inner.cur_scale > 512.0, "it grew meanwhile"
    torch_scaler = AmpScaler("cpu", growth_interval=3)
    torch_scaler.restore(512.0, EngineScaler(second).growth_tracker)
    assert torch_scaler.growth_tracker < 3


def test_gradients_that_overflow_unscaled_end_the_run(cache_dir):
    training = Training(fp16_plan(cache_dir))
    training.scaler = AmpScaler("cpu", init_scale=4.0)
    Gradients(training.model, overflow_in=range(4))  # two steps of two micro batches
    assert training.run_one().was_skipped
    with pytest.raises(EnvironmentFaultError, match=r"loss scale 1, after 2 skipped steps"):
        training.run_one()


@pytest.mark.parametrize("change", [{"optimizer_in_backward": True}, {"optimizer": Optimizer.LOMO}])
def test_an_update_inside_the_backward_pass_cannot_wait_for_the_verdict(cache_dir, change):
    plan = fp16_plan(cache_dir, **change)
    with pytest.raises(InputError, match=rf"fp16-mixed.*\b{plan.chosen.strategy.optimizer}\b"):
        install_precision(*build_trainable(fp16_plan(cache_dir)), plan.chosen, DeviceKind.CPU)
