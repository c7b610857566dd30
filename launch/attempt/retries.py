"""What follows an attempt that did not end in order. Pure: the attempts so far in, a decision out.

    out of memory         the plan's next fallback that can go on from the checkpoint there is, at the same global batch
    died, hung, failed    the same again from the newest checkpoint, a bounded number of times
    would happen again    the end: an error that a person has to mend, or one before any step, or the same before a step

Restarts are counted since the last of them that left a newer checkpoint: a run that gets on may be interrupted often.
A step that failed three times is the cause itself, whatever else might be tried.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from trainer.spec.plan import Candidate
from trainer.spec.report import Fault

MAX_RESTARTS = 5  # without a newer checkpoint
MAX_SAME_STEP = 3  # attempts that end at one step


class Tried(NamedTuple):
    """One attempt that did not end in order."""

    candidate: int  # its place among the plan's chosen candidate and fallbacks
    fault: Fault
    step: int  # optimizer steps done
    saved_step: int  # of the newest checkpoint afterwards; 0: there is none
    cause: str = ""
    is_final: bool = False  # a person has to mend something
    had_no_chance: bool = False  # it did no step, for a reason that does not pass by itself

    @property
    def was_refused(self) -> bool:
        """Whether an error kept it from its first step, or is one for a person."""
        return self.is_final or (self.fault is Fault.ERROR and self.had_no_chance)


class Decision(NamedTuple):
    """What comes next."""

    candidate: int | None  # None: the run ends
    words: str  # what is done, or why nothing more is
    is_out_of_fallbacks: bool = False


def decide(
    tried: Sequence[Tried], candidates: Sequence[Candidate], obstacle: Callable[[Candidate], str | None]
) -> Decision:
    """The next attempt after `tried`, the newest last; `obstacle` says why a fallback is no help, after its name."""
    last = tried[-1]
    if last.fault.is_memory or _is_fallback_that_cannot_start(tried):
        return _next_fallback(last, candidates, obstacle)
    if last.is_final or (last.was_refused and (len(tried) == 1 or tried[-2].cause == last.cause)):
        return Decision(None, "the same would happen again: not restarted")
    recent = _without_progress(tried)
    if sum(1 for each in recent if each.step == last.step) >= MAX_SAME_STEP:
        return Decision(None, f"it was the {MAX_SAME_STEP}rd time at step {last.step}: not restarted")
    if len(recent) > MAX_RESTARTS:
        return Decision(None, f"restarted {MAX_RESTARTS} times without a newer checkpoint: not again")
    return Decision(last.candidate, f"starting again {_from(last.saved_step)}")


def _next_fallback(
    last: Tried, candidates: Sequence[Candidate], obstacle: Callable[[Candidate], str | None]
) -> Decision:
    skipped: list[str] = []
    for number, candidate in enumerate(candidates[last.candidate + 1 :], start=last.candidate + 1):
        reason = obstacle(candidate)
        if reason is None:
            words = f"going on with the next fallback at the same global batch, {_from(last.saved_step)}"
            return Decision(number, words)
        skipped.append(f"{candidate.strategy.name} {reason}")
    words = "no fallback is left" + (f" ({'; '.join(dict.fromkeys(skipped))})" if skipped else "")
    return Decision(None, words, is_out_of_fallbacks=True)


def _is_fallback_that_cannot_start(tried: Sequence[Tried]) -> bool:
    """Whether the attempt came in place of one that ran out of memory and was refused before it trained."""
    last = tried[-1]
    return len(tried) > 1 and tried[-2].candidate < last.candidate and last.was_refused and last.had_no_chance


def _without_progress(tried: Sequence[Tried]) -> Sequence[Tried]:
    """The attempts since the last that left a newer checkpoint, that one included."""
    begin = 0
    for number in range(1, len(tried)):
        if tried[number].saved_step > tried[number - 1].saved_step:
            begin = number
    return [each for each in tried[begin:] if not each.fault.is_memory]


def _from(saved_step: int) -> str:
    return f"from step {saved_step}" if saved_step else "from the beginning: there is no checkpoint"
