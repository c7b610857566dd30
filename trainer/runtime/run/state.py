"""What changes while a run goes on, on one rank: how far it is, what it measured, what went wrong on the way."""

from dataclasses import dataclass, field
from statistics import median

from trainer.runtime.run.spikes import SpikeRecord
from trainer.spec.plan import Plan
from trainer.spec.report import Engaged, Evaluation, Figures, MemoryFigures, SpeedFigures

SKIPPED_STEPS = 2  # the first ones allocate and warm caches


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
    incidents: list[str] = field(default_factory=list)
    spikes: SpikeRecord = field(default_factory=SpikeRecord)
    fault: str | None = None  # why the last step was not to be taken
    last_loss: float | None = None  # of the last step, whatever it was
    prompt: str | None = None
    sample_before: str | None = None
    sample_after: str | None = None
    steady_steps: list[tuple[float, int]] = field(default_factory=list)  # (seconds, tokens)
    steady_parts: list[dict[str, float]] = field(default_factory=list)  # seconds of their phases

    @property
    def best_step(self) -> int | None:
        """Step of the lowest evaluation loss."""
        return min(self.evaluations, key=lambda evaluation: evaluation.loss).step if self.evaluations else None


def measured_figures(state: RunState, plan: Plan) -> Figures:
    """The run's side of the comparison: medians over the steady steps."""
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
    """Model FLOPs utilisation at this rate; None where the device's peak is unknown."""
    speed = plan.chosen.speed
    if speed.peak_flops_per_s is None:
        return None
    return tokens_per_s_per_gpu * speed.flops_per_token / speed.peak_flops_per_s
