"""Allocated bytes over the time of one step, by phase.

Of a CPU it is the running sum of the profiler's memory events; of a GPU, whose counters tell no moments, three points a
phase: what was held when it began, its peak, put in its middle, and what it left.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from trainer.runtime.run.clock import Span
from trainer.spec.report import MemoryPoint

MAX_POINTS = 200
_NS = 1e-9


class Curve:
    """The running sum of (moment in ns, bytes allocated or freed), in order, above what was held before."""

    def __init__(self, events: Sequence[tuple[int, int]], held_bytes: int, spans: Sequence[Span]) -> None:
        self._held_bytes, self._spans = held_bytes, spans
        self._points = list(running_bytes(events, held_bytes, spans))

    def peaks(self) -> dict[str, int]:
        """The most that was allocated in each phase; one without an event has what was held when it began."""
        found: dict[str, int] = {}
        for span in self._spans:
            inside = [num_bytes for when, num_bytes, _ in self._points if span.begin_ns <= when <= span.end_ns]
            found[span.phase] = max([found.get(span.phase, 0), self._at(span.begin_ns), *inside])
        return found

    def timeline(self) -> tuple[MemoryPoint, ...]:
        """At most MAX_POINTS points; of those that are left out, the highest stays."""
        if not self._points:
            return ()
        begin = min([self._points[0][0], *(span.begin_ns for span in self._spans)])
        width = max(1, (self._points[-1][0] - begin) // MAX_POINTS + 1)
        slots = groupby(self._points, key=lambda point: (point[0] - begin) // width)
        highest = (max(slot, key=lambda point: point[1]) for _, slot in slots)
        return tuple(
            MemoryPoint(at_s=(when - begin) * _NS, allocated_bytes=num_bytes, phase=phase)
            for when, num_bytes, phase in highest
        )

    def _at(self, moment_ns: int) -> int:
        before = [num_bytes for when, num_bytes, _ in self._points if when <= moment_ns]
        return before[-1] if before else self._held_bytes


def running_bytes(
    events: Sequence[tuple[int, int]], held_bytes: int, spans: Sequence[Span]
) -> Iterator[tuple[int, int, str]]:
    """(moment, bytes allocated from then on, phase) of events in order."""
    running, place = held_bytes, 0
    for when, num_bytes in events:
        running += num_bytes
        while place < len(spans) and spans[place].end_ns < when:
            place += 1
        is_in = place < len(spans) and spans[place].begin_ns <= when
        yield when, running, spans[place].phase if is_in else ""


def timeline_of_spans(spans: Sequence[Span]) -> tuple[MemoryPoint, ...]:
    """Of phases that know their own bytes."""
    points = []
    for span in spans:
        middle = (span.begin_ns + span.end_ns) // 2
        counted = ((span.begin_ns, span.begin_bytes), (middle, span.peak_bytes), (span.end_ns, span.end_bytes))
        points += [
            MemoryPoint(at_s=(when - spans[0].begin_ns) * _NS, allocated_bytes=num_bytes, phase=span.phase)
            for when, num_bytes in counted
            if num_bytes is not None
        ]
    return tuple(points)
