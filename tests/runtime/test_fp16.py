"""fp16 by autocast and a loss scaler, the same way on a CPU and on a GPU: what is scaled, skipped and told."""

import copy
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attempt_runs import reset_accelerate
from rank_factory import SEED, rank_plan
from torch.nn.utils import parameters_to_vector
from transformers import PreTrainedModel

from shardwise.trainer.runtime.data.batches import step_micro_batches
from shardwise.trainer.runtime.data.cache import TokenRows
from shardwise.trainer.runtime.engines import running_engine
from shardwise.trainer.runtime.engines.accelerator import build_accelerator
from shardwise.trainer.runtime.engines.zero import EngineScaler
from shardwise.trainer.runtime.loop.step import StepResult, run_step
from shardwise.trainer.runtime.models.build import build_trainable
from shardwise.trainer.runtime.optimizers import build_optimizer
from shardwise.trainer.runtime.precision.mixed_precision import INIT_SCALE, AmpScaler, install_precision
from shardwise.trainer.runtime.run.clock import Clock
from shardwise.trainer.spec.errors import EnvironmentFaultError, InputError
from shardwise.trainer.spec.hardware import DeviceKind
from shardwise.trainer.spec.optimizers import Optimizer
from shardwise.trainer.spec.plan import Plan
from shardwise.trainer.spec.strategy import Precision


@pytest.fixture(autouse=True)
def no_accelerate_state() -> Iterator[None]:
    yield
    reset_accelerate()


class Training:
    """A prepared model of one process and its steps."""

    def __init__(self, plan: Plan, *, weight_decay: float = 0.1) -> None:
        reset_accelerate()
        self.plan, chosen = plan, plan.chosen
        self.accelerator = build_accelerator(plan, ds_config=None)
        model, installed = build_trainable(plan)
        self.installed = install_precision(model, installed, chosen, DeviceKind.CPU)
        optimizer = build_optimizer(chosen.strategy.optimizer, model, lr=1.0, weight_decay=weight_decay)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        engine = running_engine(self.model)
        self.scaler = engine.loss_scaler(self.model, chosen.strategy.precision, DeviceKind.CPU)
        self.rows = TokenRows.open(Path(plan.data.cache_dir), "train")
        self.step = 0

    def run(self, num_steps: int, *, clip: float = 1.0) -> list[StepResult]:
        return [self.run_one(clip=clip) for _ in range(num_steps)]

    def run_one(self, *, clip: float = 1.0) -> StepResult:
        chosen = self.plan.chosen
        micro_batches, num_targets = step_micro_batches(
            self.rows, step=self.step, seed=SEED, sequences_per_step=self.plan.schedule.sequences_per_step, rank=0,
            num_ranks=1, micro_batch=chosen.micro_batch, accumulation=chosen.accumulation,
        )  # fmt: skip
        self.step += 1
        return run_step(
            self.accelerator, self.model, self.optimizer, micro_batches, num_terms=num_targets, step=self.step,
            seed=SEED, lr=1e-3, clip=clip, clock=Clock(self.accelerator.device), scaler=self.scaler,
        )  # fmt: skip

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def fp32_plan(cache_dir: Path, **engine) -> Plan:
    return rank_plan(cache_dir, **{"micro_batch": 4, "accumulation": 2, **engine})


def fp16_plan(cache_dir: Path, **engine) -> Plan:
    return fp32_plan(cache_dir, precision=Precision.FP16_MIXED, **engine)


class Gradients:
    """The largest gradient that reaches the embeddings' output, in each backward; may spoil some."""

    def __init__(self, model: PreTrainedModel, *, overflow_in: Sequence[int] = ()) -> None:
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
        training = Training(plan(cache_dir, optimizer=Optimizer.SGD), weight_decay=0.0)
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
    training.scaler = resumed = AmpScaler("cpu", init_scale=4.0, growth_interval=3)
    resumed.restore(1024.0, 2)
    assert (resumed.loss_scale, resumed.growth_tracker) == (1024.0, 2)
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
