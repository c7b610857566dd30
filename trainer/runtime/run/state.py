"""The mutable state of a run on one rank: progress, measurements, and the incidents so far."""

from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import NamedTuple

from trainer.runtime.run.spikes import SpikeRecord
from trainer.spec.plan import Plan
from trainer.spec.report import Engaged, Evaluation, Figures, MemoryFigures, SpeedFigures

SKIPPED_STEPS = 2  # the first ones allocate and warm caches


class IncidentKind(StrEnum):
    """The kinds of incidents that are counted, repeated or replaced; all others are `OTHER`."""

    STEP_NOT_TAKEN = "step_not_taken"
    MORE_STEPS_NOT_TAKEN = "more_steps_not_taken"
    NO_CHECKPOINTS = "no_checkpoints"
    BAD_ROWS = "bad_rows"
    OTHER = "other"


class Incident(NamedTuple):
    """One line of the report on something unusual."""

    text: str
    kind: IncidentKind


class IncidentLog:
    """The incidents of a run on one rank, in order."""

    def __init__(self) -> None:
        self._entries: list[Incident] = []

    @property
    def texts(self) -> list[str]:
        """The lines for the report."""
        return [entry.text for entry in self._entries]

    def note(self, text: str, kind: IncidentKind = IncidentKind.OTHER) -> None:
        """Appends an incident."""
        self._entries.append(Incident(text, kind))

    def replace(self, text: str, kind: IncidentKind) -> None:
        """Appends an incident and removes the earlier ones of its kind."""
        self._entries = [entry for entry in self._entries if entry.kind is not kind]
        self.note(text, kind)

    def count(self, kind: IncidentKind) -> int:
        """Number of incidents of a kind."""
        return sum(entry.kind is kind for entry in self._entries)


@dataclass(slots=True)
class RunState:
    """Mutable, one per rank; a report can be made of it at any moment, also in the middle of a failure."""

    step: int = 0  # optimizer steps done
    tokens_seen: int = 0
    final_loss: float | None = None
    resumed_from_step: int | None = None
    checkpoint: str | None = None  # newest committed, relative to the run directory
    export: str | None = None
    engaged: Engaged | None = None
    memory: MemoryFigures = field(default_factory=MemoryFigures)
    evaluations: list[Evaluation] = field(default_factory=list)
    log: IncidentLog = field(default_factory=IncidentLog)
    spikes: SpikeRecord = field(default_factory=SpikeRecord)
    fault: str | None = None  # of the last step, if it was not taken
    last_loss: float | None = None  # of the last step, taken or not
    prompt: str | None = None
    sample_before: str | None = None
    sample_after: str | None = None
    steady_steps: list[tuple[float, int]] = field(default_factory=list)  # (seconds, tokens)
    steady_parts: list[dict[str, float]] = field(default_factory=list)  # seconds of their phases

    @property
    def incidents(self) -> list[str]:
        """The lines of the incidents so far."""
        return self.log.texts

    @property
    def best_step(self) -> int | None:
        """Step of the lowest evaluation loss."""
        return min(self.evaluations, key=lambda evaluation: evaluation.loss).step if self.evaluations else None


def measured_figures(state: RunState, plan: Plan) -> Figures:
    """The measured figures: medians over the steady steps."""
    if not state.steady_steps:
        return Figures(memory=state.memory)
    step_s = median(seconds for seconds, _ in state.steady_steps)
    rate = median(tokens / seconds for seconds, tokens in state.steady_steps) / plan.chosen.num_ranks
    return Figures(
        memory=state.memory,
        speed=SpeedFigures(
            step_s=step_s, tokens_per_s_per_gpu=rate, mfu=model_flops_share(plan, rate), parts=_median_parts(state)
        ),
    )


def _median_parts(state: RunState) -> dict[str, float]:
    names = state.steady_parts[0] if state.steady_parts else ()
    return {name: median(parts[name] for parts in state.steady_parts) for name in names}


def model_flops_share(plan: Plan, tokens_per_s_per_gpu: float) -> float | None:
    """Model FLOPs utilisation at this rate; None if the device's peak is unknown."""
    speed = plan.chosen.speed
    if speed.peak_flops_per_s is None:
        return None
    return tokens_per_s_per_gpu * speed.flops_per_token / speed.peak_flops_per_s
