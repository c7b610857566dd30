"""How far a prediction may be off: a low, a likely and a high value of each of the three counters.

Live bytes carry the range of the closed form. Reserved and device bytes are estimated again with every line of the
overheads at its low and at its high end, so a machine whose lines were measured gets the narrower range.
"""

from msgspec.structs import asdict, replace

from trainer.planning.device import Device
from trainer.planning.memory import estimate_memory
from trainer.planning.memory.overheads import OVERHEADS, Line, OverheadTable
from trainer.planning.setting import Setting
from trainer.spec.model_shape import ModelShape
from trainer.spec.value import Value


class Range(Value, frozen=True, kw_only=True):
    """Bytes."""

    low: int
    likely: int
    high: int


class MemoryRanges(Value, frozen=True, kw_only=True):
    """Of one device at the peak of a step: torch's live bytes, its segments, and what nvidia-smi shows."""

    allocated: Range
    reserved: Range
    device: Range


def memory_ranges(
    shape: ModelShape, setting: Setting, device: Device, table: OverheadTable = OVERHEADS
) -> MemoryRanges:
    """The ranges of a setting's memory."""
    low, likely, high = (
        estimate_memory(shape, setting, device, each) for each in (_end(table, "low"), table, _end(table, "high"))
    )
    peak = likely.peak_allocated_bytes
    least, most = round(table.allocated.low * peak), round(table.allocated.high * peak)
    return MemoryRanges(
        allocated=Range(low=least, likely=peak, high=most),
        reserved=_around(low.peak_reserved_bytes, likely.peak_reserved_bytes, high.peak_reserved_bytes, least, most),
        device=_around(low.device_bytes, likely.device_bytes, high.device_bytes, least, most),
    )


def _around(low: int, likely: int, high: int, least: int, most: int) -> Range:
    """Never less than the live bytes may be."""
    return Range(low=min(likely, max(low, least)), likely=likely, high=max(high, most, likely))


def _end(table: OverheadTable, end: str) -> OverheadTable:
    lines = {name: line for name, line in asdict(table).items() if isinstance(line, Line)}
    return replace(table, **{name: replace(line, likely=getattr(line, end)) for name, line in lines.items()})
