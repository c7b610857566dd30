"""What `doctor` found, as text: faults first, each with what mends it; the last line sums up."""

from collections.abc import Sequence

from launch.doctor.finding import Diagnosis, Finding, Level
from trainer.spec.units import format_seconds

_HEADS = {Level.FAULT: "faults: training would fail", Level.WARNING: "warnings", Level.FINE: "fine"}


def render_diagnosis(diagnosis: Diagnosis, *, seconds: float | None = None) -> str:
    """All of it."""
    lines: list[str] = []
    for level, head in _HEADS.items():
        found = [finding for finding in diagnosis.findings if finding.level is level]
        if found:
            lines += [head, *_section(found), ""]
    took = f" ({format_seconds(seconds)})" if seconds is not None else ""
    return "\n".join([*lines, f"{summary(diagnosis)}{took}"])


def summary(diagnosis: Diagnosis) -> str:
    """`2 faults, 1 warning`."""
    return f"{_counted(diagnosis.num_faults, 'fault')}, {_counted(diagnosis.num_warnings, 'warning')}"


def _section(found: Sequence[Finding]) -> list[str]:
    width = max(len(finding.check) for finding in found)
    lines = []
    for finding in found:
        lines.append(f"  {finding.check:<{width}}  {finding.sentence}")
        lines += [f"  {'':<{width}}  -> {finding.fix}"] if finding.fix else []
    return lines


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
