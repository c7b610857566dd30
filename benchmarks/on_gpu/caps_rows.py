"""What the steps of piece `caps` came to, and what follows from it: memory used, regret, plans that did not hold. Pure.

Regret is what the choice lost against the fastest contender that ran within the cap and does what the job asks: the
same method, and as exact as the choice. What changes the update where the choice does not, or takes host RAM that the
job does not grant, is shown and does not count.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from on_gpu.case import CaseResult, Outcome
from on_gpu.pieces import Row
from trainer.spec.value import Value

LEAST_SHARE = 0.85  # of the cap, where more memory would help
MOST_REGRET = 0.05


class Entry(Value, frozen=True, kw_only=True):
    """One contender as it was planned."""

    key: str
    is_choice: bool = False
    is_setting: bool = False  # of the row that was taken
    beyond: str | None = None  # the budget that it exceeds, in words
    is_beyond_host: bool = False  # host RAM is among what it exceeds
    is_faithful: bool = True  # the same method, and as exact as the choice
    need_bytes: int
    host_bytes: int
    step_s: float
    tokens_per_s: float


class MoreMemory(Value, frozen=True, kw_only=True):
    """What would be taken under a larger cap."""

    cap_bytes: int
    key: str
    step_s: float
    is_better: bool  # predicted faster and as exact, or exact where the choice is not
    is_truer: bool = False  # the latter


class CapPlan(Value, frozen=True, kw_only=True):
    """A job as it was planned under its cap; without entries it was refused."""

    outcome: str = "planned"
    reason: str | None = None
    job: str
    cap_gib: int
    is_rehearsal: bool
    device: str
    cap_bytes: int = 0
    context_bytes: int = 0  # what a cap grants to the process and not to its tensors; 0 where both are counted
    seq_len: int = 0
    sequences_per_step: int = 0
    num_parameters: int = 0
    host_granted_bytes: int | None = None
    num_candidates: int = 0  # of the plan
    num_left_out: int = 0  # contenders that were not run
    why: tuple[str, ...] = ()
    more_memory: MoreMemory | None = None
    entries: tuple[Entry, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.cap_gib} GiB, {self.job}"

    @property
    def choice(self) -> Entry:
        return self.entries[0]

    def share(self, num_bytes: int) -> float:
        """The share of the cap that is used."""
        return (num_bytes - self.context_bytes) / (self.cap_bytes - self.context_bytes)


class CapRun(Value, frozen=True, kw_only=True):
    """What became of one contender."""

    outcome: Outcome
    key: str
    reason: str | None = None
    result: CaseResult | None = None

    @property
    def tokens_per_s(self) -> float | None:
        ran = self.outcome is Outcome.RAN and self.result is not None
        return self.result.measured.speed.tokens_per_s_per_gpu if ran and self.result else None


class Job(Value, frozen=True, kw_only=True):
    """A plan with what ran of it so far."""

    plan: CapPlan
    runs: dict[str, CapRun] = {}

    @property
    def chosen_run(self) -> CapRun | None:
        return self.runs.get(self.plan.choice.key) if self.plan.entries else None

    @property
    def is_whole(self) -> bool:
        """Whether every contender was tried."""
        return bool(self.plan.entries) and all(entry.key in self.runs for entry in self.plan.entries)

    def used_bytes(self, run: CapRun) -> int | None:
        """Device bytes of a run; on a CPU its peak and the process."""
        memory = run.result.measured.memory if run.result is not None else None
        if memory is None or memory.peak_allocated_bytes is None:
            return None
        if memory.device_bytes is not None:
            return memory.device_bytes
        return memory.peak_allocated_bytes + self.plan.context_bytes

    def is_within(self, run: CapRun) -> bool:
        """Whether a run took no more than the cap."""
        used = self.used_bytes(run)
        return used is None or used <= self.plan.cap_bytes

    def counts(self, entry: Entry) -> bool:
        """Whether a contender ran, within the cap, and may be held against the choice."""
        run = self.runs.get(entry.key)
        if run is None or run.tokens_per_s is None or not entry.is_faithful or entry.is_beyond_host:
            return False
        return entry.is_choice or self.is_within(run)

    def tokens_per_s(self, entry: Entry) -> float | None:
        run = self.runs.get(entry.key)
        return None if run is None else run.tokens_per_s

    @property
    def best_other(self) -> Entry | None:
        """The fastest contender beside the choice that counts."""
        others = [entry for entry in self.plan.entries if not entry.is_choice and self.counts(entry)]
        return max(others, key=lambda entry: self.tokens_per_s(entry) or 0.0, default=None)

    @property
    def regret(self) -> float | None:
        """The share of the best contender's tokens a second that the choice lacks; None where they cannot be held
        against each other."""
        best = self.best_other
        chosen = self.tokens_per_s(self.plan.choice) if self.plan.entries else None
        fastest = None if best is None else self.tokens_per_s(best)
        if chosen is None or fastest is None:
            return None
        return max(0.0, 1 - chosen / fastest)

    @property
    def broken(self) -> tuple[Entry, ...]:
        """Contenders that were said to fit and ran out of memory, or took more than the cap."""
        return tuple(
            entry
            for entry in self.plan.entries
            if entry.beyond is None
            and (run := self.runs.get(entry.key)) is not None
            and (run.outcome is Outcome.OUT_OF_MEMORY or (run.outcome is Outcome.RAN and not self.is_within(run)))
        )

    @property
    def used_share(self) -> float | None:
        """Of the cap, by a choice that ran."""
        run = self.chosen_run
        used = None if run is None or run.outcome is not Outcome.RAN else self.used_bytes(run)
        return None if used is None else self.plan.share(used)

    @property
    def wastes_memory(self) -> bool | None:
        """Whether the choice leaves memory that would help; None where that is not known."""
        more, share = self.plan.more_memory, self.used_share
        if more is None or share is None:
            return None
        return more.is_better and share < LEAST_SHARE


def jobs_of(rows: Mapping[str, Row]) -> tuple[Job, ...]:
    """The jobs that were planned, by the size of the card; a step that raised is left to its row."""
    plans: dict[str, CapPlan] = {}
    runs: dict[str, list[CapRun]] = {}
    for row in rows.values():
        if "error" in row:
            continue
        if row["kind"] == "plan":
            plan = msgspec.convert(_value(row), CapPlan)
            plans[plan.name] = plan
        else:
            runs.setdefault(row["of"], []).append(msgspec.convert(_value(row), CapRun))
    ordered = sorted(plans.values(), key=lambda plan: plan.cap_gib)
    return tuple(Job(plan=plan, runs=_by_key(runs.get(plan.name, []))) for plan in ordered)


def row_of(value: CapPlan | CapRun, *, of: str | None = None) -> Row:
    """A value as plain JSON; `of` names the job of a run."""
    kind: dict[str, Any] = {"kind": "plan"} if of is None else {"kind": "run", "of": of}
    return kind | msgspec.to_builtins(value)


def _by_key(runs: Iterable[CapRun]) -> dict[str, CapRun]:
    return {run.key: run for run in runs}


def _value(row: Row) -> Row:
    return {key: value for key, value in row.items() if key not in ("kind", "of")}
