"""Which module allocated what: the moments that modules begin and end, held against the profiler's allocations.

What is alive when the forward of a micro batch ends is what its backward needs. Under recomputation most of it is gone
by then, and what is left is each block's input.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import time_ns
from typing import Any, NamedTuple

from torch import nn
from torch._C._profiler import _EventType  # torch.profiler has it under no public name

from shardwise.trainer.runtime.run.blocks import blocks_of
from shardwise.trainer.spec.messages.profile import KeptBytes

_OUTSIDE = "outside of the model's modules (the loss)"


class Allocation(NamedTuple):
    """Bytes that were taken, or with a minus given back."""

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
            self._marks.append((time_ns(), name))

        return hook

    def _leaving(self) -> Any:  # noqa: ANN401  # see above
        def hook(*_: object) -> None:
            if len(self._stack) > 1:
                self._stack.pop()
            self._marks.append((time_ns(), self._stack[-1]))

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


def kept_by_module(
    allocations: Iterable[Allocation], marks: ModuleMarks, *, begin_ns: int, end_ns: int
) -> dict[str, int]:
    """Bytes by the module that allocated them between two moments, of what is alive at the second."""
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


def places_of(sizes: dict[str, int], blocks: Sequence[str]) -> tuple[KeptBytes, ...]:
    """Each by its place in the model: blocks count from 0, as in the names of weights."""
    found = []
    for module, num_bytes in sizes.items():
        number, inside = within_block(module, blocks)
        place = f"transformer block {number}, {inside}" if number is not None else module
        found.append(KeptBytes(module=module, place=place or _OUTSIDE, num_bytes=num_bytes))
    return tuple(found)


def over_blocks(sizes: dict[str, int], blocks: Sequence[str]) -> tuple[KeptBytes, ...]:
    """The modules of blocks added up by their names within one, those that keep most first."""
    sums: Counter[str] = Counter()
    for module, num_bytes in sizes.items():
        number, inside = within_block(module, blocks)
        if number is not None:
            sums[inside] += num_bytes
    return tuple(KeptBytes(module=name, place=name, num_bytes=size) for name, size in sums.most_common())


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
