"""The values of `shardwise doctor`: a finding is a level, one sentence with the values found, and the remedy."""

from collections.abc import Iterable
from enum import StrEnum

from shardwise.launch.terminal import wrapped
from shardwise.trainer.spec.errors import ExitCode
from shardwise.trainer.spec.units import format_seconds
from shardwise.trainer.spec.value import Value


class Level(StrEnum):
    """The worst first."""

    FAULT = "fault"  # training would fail
    WARNING = "warning"  # it would be slow, or fail later or for some jobs
    FINE = "fine"


class Finding(Value, frozen=True, kw_only=True):
    """A result of a check."""

    check: str = ""  # the row of `command.CHECKS` that found it
    level: Level
    sentence: str
    fix: str | None = None  # the command or the setting that fixes it; None if nothing is wrong


class Diagnosis(Value, frozen=True, kw_only=True):
    """Everything that was found, the worst first."""

    findings: tuple[Finding, ...]
    num_faults: int
    num_warnings: int

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.ENVIRONMENT if self.num_faults else ExitCode.DONE


def diagnosis_of(findings: Iterable[Finding]) -> Diagnosis:
    """The findings in order; a sentence of two checks appears once."""
    retained = list({finding.sentence: finding for finding in reversed(list(findings))}.values())[::-1]
    order = list(Level)
    return Diagnosis(
        findings=tuple(sorted(retained, key=lambda finding: order.index(finding.level))),
        num_faults=sum(finding.level is Level.FAULT for finding in retained),
        num_warnings=sum(finding.level is Level.WARNING for finding in retained),
    )


def fault(sentence: str, fix: str) -> Finding:
    """Training would fail."""
    return Finding(level=Level.FAULT, sentence=sentence, fix=fix)


def warning(sentence: str, fix: str) -> Finding:
    """Training would be slow, or fail later or for some jobs."""
    return Finding(level=Level.WARNING, sentence=sentence, fix=fix)


def fine(sentence: str) -> Finding:
    """The check passed."""
    return Finding(level=Level.FINE, sentence=sentence)


def explained(level: Level, message: str, *, otherwise: str) -> Finding:
    """A finding from the message of one of our errors or notes: the problem, then, on further lines or after a
    semicolon, the remedy; `otherwise` if the message has none."""
    first, _, rest = message.strip().partition("\n")
    if not rest:
        first, _, rest = message.strip().partition("; ")
    remedies = [line.strip().removeprefix("remedy: ").removeprefix("install it: ") for line in rest.splitlines()]
    fix = "; ".join(filter(None, remedies)) or otherwise
    return Finding(level=level, sentence=first.rstrip(";"), fix=fix)


_HEADS = {Level.FAULT: "faults: training would fail", Level.WARNING: "warnings", Level.FINE: "fine"}


def render_diagnosis(diagnosis: Diagnosis, *, seconds: float | None = None, width: int | None = None) -> str:
    """The findings by level, each with its remedy, and a last line such as `2 faults, 1 warning (8.59 s)`.

    Lines are wrapped at `width` columns; without it they are not.
    """
    lines: list[str] = []
    for level, head in _HEADS.items():
        found = [finding for finding in diagnosis.findings if finding.level is level]
        longest = max((len(finding.check) for finding in found), default=0)
        lines += [head] if found else []
        for finding in found:
            lines += wrapped(f"  {finding.check:<{longest}}  ", finding.sentence, width)
            lines += wrapped(f"  {'':<{longest}}  -> ", finding.fix, width) if finding.fix else []
        lines += [""] if found else []
    counts = ((diagnosis.num_faults, "fault"), (diagnosis.num_warnings, "warning"))
    last = ", ".join(f"{number or 'no'} {what}{'' if number == 1 else 's'}" for number, what in counts)
    return "\n".join([*lines, last + (f" ({format_seconds(seconds)})" if seconds is not None else "")])
