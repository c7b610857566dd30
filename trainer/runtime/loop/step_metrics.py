"""What a step's line says, and what is measured for it beside the step itself.

Everything here has to be cheap, as it is paid for in every step: counters that are read, no device that is waited for
and no question to a driver (a thread asks those). benchmarks/metrics_cost.py shows the price.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from trainer.runtime.loop.metrics import StepMetrics
from trainer.runtime.loop.session import Session
from trainer.runtime.loop.step import StepResult
from trainer.runtime.profile.memory_profile import anonymous_bytes
from trainer.runtime.run.clock import Clock
from trainer.runtime.run.machine_counters import CardWatch, Traffic, pinned_bytes
from trainer.runtime.run.state import model_flops_share
from trainer.spec.report import Evaluation

PHASES = ("data", "forward", "backward", "optimizer")
TERA = 10**12


class DoneStep(NamedTuple):
    """A step that was run, and what it was run with."""

    result: StepResult
    clock: Clock
    lr: float
    step_s: float
    padding_share: float
    rows: tuple[int, ...]  # that it passed over
    epoch: float | None


class StepObserver:
    """Measures what lies between the steps of one rank, and writes the line of each."""

    def __init__(self, session: Session, card: CardWatch) -> None:
        self._session, self._card = session, card
        self._wait_s = self._checkpoint_s = 0.0
        self._traffic = Traffic() if session.plan.chosen.strategy.offload.uses_nvme else None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the block as waiting for the other ranks."""
        begin = time.perf_counter()
        yield
        self._wait_s += time.perf_counter() - begin

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Counts the block as standing still for a checkpoint."""
        begin = time.perf_counter()
        yield
        self._checkpoint_s += time.perf_counter() - begin

    def parts(self, clock: Clock) -> dict[str, float]:
        """Seconds of a step by what they went to."""
        return {**{phase: clock.seconds(phase) for phase in PHASES}, "wait": self._wait_s}

    def line(self, done: DoneStep, evaluation: Evaluation | None) -> StepMetrics:
        """The line of a step."""
        state, result = self._session.state, done.result
        rate = result.num_targets / done.step_s
        figures: dict[str, Any] = {
            name: value for name, value in result.figures.items() if name in StepMetrics.__struct_fields__
        }
        line = StepMetrics(
            step=state.step,
            attempt=self._session.paths.attempt,
            epoch=done.epoch,
            tokens=state.tokens_seen,
            loss=result.loss,
            lr=done.lr,
            grad_norm=result.grad_norm,
            step_s=done.step_s,
            data_s=done.clock.seconds("data"),
            forward_s=done.clock.seconds("forward"),
            backward_s=done.clock.seconds("backward"),
            optimizer_s=done.clock.seconds("optimizer"),
            wait_s=self._wait_s if self._session.accelerator.num_processes > 1 else None,
            checkpoint_s=self._checkpoint_s or None,
            tokens_per_s=rate,
            padding_share=done.padding_share,
            loss_scale=result.loss_scale,
            skipped=True if result.was_skipped else None,
            skipped_rows=done.rows if result.was_skipped and done.rows else None,
            **self._speed(rate / self._session.accelerator.num_processes),
            **self._memory(done.clock),
            **self._machine(),
            **_scores(evaluation),
            **figures,
        )
        self._wait_s = 0.0
        return line

    def told(self) -> None:
        """Counts checkpoints anew: the line was written."""
        self._checkpoint_s = 0.0

    def _speed(self, rate: float) -> dict[str, Any]:
        """`rate` is of tokens a second on one device."""
        plan = self._session.plan
        return {
            "tokens_per_s_per_gpu": rate,
            "mfu": model_flops_share(plan, rate),
            "model_tflops_per_s_per_gpu": rate * plan.chosen.speed.flops_per_token / TERA,
        }

    def _memory(self, clock: Clock) -> dict[str, Any]:
        """A CPU has no counters: those of the profiled step."""
        device, measured = self._session.accelerator.device, self._session.state.memory
        host = {"host_rss_bytes": anonymous_bytes(), "host_pinned_bytes": pinned_bytes()}
        if device.type != "cuda":
            return host | {
                "memory_allocated_bytes": measured.steady_allocated_bytes,
                "memory_peak_bytes": measured.peak_allocated_bytes,
            }
        return host | {
            "memory_allocated_bytes": torch.cuda.memory_allocated(device),
            "memory_reserved_bytes": torch.cuda.memory_reserved(device),
            "memory_peak_bytes": clock.highest_bytes,
            **{f"memory_peak_{phase}_bytes": clock.peaks.get(phase) for phase in PHASES[1:]},
        }

    def _machine(self) -> dict[str, Any]:
        card = self._card.newest
        traffic = None if self._traffic is None else self._traffic.since_last()
        return {
            "memory_device_bytes": card.used_bytes,
            "gpu_utilization": card.utilization,
            "gpu_power_w": card.power_w,
            "gpu_temperature_c": card.temperature_c,
            "gpu_throttle": card.throttle,
            "nvme_read_bytes": None if traffic is None else traffic[0],
            "nvme_written_bytes": None if traffic is None else traffic[1],
        }


def _scores(evaluation: Evaluation | None) -> dict[str, Any]:
    if evaluation is None:
        return {}
    return {
        "eval_loss": evaluation.loss,
        "eval_accuracy": evaluation.accuracy,
        "eval_reward_accuracy": evaluation.reward_accuracy,
        "eval_reward_margin": evaluation.reward_margin,
    }
