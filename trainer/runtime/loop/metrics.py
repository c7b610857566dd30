"""metrics.jsonl: one JSON object per optimizer step, and how its figures are measured.

Rank 0 writes the file and flushes each line, so that a watcher sees it at once. A later attempt appends; each line
names its attempt, and the last line of a step counts.

Measuring has to be cheap, as it is paid for in every step: counters are read, no device is waited for, and no driver is
queried (a thread does that).
"""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import torch
from msgspec.structs import fields

from shardwise.trainer.runtime.loop.memory_profile import anonymous_bytes
from shardwise.trainer.runtime.loop.session import Session
from shardwise.trainer.runtime.loop.step import StepResult
from shardwise.trainer.runtime.run.clock import CardWatch, Clock, Traffic, pinned_bytes
from shardwise.trainer.runtime.run.state import model_flops_share
from shardwise.trainer.spec.report import Evaluation
from shardwise.trainer.spec.value import Value


class StepMetrics(Value, frozen=True, kw_only=True):
    """One line. Times in seconds of rank 0, counts over all ranks, memory in bytes of rank 0."""

    step: int
    attempt: int
    epoch: float | None  # None for a stream, whose length is unknown
    tokens: int  # that went through the model so far, without padding
    targets: int  # of these, learned
    loss: float
    lr: float
    grad_norm: float | None
    step_s: float
    data_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    targets_per_s: float  # learned tokens
    host_rss_bytes: int
    mfu: float | None = None  # model FLOPs over the device's dense peak; None where that is unknown
    model_tflops_per_s_per_gpu: float | None = None  # 10^12 FLOPs of the model, without what is recomputed
    padding_share: float | None = None  # of the positions that this rank puts through the model
    wait_s: float | None = None  # for the slowest rank, at the step's vote
    checkpoint_s: float | None = None  # that training stood still for saving since the line before
    memory_allocated_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    memory_peak_bytes: int | None = None
    memory_peak_forward_bytes: int | None = None  # allocated at most in a phase of this step, on a GPU
    memory_peak_backward_bytes: int | None = None
    memory_peak_optimizer_bytes: int | None = None
    memory_device_bytes: int | None = None  # used on the whole card, as nvidia-smi shows it
    host_pinned_bytes: int | None = None
    nvme_read_bytes: int | None = None  # of this process in this step, where state is offloaded to NVMe
    nvme_written_bytes: int | None = None
    gpu_utilization: float | None = None  # share of the last second in which a kernel ran
    gpu_power_w: float | None = None
    gpu_temperature_c: int | None = None
    gpu_throttle: str | None = None  # why clocks are held down
    gpu_idle_share: float | None = None  # of the sampled steps, on the line of the last: no kernel and no copy ran
    eval_loss: float | None = None
    eval_accuracy: float | None = None  # share of the held-out targets that are the most likely token
    eval_reward_accuracy: float | None = None  # of held-out pairs, under DPO
    eval_reward_margin: float | None = None
    router_aux_loss: float | None = None  # of the micro batches, weighted by their targets, without its coefficient
    reward_margin: float | None = None  # means over the pairs of the step, under DPO
    reward_accuracy: float | None = None
    reward_chosen: float | None = None
    reward_rejected: float | None = None
    logps_chosen: float | None = None
    logps_rejected: float | None = None
    loss_scale: float | None = None
    skipped: bool | None = None  # the weights are what they were before the step
    skipped_rows: tuple[int, ...] | None = None  # of the prepared data, in such a step; not of an fp16 overflow
    incidents: tuple[str, ...] | None = None  # that the first steps showed, as in the report


# Omitted from a line if None; the other fields are always present.
_OPTIONAL = frozenset({"epoch", *(field.name for field in fields(StepMetrics) if not field.required)})


_MAX_WAITING_BYTES = 16 << 20  # some 30,000 lines


class MetricsFile:
    """Appends lines on rank 0; on the other ranks it swallows them.

    On a full disk lines wait for a later one, up to `_MAX_WAITING_BYTES` of them.
    """

    def __init__(self, path: Path, *, is_writer: bool) -> None:
        self._file = path.open("ab", buffering=0) if is_writer else None
        self._waiting = b"\n" if is_writer and _ends_within_a_line(path) else b""

    def append(self, metrics: StepMetrics) -> None:
        """Writes one line; a figure that was not measured is omitted, and a number that is not finite is null."""
        if self._file is None:
            return
        named = {name: getattr(metrics, name) for name in metrics.__struct_fields__}
        line = {name: value for name, value in named.items() if not (value is None and name in _OPTIONAL)}
        if len(self._waiting) < _MAX_WAITING_BYTES:
            self._waiting += json.dumps({name: _finite(value) for name, value in line.items()}).encode() + b"\n"
        self._write(self._file)

    def _write(self, file: FileIO) -> None:
        with suppress(OSError):
            while self._waiting:
                self._waiting = self._waiting[file.write(self._waiting) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._write(self._file)
            with suppress(OSError):
                self._file.close()


def _ends_within_a_line(path: Path) -> bool:
    """True if an earlier attempt ended on a full disk, in the middle of a line."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


PHASES = ("data", "forward", "backward", "optimizer")
TERA = 10**12


class DoneStep(NamedTuple):
    """A step that was run, with its settings."""

    result: StepResult
    clock: Clock
    lr: float
    step_s: float
    padding_share: float
    rows: tuple[int, ...]  # that it passed over
    epoch: float | None
    incidents: tuple[str, ...] = ()
    idle_share: float | None = None  # of the GPU, in the step that ends a sample


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
        rate = result.num_tokens / done.step_s
        figures = {name: value for name, value in result.figures.items() if name in StepMetrics.__struct_fields__}
        line = StepMetrics(
            step=state.step,
            attempt=self._session.paths.attempt,
            epoch=done.epoch,
            tokens=state.tokens_seen,
            targets=state.targets_seen,
            loss=result.loss,
            lr=done.lr,
            grad_norm=result.grad_norm,
            step_s=done.step_s,
            **dict[str, Any]({f"{phase}_s": done.clock.seconds(phase) for phase in PHASES}),
            wait_s=self._wait_s if self._session.accelerator.num_processes > 1 else None,
            checkpoint_s=self._checkpoint_s or None,
            tokens_per_s=rate,
            targets_per_s=result.num_targets / done.step_s,
            padding_share=done.padding_share,
            loss_scale=result.loss_scale,
            skipped=True if result.was_skipped else None,
            skipped_rows=done.rows if result.was_skipped and done.rows else None,
            incidents=done.incidents or None,
            gpu_idle_share=done.idle_share,
            **self._speed(rate / self._session.accelerator.num_processes),
            **self._memory(done.clock),
            **self._machine(),
            **_scores(evaluation),
            **dict[str, Any](figures),
        )
        self._wait_s = 0.0
        return line

    def line_written(self) -> None:
        """Restarts the count of checkpoint time."""
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
