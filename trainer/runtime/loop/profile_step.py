"""One step of rank 0 under torch's profiler, for `shardwise profile`: files for its viewers, and the printed figures.

    RUN/profile/trace.json.gz           every operator with its time, for Perfetto
    RUN/profile/memory-snapshot.pickle  on a GPU: every allocation with its stack, for PyTorch's memory viewer
    RUN/profile/memory-summary.txt      on a GPU: the caching allocator's tables
    RUN/profile/memory-timeline.csv     on a CPU: allocated bytes after each event, by phase
    RUN/profile/profile.json            the figures that the command prints

It is the last step of a short run: the steps before it were timed and measured without all this. The profiler's
allocations are attributed to modules by the times at which these begin and end. Memory that is allocated when the
forward of a micro batch ends is what its backward needs; under recomputation little more than the input of each block.
"""

import csv
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._autograd import DeviceType  # torch.autograd has it under no public name
from torch._C._profiler import _EventType  # torch.profiler has it under no public name
from torch.profiler import ProfilerActivity, profile

from shardwise.trainer.runtime.loop.memory_profile import room_for_a_profile, running_bytes
from shardwise.trainer.runtime.loop.session import Session
from shardwise.trainer.runtime.memory.recomputation import blocks_of
from shardwise.trainer.runtime.models.build import plain_model
from shardwise.trainer.runtime.run.clock import Clock, Span
from shardwise.trainer.spec import codec
from shardwise.trainer.spec.plan import (
    FIGURES_FILE,
    PROFILE_FOLDER,
    OperatorTime,
    Plan,
    ProfileFigures,
    RetainedBytes,
)

TRACE, SNAPSHOT, SUMMARY, TIMELINE = (
    "trace.json.gz", "memory-snapshot.pickle", "memory-summary.txt", "memory-timeline.csv"
)  # fmt: skip
MOST_EVENTS = 200_000  # of a snapshot
_US = 1e-6
_OUTSIDE = "outside of the model's modules (the loss)"


def is_traced(plan: Plan, step: int) -> bool:
    """True for the step that is profiled."""
    return plan.profile is not None and step == plan.schedule.num_steps


@contextmanager
def traced_step(session: Session, step: int, clock: Clock) -> Iterator[None]:
    """Profiles the block, which has to be one whole optimizer step, on the rank that writes for all."""
    if not session.is_first:
        yield
        return
    folder, device = session.paths.run_dir / PROFILE_FOLDER, session.accelerator.device
    folder.mkdir(parents=True, exist_ok=True)
    model, marks, num_spans = plain_model(session.model), ModuleMarks(), len(clock.spans)
    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    begin = time.perf_counter()
    hooks = nullcontext() if session.plan.chosen.compile else marks.noted(model)  # a hook would compile blocks again
    with room_for_a_profile(), _recorded_history(folder, is_cuda=is_cuda), hooks:
        with profile(activities=activities, profile_memory=True) as profiler:
            yield
            clock.seconds("optimizer")  # waits for it
            step_s = time.perf_counter() - begin
        allocations = allocations_of(profiler, device.type)
        profiler.export_chrome_trace(str(folder / TRACE))
        figures = _figures(session, step, step_s, allocations, marks, clock.spans[num_spans:], profiler)
    if is_cuda:
        (folder / SUMMARY).write_text(torch.cuda.memory_summary(device), encoding="utf-8")
    else:
        _write_timeline(folder / TIMELINE, allocations, clock.spans[num_spans:])
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


def _figures(
    session: Session,
    step: int,
    step_s: float,
    allocations: "Sequence[Allocation]",
    marks: "ModuleMarks",
    spans: Sequence[Span],
    profiler: Any,  # noqa: ANN401  # torch.profiler.profile, whose results are untyped
) -> ProfileFigures:
    request, device_type = session.plan.profile, session.accelerator.device.type
    assert request is not None
    forward = next(span for span in spans if span.phase == "forward")
    blocks = block_names(plain_model(session.model))
    retained = retained_by_module(allocations, marks, begin_ns=forward.begin_ns, end_ns=forward.end_ns)
    return ProfileFigures(
        step=step,
        step_s=step_s,
        retained_bytes=sum(retained.values()),
        retained=places_of(retained, blocks)[: request.num_modules],
        retained_in_all_blocks=over_blocks(retained, blocks)[: request.num_modules],
        operators=_operators(profiler, device_type)[: request.num_operators],
        files=_files(device_type),
    )


def _operators(profiler: Any, device_type: str) -> tuple[OperatorTime, ...]:  # noqa: ANN401  # see above
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
    trace = {TRACE: "every operator with its time; open it at https://ui.perfetto.dev"}
    if device_type == "cuda":
        return trace | {
            SNAPSHOT: "every allocation with its stack; drop it on https://docs.pytorch.org/memory_viz",
            SUMMARY: "the tables of the caching allocator; plain text",
        }
    return trace | {TIMELINE: "allocated bytes after each event of the allocator, by phase; for a spreadsheet"}


def _write_timeline(path: Path, allocations: "Sequence[Allocation]", spans: Sequence[Span]) -> None:
    """Bytes above those held when the step began."""
    events = [(each.at_ns, each.num_bytes) for each in allocations]
    begin_ns = min([span.begin_ns for span in spans] + [when for when, _ in events[:1]])
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(("microseconds", "bytes_above_the_start", "phase"))
        writer.writerows(
            ((when - begin_ns) // 1000, num_bytes, phase) for when, num_bytes, phase in running_bytes(events, 0, spans)
        )


class Allocation(NamedTuple):
    """Allocated bytes; negative if they were freed."""

    at_ns: int
    pointer: int
    num_bytes: int


class ModuleMarks:
    """Which module was running when, by its path; empty outside of all."""

    def __init__(self) -> None:
        self._stack: list[str] = [""]
        self._marks: list[tuple[int, str]] = []

    @contextmanager
    def noted(self, model: nn.Module) -> Iterator[None]:
        """Notes the modules of `model` for a block."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._entering(name)))
            handles.append(module.register_forward_hook(self._leaving(), always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def at(self, moment_ns: int) -> str:
        """The innermost module that was running."""
        place = bisect_right(self._marks, moment_ns, key=lambda mark: mark[0])
        return self._marks[place - 1][1] if place else ""

    def _entering(self, name: str) -> Any:  # noqa: ANN401  # a hook of torch, whose arguments are anything
        def hook(*_: object) -> None:
            self._stack.append(name)
            self._marks.append((time.time_ns(), name))

        return hook

    def _leaving(self) -> Any:  # noqa: ANN401  # see above
        def hook(*_: object) -> None:
            if len(self._stack) > 1:
                self._stack.pop()
            self._marks.append((time.time_ns(), self._stack[-1]))

        return hook


def allocations_of(profiler: Any, device_type: str) -> list[Allocation]:  # noqa: ANN401  # torch.profiler.profile, whose results are untyped
    """The allocations on one kind of device, in order."""
    events = _walk(profiler.profiler.kineto_results.experimental_event_tree())
    found = [
        Allocation(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
        for event in events
        if event.tag == _EventType.Allocation and event.extra_fields.device.type == device_type
    ]
    return sorted(found)


def retained_by_module(
    allocations: Iterable[Allocation], marks: ModuleMarks, *, begin_ns: int, end_ns: int
) -> dict[str, int]:
    """Bytes that were allocated between two moments and are alive at the second, by module."""
    alive: dict[int, Allocation] = {}
    for allocation in allocations:
        if not begin_ns <= allocation.at_ns <= end_ns:
            continue
        if allocation.num_bytes > 0:
            alive[allocation.pointer] = allocation
        else:
            alive.pop(allocation.pointer, None)
    sizes: Counter[str] = Counter()
    for allocation in alive.values():
        sizes[marks.at(allocation.at_ns)] += allocation.num_bytes
    return dict(sizes.most_common())


def block_names(model: nn.Module) -> list[str]:
    """The paths of a model's blocks, in the order they run."""
    names = {module: name for name, module in model.named_modules()}
    return [names[block] for block in blocks_of(model)]


def places_of(sizes: dict[str, int], blocks: Sequence[str]) -> tuple[RetainedBytes, ...]:
    """Each by its place in the model: blocks count from 0, as in the names of weights."""
    found = []
    for module, num_bytes in sizes.items():
        number, inside = within_block(module, blocks)
        place = f"transformer block {number}, {inside}" if number is not None else module
        found.append(RetainedBytes(module=module, place=place or _OUTSIDE, num_bytes=num_bytes))
    return tuple(found)


def over_blocks(sizes: dict[str, int], blocks: Sequence[str]) -> tuple[RetainedBytes, ...]:
    """The modules of all blocks added up by their names within one, the largest first."""
    sums: Counter[str] = Counter()
    for module, num_bytes in sizes.items():
        number, inside = within_block(module, blocks)
        if number is not None:
            sums[inside] += num_bytes
    return tuple(RetainedBytes(module=name, place=name, num_bytes=size) for name, size in sums.most_common())


def within_block(module: str, blocks: Sequence[str]) -> tuple[int | None, str]:
    """(3, mlp.down_proj) of `model.layers.3.mlp.down_proj`; (None, the path) outside of blocks."""
    for number, block in enumerate(blocks):
        if module == block:
            return number, "the block itself"
        if module.startswith(f"{block}."):
            return number, module.removeprefix(f"{block}.")
    return None, module


def _walk(events: Iterable[Any]) -> Iterator[Any]:
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        yield event
        waiting += event.children
