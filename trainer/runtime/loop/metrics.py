"""metrics.jsonl: one JSON object per optimizer step, written by rank 0, flushed so that a watcher sees it at once.

A later attempt appends; each line says its attempt, and the last line of a step counts.
"""

import json
import math
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from msgspec.structs import fields

from trainer.spec.value import Value


class StepMetrics(Value, frozen=True, kw_only=True):
    """One line. Times in seconds of rank 0, counts over all ranks, memory in bytes of rank 0."""

    step: int
    attempt: int
    epoch: float | None  # of a stream, whose length nobody knows, none
    tokens: int  # seen so far, padding not counted
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
    eval_loss: float | None = None
    eval_accuracy: float | None = None  # share of the held-out targets that are the most likely token
    eval_reward_accuracy: float | None = None  # of held-out pairs, under DPO
    eval_reward_margin: float | None = None
    reward_margin: float | None = None  # means over the pairs of the step, under DPO
    reward_accuracy: float | None = None
    reward_chosen: float | None = None
    reward_rejected: float | None = None
    logps_chosen: float | None = None
    logps_rejected: float | None = None
    loss_scale: float | None = None
    skipped: bool | None = None  # the weights are what they were before the step
    skipped_rows: tuple[int, ...] | None = None  # of the prepared data, in such a step; not of an fp16 overflow


# Left out of a line where there is nothing to say; what is not here is always there.
_OPTIONAL = frozenset({"epoch", *(field.name for field in fields(StepMetrics) if not field.required)})


class MetricsFile:
    """Appends lines on rank 0; on the other ranks it swallows them."""

    def __init__(self, path: Path, *, is_writer: bool) -> None:
        self._file = path.open("a", encoding="utf-8") if is_writer else None

    def append(self, metrics: StepMetrics) -> None:
        """Writes one line; what was not measured is left out, and what is no finite number is null."""
        if self._file is None:
            return
        named = {name: getattr(metrics, name) for name in metrics.__struct_fields__}
        line = {name: value for name, value in named.items() if not (value is None and name in _OPTIONAL)}
        with suppress(OSError):  # of a full disk: the line stays in the buffer, and goes with a later one
            self._file.write(json.dumps({name: _finite(value) for name, value in line.items()}) + "\n")
            self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()


def _finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
