"""A few steps of a plan in processes of their own: an attempt like any other, told in one line where it cannot run.

Trials, the ladder and profiles run this way. Nothing is scored, saved or exported.
"""

import io
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from launch.attempt.supervisor import StopRequest
from launch.engine.operators import build_needed
from launch.inputs.trusted_code import fetch_flash_kernel
from launch.run.attempts import run_attempts
from launch.terminal import Console
from trainer.spec.errors import EnvironmentFaultError
from trainer.spec.plan import Candidate, Plan
from trainer.spec.report import Ending, Report


class ShortRun(NamedTuple):
    """A report of what ran to its end, or out of memory; else why it could not."""

    report: Report | None
    problem: str | None = None

    @property
    def ran_out_of_memory(self) -> bool:
        return self.report is not None and self.report.ending is Ending.OUT_OF_MEMORY


def short_plan(plan: Plan, candidate: Candidate, *, num_steps: int) -> Plan:
    """`plan` cut down to a few steps of one candidate, with nothing to score, save or decode."""
    schedule = replace(
        plan.schedule,
        num_steps=num_steps,
        warmup_steps=min(plan.schedule.warmup_steps, num_steps - 1),
        eval_every_steps=None,
        eval_every_s=None,
        checkpoint_every_steps=None,
        checkpoint_every_s=None,
    )
    data = replace(plan.data, num_eval_rows=0, num_eval_tokens=0)
    return replace(
        plan, candidates=(candidate,), fallbacks=(), schedule=schedule, data=data, tokenizer_path=None, is_trial=True
    )


def run_short(
    plan: Plan, run_dir: Path, *, cache: Path, console: Console, stop: StopRequest, environment: Mapping[str, str]
) -> ShortRun:
    """Runs it in `run_dir`, which is there and empty; its progress is not shown."""

    def should_stop() -> bool:
        return stop.kind is not None

    try:
        fetch_flash_kernel(plan, on_progress=console.line, should_stop=should_stop)
        operators = build_needed(plan, cache_home=cache, on_progress=console.line, should_stop=should_stop)
        if should_stop():
            return ShortRun(None, "stopped")
        report = run_attempts(
            plan,
            run_dir=run_dir,
            resume=False,
            extensions_dir=operators,
            console=Console(io.StringIO()),
            stop=stop,
            environment=environment,
        ).report
    except EnvironmentFaultError as error:
        return ShortRun(None, str(error).splitlines()[0])
    if report is not None and report.ending in (Ending.FINISHED, Ending.OUT_OF_MEMORY):
        return ShortRun(report)
    error_text = (report.error if report else None) or "no report"
    return ShortRun(None, " ".join(error_text.split()))


@contextmanager
def scratch_folder(root: Path) -> Iterator[Path]:
    """A folder under `root` that goes when the block ends, unless a run that failed left its logs in it."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=root))
    except OSError as error:
        raise EnvironmentFaultError(f"{root}: cannot be written: {error.strerror}") from error
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if not any(folder.iterdir()):
        folder.rmdir()
