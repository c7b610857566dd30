"""Which checkpoint of a run is exported or talked to: the last, the best by held-out loss, or one by its step.

The default is what a run itself exports at its end: the last, or the best of a job that stops early. Where the last is
taken and another scored better, that is said.
"""

import re
from pathlib import Path

from trainer.runtime.checkpoint import CheckpointFolder, find_checkpoint, folder_name
from trainer.runtime.checkpoint.files.search import steps_in, verified
from trainer.spec.errors import InputError
from trainer.spec.plan import Plan
from trainer.spec.report import Evaluation

_STEP = re.compile(r"step-(\d+)")


def checkpoint_of(run_dir: Path, plan: Plan, wanted: str | None) -> tuple[CheckpointFolder, list[str]]:
    """The checkpoint that `last`, `best`, `step-N` or None means, every byte of it verified, and what to say of it.

    InputError where there is none.
    """
    root, notes = run_dir / "checkpoints", list[str]()
    last = find_checkpoint(root, on_skip=notes.append)
    if last is None:
        raise InputError(f"{run_dir}: holds no checkpoint to export")
    saved, best = steps_in(root), best_evaluation(last, steps_in(root))
    if wanted is None:
        wanted = "last" if plan.job.eval.early_stop is None or best is None else "best"
    if wanted == "last":
        score = evaluation_of(last)
        if best is not None and best.step != last.step and score is not None and best.loss < score.loss:
            notes.append(
                f"step {best.step} scored better on the held-out rows ({best.loss:.4f}, the last {score.loss:.4f}): "
                "--checkpoint best"
            )
        return last, notes
    step = _step_of(wanted, best)
    if step not in saved:
        known = ", ".join(f"step-{each}" for each in saved)
        raise InputError(f"--checkpoint {wanted}: the run has no checkpoint of step {step}; it has {known}")
    return (last if step == last.step else verified(root / folder_name(step))), notes


def best_evaluation(last: CheckpointFolder, saved: list[int]) -> Evaluation | None:
    """The lowest held-out loss among steps that have a checkpoint; None where no such step was evaluated."""
    scored = [each for each in last.facts.evaluations if each.step in saved]
    return min(scored, key=lambda each: each.loss, default=None)


def evaluation_of(checkpoint: CheckpointFolder) -> Evaluation | None:
    """The score of a checkpoint's own step, as far as it knows."""
    return next((each for each in checkpoint.facts.evaluations if each.step == checkpoint.step), None)


def _step_of(wanted: str, best: Evaluation | None) -> int:
    if wanted == "best":
        if best is None:
            raise InputError(
                "--checkpoint best: no step of this run has both an evaluation and a checkpoint; take last"
            )
        return best.step
    match = _STEP.fullmatch(wanted)
    if match is None:
        raise InputError(f"--checkpoint {wanted}: is none of last, best and step-N")
    return int(match[1])
