"""What a sink is: something outside the run that is told of it, and may fail, hang or vanish without the run noticing.

No sink runs in a process that trains. The supervisor starts one process for all of them (`sink_start`), which reads the
run directory (`sink_reader`) and feeds each sink from a thread of its own (`sink_process`). To add a sink: a class with
these methods, and a row in `sink_process.sinks_of`.
"""

import sys
from pathlib import Path
from typing import NamedTuple, Protocol

from trainer.spec.job.sections import WandbMode
from trainer.spec.plan import Plan
from trainer.spec.report import Report
from trainer.spec.value import Value

SAID = "sink: "  # begins a line of the log that the supervisor shows


class SinkOrder(Value, frozen=True, kw_only=True):
    """What the supervisor asks of the sink process, in one line on its standard input."""

    name: str
    project: str
    group: str | None = None  # of the points of a sweep
    first_attempt: int  # of this supervisor; earlier ones were told of by an earlier one
    wandb: WandbMode = WandbMode.OFF
    tensorboard: bool = False
    notify: tuple[str, ...] | None = None

    @property
    def is_empty(self) -> bool:
        return self.wandb is WandbMode.OFF and not self.tensorboard and self.notify is None


class LastWord(Value, frozen=True, kw_only=True):
    """What the supervisor says at the end, in the second line; without it the supervisor died."""

    has_report: bool  # report.json tells of this supervisor's attempts
    error: str | None = None  # why it ended, where that is in no report


class Run(NamedTuple):
    """A run whose first attempt is about to begin."""

    run_dir: Path
    order: SinkOrder
    plan: Plan  # of that attempt


class Line(NamedTuple):
    """One line of metrics.jsonl."""

    place: int  # in the file, from 0, which no resumption changes
    step: int
    attempt: int
    values: dict[str, float]  # by grouped name, predicted ones among them


class Incident(NamedTuple):
    """Something that a person wants to hear of while the run goes on."""

    title: str
    text: str


class End(NamedTuple):
    """How this supervisor's part of the run ended."""

    report: Report | None
    error: str | None = None


class Sink(Protocol):
    """Told of one run, in this order; whatever a method raises ends this sink and no other."""

    name: str

    def begin(self, run: Run) -> None:
        """The first attempt has a plan; not called where none ever had."""

    def step(self, line: Line) -> None:
        """Every line of metrics.jsonl from the first one on, those before a resumption too."""

    def incident(self, incident: Incident) -> None:
        """Out of memory, a rank that died, a loss that is no number, a stall."""

    def end(self, end: End) -> None:
        """Nothing more comes; called also where `begin` was not."""


def say(text: str) -> None:
    """A line for whoever watches the run."""
    sys.stderr.write(f"{SAID}{text}\n")
    sys.stderr.flush()
