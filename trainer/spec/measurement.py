"""What a measuring process writes for the probe that started it: figures, and a line for each that is missing."""

from trainer.spec.hardware import MeasuredRates
from trainer.spec.value import Value


class Measurement(Value, frozen=True, kw_only=True):
    """The figures of one device so far; a process that is stopped leaves those it had."""

    rates: MeasuredRates = MeasuredRates()
    notes: tuple[str, ...] = ()


class GatherResult(Value, frozen=True, kw_only=True):
    """What one rank saw of an all-gather."""

    bytes_per_s: int  # each way through its device
    is_correct: bool
