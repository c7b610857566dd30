"""A case: a model, rows of one length, settings of the job. And what became of it, predicted beside measured."""

from enum import StrEnum

from trainer.spec.report import Figures
from trainer.spec.value import Value


class Outcome(StrEnum):
    """What became of a case."""

    RAN = "ran"
    OUT_OF_MEMORY = "out of memory"
    REFUSED = "refused"  # there is no such thing on this device; the reason says which
    FAILED = "failed"


class Case(Value, frozen=True, kw_only=True):
    """One configuration; its name is its own among those of a piece."""

    name: str
    model: str  # a preset of trainer/presets, with drawn weights
    settings: dict[str, str] = {}  # of the job, as on the command line: {"pin.precision": "bf16"}
    seq_len: int = 2048
    micro_batch: int | None = 1  # None: the planner's choice
    accumulation: int = 1
    vram_bytes: int | None = None  # the cap that --vram sets
    num_steps: int = 6  # two that allocate and warm up, one whose memory is measured, the others are timed

    @property
    def sequences_per_step(self) -> int:
        """Rows of the global batch."""
        return (self.micro_batch or 1) * self.accumulation


class CaseResult(Value, frozen=True, kw_only=True):
    """A case after it ran, or did not. Bytes are of one device."""

    case: Case
    outcome: Outcome
    reason: str | None = None
    strategy: str | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    predicted: Figures = Figures()
    measured: Figures = Figures()
    need_bytes: int | None = None  # predicted, with the margin that a plan keeps
    usable_bytes: int | None = None
    facts: dict[str, str] = {}  # what was seen to run
    losses: tuple[float, ...] = ()  # of every step
    step_s: tuple[float, ...] = ()  # of every step, the slow first ones too
    wall_s: float = 0.0  # of the whole run, start to end

    @property
    def said_fits(self) -> bool | None:
        """What the plan said of it; None where there was none."""
        if self.need_bytes is None or self.usable_bytes is None:
            return None
        return self.need_bytes <= self.usable_bytes
