"""How sure a plan's figures are, and from what: sentences for the notes of a plan."""

from collections.abc import Iterator, Sequence

from trainer.planning.calibrate import Correction, Corrections, Factor
from trainer.planning.device import Device
from trainer.planning.tables.gpu_specs import MIG_MARK
from trainer.spec.hardware import DeviceKind
from trainer.spec.plan import Candidate, TrialResult
from trainer.spec.units import format_seconds

# What the closed forms miss on published runs of other people (`python benchmarks/accuracy.py`), as nine in ten; a
# card without NVLink, one that is rated by what its driver reports, and a CPU, depend on more that no datasheet says.
WELL_KNOWN_CARDS = ("A100", "H100", "H200")
WELL_KNOWN_SPEED, OTHER_SPEED, ASSUMED_SPEED = 0.15, 0.5, 1.0
MEMORY = "2 %"


def certainty_words(corrections: Corrections, chosen: Candidate, device: Device) -> tuple[str, ...]:
    """Certainty of the predictions for `chosen`, from earlier runs or, without any, from published accuracy."""
    return tuple(_words(corrections, chosen, device))


def trial_words(trials: Sequence[TrialResult]) -> tuple[str, ...]:
    """Measurements of trials beside their predictions, in the order they ran; empty without trials."""
    timed = [
        (trial.strategy, trial.step_s, trial.predicted_step_s)
        for trial in trials
        if trial.step_s is not None and trial.predicted_step_s is not None
    ]
    if not timed:
        return ()
    measured = ", ".join(f"{name} {format_seconds(step_s)}" for name, step_s, _ in timed)
    expected = ", ".join(format_seconds(step_s) for _, _, step_s in timed)
    return (f"trial: {measured} a step; predicted {expected}",)


def usual_error(device: Device) -> float | None:
    """By how much, as a share, a step may take longer or shorter than predicted before any run on this device.

    None: the speed of the device is not known, and nothing was predicted.
    """
    if not device.has_known_speed:
        return None
    if device.kind is DeviceKind.CPU or device.is_rated_by_driver:
        return ASSUMED_SPEED
    return WELL_KNOWN_SPEED if _is_well_known(device) else OTHER_SPEED


def _words(corrections: Corrections, chosen: Candidate, device: Device) -> Iterator[str]:
    correction = corrections.of(chosen.strategy, chosen.method)
    is_tried = chosen.strategy.name in corrections.tried  # the trial's own sentence says what was measured
    if correction.step.num_runs and not is_tried:
        like = "like this one" if correction.is_of_class else "in this precision"
        yield f"step time {_applied(correction.step, like)}"
    if correction.peak.num_runs:
        yield f"peak memory {_applied(correction.peak, 'like this one')}"
    if not correction.step.num_runs and not is_tried:
        unknown = "no run like this one" if corrections.num_unused or correction.peak.num_runs else "no run"
        expected = [words for words in (_speed_words(device), _memory_words(correction)) if words]
        if expected:
            yield f"{unknown} on this device yet: expect {', '.join(expected)}"
    if corrections.num_unused:
        runs = _runs(corrections.num_unused)
        yield f"{runs} on this device not used: another version, or a model of another size"


def _applied(factor: Factor, like: str) -> str:
    spread = "" if factor.spread is None else f" (spread {factor.spread:.1%})"
    runs = f"{_runs(factor.num_runs)} {like} on this device{spread}"
    if abs(factor.value - 1) < 0.0005:
        return f"not corrected: {runs} measured {factor.measured:.3f} of it"
    return f"corrected by {factor.value:.3g} from {runs}, which measured {factor.measured:.3g} of what was predicted"


def _runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number} runs"


def _speed_words(device: Device) -> str | None:
    error = usual_error(device)
    if error is None:
        return None
    return "tokens/s within " + ("a factor of 2" if error == ASSUMED_SPEED else f"+-{error:.0%}".replace("%", " %"))


def _memory_words(correction: Correction) -> str | None:
    return None if correction.peak.num_runs else f"peak memory within {MEMORY}"


def _is_well_known(device: Device) -> bool:
    """No published run was made on a MIG slice of one of these cards."""
    return device.name.startswith(WELL_KNOWN_CARDS) and MIG_MARK not in device.name
