"""One step of rank 0 under torch's profiler, for `shardwise profile`: files for its viewers, and the printed figures.

    RUN/profile/trace.json.gz           every operator with its time and its allocations, for Perfetto
    RUN/profile/memory-snapshot.pickle  on a GPU: every allocation with its stack, for PyTorch's memory viewer
    RUN/profile/memory-summary.txt      on a GPU: the caching allocator's tables
    RUN/profile/profile.json            the figures that the command prints

It is the last step of a short run: the steps before it were timed and measured without all this.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType  # torch.autograd has it under no public name
from torch.profiler import ProfilerActivity, profile

from shardwise.trainer.runtime.loop.memory_profile import room_for_a_profile
from shardwise.trainer.runtime.loop.session import Session
from shardwise.trainer.runtime.run.clock import Clock
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import FIGURES_FILE, PROFILE_FOLDER, OperatorTime, Plan, ProfileFigures

TRACE, SNAPSHOT, SUMMARY = "trace.json.gz", "memory-snapshot.pickle", "memory-summary.txt"
MOST_EVENTS = 200_000  # of a snapshot
_US = 1e-6


def is_traced(plan: Plan, step: int) -> bool:
    """True for the step that is profiled."""
    return plan.profile is not None and step == plan.schedule.num_steps


@contextmanager
def traced_step(session: Session, step: int, clock: Clock) -> Iterator[None]:
    """Profiles the block, which has to be one whole optimizer step, on the rank that writes for all."""
    request = session.plan.profile
    if not session.is_first or request is None:
        yield
        return
    folder, device = session.paths.run_dir / PROFILE_FOLDER, session.accelerator.device
    folder.mkdir(parents=True, exist_ok=True)
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    begin = time.perf_counter()
    with room_for_a_profile(), _recorded_history(folder, is_cuda=is_cuda):
        with profile(activities=activities, profile_memory=True) as profiler:
            yield
            clock.seconds("optimizer")  # waits for it
            step_s = time.perf_counter() - begin
        profiler.export_chrome_trace(str(folder / TRACE))
        operators = _operators(profiler, device.type)[: request.num_operators]
    if is_cuda:
        (folder / SUMMARY).write_text(torch.cuda.memory_summary(device), encoding="utf-8")
    figures = ProfileFigures(step=step, step_s=step_s, operators=operators, files=_files(device.type))
    codec.write(folder / FIGURES_FILE, figures)


@contextmanager
def _recorded_history(folder: Path, *, is_cuda: bool) -> Iterator[None]:
    """Makes a GPU's allocator record every allocation of the block, and writes that for PyTorch's viewer."""
    if not is_cuda:
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
    try:
        yield
        torch.cuda.memory._dump_snapshot(str(folder / SNAPSHOT))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def _operators(profiler: Any, device_type: str) -> tuple[OperatorTime, ...]:  # noqa: ANN401  # torch.profiler.profile, whose results are untyped
    """The operators, longest self time first."""
    found = [
        OperatorTime(
            name=average.key,
            num_calls=average.count,
            seconds=_US * (average.self_device_time_total if device_type == "cuda" else average.self_cpu_time_total),
        )
        for average in profiler.key_averages()
        if average.device_type == DeviceType.CPU  # an operator; its kernels are listed once more, as the device's
    ]
    return tuple(sorted((each for each in found if each.seconds > 0), key=lambda each: -each.seconds))


def _files(device_type: str) -> dict[str, str]:
    trace = {TRACE: "every operator with its time and its allocations; open it at https://ui.perfetto.dev"}
    if device_type != "cuda":
        return trace
    return trace | {
        SNAPSHOT: "every allocation with its stack; drop it on https://docs.pytorch.org/memory_viz",
        SUMMARY: "the tables of the caching allocator; plain text",
    }
