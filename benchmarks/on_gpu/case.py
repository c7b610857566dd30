"""Cases (a model, rows of one kind, settings of the job) and their results (predictions and measurements)."""

from enum import StrEnum
from typing import Any

import msgspec

from shardwise.trainer.spec.report import Figures, relative_difference
from shardwise.trainer.spec.value import Value

Row = dict[str, Any]  # one line of the log: plain JSON values


class Outcome(StrEnum):
    """How a case ended."""

    RAN = "ran"
    OUT_OF_MEMORY = "out of memory"
    REFUSED = "refused"  # the device or a library does not support it; the reason names which
    FAILED = "failed"


class RowKind(StrEnum):
    """The rows that a case trains on."""

    FULL = "full"  # every row has seq_len tokens
    SHORT = "short"  # an eighth of seq_len to all of it
    PAIRS = "pairs"  # prompts with a better and a worse answer, as text


class Case(Value, frozen=True, kw_only=True):
    """One configuration. Its name is unique within its part."""

    name: str
    model: str  # a preset of trainer/presets or a row of `models.OWN`, with random weights
    settings: dict[str, str] = {}  # of the job file: {"pin.precision": "bf16"}
    seq_len: int = 2048
    micro_batch: int | None = 1  # None: the planner's choice
    accumulation: int = 1
    vram_bytes: int | None = None  # the cap that --vram sets
    cap_share: float | None = None  # the cap as a share of the planned need, instead of `vram_bytes`
    must_fit: bool = False  # refused, as for a user, if no strategy fits; otherwise it runs even if it does not fit
    num_steps: int = 6  # two warm-up steps, one with measured memory, the others are timed
    rows: RowKind = RowKind.FULL
    engine: str | None = None  # an engine that the planner refuses on one rank, used instead of none

    @property
    def sequences_per_step(self) -> int:
        """Rows of the global batch."""
        return (self.micro_batch or 1) * self.accumulation


class CaseResult(Value, frozen=True, kw_only=True):
    """How a case ended. Bytes are of one device."""

    name: str
    outcome: Outcome
    reason: str | None = None
    strategy: str | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    checkpointing: str | None = None
    predicted: Figures = Figures()
    measured: Figures = Figures()
    peak_event: str | None = None
    need_bytes: int | None = None  # predicted: the smallest memory that works, context included
    usable_bytes: int | None = None
    facts: dict[str, str] = {}  # verified by the ranks after the first step
    losses: tuple[float, ...] = ()
    wall_s: float = 0.0  # of the whole run
    is_shared: bool = False  # other runs were on the card, so speed and device bytes are not its own

    @property
    def peak_error(self) -> float | None:
        """Relative error of the predicted peak, prediction / measurement - 1; None if no step was measured."""
        predicted, measured = (side.memory.peak_allocated_bytes for side in (self.predicted, self.measured))
        return predicted / measured - 1 if predicted and measured and self.outcome is Outcome.RAN else None

    @property
    def steady_error(self) -> float | None:
        """The same for the bytes allocated between steps."""
        predicted, measured = (side.memory.steady_allocated_bytes for side in (self.predicted, self.measured))
        return predicted / measured - 1 if predicted and measured and self.outcome is Outcome.RAN else None

    @property
    def peak_difference(self) -> float | None:
        """(measured - predicted) / predicted of the peak; None if no step was measured."""
        predicted, measured = (side.memory.peak_allocated_bytes for side in (self.predicted, self.measured))
        return relative_difference(predicted, measured) if self.outcome is Outcome.RAN else None

    @property
    def speed_difference(self) -> float | None:
        """The same for the tokens per second."""
        predicted = self.predicted.speed.tokens_per_s_per_gpu
        return relative_difference(predicted, self.tokens_per_s) if self.outcome is Outcome.RAN else None

    @property
    def tokens_per_s(self) -> float | None:
        """Measured tokens per second; None if other runs shared the card."""
        return self.measured.speed.tokens_per_s_per_gpu

    @property
    def speed_error(self) -> float | None:
        """Relative error of the predicted tokens per second."""
        predicted, measured = self.predicted.speed.tokens_per_s_per_gpu, self.tokens_per_s
        return predicted / measured - 1 if predicted and measured and self.outcome is Outcome.RAN else None


def row_of(result: CaseResult, **more: object) -> Row:
    """A result as a line of the log, without empty values; `more` are figures of its part."""
    return {"result": _without_empty(msgspec.to_builtins(result)), "outcome": str(result.outcome), **more}


def result_of(row: Row) -> CaseResult | None:
    """The result in a line of the log; None if the step raised, or is of another kind."""
    return msgspec.convert(row["result"], CaseResult) if "result" in row else None


def without_shared_figures(row: Row) -> Row:
    """A row without speed and device bytes, which other runs on the card change."""
    if "result" not in row:
        return row
    measured = row["result"].get("measured", {})
    memory = {name: value for name, value in measured.get("memory", {}).items() if name != "device_bytes"}
    return row | {"result": row["result"] | {"measured": {"memory": memory}, "is_shared": True}}


def _without_empty(value: Any) -> Any:  # noqa: ANN401  # any JSON value
    if not isinstance(value, dict):
        return value
    items = {key: _without_empty(item) for key, item in value.items()}
    return {key: item for key, item in items.items() if item not in (None, {}, [], ())}
