"""The rows of piece `prediction`: of each case what was predicted and measured, and the figures that are compared.

An error is prediction / measurement - 1. What a device does not count (a CPU has neither reserved nor device bytes)
has no error. Rows hold no path of the machine.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from on_gpu.case import CaseResult, Outcome
from on_gpu.pieces import Row
from trainer.spec.hardware import Hardware
from trainer.spec.report import Figures
from trainer.spec.strategy import Method
from trainer.spec.value import Value

CASE, CAP, PROBE, ALLOCATOR = "case", "cap", "probe", "allocator"  # kinds of rows


class CaseRow(Value, frozen=True, kw_only=True):
    """A case that was planned and run, with everything that its prediction was made from."""

    kind: str = CASE
    outcome: Outcome
    result: CaseResult
    is_rehearsal: bool
    device: str
    versions: dict[str, str] = {}
    environment: dict[str, str] = {}  # what was set for this run alone
    job: dict[str, str] = {}  # relative to the preset
    model_config: dict[str, Any] | None = None  # None: the preset's own
    num_rows: int = 0
    hardware: Hardware | None = None  # None where there was no plan
    events: dict[str, int] = {}  # predicted bytes of every event of a step
    peak_event: str | None = None
    context_bytes: int = 0  # of the process beside torch's allocator, predicted

    @property
    def name(self) -> str:
        return self.result.case.name

    @property
    def method(self) -> Method:
        return Method(self.result.case.settings["train.method"])

    @property
    def is_of_one_memory(self) -> bool:
        """Whether what is offloaded counts as the rest does, which no prediction means: a CPU has but host RAM."""
        settings = self.result.case.settings
        moved = (settings.get("pin.offload", "none"), settings.get("pin.activation_offload", "false"))
        return self.is_rehearsal and moved != ("none", "false")


class Figure(NamedTuple):
    """A figure that is predicted and measured."""

    name: str
    of: Callable[[Figures], float | None]
    is_bytes: bool = True

    def predicted(self, row: CaseRow) -> float | None:
        return self.of(row.result.predicted)

    def measured(self, row: CaseRow) -> float | None:
        return self.of(row.result.measured) if row.outcome is Outcome.RAN else None

    def error(self, row: CaseRow) -> float | None:
        """Of a case that ran; None where either side has no such figure, or both are not of the same memory."""
        if self.is_bytes and row.is_of_one_memory:
            return None
        predicted, measured = self.predicted(row), self.measured(row)
        return predicted / measured - 1 if predicted and measured else None


STEADY = Figure("steady", lambda found: found.memory.steady_allocated_bytes)
PEAK = Figure("peak allocated", lambda found: found.memory.peak_allocated_bytes)
RESERVED = Figure("reserved", lambda found: found.memory.peak_reserved_bytes)
DEVICE = Figure("device", lambda found: found.memory.device_bytes)
STEP = Figure("step time", lambda found: found.speed.step_s, is_bytes=False)
TOKENS = Figure("tokens/s", lambda found: found.speed.tokens_per_s_per_gpu, is_bytes=False)
FIGURES = (STEADY, PEAK, RESERVED, DEVICE, STEP, TOKENS)


def row_of(value: Value) -> Row:
    """A value as plain JSON."""
    plain: Row = msgspec.to_builtins(value)
    return plain


def case_rows(rows: Mapping[str, Row], kind: str = CASE) -> tuple[CaseRow, ...]:
    """The cases among the rows, in their order; a step that raised is none."""
    return tuple(msgspec.convert(row, CaseRow) for row in _of_kind(rows, kind))


def _of_kind(rows: Mapping[str, Row], kind: str) -> Iterator[Row]:
    return (row for row in rows.values() if row.get("kind") == kind and "error" not in row)


def raised(rows: Mapping[str, Row]) -> tuple[str, ...]:
    """The steps that raised, each with its error."""
    return tuple(f"{name}: {row['error']}" for name, row in rows.items() if "error" in row)


def is_rehearsal(rows: Mapping[str, Row]) -> bool:
    """Whether any of the rows is of a rehearsal."""
    return any(row.get("is_rehearsal") for row in rows.values())


def without_paths(text: str | None, *folders: Path) -> str | None:
    """A message without the folders of the machine that it names."""
    if text is None:
        return None
    for number, folder in enumerate(sorted(folders, key=lambda path: -len(str(path)))):
        text = text.replace(f"{folder}/", "").replace(str(folder), "." if number == 0 else "~")
    return text
