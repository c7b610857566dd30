"""What a check of `shardwise doctor` found: how bad it is, one sentence with the values seen, and what mends it."""

from collections.abc import Iterable
from enum import StrEnum

from trainer.spec.errors import ExitCode
from trainer.spec.value import Value


class Level(StrEnum):
    """The worst first."""

    FAULT = "fault"  # training would fail
    WARNING = "warning"  # it would be slow, or fail later or for some jobs
    FINE = "fine"


class Finding(Value, frozen=True, kw_only=True):
    """One thing that a check has to say."""

    check: str = ""  # the row of the table in `doctor_checks` that found it
    level: Level
    sentence: str
    fix: str | None = None  # the command or the setting that mends it; None where nothing has to be


class Diagnosis(Value, frozen=True, kw_only=True):
    """Everything that was found, the worst first."""

    findings: tuple[Finding, ...]
    num_faults: int
    num_warnings: int

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.ENVIRONMENT if self.num_faults else ExitCode.DONE


def diagnosis_of(findings: Iterable[Finding]) -> Diagnosis:
    """The findings in order; a sentence that two checks came to stands once."""
    kept = list({finding.sentence: finding for finding in reversed(list(findings))}.values())[::-1]
    order = list(Level)
    return Diagnosis(
        findings=tuple(sorted(kept, key=lambda finding: order.index(finding.level))),
        num_faults=sum(finding.level is Level.FAULT for finding in kept),
        num_warnings=sum(finding.level is Level.WARNING for finding in kept),
    )


def fault(sentence: str, fix: str) -> Finding:
    """Training would fail."""
    return Finding(level=Level.FAULT, sentence=sentence, fix=fix)


def warning(sentence: str, fix: str) -> Finding:
    """Worth knowing before something is started."""
    return Finding(level=Level.WARNING, sentence=sentence, fix=fix)


def fine(sentence: str) -> Finding:
    """Looked at, and as it should be."""
    return Finding(level=Level.FINE, sentence=sentence)


def explained(level: Level, message: str, *, otherwise: str) -> Finding:
    """A finding from the words of one of our errors or notes: what is wrong, then, on further lines or after a
    semicolon, the remedy; `otherwise` where they bring none."""
    first, _, rest = message.strip().partition("\n")
    if not rest:
        first, _, rest = message.strip().partition("; ")
    words = [line.strip().removeprefix("remedy: ").removeprefix("install it: ") for line in rest.splitlines()]
    fix = "; ".join(word for word in words if word) or otherwise
    return Finding(level=level, sentence=first.rstrip(";"), fix=fix)


def fault_of(message: str, *, otherwise: str) -> Finding:
    """A fault from the words of one of our errors."""
    return explained(Level.FAULT, message, otherwise=otherwise)
